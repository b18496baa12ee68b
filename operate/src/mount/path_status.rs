//! The state of one path of a mount that uses all its addresses at once: plain data, for its socket
//! and for JSON output.

use std::time::Duration;

use rblk_runtime::rates::Rates;
use serde::{Deserialize, Serialize};

/// The word of [`PathStatus::state`] for a path that carries requests.
const IN_USE: &str = "in use";

/// State of a path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathStatus {
    /// The address of the target.
    pub address: String,
    /// The RDMA device of this host, or `soft`. Empty until the path was in use once.
    #[serde(default)]
    pub rdma_device: String,
    /// The transport of the messages. Empty until the path was in use once.
    #[serde(default)]
    pub transport: String,
    /// `in use`, `joining` (it is connected and tested), `probed` (an answer of its address is
    /// awaited) or `waiting` (it is tried again later).
    pub state: String,
    /// Milliseconds for which the path is in use, or for which it is not.
    #[serde(default)]
    pub for_ms: u64,
    /// Times the path was lost since this process serves the mount.
    #[serde(default)]
    pub lost: u64,
    /// Why the path was lost, or why the last try failed. Absent while the path is in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What was sent by it, repetitions included.
    #[serde(flatten)]
    pub work: PathWork,
    /// The rates of that, without latencies. Absent until they are measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
}

/// Requests sent by a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PathWork {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes of the reads.
    pub read_bytes: u64,
    /// Bytes of the writes.
    pub written_bytes: u64,
}

impl PathWork {
    /// Takes the work of another queue in.
    pub fn add(&mut self, other: &Self) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
    }

    /// The rates since an earlier moment.
    #[must_use]
    pub fn rates(&self, earlier: &Self, apart: Duration) -> Rates {
        let since = |of: fn(&Self) -> u64| of(self).saturating_sub(of(earlier));
        let requests = [since(|work| work.reads), since(|work| work.writes)];
        let bytes = [since(|work| work.read_bytes), since(|work| work.written_bytes)];
        Rates::of_counts(requests, bytes, apart)
    }
}

/// What happens to a path that is not in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathTry {
    /// It is connected and tested.
    Joining,
    /// An answer of its address is awaited.
    Probed,
    /// It is tried again later.
    Waiting,
}

impl PathStatus {
    /// The word for a path that is in use (`None`), or is tried.
    #[must_use]
    pub fn word(tried: Option<PathTry>) -> &'static str {
        match tried {
            None => IN_USE,
            Some(PathTry::Joining) => "joining",
            Some(PathTry::Probed) => "probed",
            Some(PathTry::Waiting) => "waiting",
        }
    }

    /// Whether it carries requests.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        self.state == IN_USE
    }

    /// A line about a path that is not in use; `None` if it is.
    #[must_use]
    pub fn line(&self) -> Option<String> {
        let why = self.reason.as_deref().map(|why| format!(": {why}")).unwrap_or_default();
        let line = || {
            format!(
                "its path to {} is not in use (for {} s{why})",
                self.address,
                self.for_ms / 1000
            )
        };
        (!self.is_in_use()).then(line)
    }
}
