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

    /// Block commands that had to wait for a limit of the volume or of their host.
    commands: Counter Number => "rblk_target_volume_delayed_commands_total",
    /// Commands that their limits have let pass since. The others still wait, or ended with their
    /// connection, or lost their volume.
    begun: Counter Number,
    /// Time that block commands waited for a limit of the volume or of their host.
    ///
    /// Only those that their limits have let pass.
    waited_us: Counter Micros => "rblk_target_volume_delay_seconds_total",
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
