//! [`QueueTasks`]: the common state of the handle, its futures, its buffers and the driver of one
//! queue. All of them are in one thread.
//!
//! The program's code never runs while a part of this is borrowed: wakers are woken and dropped,
//! and requests are dropped, after the borrow.

use std::cell::{Cell, RefCell};
use std::io;
use std::task::Waker;
use std::time::Duration;

use super::requests::{CompletionReceiver, RequestEnd, Requests};
use super::waiters::{WaiterTicket, Waiters};
use crate::{Buffer, Completion, Counts, Queue, Request};

/// The common state of one queue's tasks.
pub(super) struct QueueTasks {
    inner: RefCell<Inner>,
    depth: usize,
    driver: Cell<Option<Waker>>,
    // The driver has work.
    kicked: Cell<bool>,
    closed: Cell<bool>,
    handles: Cell<usize>,
}

struct Inner {
    // `None`: the driver is gone.
    queue: Option<Queue>,
    requests: Requests,
    for_buffers: Waiters,
    for_settled: Waiters,
}

/// The reason why a task gets nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Over {
    /// The handle is closed.
    Closed,
    /// The driver is gone, and the queue with it.
    Ended,
}

/// The result for a task that waits for a buffer.
pub(super) enum BufferFound {
    Buffer(Buffer),
    NotYet,
    Over(Over),
}

impl QueueTasks {
    pub(super) fn new(queue: Queue) -> Self {
        let depth = queue.depth();
        let inner = Inner {
            queue: Some(queue),
            requests: Requests::new(depth),
            for_buffers: Waiters::default(),
            for_settled: Waiters::default(),
        };
        Self {
            inner: RefCell::new(inner),
            depth,
            driver: Cell::new(None),
            kicked: Cell::new(false),
            closed: Cell::new(false),
            handles: Cell::new(0),
        }
    }

    /// The depth of the queue: the limit of its requests at once.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// Requests under way, of dropped futures, too; requests that wait; requests under way of
    /// dropped futures; free buffers.
    pub(super) fn numbers(&self) -> [usize; 4] {
        let inner = self.inner.borrow();
        let (under_way, free) = match &inner.queue {
            Some(queue) => (queue.under_way(), queue.free_buffers()),
            None => (0, 0),
        };
        [under_way, inner.requests.waiting(), inner.requests.given_up(), free]
    }

    pub(super) fn counts(&self) -> Option<Counts> {
        self.inner.borrow().queue.as_ref().map(Queue::counts)
    }

    pub(super) fn one_handle_more(&self) {
        self.handles.set(self.handles.get() + 1);
    }

    /// A handle was dropped. After the last one the driver ends.
    pub(super) fn one_handle_less(&self) {
        self.handles.set(self.handles.get().saturating_sub(1));
        if self.handles.get() == 0 {
            self.close();
        }
    }

    /// Takes no more requests. Waiting requests are not sent.
    pub(super) fn close(&self) {
        self.closed.set(true);
        let wakers = {
            let mut inner = self.inner.borrow_mut();
            let mut wakers = inner.requests.end_waiting();
            wakers.extend(inner.for_buffers.all());
            wakers
        };
        wakers.into_iter().for_each(Waker::wake);
        self.kick();
    }

    fn over(&self, inner: &Inner) -> Option<Over> {
        match (&inner.queue, self.closed.get()) {
            (None, _) => Some(Over::Ended),
            (Some(_), true) => Some(Over::Closed),
            (Some(_), false) => None,
        }
    }

    /// The reason why no request is sent, if there is one.
    pub(super) fn is_over(&self) -> Option<Over> {
        self.over(&self.inner.borrow())
    }

    /// Takes a request: it is under way, or waits for its turn. Returns its number, for
    /// [`Self::take`].
    ///
    /// # Errors
    /// The handle is closed or the driver is gone: the request comes back.
    pub(super) fn begin(&self, request: Request, waker: &Waker) -> Result<usize, (Over, Request)> {
        let (number, wakers) = {
            let mut inner = self.inner.borrow_mut();
            if let Some(over) = self.over(&inner) {
                return Err((over, request));
            }
            let number = inner.requests.put(request, waker.clone());
            (number, inner.admit())
        };
        wakers.into_iter().for_each(Waker::wake);
        self.kick();
        Ok(number)
    }

    /// The end of a request, if it has come. This waker is woken then.
    pub(super) fn take(&self, number: usize, waker: &Waker) -> Option<RequestEnd> {
        let taken = self.inner.borrow_mut().requests.take(number, waker);
        // An `Err` has a waker to drop, now that nothing is borrowed.
        taken.ok()
    }

    /// Gives a request up: its future is dropped before the end.
    pub(super) fn give_up(&self, number: usize) {
        let left = self.inner.borrow_mut().requests.give_up(number);
        drop(left);
        self.buffer_is_free();
    }

    /// A buffer for the first task in line.
    pub(super) fn buffer(&self, ticket: &mut Option<WaiterTicket>, waker: &Waker) -> BufferFound {
        let (found, left) = {
            let mut inner = self.inner.borrow_mut();
            let first = inner.for_buffers.is_first(*ticket);
            let free = match &mut inner.queue {
                Some(queue) if first && !self.closed.get() => queue.buffer(),
                _ => None,
            };
            match (free, self.over(&inner)) {
                (Some(buffer), _) => {
                    let left = inner.for_buffers.leave(ticket.take());
                    (BufferFound::Buffer(buffer), left)
                }
                (None, Some(over)) => {
                    (BufferFound::Over(over), inner.for_buffers.leave(ticket.take()))
                }
                (None, None) => (BufferFound::NotYet, inner.for_buffers.wait(ticket, waker)),
            }
        };
        drop(left);
        if matches!(found, BufferFound::Buffer(_)) {
            // Another buffer may be free for the next in line.
            self.buffer_is_free();
        }
        found
    }

    /// A task stops waiting for a buffer.
    pub(super) fn leave_buffers(&self, ticket: Option<WaiterTicket>) {
        let left = self.inner.borrow_mut().for_buffers.leave(ticket);
        drop(left);
        self.buffer_is_free();
    }

    /// A buffer was dropped: wakes the first task in line.
    pub(super) fn buffer_is_free(&self) {
        let first = {
            let inner = self.inner.borrow();
            let free = inner.queue.as_ref().is_some_and(|queue| queue.free_buffers() > 0);
            if free { inner.for_buffers.first() } else { None }
        };
        if let Some(first) = first {
            first.wake();
        }
    }

    /// Whether no abandoned request is under way. If there are some, this waker is woken when the
    /// last one has ended.
    pub(super) fn is_settled(&self, ticket: &mut Option<WaiterTicket>, waker: &Waker) -> bool {
        let (settled, left) = {
            let mut inner = self.inner.borrow_mut();
            let settled = inner.requests.given_up() == 0;
            let left = match settled {
                true => inner.for_settled.leave(ticket.take()),
                false => inner.for_settled.wait(ticket, waker),
            };
            (settled, left)
        };
        drop(left);
        settled
    }

    /// A task stops waiting for that.
    pub(super) fn leave_settled(&self, ticket: Option<WaiterTicket>) {
        let left = self.inner.borrow_mut().for_settled.leave(ticket);
        drop(left);
    }

    fn kick(&self) {
        self.kicked.set(true);
        if let Some(driver) = self.driver.take() {
            driver.wake();
        }
    }

    /// Whether the driver has work. If not, its waker is woken at the next work.
    pub(super) fn is_kicked(&self, waker: &Waker) -> bool {
        if self.kicked.get() {
            return true;
        }
        let before = self.driver.replace(Some(waker.clone()));
        drop(before);
        false
    }

    /// One turn of the queue. Returns whether the next is due at once. `done` is empty before and
    /// after.
    ///
    /// # Errors
    /// The queue cannot go on.
    pub(super) fn turn(&self, done: &mut Vec<Completion>) -> io::Result<bool> {
        self.kicked.set(false);
        {
            let mut inner = self.inner.borrow_mut();
            let Some(queue) = &mut inner.queue else { return Err(gone()) };
            queue.poll(done)?;
        }
        let came = !done.is_empty();
        for completion in done.drain(..) {
            self.tell(completion);
        }
        let (before, after, wakers) = {
            let mut inner = self.inner.borrow_mut();
            let before = inner.requests.waiting();
            let wakers = inner.admit();
            (before, inner.requests.waiting(), wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
        Ok(came || before != after)
    }

    fn tell(&self, completion: Completion) {
        let told = self.inner.borrow_mut().requests.complete(completion);
        match told {
            Some(CompletionReceiver::Future(waker)) => waker.wake(),
            Some(CompletionReceiver::Nobody(completion)) => {
                drop(completion);
                self.buffer_is_free();
                let waiting = {
                    let inner = self.inner.borrow();
                    match inner.requests.given_up() {
                        0 => inner.for_settled.all(),
                        _ => Vec::new(),
                    }
                };
                waiting.into_iter().for_each(Waker::wake);
            }
            None => debug_assert!(false, "a completion of no request"),
        }
    }

    /// Prepares a sleep of the driver. Returns its limit; `None`: a turn is due first.
    ///
    /// # Errors
    /// As of [`Self::turn`].
    pub(super) fn arm(&self) -> io::Result<Option<Duration>> {
        let mut inner = self.inner.borrow_mut();
        inner.queue.as_mut().ok_or_else(gone)?.arm()
    }

    /// The queue, once no more requests are sent and none is under way.
    pub(super) fn finished(&self) -> Option<Queue> {
        let queue = {
            let mut inner = self.inner.borrow_mut();
            inner.queue.take_if(|queue| self.closed.get() && queue.under_way() == 0)?
        };
        self.end();
        Some(queue)
    }

    /// The driver is gone: the queue goes with it, and every waiting task is woken.
    pub(super) fn end(&self) {
        let (queue, wakers) = {
            let mut inner = self.inner.borrow_mut();
            let queue = inner.queue.take();
            let mut wakers = inner.requests.end_all();
            wakers.extend(inner.for_buffers.all());
            wakers.extend(inner.for_settled.all());
            (queue, wakers)
        };
        drop(queue);
        drop(self.driver.take());
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl Inner {
    /// Gives the queue the waiting requests, as many as it takes. Returns the wakers of requests
    /// that it refused.
    fn admit(&mut self) -> Vec<Waker> {
        let mut wakers = Vec::new();
        let Some(queue) = &mut self.queue else { return wakers };
        while queue.under_way() < queue.depth() {
            let Some((number, request)) = self.requests.next_waiting() else { break };
            if let Err(refused) = queue.submit(request.with_token(number as u64)) {
                let end = RequestEnd::Refused(refused.request, refused.reason);
                wakers.extend(self.requests.end(number, end));
            }
        }
        wakers
    }
}

fn gone() -> io::Error {
    io::Error::other("the driver of the queue is gone")
}
