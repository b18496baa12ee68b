//! The cache: slots of the arena that hold blocks of volumes.
//!
//! A poll group owns one [`Shard`]: a part of the arena, the store's ring, and every stripe of
//! [`STRIPE_BYTES`] of every volume that [`shard_of`] gives it. A poll group that serves a command
//! calls its own shard, and sends a [`ShardRequest`] to each other shard that has a part of the
//! range. The answer is a [`ShardReply`]. Shards share no table, so the cache has no lock; the
//! stores of one backing share its syncs ([`crate::store`]). Memory that a shard lends
//! ([`Segments`]) is in the one arena that is registered with every device, so the poll group that
//! serves the command moves data straight to and from it.
//!
//! ```text
//! poll group A: command --> ask shard B: Read ----------------> look up, pin (or fill, then pin)
//!               RDMA WRITE from the slots <----- Read(segments)
//!               completion proves it is gone --> Release ------> unpin
//! ```
//!
//! | file | holds |
//! | --- | --- |
//! | `shard_messages.rs` | requests to shards, their replies, and lent memory |
//! | `shard.rs` | the shard: takes requests, decides the next step of each job |
//! | `read_job.rs`, `write_job.rs`, `discard_zero.rs` | the steps of reads, writes and discards |
//! | `write_backs.rs` | dirty blocks on their way to the store, and flushes |
//! | `memory_queue.rs` | the order in which jobs get memory |
//! | `minimums.rs`, `slots/minimum.rs` | the cache that a volume keeps when others need memory |
//! | `maximums.rs`, `slots/maximum.rs` | the most cache that a volume may have |
//! | `session_memory.rs` | how much memory the peers of a session may keep |
//! | `core.rs` | the state that all jobs use: the fields below |
//! | `slots/mod.rs`, `slots/dirty.rs` | slots: memory, index by block, pins; lists of dirty slots |
//! | `policy/mod.rs` | the choice of the slot to evict: S3-FIFO. Pure |
//! | `range_lock/mod.rs`, `locks.rs` | which job works on which range of a store |
//! | `job.rs`, `span.rs`, `block_write.rs` | jobs, their ranges, and writes too small for a job |
//! | `shard_volumes.rs` | the volumes of a shard, and the figures it publishes of them |
//! | `store_queue.rs` | the store, and operations that wait to go there |
//! | `answers.rs`, `shard_clock.rs`, `lists.rs` | answers, time, reused lists |
//! | `reshape.rs` | the change of one volume while others are served |
//! | `stop.rs` | the steps in which a shard stops |
//!
//! These invariants hold in every cache mode:
//!
//! - **A slot's bytes never change while the slot is in the index.** A write lands in slots of its
//!   own, which then take the place of the old ones. An old slot is freed when the last RDMA or
//!   store I/O that reads it is done. So no reader sees a torn block, and an RDMA WRITE needs no
//!   copy.
//! - **The index has the data that was acknowledged last, or newer data.** A write enters the index
//!   before it is acknowledged.
//! - **One at a time at the store.** Fills, writes, write-backs and changes of overlapping ranges
//!   take turns ([`range_lock`]), in the order in which they came. So a fill never keeps data that
//!   a write has just replaced, and the store sees writes of a block in the order in which the
//!   index did.
//! - **Memory first, then the lock.** A job that holds a lock waits only for the store, so jobs
//!   never wait in a circle.

mod answers;
mod block_write;
mod core;
mod discard_zero;
mod job;
mod landing_slots;
mod lists;
mod locks;
mod maximums;
mod memory_queue;
mod minimums;
pub(crate) mod policy;
pub(crate) mod range_lock;
mod read_job;
mod reshape;
mod session_memory;
pub(crate) mod shard;
mod shard_clock;
pub(crate) mod shard_messages;
mod shard_volumes;
pub mod slots;
mod span;
mod stop;
mod store_queue;
#[cfg(test)]
mod tests;
mod write_backs;
mod write_job;

use std::time::Duration;

use rblk_protocol::width::{wide, wide64};
pub(crate) use read_job::Hit;
pub use shard::Shard;
pub use shard_messages::{
    ArenaEnds, JobId, PartToken, Segments, ShardReply, ShardRequest, SlotsOf,
};
pub use shard_volumes::StoreFailure;
pub use stop::Unsaved;
pub(crate) use write_job::{Landed, OneBlock, OneWrite};

use crate::volume::ids::VolumeIndex;

/// Bytes of a slot, and of a cached block.
pub(crate) const SLOT_BYTES: usize = crate::memory::arena::MIN_EXTENT_BYTES as usize;

/// Volumes are dealt to shards in stripes of this many bytes. A command of at most this length
/// touches two shards at most.
pub const STRIPE_BYTES: u64 = 1 << 20;

/// The shard that caches a byte of a volume.
#[must_use]
pub fn shard_of(volume: VolumeIndex, offset_bytes: u64, shards: usize) -> usize {
    let stripe = offset_bytes / STRIPE_BYTES + u64::from(volume.0);
    wide(stripe % wide64(shards.max(1)))
}

/// Settings of a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShardOptions {
    /// Most bytes of this shard that may be acknowledged and in memory only.
    pub dirty_max_bytes: usize,
    /// A dirty block is on its way to the store after at most this time.
    pub write_back_delay: Duration,
    /// Most bytes of one write-back.
    pub write_back_max_bytes: u32,
    /// Makes the hash of blocks unpredictable to peers.
    pub seed: u64,
}

/// Events that a shard counted since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct CacheCounters {
    /// Blocks that reads found.
    pub hits: u64,
    /// Blocks that reads did not find.
    pub misses: u64,
    /// Blocks that were read ahead.
    pub prefetched: u64,
    /// Bytes read from stores for cached volumes.
    pub fill_bytes: u64,
    /// Write-backs: operations of the store, each of one or more neighbouring blocks.
    pub write_backs: u64,
    /// Bytes of these write-backs.
    pub write_back_bytes: u64,
    /// Writes that found no room for dirty blocks and went to the store.
    pub dirty_limited: u64,
    /// Bytes copied, only for writes of parts of blocks.
    pub copied_bytes: u64,
    /// Store operations that failed.
    pub store_errors: u64,
    /// Requests that had to wait for memory.
    pub memory_waits: u64,
    /// Jobs that had to wait for another on the same range.
    pub range_waits: u64,
}
