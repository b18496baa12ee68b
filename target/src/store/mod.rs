//! Persistent bytes of volumes: files and block devices.
//!
//! A [`Store`] carries out [`Op`]s on the [`Backing`]s of its volumes and moves data between them
//! and one [`rblk_fabric::Region`]. It belongs to one data thread. [`UringStore`] is one io_uring,
//! and also the place where the data thread sleeps. The tests compare it with `SyncStore`, which
//! makes blocking calls.
//!
//! Contract:
//!
//! - **Units.** Offsets and lengths are bytes. Offsets of an [`OpKind`] count from the start of the
//!   volume, those of a [`Segment`] from the start of the region.
//! - **Lending.** From [`Store::submit`] until [`Store::reap`] gives the [`OpDone`], the bytes of
//!   the op's segments belong to the store: nothing else may write them, and during a read nothing
//!   else may read them. The list of segments is the caller's again as soon as `submit` returns.
//! - **Alignment.** Ranges and segments are aligned as the backing wants it, see
//!   [`Backing::alignment`] and [`Backing::memory_alignment`]; otherwise the result may be an
//!   error.
//! - **Once.** Every accepted op gives exactly one `OpDone`, also when its volume is unknown, its
//!   range is outside the volume or it would write to a read-only backing. None is lost, none is
//!   given twice.
//! - **Order.** None: ops run concurrently and are done in any order. Ops whose ranges overlap must
//!   not be in flight together, unless either result will do.
//! - **All or an error.** A read or write is done with its whole length or an error, never in part;
//!   after a failed write, discard or write-zeroes, the contents of its range are unknown.
//! - **Durability.** `Flush` makes every op of that volume durable whose `OpDone` was given out
//!   before the flush was submitted, by any store of the same backing. A write with `fua` is
//!   durable when it is done.
//! - **Losses.** When the system fails to make data durable, every flush that covers the data
//!   fails, in every store, and so does every later flush of that backing: see [`backing`].
//! - **Discard** promises no content: afterwards a range of a file reads as zeroes, a range of a
//!   device as anything. `WriteZeroes` always reads as zeroes; with `may_unmap` the space may be
//!   given up.
//! - **Bounded.** A full store refuses the op and returns it; nothing is allocated per op.

mod alignment;
pub(crate) mod at_path;
pub(crate) mod backing;
mod error;
mod methods;
mod protection;
pub mod room;
mod store_identity;
#[cfg(test)]
mod sync;
mod syncs;
pub mod uring;

#[cfg(test)]
mod tests;

use nix::errno::Errno;

use crate::volume::ids::VolumeIndex;

pub use at_path::{StoreFault, StoreFaultKind};
pub use backing::{Backing, Direct, OpenOptions};
pub use error::{StoreError, StoreErrorKind};
pub use store_identity::StoreIdentity;
#[cfg(test)]
pub(crate) use sync::SyncStore;
pub use syncs::Losses;
pub use uring::{
    Counters, MAX_CAPACITY, MAX_WATCHES, UringOptions, UringStore, Wait, Warning, WatchSet,
    WatchToken,
};

/// Most segments of one op.
pub const MAX_SEGMENTS: usize = 1024;

/// What a backing is.
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

/// The submitter's name for an op; comes back in [`OpDone`]. The store does not look at it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OpToken(pub u64);

/// One thing to do. Nothing here owns memory, so that no op allocates.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Op {
    /// Comes back in [`OpDone`].
    pub token: OpToken,
    /// Whose bytes.
    pub volume: VolumeIndex,
    /// What to do.
    pub kind: OpKind,
}

/// What to do, in bytes.
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
        /// Done means durable.
        fua: bool,
    },
    /// Makes what is done durable.
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
        /// Space may be given up; without it the range stays allocated where the backing can say
        /// so.
        may_unmap: bool,
    },
}

impl OpKind {
    /// The bytes of the volume the op touches: first byte and length. A flush touches `(0, 0)`.
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
    /// Bytes read or written (always the whole length; 0 for the other kinds), or what went wrong.
    /// `ENXIO`: no such volume. `EINVAL`: a range outside the volume or the region, or segments
    /// that do not fit the op. `EROFS`: read-only. `EIO`: the backing ended before the volume did.
    /// `EOPNOTSUPP`: a discard the backing cannot do. Everything else is the kernel's own answer.
    pub result: Result<u32, Errno>,
}

/// Carries out ops. See the module for the contract.
pub trait Store {
    /// Accepts an op, or gives it back when the store is full. An empty range is done at once.
    ///
    /// `memory` is where a read lands or a write comes from, in order: at most [`MAX_SEGMENTS`]
    /// segments whose lengths add up to that of the op. For the other kinds it is empty. A list
    /// that is not so makes the op end with `EINVAL`. What a read leaves where two of its segments
    /// overlap is unknown.
    ///
    /// # Errors
    /// The op itself, when as many ops as the store can hold are in flight.
    fn submit(&mut self, op: Op, memory: &[Segment]) -> Result<(), Op>;

    /// Appends what is done to `out`.
    fn reap(&mut self, out: &mut Vec<OpDone>);

    /// Ops accepted and not yet given out by [`Self::reap`].
    fn in_flight(&self) -> usize;

    /// Serves a volume no longer, and lets go of its backing. All of its ops were given out.
    ///
    /// # Errors
    /// What keeps the backing here. Stores without backings have none.
    fn close(&mut self, volume: VolumeIndex) -> Result<(), StoreError> {
        let _ = volume;
        Ok(())
    }
}

// The answer to an op that must not or need not go to the kernel.
fn refusal(
    backing: Option<&Backing>,
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

// Whether the segments are not too many, lie inside the region and add up to `len` bytes.
fn fits(memory: &[Segment], region_len: usize, len: u64) -> bool {
    let inside = |segment: &Segment| {
        segment.offset.checked_add(segment.len as usize).is_some_and(|end| end <= region_len)
    };
    memory.len() <= MAX_SEGMENTS
        && memory.iter().all(inside)
        && memory.iter().map(|segment| u64::from(segment.len)).sum::<u64>() == len
}
