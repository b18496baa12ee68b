//! [`GuestRequest`]: one request of a guest, read from its descriptors, and the
//! [`GuestRequestStep`]s that carry it out.
//!
//! A guest may write anything into a descriptor, and change it at any time. So each is read once,
//! and every address is looked up when it is used. A bad request is answered with a status to the
//! guest, if it names a place for one. A request without that place breaks its ring.
//!
//! The data of a request is in pieces of the guest's memory. If every piece is whole blocks and
//! they are few, the target moves each piece on its own, directly from or to the guest's memory.
//! Otherwise the data goes through buffers of the queue.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use virtio_queue::DescriptorChain;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::guest_memory::GuestMemory;
use crate::engine::io::IoOp;
use crate::engine::path::DataPlace;

/// Bytes of the head of a request: type, priority, sector.
const HEAD: u64 = 16;
/// Bytes of a range of a DISCARD: sector, sectors, flags.
const RANGE: u64 = 16;
/// Limit of the ranges of a DISCARD or WRITE_ZEROES.
pub(super) const RANGES_MAX: u32 = 16;
/// Most sectors of a range: the limit of a disk.
pub(super) const RANGE_SECTORS_MAX: u32 = 1 << 21;
/// Limit of the descriptors of one request: the size of the longest ring.
const DESCRIPTORS_MAX: usize = 1024;
/// Pieces shorter than this on average are gathered in a buffer: a copy of so many bytes takes less
/// time than a request to the target.
const PIECE_LEAST: u64 = 16 << 10;
/// Bytes of the name of a disk.
pub(super) const ID_BYTES: usize = 20;
const SECTOR: u64 = 512;

pub(super) const OK: u8 = status(VIRTIO_BLK_S_OK);
pub(super) const IO_ERROR: u8 = status(VIRTIO_BLK_S_IOERR);
const UNSUPPORTED: u8 = status(VIRTIO_BLK_S_UNSUPP);

const fn status(value: u32) -> u8 {
    value.to_le_bytes()[0]
}

/// Bytes of the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct GuestPiece {
    guest: u64,
    len: u64,
}

/// A range of a DISCARD or a WRITE_ZEROES.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Range {
    sector: u64,
    sectors: u32,
    unmap: bool,
}

/// The operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum GuestOp {
    Read,
    Write,
    #[default]
    Flush,
    Discard,
    WriteZeroes,
    GetId,
}

impl GuestOp {
    /// The target's operation. `None`, if the target has no part in it.
    pub(super) fn for_target(self) -> Option<IoOp> {
        match self {
            Self::Read => Some(IoOp::Read),
            Self::Write => Some(IoOp::Write),
            Self::Flush => Some(IoOp::Flush),
            Self::Discard => Some(IoOp::Discard),
            Self::WriteZeroes => Some(IoOp::WriteZeroes),
            Self::GetId => None,
        }
    }
}

/// A request to the target that is a part of a guest's request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GuestRequestStep {
    /// First byte of the volume.
    pub(super) offset: u64,
    /// Bytes.
    pub(super) len: u64,
    /// First byte of the data of the request.
    pub(super) at: u64,
    /// The place of the data in the guest's memory; `None`: the data is in a buffer, or there is
    /// none.
    pub(super) guest: Option<(u64, DataPlace)>,
    /// Zeros may be holes.
    pub(super) may_unmap: bool,
}

/// A request has no place for its status: its ring breaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NoStatus;

/// The bounds of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DiskLimits {
    /// Bytes of a block of the volume.
    pub(super) block: u64,
    /// Most bytes of one request of the target.
    pub(super) step: u64,
}

/// One request of a guest. The next request reuses its memory.
#[derive(Debug, Default)]
pub(super) struct GuestRequest {
    head: u16,
    op: GuestOp,
    sector: u64,
    // Data for the device to read, and room for it to write.
    given: Vec<GuestPiece>,
    wanted: Vec<GuestPiece>,
    ranges: Vec<Range>,
    status_at: u64,
    status: u8,
    straight: bool,
    // The position of the steps: the next piece or range, the byte in it, and the bytes before.
    next: usize,
    within: u64,
    at: u64,
    done: bool,
}

impl GuestRequest {
    /// Reads a request.
    ///
    /// # Errors
    /// [`NoStatus`]. Any other fault is in its [status](Self::status).
    pub(super) fn read(
        &mut self,
        chain: DescriptorChain<&GuestMemoryMmap>,
        memory: &GuestMemory,
        rules: DiskLimits,
    ) -> Result<(), NoStatus> {
        self.given.clear();
        self.wanted.clear();
        self.ranges.clear();
        (self.next, self.within, self.at, self.done) = (0, 0, 0, false);
        self.head = chain.head_index();
        self.gather(chain)?;
        self.take_status(memory)?;
        self.status = match self.understand(memory, rules) {
            Ok(()) => OK,
            Err(status) => status,
        };
        self.done |= self.status != OK;
        Ok(())
    }

    fn gather(&mut self, chain: DescriptorChain<&GuestMemoryMmap>) -> Result<(), NoStatus> {
        let (mut goes_on, mut count) = (true, 0);
        for descriptor in chain {
            goes_on = descriptor.has_next();
            count += 1;
            let piece = GuestPiece { guest: descriptor.addr().0, len: descriptor.len().into() };
            let pieces = match descriptor.is_write_only() {
                true => &mut self.wanted,
                // Pieces for the device to read come first.
                false if !self.wanted.is_empty() => return Err(NoStatus),
                false => &mut self.given,
            };
            match pieces.last_mut() {
                _ if piece.len == 0 => {}
                Some(last) if last.guest.checked_add(last.len) == Some(piece.guest) => {
                    last.len += piece.len;
                }
                _ => pieces.push(piece),
            }
            if count > DESCRIPTORS_MAX {
                return Err(NoStatus);
            }
        }
        // The chain was cut: by a descriptor outside the memory, or a loop.
        if goes_on { Err(NoStatus) } else { Ok(()) }
    }

    /// Takes the status byte: the last byte for the device to write.
    fn take_status(&mut self, memory: &GuestMemory) -> Result<(), NoStatus> {
        let last = self.wanted.last_mut().ok_or(NoStatus)?;
        last.len -= 1;
        self.status_at = last.guest.checked_add(last.len).ok_or(NoStatus)?;
        if last.len == 0 {
            self.wanted.pop();
        }
        memory.place(self.status_at, 1).map(drop).ok_or(NoStatus)
    }

    fn understand(&mut self, memory: &GuestMemory, rules: DiskLimits) -> Result<(), u8> {
        let mut head = [0; 16];
        take(&mut self.given, memory, &mut head).ok_or(IO_ERROR)?;
        let (kind, _, sector) = fields(head);
        self.sector = sector;
        self.op = match kind {
            VIRTIO_BLK_T_IN => GuestOp::Read,
            VIRTIO_BLK_T_OUT => GuestOp::Write,
            VIRTIO_BLK_T_FLUSH => GuestOp::Flush,
            VIRTIO_BLK_T_DISCARD => GuestOp::Discard,
            VIRTIO_BLK_T_WRITE_ZEROES => GuestOp::WriteZeroes,
            VIRTIO_BLK_T_GET_ID => GuestOp::GetId,
            _ => return Err(UNSUPPORTED),
        };
        match self.op {
            GuestOp::Read | GuestOp::Write => self.survey(memory, rules),
            GuestOp::Discard | GuestOp::WriteZeroes => self.read_ranges(memory, rules),
            GuestOp::Flush => Ok(()),
            GuestOp::GetId => {
                self.done = true;
                let room = total(&self.wanted).is_some_and(|room| room >= ID_BYTES as u64);
                if room { Ok(()) } else { Err(IO_ERROR) }
            }
        }
    }

    /// Checks that all of the data is memory and whole blocks, and chooses how to move it.
    fn survey(&mut self, memory: &GuestMemory, rules: DiskLimits) -> Result<(), u8> {
        let len = total(self.data()).filter(|len| *len > 0).ok_or(IO_ERROR)?;
        let offset = self.sector.checked_mul(SECTOR).ok_or(IO_ERROR)?;
        offset.checked_add(len).ok_or(IO_ERROR)?;
        if !(offset.is_multiple_of(rules.block) && len.is_multiple_of(rules.block)) {
            return Err(IO_ERROR);
        }
        let (mut steps, mut whole) = (0u64, true);
        for piece in self.data() {
            let mut at = 0;
            while at < piece.len {
                let guest = piece.guest.checked_add(at).ok_or(IO_ERROR)?;
                let (_, run) = memory.place(guest, piece.len - at).ok_or(IO_ERROR)?;
                steps += run.div_ceil(rules.step);
                whole &= run.is_multiple_of(rules.block);
                at += run;
            }
        }
        self.straight = whole && (steps == 1 || len / steps >= PIECE_LEAST);
        Ok(())
    }

    fn read_ranges(&mut self, memory: &GuestMemory, rules: DiskLimits) -> Result<(), u8> {
        let len = total(&self.given).ok_or(IO_ERROR)?;
        let most = u64::from(RANGES_MAX) * RANGE;
        if len == 0 || !len.is_multiple_of(RANGE) || len > most {
            return Err(IO_ERROR);
        }
        for _ in 0..len / RANGE {
            let mut bytes = [0; 16];
            take(&mut self.given, memory, &mut bytes).ok_or(IO_ERROR)?;
            let (low, high, tail) = fields(bytes);
            let sector = u64::from(high) << 32 | u64::from(low);
            let [sectors, flags] = [tail, tail >> 32].map(|half| (half & 0xffff_ffff) as u32);
            let known = match self.op {
                GuestOp::WriteZeroes => VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
                _ => 0,
            };
            if flags & !known != 0 {
                return Err(UNSUPPORTED);
            }
            let (offset, len) = (sector.checked_mul(SECTOR), u64::from(sectors) * SECTOR);
            let offset = offset.filter(|at| at.checked_add(len).is_some()).ok_or(IO_ERROR)?;
            let whole = offset.is_multiple_of(rules.block) && len.is_multiple_of(rules.block);
            if sectors == 0 || sectors > RANGE_SECTORS_MAX || !whole {
                return Err(IO_ERROR);
            }
            self.ranges.push(Range { sector, sectors, unmap: flags != 0 });
        }
        Ok(())
    }

    /// The pieces of the data.
    fn data(&self) -> &[GuestPiece] {
        match self.op {
            GuestOp::Write => &self.given,
            _ => &self.wanted,
        }
    }

    /// The operation.
    pub(super) fn op(&self) -> GuestOp {
        self.op
    }

    /// The status so far.
    pub(super) fn status(&self) -> u8 {
        self.status
    }

    /// Fails the request: no more steps begin.
    pub(super) fn fail(&mut self) {
        (self.status, self.done) = (IO_ERROR, true);
    }

    /// Whether every step has begun.
    pub(super) fn has_begun(&self) -> bool {
        self.done
    }

    /// Starts the next step. `None`: there is none, or the guest's memory has lost the data.
    pub(super) fn next_step(
        &mut self,
        memory: &GuestMemory,
        rules: DiskLimits,
    ) -> Option<GuestRequestStep> {
        if self.done {
            return None;
        }
        let step = match self.op {
            GuestOp::Read | GuestOp::Write => self.next_of_data(memory, rules),
            GuestOp::Discard | GuestOp::WriteZeroes => self.next_of_ranges(),
            GuestOp::Flush | GuestOp::GetId => {
                self.done = true;
                Some(GuestRequestStep { offset: 0, len: 0, at: 0, guest: None, may_unmap: false })
            }
        };
        if step.is_none() {
            self.fail();
        }
        step
    }

    fn next_of_ranges(&mut self) -> Option<GuestRequestStep> {
        let Range { sector, sectors, unmap } = *self.ranges.get(self.next)?;
        self.next += 1;
        self.done = self.next == self.ranges.len();
        let (offset, len) = (sector * SECTOR, u64::from(sectors) * SECTOR);
        Some(GuestRequestStep { offset, len, at: 0, guest: None, may_unmap: unmap })
    }

    fn next_of_data(
        &mut self,
        memory: &GuestMemory,
        rules: DiskLimits,
    ) -> Option<GuestRequestStep> {
        let at = self.at;
        let offset = self.sector.checked_mul(SECTOR)?.checked_add(at)?;
        let (len, guest) = if self.straight {
            let piece = *self.data().get(self.next)?;
            let guest = piece.guest.checked_add(self.within)?;
            let (place, run) = memory.place(guest, (piece.len - self.within).min(rules.step))?;
            // The new memory may split the data into other pieces.
            if !run.is_multiple_of(rules.block) {
                return None;
            }
            self.within += run;
            if self.within == piece.len {
                (self.next, self.within) = (self.next + 1, 0);
            }
            self.done = self.next == self.data().len();
            (run, Some((guest, place)))
        } else {
            let left = total(self.data())?.checked_sub(at)?;
            let len = left.min(rules.step);
            self.done = len == left;
            (len, None)
        };
        self.at += len;
        Some(GuestRequestStep { offset, len, at, guest, may_unmap: false })
    }

    /// Copies `len` bytes of the data, starting at byte `at`, from the guest's memory to a buffer,
    /// or the reverse. Returns whether all of it is memory.
    pub(super) fn copy(
        &self,
        memory: &GuestMemory,
        (at, len): (u64, u64),
        buffer: (&rblk_fabric::Region, usize),
    ) -> bool {
        let (buffer, mut place) = buffer;
        let (mut skip, mut left) = (at, len);
        for piece in self.data() {
            let mut within = skip.min(piece.len);
            skip -= within;
            while within < piece.len && left > 0 {
                let found = piece.guest.checked_add(within).and_then(|guest| {
                    let (found, run) = memory.place(guest, (piece.len - within).min(left))?;
                    Some((memory.region(guest)?, found.offset, run))
                });
                let Some((region, offset, run)) = found else { return false };
                // No run is longer than the buffer.
                let Ok(bytes) = usize::try_from(run) else { return false };
                match self.op {
                    GuestOp::Write => region.copy_to(offset, buffer, place, bytes),
                    _ => buffer.copy_to(place, region, offset, bytes),
                }
                (place, within, left) = (place + bytes, within + run, left - run);
            }
        }
        left == 0
    }

    /// Writes the name of the disk to the guest.
    pub(super) fn tell_id(&mut self, memory: &GuestMemory, id: &[u8; ID_BYTES]) {
        let mut left = &id[..];
        for piece in &self.wanted {
            let len = usize::try_from(piece.len).map_or(left.len(), |len| len.min(left.len()));
            let (now, rest) = left.split_at(len);
            if memory.view().write_slice(now, GuestAddress(piece.guest)).is_err() {
                return self.fail();
            }
            left = rest;
        }
    }

    /// Writes the status to the guest. Returns the head of the request and the number of written
    /// bytes, for the ring.
    pub(super) fn tell_status(&self, memory: &GuestMemory) -> (u16, u32) {
        // If the status cannot be written to the memory, the guest learns nothing.
        let _ = memory.view().write_obj(self.status, GuestAddress(self.status_at));
        let reads = matches!(self.op, GuestOp::Read | GuestOp::GetId) && self.status == OK;
        let data = if reads { total(&self.wanted).unwrap_or(0) } else { 0 };
        (self.head, u32::try_from(data + 1).unwrap_or(u32::MAX))
    }
}

/// The bytes of all pieces.
fn total(pieces: &[GuestPiece]) -> Option<u64> {
    pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.len))
}

/// Removes the first bytes from the pieces.
fn take(pieces: &mut Vec<GuestPiece>, memory: &GuestMemory, out: &mut [u8]) -> Option<()> {
    let mut filled = 0;
    while filled < out.len() {
        let first = pieces.first_mut()?;
        let wanted = out.len() - filled;
        let len = usize::try_from(first.len).map_or(wanted, |len| len.min(wanted));
        let into = out.get_mut(filled..filled + len)?;
        memory.view().read_slice(into, GuestAddress(first.guest)).ok()?;
        filled += len;
        first.guest = first.guest.checked_add(len as u64)?;
        first.len -= len as u64;
        if first.len == 0 {
            pieces.remove(0);
        }
    }
    Some(())
}

/// Two numbers of 4 bytes, and one of 8.
fn fields(bytes: [u8; 16]) -> (u32, u32, u64) {
    let number = u128::from_le_bytes(bytes);
    ((number & 0xffff_ffff) as u32, ((number >> 32) & 0xffff_ffff) as u32, (number >> 64) as u64)
}

const _: () = assert!(HEAD == 16 && RANGE == 16);
