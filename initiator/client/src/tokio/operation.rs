//! [`Operation`]: the future of a request.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use super::buffer::Buffer;
use super::failed::{Failed, Why};
use super::requests::RequestEnd;
use super::shared::QueueTasks;
use crate::{Completion, Request};

/// A request, from before its first poll to its end. The future holds no borrow, and gives the
/// request up when it is dropped.
#[must_use = "futures do nothing unless polled"]
pub(super) struct Operation {
    shared: Rc<QueueTasks>,
    at: At,
}

enum At {
    Begin(Request),
    Begun(usize),
    Done,
}

impl Operation {
    /// The operation begins with its first poll.
    pub(super) fn new(shared: &Rc<QueueTasks>, request: Request) -> Self {
        Self { shared: Rc::clone(shared), at: At::Begin(request) }
    }

    fn failed(&self, why: Why, buffer: Option<crate::Buffer>) -> Failed {
        Failed { why, buffer: self.wrap(buffer) }
    }

    fn wrap(&self, buffer: Option<crate::Buffer>) -> Option<Buffer> {
        buffer.map(|buffer| Buffer::new(buffer, &self.shared))
    }

    fn result(&self, end: RequestEnd) -> Result<Option<Buffer>, Failed> {
        match end {
            RequestEnd::Completed(Completion { result: Ok(_), buffer, .. }) => {
                Ok(self.wrap(buffer))
            }
            RequestEnd::Completed(Completion { result: Err(error), buffer, .. }) => {
                Err(self.failed(Why::Io(error), buffer))
            }
            RequestEnd::Refused(request, reason) => {
                Err(self.failed(Why::Refused(reason), request.into_buffer()))
            }
            RequestEnd::Unsent(request) => {
                let why = self.shared.is_over().map_or(Why::Closed, Why::from);
                Err(self.failed(why, request.into_buffer()))
            }
            RequestEnd::Lost => Err(self.failed(Why::Ended, None)),
        }
    }
}

impl Future for Operation {
    /// The buffer, if the request has one.
    type Output = Result<Option<Buffer>, Failed>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let number = match std::mem::replace(&mut self.at, At::Done) {
            At::Begin(request) => match self.shared.begin(request, context.waker()) {
                Ok(number) => number,
                Err((over, request)) => {
                    return Poll::Ready(Err(self.failed(over.into(), request.into_buffer())));
                }
            },
            At::Begun(number) => number,
            At::Done => panic!("a request was polled after its end"),
        };
        match self.shared.take(number, context.waker()) {
            Some(end) => Poll::Ready(self.result(end)),
            None => {
                self.at = At::Begun(number);
                Poll::Pending
            }
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.at, At::Done) {
            At::Begin(request) => {
                drop(request);
                self.shared.buffer_is_free();
            }
            At::Begun(number) => self.shared.give_up(number),
            At::Done => {}
        }
    }
}
