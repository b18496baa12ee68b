//! [`MountTimes`]: the times of the requests of a mount.

use rblk_runtime::LatencyCounts;
use serde::{Deserialize, Serialize};

/// The times of one kind of request: in all, and by the reason of the wait.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountOpTimes {
    /// From the driver's request to its answer.
    pub total: LatencyCounts,
    /// At this end: until the command was posted; for a repeated command, until the last time.
    pub queue: LatencyCounts,
    /// From the post to the answer: the wire and the target.
    pub target: LatencyCounts,
}

impl MountOpTimes {
    /// The stages, with their names.
    #[must_use]
    pub fn stages(&self) -> [(&'static str, &LatencyCounts); 2] {
        [("queue", &self.queue), ("target", &self.target)]
    }
}

/// The times of a mount's requests, or of one queue's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MountTimes {
    /// READs.
    pub read: MountOpTimes,
    /// WRITEs.
    pub write: MountOpTimes,
    /// FLUSHes.
    pub flush: MountOpTimes,
}

impl MountTimes {
    /// Takes all times of another in.
    pub fn add(&mut self, other: &Self) {
        let pairs = [
            (&mut self.read, &other.read),
            (&mut self.write, &other.write),
            (&mut self.flush, &other.flush),
        ];
        for (mine, other) in pairs {
            mine.total.add(&other.total);
            mine.queue.add(&other.queue);
            mine.target.add(&other.target);
        }
    }

    /// The kinds of requests, with their names.
    #[must_use]
    pub fn kinds(&self) -> [(&'static str, &MountOpTimes); 3] {
        [("read", &self.read), ("write", &self.write), ("flush", &self.flush)]
    }
}
