//! [`ActiveOp`]: an op from submission to its last completion, and the entries it takes. [`Ops`]:
//! all ops of a store.
//!
//! An op may take several entries, one after another: after a short transfer, after a refusal with
//! another method left, and in steps over a long range.

use io_uring::types::{Fixed, FsyncFlags};
use io_uring::{opcode, squeue};
use nix::errno::Errno;
use rblk_fabric::Region;
use rblk_protocol::width::{narrow, wide};

use super::counters::Counters;
use crate::store::backing::Backing;
use crate::store::methods::Method;
use crate::store::syncs::SyncNumber;
use crate::store::uring::entry_memory::{IoVecs, Pieces};
use crate::store::{Op, OpKind, OpToken, Segment};
use crate::volume::ids::VolumeIndex;

/// Bytes zeroed by one write where no better method works.
pub(super) const ZERO_CHUNK: u32 = 1 << 20;

// Number of times that an op is sent again after EAGAIN or EINTR, before that error becomes its
// result.
const RETRIES: u32 = 1000;

// BLOCK_URING_CMD_DISCARD: _IO(0x12, 0) of linux/blkdev.h.
const BLOCK_DISCARD: u32 = 0x1200;

/// The current step of an op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// None: the place is free.
    Idle,
    /// A read or write.
    Transfer,
    /// A flush, or a durable write that is written: the backing's sync that covers it is not known
    /// yet.
    Unsynced,
    /// Waits for that sync.
    Awaiting(SyncNumber),
    /// Runs that sync, for all ops that wait for it.
    Sync(SyncNumber),
    /// Discards or zeroes by this method.
    Change(Method),
}

impl Phase {
    /// The first step of an op; `None` when the backing has no method for it.
    pub(super) fn first(kind: &OpKind, backing: &Backing) -> Option<Self> {
        match *kind {
            OpKind::Read { .. } | OpKind::Write { .. } => Some(Self::Transfer),
            OpKind::Flush => Some(Self::Unsynced),
            OpKind::Discard { .. } => backing.methods().discard().map(Self::Change),
            OpKind::WriteZeroes { may_unmap, .. } => {
                Some(Self::Change(backing.methods().zero(may_unmap)))
            }
        }
    }
}

/// An op from submit to its last completion.
#[derive(Debug)]
pub(super) struct ActiveOp {
    /// The op.
    pub(super) op: Op,
    /// The current step.
    pub(super) phase: Phase,
    // Bytes finished.
    progress: u64,
    // Bytes covered by the entry in the kernel, for entries with a result that contains no length.
    step: u64,
    retries: u32,
    // From the backing: a durable write needs no sync.
    has_own_fua: bool,
    // From the backing: discard and zeroing advance to multiples of this.
    range_step: u64,
    // For a transfer. Unchanged while the kernel has an entry, which may point into it.
    memory: IoVecs,
}

impl ActiveOp {
    /// A free place.
    pub(super) fn idle() -> Self {
        Self {
            op: Op { token: OpToken(0), volume: VolumeIndex(0), kind: OpKind::Flush },
            phase: Phase::Idle,
            progress: 0,
            step: 0,
            retries: 0,
            has_own_fua: false,
            range_step: 1,
            memory: IoVecs::default(),
        }
    }

    /// Starts an op of a backing with its memory. False when the memory is not inside the region.
    pub(super) fn start(
        &mut self,
        op: Op,
        phase: Phase,
        backing: &Backing,
        region: &Region,
        memory: &[Segment],
    ) -> bool {
        (self.op, self.phase, self.progress, self.step, self.retries) = (op, phase, 0, 0, 0);
        self.has_own_fua = backing.has_own_fua();
        self.range_step = backing.methods().range_step();
        self.memory.set(region, memory)
    }

    /// Whether the op's written data is durable only after a sync of the backing.
    pub(super) fn owes_sync(&self) -> bool {
        let fua = matches!(self.op.kind, OpKind::Write { fua: true, .. });
        fua && !self.has_own_fua && self.phase == Phase::Transfer
    }

    /// The result of an op that succeeded: bytes moved, 0 for ops that move none.
    pub(super) fn value(&self) -> u32 {
        match self.op.kind {
            OpKind::Read { len, .. } | OpKind::Write { len, .. } => len,
            OpKind::Flush | OpKind::Discard { .. } | OpKind::WriteZeroes { .. } => 0,
        }
    }

    /// Ends the op: its place is free. The capacity of its list stays.
    pub(super) fn stop(&mut self) {
        self.phase = Phase::Idle;
        self.memory.clear();
    }

    /// Handles the result of an entry. Returns the op's result, or `None` when the op takes another
    /// entry.
    pub(super) fn advance(
        &mut self,
        result: i32,
        backing: &Backing,
        counters: &mut Counters,
    ) -> Option<Result<u32, Errno>> {
        let (_, len) = self.op.kind.range();
        let Ok(bytes) = u32::try_from(result) else {
            let errno = Errno::from_raw(result.wrapping_neg());
            // The kernel reports lost writes by one failed sync, with any errno. Another sync may
            // succeed although they are lost.
            let may_repeat = !matches!(self.phase, Phase::Sync(_)) && self.retries < RETRIES;
            if may_repeat && matches!(errno, Errno::EAGAIN | Errno::EINTR) {
                self.retries += 1;
                counters.retried += 1;
                return None;
            }
            if let Phase::Change(method) = self.phase
                && method.is_refused_by(errno)
            {
                backing.methods().refuse(method);
                let Some(next) = Phase::first(&self.op.kind, backing) else {
                    return Some(Err(Errno::EOPNOTSUPP));
                };
                self.phase = next;
                return None;
            }
            return Some(Err(errno));
        };
        if matches!(self.phase, Phase::Sync(_)) {
            return Some(Ok(0));
        }
        let counted = matches!(self.phase, Phase::Transfer | Phase::Change(Method::WriteZeroes));
        let moved = if counted { u64::from(bytes).min(self.step) } else { self.step };
        self.progress += moved;
        if self.progress >= len {
            return Some(Ok(self.value()));
        }
        if counted && moved < self.step {
            counters.short += 1;
            // The end of the file: no more bytes, or direct I/O stopped at an unaligned place.
            if moved == 0 || !moved.is_multiple_of(backing.alignment().into()) {
                return Some(Err(Errno::EIO));
            }
        }
        if self.phase == Phase::Transfer {
            self.memory.advance(moved);
        }
        None
    }

    /// The next entry; `None` when no work is left, which is a bug in this code.
    ///
    /// The entry points into this value, the region of [`Self::start`] and `zeroes`. The entry is
    /// valid as long as they are and the op neither starts, advances nor stops.
    pub(super) fn entry(&mut self, pieces: &Pieces, zeroes: &Region) -> Option<squeue::Entry> {
        let file = Fixed(self.op.volume.0.into());
        let (offset, len) = self.op.kind.range();
        let (offset, left) = (offset + self.progress, len - self.progress);
        match (self.phase, self.op.kind) {
            (Phase::Transfer, OpKind::Read { .. }) => {
                self.step = left;
                self.read(file, offset, pieces)
            }
            (Phase::Transfer, OpKind::Write { fua, .. }) => {
                self.step = left;
                let flags = if fua && self.has_own_fua { libc::RWF_DSYNC } else { 0 };
                self.write(file, offset, flags, pieces)
            }
            (Phase::Change(Method::WriteZeroes), _) => {
                let bytes: u32 = narrow(left.min(ZERO_CHUNK.into()));
                self.step = bytes.into();
                let from = zeroes.pointer(0, bytes as usize)?;
                Some(opcode::Write::new(file, from.as_ptr(), bytes).offset(offset).build())
            }
            (Phase::Change(method @ (Method::BlockDiscard | Method::WaitingDiscard)), _) => {
                self.step = left.min(self.range_step - offset % self.range_step);
                // The start goes into `addr`, the length into `addr3`, where `cmd` begins.
                let mut cmd = [0; 16];
                cmd[..8].copy_from_slice(&self.step.to_ne_bytes());
                let discard = opcode::UringCmd16::new(file, BLOCK_DISCARD);
                let entry = discard.addr(Some(offset)).cmd(cmd).build();
                let may_wait = method == Method::WaitingDiscard;
                Some(if may_wait { entry.flags(squeue::Flags::ASYNC) } else { entry })
            }
            (Phase::Change(method @ (Method::PunchHole | Method::ZeroRange)), _) => {
                self.step = left.min(self.range_step - offset % self.range_step);
                let mode = method.fallocate_mode().bits();
                Some(opcode::Fallocate::new(file, self.step).offset(offset).mode(mode).build())
            }
            (Phase::Sync(_), _) => {
                Some(opcode::Fsync::new(file).flags(FsyncFlags::DATASYNC).build())
            }
            (Phase::Idle | Phase::Unsynced | Phase::Awaiting(_) | Phase::Transfer, _) => None,
        }
    }

    fn read(&self, file: Fixed, offset: u64, pieces: &Pieces) -> Option<squeue::Entry> {
        let [part] = self.memory.rest() else {
            let (list, parts) = self.memory.as_kernel_list()?;
            return Some(opcode::Readv::new(file, list, parts).offset(offset).build());
        };
        let bytes = u32::try_from(part.len()).ok()?;
        Some(match pieces.holding(part) {
            Some(piece) => {
                opcode::ReadFixed::new(file, part.base(), bytes, piece).offset(offset).build()
            }
            None => opcode::Read::new(file, part.base(), bytes).offset(offset).build(),
        })
    }

    fn write(
        &self,
        file: Fixed,
        offset: u64,
        flags: i32,
        pieces: &Pieces,
    ) -> Option<squeue::Entry> {
        let [part] = self.memory.rest() else {
            let (list, parts) = self.memory.as_kernel_list()?;
            let scattered = opcode::Writev::new(file, list, parts);
            return Some(scattered.offset(offset).rw_flags(flags).build());
        };
        let bytes = u32::try_from(part.len()).ok()?;
        Some(match pieces.holding(part) {
            Some(piece) => {
                let fixed = opcode::WriteFixed::new(file, part.base(), bytes, piece);
                fixed.offset(offset).rw_flags(flags).build()
            }
            None => {
                let plain = opcode::Write::new(file, part.base(), bytes);
                plain.offset(offset).rw_flags(flags).build()
            }
        })
    }
}

/// The ops of a store: a fixed number of places.
///
/// Invariant: a place is in the list of free ones exactly when its op is [`Phase::Idle`].
#[derive(Debug)]
pub(super) struct Ops {
    places: Box<[ActiveOp]>,
    free: Vec<u32>,
}

impl Ops {
    /// Room for `capacity` ops.
    pub(super) fn new(capacity: u32) -> Self {
        Self {
            places: (0..capacity).map(|_| ActiveOp::idle()).collect(),
            free: (0..capacity).rev().collect(),
        }
    }

    /// Number of ops that fit.
    pub(super) fn capacity(&self) -> usize {
        self.places.len()
    }

    /// Ops that have not ended.
    #[inline]
    pub(super) fn active(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// A free place, for [`ActiveOp::start`].
    #[inline]
    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// The op of a place.
    #[inline]
    pub(super) fn get(&mut self, index: u32) -> &mut ActiveOp {
        &mut self.places[wide(index)]
    }

    /// The op of a place, to read.
    #[inline]
    pub(super) fn peek(&self, index: u32) -> &ActiveOp {
        &self.places[wide(index)]
    }

    /// Whether the place has an op.
    #[inline]
    pub(super) fn is_active(&self, index: u32) -> bool {
        self.places.get(wide(index)).is_some_and(|op| op.phase != Phase::Idle)
    }

    /// Ends an op: its place is free.
    #[inline]
    pub(super) fn end(&mut self, index: u32) -> Op {
        let active = self.get(index);
        active.stop();
        let op = active.op;
        self.free.push(index);
        op
    }

    /// Leaks the lists of parts that the kernel may still read.
    pub(super) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.places));
        self.free.clear();
    }
}

#[cfg(test)]
mod tests {
    use io_uring::opcode::{Read, ReadFixed, Readv, Write, WriteFixed, Writev};
    use rblk_fabric::PageKind;

    use super::*;
    use crate::store::uring::cooperative;
    use crate::store::{Direct, OpenOptions};

    const BYTES: usize = 256 << 10;

    // The kernel operations for a transfer of these segments, when the kernel moves `moved` bytes
    // at a time.
    fn opcodes(registered: bool, write: bool, memory: &[(usize, u32)], moved: &[i32]) -> Vec<u8> {
        let region = Region::allocate(BYTES, PageKind::Normal).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::File::create(&path).unwrap().set_len(BYTES as u64).unwrap();
        let options = OpenOptions { direct: Direct::Off, ..OpenOptions::default() };
        let backing = Backing::open(&path, &options).unwrap();
        let ring = cooperative(8).unwrap();
        let pieces = match registered {
            true => Pieces::register(&ring, &region, 0..BYTES).unwrap(),
            false => Pieces::none(),
        };
        let memory: Vec<_> = memory.iter().map(|&(offset, len)| Segment { offset, len }).collect();
        let len = memory.iter().map(|segment| segment.len).sum();
        let kind = match write {
            true => OpKind::Write { offset: 0, len, fua: true },
            false => OpKind::Read { offset: 0, len },
        };
        let op = Op { token: OpToken(1), volume: VolumeIndex(0), kind };
        let mut active = ActiveOp::idle();
        let mut counters = Counters::default();
        assert!(active.start(op, Phase::Transfer, &backing, &region, &memory));
        let mut opcodes = Vec::new();
        for (turn, &bytes) in moved.iter().enumerate() {
            let entry = active.entry(&pieces, &region).unwrap();
            opcodes.push(u8::try_from(entry.get_opcode()).unwrap());
            let ended = active.advance(bytes, &backing, &mut counters);
            let last = turn + 1 == moved.len();
            assert_eq!(ended, last.then_some(Ok(len)), "after {turn} turns");
        }
        opcodes
    }

    #[test]
    fn a_sync_that_failed_is_not_sent_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        std::fs::File::create(&path).unwrap().set_len(BYTES as u64).unwrap();
        let options = OpenOptions { direct: Direct::Off, ..OpenOptions::default() };
        let backing = Backing::open(&path, &options).unwrap();
        let region = Region::allocate(4096, PageKind::Normal).unwrap();
        let write = OpKind::Write { offset: 0, len: 4096, fua: true };
        for kind in [OpKind::Flush, write] {
            for errno in [Errno::EAGAIN, Errno::EINTR, Errno::EIO] {
                let op = Op { token: OpToken(1), volume: VolumeIndex(0), kind };
                let mut active = ActiveOp::idle();
                let memory = [Segment { offset: 0, len: 4096 }];
                let sync = Phase::Sync(SyncNumber::default());
                assert!(active.start(op, sync, &backing, &region, &memory));
                let ended = active.advance(-(errno as i32), &backing, &mut Counters::default());
                assert_eq!(ended, Some(Err(errno)), "{kind:?}");
            }
        }
    }

    #[test]
    fn a_single_run_uses_the_registered_memory() {
        for (write, registered, one, list) in [
            (false, true, ReadFixed::CODE, Readv::CODE),
            (true, true, WriteFixed::CODE, Writev::CODE),
            (false, false, Read::CODE, Readv::CODE),
            (true, false, Write::CODE, Writev::CODE),
        ] {
            let opcodes = |memory: &[_], moved: &[_]| opcodes(registered, write, memory, moved);
            assert_eq!(opcodes(&[(4096, 8192)], &[8192]), [one]);
            let adjacent = [(4096, 512), (4608, 0), (4608, 1024), (5632, 6656)];
            assert_eq!(opcodes(&adjacent, &[8192]), [one]);
            let apart = [(8192, 4096), (0, 4096)];
            assert_eq!(opcodes(&apart, &[8192]), [list]);
            // Within the first segment, to its end, within the second, only an interruption.
            let interrupted = -(Errno::EINTR as i32);
            assert_eq!(opcodes(&apart, &[512, 7680]), [list, list]);
            assert_eq!(opcodes(&apart, &[4096, interrupted, 4096]), [list, one, one]);
            assert_eq!(opcodes(&apart, &[interrupted, 4608, 3584]), [list, list, one]);
        }
    }
}
