//! Persistent bytes of volumes: files, block devices and images of a Ceph cluster.
//!
//! A [`Store`] carries out [`Op`]s on the [`OpenStore`]s of its volumes and moves data between them
//! and one [`rblk_fabric::Region`]. It belongs to one data thread. [`UringStore`] is one io_uring
//! for the [`Backing`]s of files and devices, and also the place where the data thread sleeps. It
//! hands the ops of an [`Image`] to librbd ([`rbd`]). The tests compare it with `SyncStore`, which
//! makes blocking calls.
//!
//! Contract:
//!
//! - **Units.** Offsets and lengths are bytes. Offsets of an [`OpKind`] count from the start of the
//!   volume, those of a [`Segment`] from the start of the region.
//! - **Lending.** From [`Store::submit`] until [`Store::reap`] gives the [`OpDone`], the bytes of
//!   the op's segments belong to the store: nothing else may write them, and during a read nothing
//!   else may read them. The list of segments is the caller's again as soon as `submit` returns.
//! - **Alignment.** Ranges and segments have the alignment of the backing, see
//!   [`Backing::alignment`] and [`Backing::memory_alignment`]; otherwise the result may be an
//!   error.
//! - **Once.** Every accepted op gives exactly one `OpDone`, even when its volume is unknown, its
//!   range is outside the volume, or it would write to a read-only backing. None is lost, none is
//!   given twice.
//! - **Order.** None: ops run concurrently and end in any order. Ops with overlapping ranges must
//!   not be in flight together, unless either result is acceptable.
//! - **All or an error.** A read or write ends with its whole length or an error, never in part;
//!   after a failed write, discard or write-zeroes, the contents of its range are unknown.
//! - **Durability.** `Flush` makes every op of that volume durable that any store of the backing
//!   returned as `OpDone` before the flush was submitted. A write with `fua` is durable when it is
//!   done.
//! - **Losses.** When the system fails to make data durable, every flush that covers the data
//!   fails, in every store, and so does every later flush of that backing: see [`backing`].
//! - **Loss of the store.** From the moment when an image belongs to another client, no op of it
//!   ends, until [`Store::let_go`].
//! - **Discard** promises no content: afterwards a range of a file reads as zeroes, a range of a
//!   device as any bytes. `WriteZeroes` always reads as zeroes; with `may_unmap` the space may be
//!   freed.
//! - **Bounded.** A full store refuses the op and returns it; ops do not allocate.

mod alignment;
pub(crate) mod at_path;
mod attachment;
pub(crate) mod backing;
mod error;
mod methods;
mod open_store;
mod protection;
pub mod rbd;
mod store_identity;
#[cfg(test)]
mod sync;
mod syncs;
pub mod uring;

#[cfg(test)]
mod tests;

use nix::errno::Errno;

use crate::volume::ids::VolumeIndex;

pub use attachment::Attachment;
pub use backing::{Backing, Direct, OpenOptions};
pub use error::{StoreError, StoreErrorKind};
pub use open_store::OpenStore;
pub use rbd::open_image::Image;
pub use store_identity::StoreIdentity;
#[cfg(test)]
pub(crate) use sync::SyncStore;
pub use syncs::Losses;
pub use uring::{
    Counters, FdToken, MAX_CAPACITY, MAX_WATCHES, TurnSleep, UringOptions, UringStore, Warning,
    WatchSet,
};

/// Most segments of one op.
pub const MAX_SEGMENTS: usize = 1024;

/// The kind of a backing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BackingKind {
    /// A regular file.
    File,
    /// A block device.
    BlockDevice,
}

/// A run of bytes of the region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// First byte in the region.
    pub offset: usize,
    /// Bytes.
    pub len: u32,
}

/// The submitter's name for an op; comes back in [`OpDone`]. The store does not interpret it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpToken(pub u64);

/// An operation. Owns no memory, so that no op allocates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Op {
    /// Comes back in [`OpDone`].
    pub token: OpToken,
    /// The volume.
    pub volume: VolumeIndex,
    /// The kind of operation.
    pub kind: OpKind,
}

/// The kind of an operation. Offsets and lengths are bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpKind {
    /// Volume to region.
    Read {
        /// First byte in the volume.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Region to volume.
    Write {
        /// First byte in the volume.
        offset: u64,
        /// Bytes.
        len: u32,
        /// The write is done only when it is durable.
        fua: bool,
    },
    /// Makes ended ops durable.
    Flush,
    /// The contents of the range are no longer needed.
    Discard {
        /// First byte in the volume.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// The range reads as zeroes.
    WriteZeroes {
        /// First byte in the volume.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The space may be freed. Otherwise the range stays allocated, where the backing supports
        /// that.
        may_unmap: bool,
    },
}

impl OpKind {
    /// The bytes of the volume that the op touches: first byte and length. A flush touches `(0,
    /// 0)`.
    #[must_use]
    #[inline]
    pub fn range(&self) -> (u64, u64) {
        match *self {
            Self::Read { offset, len, .. } | Self::Write { offset, len, .. } => {
                (offset, len.into())
            }
            Self::Discard { offset, len } | Self::WriteZeroes { offset, len, .. } => (offset, len),
            Self::Flush => (0, 0),
        }
    }

    /// Whether the op changes the volume.
    #[must_use]
    pub fn changes(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard { .. } | Self::WriteZeroes { .. })
    }
}

/// The end of an op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpDone {
    /// The op's token.
    pub token: OpToken,
    /// Bytes read or written (always the whole length; 0 for the other kinds), or an error.
    /// `ENXIO`: no such volume. `EINVAL`: a range outside the volume or the region, or segments
    /// that do not fit the op. `EROFS`: read-only. `EIO`: the backing is shorter than the volume.
    /// `EOPNOTSUPP`: the backing cannot discard. Any other error is the kernel's own.
    pub result: Result<u32, Errno>,
}

/// Carries out ops. See the module for the contract.
pub trait Store {
    /// Accepts an op, or gives it back when the store is full. An empty range is done at once.
    ///
    /// `memory` receives the bytes of a read or has the bytes of a write, in order: at most
    /// [`MAX_SEGMENTS`] segments that add up to the op's length. For the other kinds it is empty.
    /// Any other list makes the op end with `EINVAL`. The bytes of a read are unknown where two of
    /// its segments overlap.
    ///
    /// # Errors
    /// The op itself, when the store is full.
    fn submit(&mut self, op: Op, memory: &[Segment]) -> Result<(), Op>;

    /// Appends the ended ops to `out`.
    fn reap(&mut self, out: &mut Vec<OpDone>);

    /// Ops accepted and not yet returned by [`Self::reap`].
    fn in_flight(&self) -> usize;

    /// The store of a volume is lost, and the connections of the volume have ended, in every data
    /// thread. Ops of a lost store do not end before this call, since their answers could be wrong;
    /// now they fail with `ESHUTDOWN`. Other stores are never lost.
    fn let_go(&mut self, volume: VolumeIndex) {
        let _ = volume;
    }

    /// Whether a store may fall silent.
    fn may_fall_silent(&self) -> bool {
        false
    }

    /// The next volume whose store has become silent (true), or speaks again, since the last call.
    /// While a store is silent, others may have written to it, and nobody can say so: its volume
    /// must not be answered from a cache. Only images fall silent.
    fn next_silence(&mut self) -> Option<(VolumeIndex, bool)> {
        None
    }

    /// Ends the service of a volume, and drops its backing. All of its ops were returned before.
    ///
    /// # Errors
    /// The reason why the store keeps the backing. Stores without backings have no error.
    fn close(&mut self, volume: VolumeIndex) -> Result<(), StoreError> {
        let _ = volume;
        Ok(())
    }
}

/// The bounds of ops.
trait Bounds {
    /// Whether ops must change nothing.
    fn read_only(&self) -> bool;

    /// The bytes that ops may touch.
    fn size_bytes(&self) -> u64;
}

// The result of an op that must not or need not go to the kernel or the cluster.
fn refusal<B: Bounds>(
    backing: Option<&B>,
    region_len: usize,
    kind: &OpKind,
    memory: &[Segment],
) -> Option<Result<u32, Errno>> {
    let Some(backing) = backing else { return Some(Err(Errno::ENXIO)) };
    if kind.changes() && backing.read_only() {
        return Some(Err(Errno::EROFS));
    }
    let (offset, len) = kind.range();
    if offset.checked_add(len).is_none_or(|end| end > backing.size_bytes()) {
        return Some(Err(Errno::EINVAL));
    }
    let moved = if matches!(kind, OpKind::Read { .. } | OpKind::Write { .. }) { len } else { 0 };
    if !fits(memory, region_len, moved) {
        return Some(Err(Errno::EINVAL));
    }
    if len == 0 && *kind != OpKind::Flush {
        return Some(Ok(0));
    }
    None
}

// Whether the segments are few enough, lie inside the region and add up to `len` bytes.
fn fits(memory: &[Segment], region_len: usize, len: u64) -> bool {
    let inside = |segment: &Segment| {
        segment.offset.checked_add(segment.len as usize).is_some_and(|end| end <= region_len)
    };
    memory.len() <= MAX_SEGMENTS
        && memory.iter().all(inside)
        && memory.iter().map(|segment| u64::from(segment.len)).sum::<u64>() == len
}
