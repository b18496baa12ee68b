//! The futures of tasks that wait in line: [`BufferWait`] and [`Settled`].

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use super::buffer::Buffer;
use super::failed::Failed;
use super::shared::{BufferFound, QueueTasks};
use super::waiters::WaiterTicket;

/// Waits for a free buffer.
#[must_use = "futures do nothing unless polled"]
pub(super) struct BufferWait {
    shared: Rc<QueueTasks>,
    ticket: Option<WaiterTicket>,
}

impl BufferWait {
    pub(super) fn new(shared: &Rc<QueueTasks>) -> Self {
        Self { shared: Rc::clone(shared), ticket: None }
    }
}

impl Future for BufferWait {
    type Output = Result<Buffer, Failed>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { shared, ticket } = &mut *self;
        match shared.buffer(ticket, context.waker()) {
            BufferFound::Buffer(buffer) => Poll::Ready(Ok(Buffer::new(buffer, shared))),
            BufferFound::Over(over) => Poll::Ready(Err(Failed { why: over.into(), buffer: None })),
            BufferFound::NotYet => Poll::Pending,
        }
    }
}

impl Drop for BufferWait {
    fn drop(&mut self) {
        if self.ticket.is_some() {
            self.shared.leave_buffers(self.ticket.take());
        }
    }
}

/// Waits until no abandoned request is under way.
#[must_use = "futures do nothing unless polled"]
pub(super) struct Settled {
    shared: Rc<QueueTasks>,
    ticket: Option<WaiterTicket>,
}

impl Settled {
    pub(super) fn new(shared: &Rc<QueueTasks>) -> Self {
        Self { shared: Rc::clone(shared), ticket: None }
    }
}

impl Future for Settled {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Self { shared, ticket } = &mut *self;
        match shared.is_settled(ticket, context.waker()) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    }
}

impl Drop for Settled {
    fn drop(&mut self) {
        if self.ticket.is_some() {
            self.shared.leave_settled(self.ticket.take());
        }
    }
}
