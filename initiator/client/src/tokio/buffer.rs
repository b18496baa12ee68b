//! [`Buffer`]: memory for the data of one request of a task.

use std::rc::Rc;

use super::shared::QueueTasks;

/// A [buffer](crate::Buffer) of the queue of a [`Handle`](super::Handle): memory for the data of
/// one request. A request takes it, and gives it back with its result. A dropped buffer goes to the
/// next task that waits in [`Handle::buffer`](super::Handle::buffer). A buffer stays in its thread.
pub struct Buffer {
    // `None` during the drop, and after the move into a request.
    buffer: Option<crate::Buffer>,
    shared: Rc<QueueTasks>,
}

impl Buffer {
    pub(super) fn new(buffer: crate::Buffer, shared: &Rc<QueueTasks>) -> Self {
        Self { buffer: Some(buffer), shared: Rc::clone(shared) }
    }

    /// The buffer for a request. [`Self::new`] has set it.
    pub(super) fn into_inner(mut self) -> Option<crate::Buffer> {
        self.buffer.take()
    }

    fn inner(&self) -> &crate::Buffer {
        self.buffer.as_ref().expect("a buffer has its memory until it is gone")
    }

    fn inner_mut(&mut self) -> &mut crate::Buffer {
        self.buffer.as_mut().expect("a buffer has its memory until it is gone")
    }

    /// Bytes of the buffer: the most data of one request.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.inner().capacity()
    }

    /// Copies bytes out, starting at byte `at`.
    ///
    /// # Panics
    /// The bytes are not all inside the buffer.
    pub fn read(&self, at: usize, out: &mut [u8]) {
        self.inner().read(at, out);
    }

    /// Copies bytes in, starting at byte `at`.
    ///
    /// # Panics
    /// The bytes do not all fit into the buffer.
    pub fn write(&mut self, at: usize, bytes: &[u8]) {
        self.inner_mut().write(at, bytes);
    }

    /// Zeroes bytes.
    ///
    /// # Panics
    /// The bytes are not all inside the buffer.
    pub fn zero(&mut self, at: usize, len: usize) {
        self.inner_mut().zero(at, len);
    }

    /// Copies bytes of another buffer, of any queue, into this one.
    ///
    /// # Panics
    /// The bytes are not all inside both buffers.
    pub fn copy_from(&mut self, at: usize, other: &Self, from: usize, len: usize) {
        self.inner_mut().copy_from(at, other.inner(), from, len);
    }

    /// The first byte, as of [`crate::Buffer::as_ptr`]: valid until this value is dropped or moved
    /// into a request.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.inner().as_ptr()
    }

    /// The pointer of [`Self::as_ptr`], for writing.
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.inner_mut().as_mut_ptr()
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("buffer", &self.buffer).finish_non_exhaustive()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            drop(buffer);
            self.shared.buffer_is_free();
        }
    }
}
