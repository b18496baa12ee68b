//! [`TraceLine`]: one slow command of a volume, as a trace shows it.

use serde::{Deserialize, Serialize};

/// A command that took long. Times are in microseconds; the stages add up to `total_us`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct TraceLine {
    /// The time of its reply, in milliseconds since 1970.
    pub unix_ms: u64,
    /// The volume.
    pub volume: String,
    /// The host, as `session list` shows it; empty if its session has ended.
    pub host: String,
    /// The number of the session.
    pub session: u32,
    /// The I/O queue of the session.
    pub queue: u16,
    /// The poll group that served it.
    pub poll_group: usize,
    /// `read`, `write`, `flush`, `discard` or `write-zeroes`.
    pub op: String,
    /// First block.
    pub lba: u64,
    /// Blocks.
    pub blocks: u64,
    /// Bytes.
    pub bytes: u64,
    /// The answer was an error.
    pub failed: bool,
    /// From its arrival to its reply.
    pub total_us: u64,
    /// In the completion queue.
    pub queue_us: u64,
    /// For its data.
    pub data_us: u64,
    /// For memory, others on the same blocks, other poll groups.
    pub cache_us: u64,
    /// For the store.
    pub store_us: u64,
    /// For room to send the reply.
    pub answer_us: u64,
    /// Commands that were left out before this one, because they came faster than the client took
    /// them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}
