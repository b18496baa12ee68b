//! The cache: slots of the arena that hold blocks of volumes.
//!
//! A poll group owns one [`Shard`]: a part of the arena, the store's ring, and every stripe of
//! [`STRIPE_BYTES`] of every volume that [`shard_of`] gives it. A poll group that serves a command
//! asks the shards concerned, its own or another's, by [`ShardRequest`]; the answer is a
//! [`ShardReply`]. Nothing else is shared, so there is nothing to lock. Memory that a shard lends
//! ([`Segments`]) is in the one arena that every device knows, so whoever serves the command moves
//! data straight to and from it.
//!
//! ```text
//! poll group A: command --> ask shard B: Read ----------------> look up, pin (or fill, then pin)
//!               RDMA WRITE from the slots <----- Read(segments)
//!               completion proves it is gone --> Release ------> unpin
//! ```
//!
//! | file | holds |
//! | --- | --- |
//! | `message.rs` | what poll groups and shards say to each other |
//! | `slots.rs`, `slots/dirty.rs` | slots: memory, index by block, pins; lists of dirty ones |
//! | `policy.rs` | which slot leaves: S3-FIFO. Pure |
//! | `range_lock.rs` | who works on which range of a store. Pure |
//! | `shard.rs` | the shard: requests, memory, locks, the store |
//! | `memory.rs` | who gets memory, and when |
//! | `transfer.rs` | operations of the store |
//! | `read.rs` | reads, fills, prefetches |
//! | `write.rs` | writes, discards, zeroing |
//! | `write_back.rs` | dirty blocks to the store, flushes |
//! | `report.rs` | what the shard tells of its volumes |
//! | `job.rs` | what a shard works on |
//!
//! What holds, whatever the mode:
//!
//! - **A slot's bytes never change while it is in the index.** A write lands in slots of its own,
//!   which then take the place of the old ones; those are freed when the last RDMA or store I/O
//!   that reads them is done. So no reader sees a torn block, and an RDMA WRITE needs no copy.
//! - **What the index says is what was acknowledged last, or newer.** A write enters it before it
//!   is acknowledged.
//! - **One at a time at the store.** Fills, writes, write-backs and changes of overlapping ranges
//!   take turns ([`range_lock`]), in the order they came. So a fill never keeps what a write has
//!   just replaced, and the store sees writes of a block in the order in which the index did.
//! - **Memory first, then the lock.** Who holds a lock waits for the store alone, so nobody waits
//!   in a circle.

mod job;
mod memory;
pub mod message;
pub mod policy;
pub mod range_lock;
mod read;
mod report;
pub mod shard;
pub mod slots;
#[cfg(test)]
mod tests;
mod transfer;
mod write;
mod write_back;

pub use message::{JobId, PartToken, Segments, ShardReply, ShardRequest};
pub use shard::{CacheCounters, Shard, ShardOptions};

use crate::store::VolumeIndex;

/// Bytes of a slot, and of the blocks the cache keeps.
pub const SLOT_BYTES: usize = crate::arena::MIN_EXTENT_BYTES as usize;

/// Volumes are dealt to shards in stripes of this many bytes. A command that is no longer touches
/// two shards at most.
pub const STRIPE_BYTES: u64 = 1 << 20;

/// The shard that caches a byte of a volume.
#[must_use]
pub fn shard_of(volume: VolumeIndex, offset_bytes: u64, shards: usize) -> usize {
    let stripe = offset_bytes / STRIPE_BYTES + u64::from(volume.0);
    // The remainder is below `shards`.
    usize::try_from(stripe % shards.max(1) as u64).unwrap_or(0)
}
