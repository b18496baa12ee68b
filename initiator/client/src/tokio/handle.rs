//! [`Handle`]: the way of tasks to send requests.

use std::fmt;
use std::rc::Rc;

use super::buffer::Buffer;
use super::failed::Failed;
use super::operation::Operation;
use super::shared::QueueTasks;
use super::waits::{BufferWait, Settled};
use crate::{Counts, Request};

/// A queue, for the tasks of one thread. Clone it for each task. Requests of different tasks are
/// under way together, and have no order.
///
/// The effect of a dropped future is described [above](super#futures-that-are-dropped).
pub struct Handle {
    shared: Rc<QueueTasks>,
}

impl Handle {
    pub(super) fn new(shared: Rc<QueueTasks>) -> Self {
        shared.one_handle_more();
        Self { shared }
    }

    /// Takes a buffer. Waits until one is free.
    ///
    /// # Errors
    /// The handle is closed, or the driver is gone.
    pub async fn buffer(&self) -> Result<Buffer, Failed> {
        BufferWait::new(&self.shared).await
    }

    /// Reads `len` bytes from byte `offset` of the volume to the start of a buffer.
    ///
    /// # Errors
    /// [`Failed`], with the reason and the buffer.
    pub async fn read(&self, buffer: Buffer, offset: u64, len: usize) -> Result<Buffer, Failed> {
        self.transfer(buffer, |buffer| Request::read(buffer, offset, len)).await
    }

    /// Writes `len` bytes at the start of a buffer to byte `offset` of the volume.
    ///
    /// # Errors
    /// As of [`Self::read`].
    pub async fn write(&self, buffer: Buffer, offset: u64, len: usize) -> Result<Buffer, Failed> {
        self.transfer(buffer, |buffer| Request::write(buffer, offset, len)).await
    }

    /// Writes, and makes the data durable before the completion.
    ///
    /// # Errors
    /// As of [`Self::read`].
    pub async fn write_durable(
        &self,
        buffer: Buffer,
        offset: u64,
        len: usize,
    ) -> Result<Buffer, Failed> {
        self.transfer(buffer, |buffer| Request::write(buffer, offset, len).durable()).await
    }

    /// Makes durable every write, of any queue of the volume, that was completed before this is
    /// polled first.
    ///
    /// # Errors
    /// As of [`Self::read`].
    pub async fn flush(&self) -> Result<(), Failed> {
        self.order(Request::flush()).await
    }

    /// Discards a range: its data is not needed any more.
    ///
    /// # Errors
    /// As of [`Self::read`].
    pub async fn discard(&self, offset: u64, len: u64) -> Result<(), Failed> {
        self.order(Request::discard(offset, len)).await
    }

    /// Zeroes a range. The store may give its space back.
    ///
    /// # Errors
    /// As of [`Self::read`].
    pub async fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), Failed> {
        self.order(Request::write_zeroes(offset, len)).await
    }

    /// Zeroes a range, and keeps its space allocated.
    ///
    /// # Errors
    /// As of [`Self::read`].
    pub async fn write_zeroes_allocated(&self, offset: u64, len: u64) -> Result<(), Failed> {
        self.order(Request::write_zeroes(offset, len).keep_allocated()).await
    }

    async fn transfer(
        &self,
        buffer: Buffer,
        request: impl FnOnce(crate::Buffer) -> Request,
    ) -> Result<Buffer, Failed> {
        let buffer = buffer.into_inner().expect("a buffer has its memory until it is gone");
        let buffer = Operation::new(&self.shared, request(buffer)).await?;
        Ok(buffer.expect("a completion brings the buffer of its request"))
    }

    async fn order(&self, request: Request) -> Result<(), Failed> {
        Operation::new(&self.shared, request).await.map(drop)
    }

    /// Waits until no request of a dropped future is under way: its effect on the volume is
    /// complete then, and its buffer is free.
    pub async fn settled(&self) {
        Settled::new(&self.shared).await;
    }

    /// Takes no more requests, of any clone. Waiting requests fail with
    /// [`Why::Closed`](super::Why::Closed). [`Driver::run`](super::Driver::run) returns once the
    /// requests under way have ended. The drop of the last handle does this, too.
    pub fn close(&self) {
        self.shared.close();
    }

    /// The depth of the queue: the limit of its requests at once.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.shared.depth()
    }

    /// Requests under way, including those of dropped futures.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.shared.numbers()[0]
    }

    /// Requests that wait because the queue is full.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.shared.numbers()[1]
    }

    /// Requests under way after their futures were dropped.
    #[must_use]
    pub fn given_up(&self) -> usize {
        self.shared.numbers()[2]
    }

    /// Free buffers.
    #[must_use]
    pub fn free_buffers(&self) -> usize {
        self.shared.numbers()[3]
    }

    /// The present counters of the queue. `None` when the driver is gone.
    #[must_use]
    pub fn counts(&self) -> Option<Counts> {
        self.shared.counts()
    }
}

impl Clone for Handle {
    fn clone(&self) -> Self {
        Self::new(Rc::clone(&self.shared))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.one_handle_less();
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [under_way, waiting, given_up, free_buffers] = self.shared.numbers();
        f.debug_struct("Handle")
            .field("under_way", &under_way)
            .field("waiting", &waiting)
            .field("given_up", &given_up)
            .field("free_buffers", &free_buffers)
            .finish_non_exhaustive()
    }
}
