//! [`GuestRing`]: a ring of a guest: its available and used requests, and the events both ways.
//!
//! The ring is in the guest's memory. It is read and written through rust-vmm's virtio-queue, which
//! checks every index and address.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{DescriptorChain, Queue, QueueT};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::event::{Kick, NotifyFd};
use super::guest_memory::GuestMemory;

/// Limit of a ring's size.
pub(super) const SIZE_MAX: u16 = 1024;

/// The parts of a ring. The addresses are the guest's.
#[derive(Debug)]
pub(super) struct RingParts {
    pub(super) size: u16,
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    pub(super) base: u16,
    pub(super) event_index: bool,
    pub(super) kick: Kick,
    pub(super) call: Option<NotifyFd>,
    pub(super) error: Option<NotifyFd>,
    /// The answered requests are unknown, unless the guest has just made the ring.
    pub(super) in_doubt: bool,
}

/// A ring of a guest.
#[derive(Debug)]
pub(super) struct GuestRing {
    queue: Queue,
    memory: Arc<GuestMemory>,
    kick: Kick,
    call: Option<NotifyFd>,
    error: Option<NotifyFd>,
    // A request was completed since the last notification of the guest.
    owes_call: bool,
    broken: bool,
}

/// The reason to leave a ring in doubt alone.
const IN_DOUBT: &str = "the program before this one did not end in good order, and left no record of the requests of \
                        the ring that it answered: reset the guest";

impl GuestRing {
    /// A ring in that memory.
    ///
    /// # Errors
    /// The ring is not all inside the memory, or not aligned, or its size is invalid.
    pub(super) fn new(parts: RingParts, memory: Arc<GuestMemory>) -> io::Result<Self> {
        let RingParts { size, descriptors, available, used, base, event_index, kick, .. } = parts;
        let mut queue = Queue::new(SIZE_MAX).map_err(io::Error::other)?;
        let set = queue
            .try_set_size(size)
            .and_then(|()| queue.try_set_desc_table_address(GuestAddress(descriptors)))
            .and_then(|()| queue.try_set_avail_ring_address(GuestAddress(available)))
            .and_then(|()| queue.try_set_used_ring_address(GuestAddress(used)));
        set.map_err(io::Error::other)?;
        queue.set_event_idx(event_index);
        queue.set_ready(true);
        if !queue.is_valid(memory.view()) {
            return Err(io::Error::other("a ring that is not all inside the guest's memory"));
        }
        queue.set_next_avail(base);
        let done = queue.used_idx(memory.view(), Ordering::Acquire).map_err(io::Error::other)?;
        queue.set_next_used(done.0);
        let (call, error) = (parts.call, parts.error);
        let mut ring = Self { queue, memory, kick, call, error, owes_call: false, broken: false };
        if parts.in_doubt && (base, done.0) != (0, 0) {
            ring.breaks(IN_DOUBT);
        }
        Ok(ring)
    }

    /// Whether the ring is broken: nothing is taken from it.
    pub(super) fn is_broken(&self) -> bool {
        self.broken
    }

    /// Readable after a kick of the guest.
    pub(super) fn kick(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    /// Resets the kick.
    pub(super) fn clear_kick(&mut self) {
        self.kick.clear();
    }

    /// Sets the event that notifies the guest of completions.
    pub(super) fn set_call(&mut self, call: Option<NotifyFd>) {
        self.call = call;
        // The new event notifies of earlier completions, too.
        self.owes_call = true;
    }

    /// Sets the event that notifies the front end of a broken ring.
    pub(super) fn set_error(&mut self, error: Option<NotifyFd>) {
        self.error = error;
    }

    /// Switches to new guest memory, with the ring at its address.
    pub(super) fn set_memory(&mut self, memory: Arc<GuestMemory>) {
        self.broken |= !self.queue.is_valid(memory.view());
        self.memory = memory;
    }

    /// Descriptors of the ring.
    pub(super) fn size(&self) -> u16 {
        self.queue.size()
    }

    /// The next available request.
    pub(super) fn next(&mut self) -> Option<DescriptorChain<&GuestMemoryMmap>> {
        if self.broken {
            return None;
        }
        let Self { queue, memory, .. } = self;
        let next = queue.next_avail();
        let offered = queue.avail_idx(memory.view(), Ordering::Acquire);
        match offered {
            Ok(offered) if offered.0 == next => return None,
            Ok(offered) if offered.0.wrapping_sub(next) <= queue.size() => {}
            _ => {
                self.breaks("it offers more requests than it has room for");
                return None;
            }
        }
        self.queue.pop_descriptor_chain(self.memory.view())
    }

    /// Whether a request is available, perhaps without a kick.
    pub(super) fn has_some(&self) -> bool {
        let offered = self.queue.avail_idx(self.memory.view(), Ordering::Acquire);
        !self.broken && offered.is_ok_and(|offered| offered.0 != self.queue.next_avail())
    }

    /// Asks the guest to kick for new requests. Check for requests afterwards.
    pub(super) fn ask_for_kicks(&mut self) {
        if self.queue.enable_notification(self.memory.view()).is_err() {
            self.breaks("its flags are not in memory");
        }
    }

    /// Puts a completed request into the used ring.
    pub(super) fn put(&mut self, (head, len): (u16, u32)) {
        match self.queue.add_used(self.memory.view(), head, len) {
            Ok(()) => self.owes_call = true,
            Err(_) => self.breaks("the used ring is not in the memory of the guest"),
        }
    }

    /// Notifies the guest of completions, if the guest asks for that.
    pub(super) fn call(&mut self) {
        if !std::mem::take(&mut self.owes_call) {
            return;
        }
        if self.queue.needs_notification(self.memory.view()).unwrap_or(true)
            && let Some(call) = &mut self.call
        {
            self.owes_call = !call.tell();
        }
    }

    /// The guest broke a rule: no more requests are taken from the ring. Other rings go on.
    pub(super) fn breaks(&mut self, why: &str) {
        if !std::mem::replace(&mut self.broken, true) {
            tracing::warn!(
                why,
                "a ring of the guest is broken: it is not served until the guest resets its disk"
            );
            self.error.as_mut().map(NotifyFd::tell);
        }
    }

    /// The index of the next request.
    pub(super) fn base(&self) -> u16 {
        self.queue.next_avail()
    }
}
