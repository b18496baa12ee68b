//! [`Delays`]: the commands of one volume in one poll group that had to wait for a limit.

use serde::{Deserialize, Serialize};

rblk_fabric::counters! {
    /// Written by the thread of the poll group.
    #[derive(Debug, Default)]
    pub struct Delays;

    /// The counters at one moment; also their sum over poll groups.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(default)]
    pub struct DelayCounts;

    /// Commands that came while their volume or host was over its limit.
    commands,
    /// Microseconds that they waited, of those that have begun since.
    waited_us,
}
