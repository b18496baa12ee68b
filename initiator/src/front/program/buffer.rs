//! [`Buffer`]: memory for the data of one request. The target's RDMA moves data from and to it.
//! [`BufferSlots`]: the buffers of one queue.
//!
//! Invariants:
//! - A slot is in one [`Buffer`], or free. A submitted buffer is inside its request, out of reach
//!   of the program, and comes back when no device touches it any more.
//! - The memory is unmapped when the last of three is gone: the queue, its buffers, and the
//!   registrations of its paths. The registrations go after the QPs (`path/mod.rs`). So late RDMA
//!   never meets freed memory.
//! - Only the queue hands slots out, so none is reused once the queue is dropped with requests
//!   under way.

use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use rblk_fabric::Region;
use rblk_protocol::width::wide;

/// The buffers of one queue.
#[derive(Debug)]
pub(super) struct BufferSlots {
    memory: Arc<Region>,
    stride: usize,
    data_max: usize,
    free: ArrayQueue<u32>,
}

impl BufferSlots {
    /// As many slots of `stride` bytes as fit into the memory, for `data_max` bytes each. `None` if
    /// none fits.
    pub(super) fn new(memory: Arc<Region>, stride: usize, data_max: usize) -> Option<Arc<Self>> {
        let count = memory.len().checked_div(stride)?;
        let last = u32::try_from(count.checked_sub(1)?).ok()?;
        let free = ArrayQueue::new(count);
        for slot in 0..=last {
            free.push(slot).ok()?;
        }
        Some(Arc::new(Self { memory, stride, data_max: data_max.min(stride), free }))
    }

    /// A free buffer, if there is one.
    pub(super) fn take(self: &Arc<Self>) -> Option<Buffer> {
        let slot = self.free.pop()?;
        Some(Buffer { slots: Arc::clone(self), slot })
    }

    /// Whether a buffer is one of these.
    pub(super) fn has(&self, buffer: &Buffer) -> bool {
        std::ptr::eq(self, Arc::as_ptr(&buffer.slots))
    }

    /// Free buffers.
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }
}

/// Memory for the data of one request. The target moves data to and from it by RDMA, so nothing is
/// copied on the way. Get one by [`Queue::buffer`](super::Queue::buffer), and give it to the
/// requests of the same queue: [`Completion::buffer`](super::Completion::buffer) brings it back.
/// Dropping it frees its place for another buffer.
///
/// There is no `&[u8]` of the bytes, because the target has a key to the memory as long as it is
/// connected: if it breaks the protocol, it can change bytes at any time. [`Buffer::read`] and
/// [`Buffer::write`] copy. For work in place there are pointers.
#[derive(Debug)]
pub struct Buffer {
    slots: Arc<BufferSlots>,
    slot: u32,
}

impl Buffer {
    /// Bytes of the buffer: the most data of one request.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slots.data_max
    }

    /// Copies bytes out, starting at byte `at`.
    ///
    /// # Panics
    /// The bytes are not all inside the buffer.
    pub fn read(&self, at: usize, out: &mut [u8]) {
        self.slots.memory.read(self.place(at, out.len()), out);
    }

    /// Copies bytes in, starting at byte `at`.
    ///
    /// # Panics
    /// The bytes do not all fit into the buffer.
    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        self.slots.memory.write(self.place(at, bytes.len()), bytes);
    }

    /// Zeroes bytes.
    ///
    /// # Panics
    /// The bytes are not all inside the buffer.
    pub fn zero(&mut self, at: usize, len: usize) {
        self.slots.memory.zero(self.place(at, len), len);
    }

    /// Copies bytes of another buffer, of any queue, into this one.
    ///
    /// # Panics
    /// The bytes are not all inside both buffers.
    pub fn copy_from(&mut self, at: usize, other: &Self, from: usize, len: usize) {
        let (to, from) = (self.place(at, len), other.place(from, len));
        other.slots.memory.copy_to(from, &self.slots.memory, to, len);
    }

    /// The first byte. It is at a multiple of 4096, and valid for reading as many bytes as the
    /// buffer [holds](Self::capacity) until this value is dropped or moved into a request: then the
    /// device reads and writes there. The bytes may change at any time, as in memory that other
    /// processes share.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.pointer().cast_const()
    }

    /// The pointer of [`Self::as_ptr`], for writing.
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.pointer()
    }

    fn pointer(&self) -> *mut u8 {
        let pointer = self.slots.memory.pointer(self.offset(), self.slots.data_max);
        pointer.expect("a slot inside the memory").as_ptr()
    }

    /// The offset of the buffer in the memory of its queue.
    pub(super) fn offset(&self) -> usize {
        wide(self.slot) * self.slots.stride
    }

    /// The offset of these bytes in the memory of the queue.
    fn place(&self, at: usize, len: usize) -> usize {
        let end = at.checked_add(len);
        let capacity = self.slots.data_max;
        assert!(
            end.is_some_and(|end| end <= capacity),
            "{len} bytes from {at} are not inside a buffer of {capacity}"
        );
        self.offset() + at
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // The list has a place for every slot.
        let _ = self.slots.free.push(self.slot);
    }
}

#[cfg(test)]
mod tests {
    use rblk_fabric::PageKind;

    use super::*;

    fn slots() -> Arc<BufferSlots> {
        let memory = Region::allocate(3 * 8192, PageKind::Normal).unwrap();
        BufferSlots::new(memory, 8192, 4096).unwrap()
    }

    #[test]
    fn a_buffer_is_its_own_and_comes_back_when_it_is_dropped() {
        let slots = slots();
        let mut all: Vec<_> = std::iter::from_fn(|| slots.take()).collect();
        assert_eq!((all.len(), slots.free()), (3, 0));
        for (byte, buffer) in (1..).zip(&mut all) {
            buffer.write(0, &vec![byte; buffer.capacity()]);
        }
        for (byte, buffer) in (1u8..).zip(&all) {
            let mut found = [0; 4096];
            buffer.read(0, &mut found);
            assert!(found.iter().all(|found| *found == byte));
            assert!(slots.has(buffer) && buffer.as_ptr().addr() % 4096 == 0);
        }
        let (first, rest) = all.split_at_mut(1);
        first[0].copy_from(1, &rest[0], 0, 2);
        first[0].zero(2, 1);
        let mut found = [9; 4];
        first[0].read(0, &mut found);
        assert_eq!(found, [1, 2, 0, 1]);
        all.clear();
        assert_eq!(slots.free(), 3);
    }

    #[test]
    fn the_memory_outlives_the_queue_in_a_buffer_and_in_a_registration() {
        let slots = slots();
        let registered = Arc::clone(&slots.memory);
        let memory = Arc::downgrade(&registered);
        let buffer = slots.take().unwrap();
        drop(slots);
        assert!(memory.upgrade().is_some());
        drop(buffer);
        assert!(memory.upgrade().is_some(), "a path may still be registered");
        drop(registered);
        assert!(memory.upgrade().is_none());
    }

    #[test]
    #[should_panic(expected = "not inside a buffer of 4096")]
    fn the_place_of_the_trailer_is_out_of_reach() {
        slots().take().unwrap().write(4095, &[1, 2]);
    }

    #[test]
    fn memory_without_a_slot_has_no_buffers() {
        let memory = Region::allocate(4096, PageKind::Normal).unwrap();
        assert!(BufferSlots::new(Arc::clone(&memory), 8192, 4096).is_none());
        assert!(BufferSlots::new(memory, 0, 0).is_none());
    }
}
