//! [`Delays`]: the commands of one volume in one poll group that had to wait for a limit.

use serde::{Deserialize, Serialize};

rblk_runtime::counters! {
    /// Written by the thread of the poll group.
    #[derive(Debug, Default)]
    pub struct Delays;

    /// The counters at one moment; also their sum over poll groups.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct DelayCounts;

    /// Commands that came while their volume or host was over its limit.
    commands,
    /// Commands that their limits have let pass since. The others still wait, or ended with their
    /// connection, or lost their volume.
    begun,
    /// Microseconds that the passed commands waited.
    waited_us,
}

impl DelayCounts {
    /// Mean wait of the passed commands; `None` before the first.
    #[must_use]
    pub fn mean_us(&self) -> Option<u64> {
        self.waited_us.checked_div(self.begun)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_covers_only_commands_that_started() {
        let counts = DelayCounts { commands: 1000, begun: 4, waited_us: 100 };
        assert_eq!(counts.mean_us(), Some(25));
        assert_eq!(DelayCounts { begun: 0, ..counts }.mean_us(), None);
    }
}
