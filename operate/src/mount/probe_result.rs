//! [`Probe`]: the result of a try to use a target, as `rblk-initiatord` reports it to
//! `rblk-initiator doctor`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The reason for a failed try; each has a fix of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProbeError {
    /// Built without RDMA.
    NoVerbs,
    /// No process listens on that port.
    Refused,
    /// No answer.
    TimedOut,
    /// The peer is not rblk.
    NotRblk,
    /// The target has a key other than the required one.
    WrongTargetKey,
    /// The target does not know the key of this host.
    HostNotAllowed,
    /// The target requires keys, and this host has none.
    KeysWanted,
    /// The target has no keys, and this host requires them.
    NoProof,
    /// The connection would not be encrypted.
    NotEncrypted,
    /// No version in common.
    Version,
    /// The target has no room, or stops.
    Busy,
    /// Memory cannot be locked.
    Memlock,
    /// An agreed verb does not work.
    SelfTest,
    /// Another error; the text names it.
    Other,
}

/// The result of a try.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Probe {
    /// Everything works.
    Works {
        /// Name of the target.
        target: String,
        /// What carries the messages.
        transport: String,
        /// The device of this host.
        device: String,
        /// Volumes that this host may see.
        volumes: Vec<String>,
        /// The READ; `None` without a volume to read.
        data: Option<LargeRead>,
    },
    /// The target cannot be used.
    Failed {
        /// The reason, for the fix.
        error: ProbeError,
        /// The reason, for people.
        text: String,
    },
}

/// One READ, as large as a mount's.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LargeRead {
    /// The volume.
    pub volume: String,
    /// Bytes.
    pub bytes: u64,
    /// The time of the READ.
    pub took: Duration,
    /// The fault; `None` after a success.
    pub fault: Option<ReadFault>,
}

/// The reason why a READ failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReadFault {
    /// The data did not come.
    Silent,
    /// The target answered with that errno.
    Errno(i32),
    /// The connection ended, with that reason.
    Ended(String),
}

impl Probe {
    /// A failure without a rule.
    pub fn other(text: String) -> Self {
        Self::Failed { error: ProbeError::Other, text }
    }
}
