//! [`Batch`]: many tags to a command (kernel 7.0). One command hands requests out for as long as
//! the queue lives; one command takes the results of a whole turn.
//!
//! ```text
//! PREP    every tag, once                      a list of elements
//! FETCH   armed until the disk stops           each completion brings a buffer of tags, to be
//!                                              given back at once
//! COMMIT  one per turn with results            a list of elements; the tags are the kernel's again
//! ```
//!
//! # Memory the kernel reads and writes
//!
//! - A *list* is being filled, with the kernel, or free. With the kernel it is from the push of its
//!   command to that command's completion, which may come after its tags have come again with new
//!   requests.
//! - A *tag buffer* is the kernel's from when it is put into the ring of buffers to the completion
//!   that names it. The tags are copied out and the buffer is put back before the first of them is
//!   looked at.
//! - A fetch that ends by itself (no buffer was left, or no room for its completion) is armed again
//!   with a new ring of buffers: what became of the old one's is not known.
//!
//! A tag cannot be answered twice in one list: it comes again only after the list went to the
//! kernel. What the kernel says is bounded all the same.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::{IoUring, cqueue, opcode, squeue};
use rblk_fabric::{PageKind, Region};

use super::NODE;
use crate::ublk::abi::{self, BatchElement, BatchIo};
use crate::ublk::error::{Result, UblkError};
use crate::ublk::sqe;

/// Commands of a batch queue that can wait for the same submission: every list, and the fetch.
pub(super) const COMMANDS: u16 = LISTS as u16 + 1;

/// Lists: one is filled, the others may be with the kernel. Each is taken within its submission, so
/// that two would do; more, where the kernel is short of memory and takes none for a while.
const LISTS: u8 = 4;
/// Tag buffers. A turn of the ring fills one or two; when they run out the fetch ends and is armed
/// again.
const TAG_BUFFERS: u16 = 16;
const TAG_BUFFER_BYTES: usize = abi::BATCH_TAGS_MAX * abi::BATCH_TAG_BYTES;
#[allow(clippy::cast_possible_truncation)] // 256.
const TAG_BUFFER_LEN: u32 = TAG_BUFFER_BYTES as u32;
/// The only group of buffers of the ring.
const GROUP: u16 = 0;
/// Bytes of an entry of the ring of buffers: address, length, number, and in the first one the
/// ring's tail.
const RING_ENTRY_BYTES: usize = 16;
const RING_TAIL_OFFSET: usize = 14;
/// The ring of buffers, and then the lists, begin on a page.
const TAGS_OFFSET: usize = 4096;
const LISTS_OFFSET: usize = TAGS_OFFSET + TAG_BUFFERS as usize * TAG_BUFFER_BYTES;
const ELEMENT_BYTES: usize = abi::BATCH_ELEMENT_BYTES as usize;

const _: () = assert!(TAG_BUFFERS.is_power_of_two());
const _: () = assert!(TAG_BUFFERS as usize * RING_ENTRY_BYTES <= TAGS_OFFSET);

/// `user_data` of the fetch; a list's is its index.
const FETCH: u64 = 1 << 32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ListState {
    /// Free, or (if it is the one) being filled.
    Ours,
    /// A PREP of all tags is on its way.
    Preparing,
    /// A COMMIT is on its way.
    Committing,
}

#[derive(Clone, Copy, Debug)]
struct List {
    state: ListState,
    /// First element that is not committed.
    first: u16,
    /// Elements.
    len: u16,
}

/// What the completion of a batch command says, beyond tags to hand out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Said {
    /// Nothing; there may be tags.
    Nothing,
    /// A command has to be pushed: the fetch, or the rest of a list.
    Again(Command),
    /// No more requests will come.
    Abort,
    /// The driver refused to prepare or to fetch (errno): no request will ever come.
    Refused(i32),
    /// The driver refused the result of a tag (errno); the rest of its list, if any, has to be
    /// pushed again.
    Lost(u16, i32, Option<Command>),
}

/// A command to be pushed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Command {
    /// Arm the fetch.
    Fetch,
    /// Hand a list in.
    List(u8),
}

pub(super) struct Batch {
    // Ring of buffers, tag buffers, lists. The queue drops its io_uring before this.
    memory: Arc<Region>,
    queue_id: u16,
    depth: u16,
    lists: [List; LISTS as usize],
    filling: u8,
    /// The ring's tail: buffers ever put into it.
    tail: u16,
    tags: [u16; abi::BATCH_TAGS_MAX],
    next_tag: u16,
    tag_count: u16,
}

impl Batch {
    /// Allocates, and gives the ring its buffers.
    pub(super) fn new(ring: &IoUring, queue_id: u16, depth: u16) -> Result<Self> {
        let len = LISTS_OFFSET + usize::from(LISTS) * usize::from(depth) * ELEMENT_BYTES;
        let memory = Region::allocate(len, PageKind::Normal)
            .map_err(io::Error::other)
            .map_err(|e| UblkError::system("allocating the lists of a ublk queue", e))?;
        let list = List { state: ListState::Ours, first: 0, len: 0 };
        let mut batch = Self {
            memory,
            queue_id,
            depth,
            lists: [list; LISTS as usize],
            filling: 0,
            tail: 0,
            tags: [0; abi::BATCH_TAGS_MAX],
            next_tag: 0,
            tag_count: 0,
        };
        batch.register_buffers(ring)?;
        Ok(batch)
    }

    fn register_buffers(&mut self, ring: &IoUring) -> Result<()> {
        self.memory.zero(0, usize::from(TAG_BUFFERS) * RING_ENTRY_BYTES);
        self.tail = 0;
        // SAFETY: the ring of buffers is the first page of `memory`, which outlives the io_uring.
        let registered = unsafe {
            let address = self.memory.address();
            ring.submitter().register_buf_ring_with_flags(address, TAG_BUFFERS, GROUP, 0)
        };
        registered.map_err(|e| UblkError::system("registering buffers for ublk batches", e))?;
        for buffer in 0..TAG_BUFFERS {
            self.put_buffer(buffer);
        }
        Ok(())
    }

    /// A ring of buffers of which all are there. Only while no fetch is armed.
    pub(super) fn renew_buffers(&mut self, ring: &IoUring) -> Result<()> {
        ring.submitter()
            .unregister_buf_ring(GROUP)
            .map_err(|e| UblkError::system("taking buffers for ublk batches back", e))?;
        self.register_buffers(ring)
    }

    /// Puts a tag buffer into the ring.
    #[inline]
    fn put_buffer(&mut self, buffer: u16) {
        let offset = TAGS_OFFSET + usize::from(buffer) * TAG_BUFFER_BYTES;
        let mut entry = [0; RING_TAIL_OFFSET];
        entry[0..8].copy_from_slice(&(self.memory.address() + offset as u64).to_ne_bytes());
        entry[8..12].copy_from_slice(&TAG_BUFFER_LEN.to_ne_bytes());
        entry[12..14].copy_from_slice(&buffer.to_ne_bytes());
        let place = usize::from(self.tail & (TAG_BUFFERS - 1));
        self.memory.write(place * RING_ENTRY_BYTES, &entry);
        self.tail = self.tail.wrapping_add(1);
        if let Some(tail) = self.memory.pointer(RING_TAIL_OFFSET, 2) {
            // SAFETY: two bytes inside the region, aligned (its base is a page's), which this
            // program reaches only here, and the kernel only reads, as an atomic.
            let tail_word = unsafe { AtomicU16::from_ptr(tail.as_ptr().cast()) };
            // The entry before the tail that covers it.
            tail_word.store(self.tail, Ordering::Release);
        }
    }

    /// Fills a list with every tag. `address` is where its buffer is.
    pub(super) fn prepare_all(&mut self, address: impl Fn(u16) -> u64) -> Command {
        let list = self.filling;
        for tag in 0..self.depth {
            self.add(tag, 0, address(tag));
        }
        self.lists[usize::from(list)].state = ListState::Preparing;
        self.filling = (list + 1) % LISTS;
        Command::List(list)
    }

    /// Notes a result for the next commit. False, if there is no room: not with a correct kernel.
    #[inline]
    pub(super) fn add(&mut self, tag: u16, result: i32, buf_addr: u64) -> bool {
        let list = usize::from(self.filling);
        let at = self.lists[list].len;
        if at >= self.depth {
            return false;
        }
        let element = BatchElement { tag, buf_index: 0, result, buf_addr };
        self.memory.write(self.element_offset(list, at), &element.to_bytes());
        self.lists[list].len = at + 1;
        true
    }

    /// There are results that no command holds yet.
    #[inline]
    pub(super) fn has_results(&self) -> bool {
        self.lists[usize::from(self.filling)].len > 0
    }

    /// The results so far as a command; none, if there are none, or the kernel has all other lists:
    /// then they wait for the next turn.
    #[inline]
    pub(super) fn seal(&mut self) -> Option<Command> {
        if !self.has_results() {
            return None;
        }
        let free = (0..LISTS)
            .find(|i| *i != self.filling && self.lists[usize::from(*i)].state == ListState::Ours)?;
        let list = std::mem::replace(&mut self.filling, free);
        self.lists[usize::from(list)].state = ListState::Committing;
        Some(Command::List(list))
    }

    /// Lists with the kernel: each completes within its own submission.
    #[inline]
    pub(super) fn lists_out(&self) -> usize {
        self.lists.iter().filter(|list| list.state != ListState::Ours).count()
    }

    /// The submission entry of a command.
    #[inline]
    pub(super) fn entry(&self, command: Command) -> squeue::Entry {
        match command {
            Command::Fetch => {
                let header = BatchIo {
                    q_id: self.queue_id,
                    elem_bytes: abi::BATCH_TAG_LEN,
                    ..BatchIo::default()
                };
                let cmd = header.to_sqe_bytes();
                sqe::multishot(NODE, abi::IO_FETCH_IO_CMDS, cmd, GROUP, FETCH)
            }
            Command::List(index) => {
                let list = &self.lists[usize::from(index % LISTS)];
                let header = BatchIo {
                    q_id: self.queue_id,
                    flags: abi::BATCH_HAS_BUF_ADDR,
                    nr_elem: list.len - list.first,
                    elem_bytes: abi::BATCH_ELEMENT_BYTES,
                    ..BatchIo::default()
                };
                let op = match list.state {
                    ListState::Preparing => abi::IO_PREP_IO_CMDS,
                    _ => abi::IO_COMMIT_IO_CMDS,
                };
                let offset = self.element_offset(usize::from(index), list.first);
                opcode::UringCmd16::new(NODE, op)
                    .cmd(header.to_sqe_bytes())
                    .addr(Some(self.memory.address() + offset as u64))
                    .build()
                    .user_data(index.into())
            }
        }
    }

    /// Takes a completion of one of these commands.
    #[inline]
    pub(super) fn completed(&mut self, user_data: u64, result: i32, flags: u32) -> Said {
        if user_data == FETCH {
            return self.fetched(result, flags);
        }
        let Some(index) = u8::try_from(user_data).ok().filter(|i| *i < LISTS) else {
            return Said::Nothing;
        };
        match self.lists[usize::from(index)].state {
            ListState::Committing => self.committed(index, result),
            ListState::Preparing => {
                self.release(index);
                if result < 0 { Said::Refused(-result) } else { Said::Nothing }
            }
            ListState::Ours => Said::Nothing,
        }
    }

    #[inline]
    fn fetched(&mut self, result: i32, flags: u32) -> Said {
        if let Some(buffer) = cqueue::buffer_select(flags).filter(|b| *b < TAG_BUFFERS) {
            // The tags of the last completion are gone: they are taken before the next completion
            // is.
            let bytes = usize::try_from(result).unwrap_or(0).min(TAG_BUFFER_BYTES);
            let mut count = 0;
            let mut offset = TAGS_OFFSET + usize::from(buffer) * TAG_BUFFER_BYTES;
            for tag in &mut self.tags[..bytes / abi::BATCH_TAG_BYTES] {
                let mut bytes = [0; abi::BATCH_TAG_BYTES];
                self.memory.read(offset, &mut bytes);
                *tag = u16::from_ne_bytes(bytes);
                offset += abi::BATCH_TAG_BYTES;
                count += 1;
            }
            (self.next_tag, self.tag_count) = (0, count);
            self.put_buffer(buffer);
        }
        if cqueue::more(flags) {
            return Said::Nothing;
        }
        match result {
            abi::IO_RES_ABORT => Said::Abort,
            // Ended with tags, or for want of a buffer or of memory: what was not delivered waits
            // in the driver.
            0.. => Said::Again(Command::Fetch),
            _ => match -result {
                libc::ENOBUFS | libc::ENOMEM | libc::EAGAIN => Said::Again(Command::Fetch),
                errno => Said::Refused(errno),
            },
        }
    }

    fn committed(&mut self, index: u8, result: i32) -> Said {
        let list = usize::from(index);
        let List { first, len, .. } = self.lists[list];
        let left = len - first;
        let done = u16::try_from(result / i32::from(abi::BATCH_ELEMENT_BYTES)).unwrap_or(0);
        if done >= left {
            self.release(index);
            return Said::Nothing;
        }
        let again = Command::List(index);
        if done > 0 {
            // The errno of the one that stopped it comes when it is the first.
            self.lists[list].first = first + done;
            return Said::Again(again);
        }
        let mut bytes = [0; 2];
        self.memory.read(self.element_offset(list, first), &mut bytes);
        let errno = if result < 0 { -result } else { libc::EIO };
        let rest = if left > 1 {
            self.lists[list].first = first + 1;
            Some(again)
        } else {
            self.release(index);
            None
        };
        Said::Lost(u16::from_ne_bytes(bytes), errno, rest)
    }

    fn release(&mut self, index: u8) {
        self.lists[usize::from(index)] = List { state: ListState::Ours, first: 0, len: 0 };
    }

    /// The next tag that has a request.
    #[inline]
    pub(super) fn next_tag(&mut self) -> Option<u16> {
        if self.next_tag >= self.tag_count {
            return None;
        }
        let tag = self.tags.get(usize::from(self.next_tag)).copied();
        self.next_tag += 1;
        tag
    }

    /// There are tags to hand out.
    #[inline]
    pub(super) fn has_tags(&self) -> bool {
        self.next_tag < self.tag_count
    }

    #[inline]
    fn element_offset(&self, list: usize, at: u16) -> usize {
        LISTS_OFFSET + (list * usize::from(self.depth) + usize::from(at)) * ELEMENT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `IORING_CQE_F_BUFFER` with a number, and `IORING_CQE_F_MORE`.
    fn delivered(buffer: u16) -> u32 {
        u32::from(buffer) << 16 | 1 | 2
    }

    fn batch(depth: u16) -> Option<(IoUring, Batch)> {
        // A sandbox may refuse io_uring: then there is nothing to test.
        let ring = IoUring::new(8).ok()?;
        let batch = Batch::new(&ring, 3, depth).unwrap();
        Some((ring, batch))
    }

    fn lay_tags(batch: &Batch, buffer: u16, tags: &[u16]) {
        for (i, tag) in tags.iter().enumerate() {
            let offset = TAGS_OFFSET + usize::from(buffer) * TAG_BUFFER_BYTES + 2 * i;
            batch.memory.write(offset, &tag.to_ne_bytes());
        }
    }

    fn take(batch: &mut Batch) -> Vec<u16> {
        std::iter::from_fn(|| batch.next_tag()).collect()
    }

    fn ring_tail(batch: &Batch) -> u16 {
        let mut bytes = [0; 2];
        batch.memory.read(RING_TAIL_OFFSET, &mut bytes);
        u16::from_ne_bytes(bytes)
    }

    #[test]
    fn tags_come_in_order_and_their_buffer_goes_back() {
        let Some((_ring, mut batch)) = batch(8) else { return };
        assert_eq!(ring_tail(&batch), TAG_BUFFERS);
        lay_tags(&batch, 5, &[7, 0, 3]);
        assert_eq!(batch.completed(FETCH, 6, delivered(5)), Said::Nothing);
        assert_eq!(ring_tail(&batch), TAG_BUFFERS + 1);
        let mut number = [0; 2];
        batch.memory.read(12, &mut number);
        assert_eq!(u16::from_ne_bytes(number), 5, "the buffer is at the ring's first place");
        assert!(batch.has_tags());
        assert_eq!(take(&mut batch), [7, 0, 3]);
        // None at all, an odd length, more than a buffer holds, and a buffer there is not.
        assert_eq!(batch.completed(FETCH, 0, delivered(0)), Said::Nothing);
        assert_eq!(take(&mut batch), [0_u16; 0]);
        assert_eq!(batch.completed(FETCH, 3, delivered(1)), Said::Nothing);
        assert_eq!(take(&mut batch).len(), 1);
        assert_eq!(batch.completed(FETCH, i32::MAX, delivered(1)), Said::Nothing);
        assert_eq!(take(&mut batch).len(), abi::BATCH_TAGS_MAX);
        assert_eq!(batch.completed(FETCH, 4, delivered(TAG_BUFFERS)), Said::Nothing);
        assert!(!batch.has_tags());
    }

    #[test]
    fn a_fetch_that_ends_is_armed_again_unless_the_driver_says_no() {
        let Some((ring, mut batch)) = batch(8) else { return };
        assert_eq!(batch.completed(FETCH, -libc::ENODEV, 0), Said::Abort);
        assert_eq!(batch.completed(FETCH, -libc::EINVAL, 0), Said::Refused(libc::EINVAL));
        let again = Said::Again(Command::Fetch);
        assert_eq!(batch.completed(FETCH, -libc::ENOBUFS, 0), again);
        batch.renew_buffers(&ring).unwrap();
        assert_eq!(ring_tail(&batch), TAG_BUFFERS);
        // The last completion may have tags.
        lay_tags(&batch, 0, &[1]);
        assert_eq!(batch.completed(FETCH, 2, delivered(0) & !2), again);
        assert_eq!(take(&mut batch), [1]);
    }

    #[test]
    fn lists_go_round_and_wait_when_the_kernel_has_them_all() {
        let Some((_ring, mut batch)) = batch(2) else { return };
        assert_eq!((batch.seal(), batch.has_results()), (None, false));
        let mut out = Vec::new();
        for _ in 1..LISTS {
            assert!(batch.add(0, 512, 4096) && batch.add(1, -5, 8192) && !batch.add(0, 0, 4096));
            let Some(Command::List(list)) = batch.seal() else { panic!("a list is free") };
            out.push(list);
        }
        assert_eq!((batch.lists_out(), out.len()), (3, 3));
        assert!(batch.add(1, 0, 8192));
        assert_eq!(batch.seal(), None);
        assert!(batch.has_results());
        assert_eq!(batch.completed(out[1].into(), 32, 0), Said::Nothing);
        assert!(batch.seal().is_some() && !batch.has_results());
        // A completion of a list that is not out says nothing.
        assert_eq!(batch.completed(out[1].into(), -5, 0), Said::Nothing);
        assert_eq!(batch.completed(99, -5, 0), Said::Nothing);
    }

    #[test]
    fn what_a_commit_left_is_handed_in_again_without_the_one_that_was_refused() {
        let Some((_ring, mut batch)) = batch(4) else { return };
        for tag in [2, 0, 3, 1] {
            assert!(batch.add(tag, 0, 4096));
        }
        let Some(Command::List(list)) = batch.seal() else { panic!("a list is free") };
        let again = Command::List(list);
        assert_eq!(batch.completed(list.into(), 16, 0), Said::Again(again));
        let lost = Said::Lost(0, libc::EBUSY, Some(again));
        assert_eq!(batch.completed(list.into(), -libc::EBUSY, 0), lost);
        assert_eq!(batch.completed(list.into(), 16, 0), Said::Again(again));
        assert_eq!(batch.completed(list.into(), 0, 0), Said::Lost(1, libc::EIO, None));
        assert_eq!(batch.lists_out(), 0);
    }

    #[test]
    fn all_tags_are_prepared_by_one_command() {
        let Some((_ring, mut batch)) = batch(4) else { return };
        let Command::List(list) = batch.prepare_all(|tag| 4096 * (1 + u64::from(tag))) else {
            panic!("a list")
        };
        let mut element = [0; ELEMENT_BYTES];
        batch.memory.read(batch.element_offset(list.into(), 3), &mut element);
        let expected = BatchElement { tag: 3, buf_addr: 4 * 4096, ..BatchElement::default() };
        assert_eq!(element, expected.to_bytes());
        assert!(!batch.has_results());
        assert_eq!(batch.completed(list.into(), -libc::EBUSY, 0), Said::Refused(libc::EBUSY));
        assert_eq!(batch.lists_out(), 0);
    }
}
