//! [`Queue`]: one thread's way to a volume.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_protocol::BlockSize;
use rblk_protocol::width::narrow;
use rblk_runtime::data_thread::Turns;

use super::buffer::BufferSlots;
use super::polled::Polled;
use super::upkeep::GivenQueue;
use super::{Buffer, Completion, Reason, Refused, Request};

/// One thread's way to a volume: buffers, requests and completions. A queue has connections of its
/// own and shares no lock with other queues. It can be sent to another thread, and used by one
/// thread at a time.
///
/// The queue works inside [`poll`](Self::poll) and [`wait`](Self::wait) only. Drop a queue that is
/// no longer needed. In a thread with other work, poll [`event_fd`](Self::event_fd) beside it. A
/// queue that is left alone for more than 10 s keeps the other queues of its volume from a target
/// that lost its memory.
///
/// Dropping a queue gives up its requests: no completion reports their results. An abandoned write
/// may still be done, later than writes that another queue of the volume sends after that. The
/// memory of the queue stays mapped until its buffers are dropped and the device is done with it.
/// The volume goes on without the queue.
pub struct Queue {
    polled: Polled,
    turns: Turns,
    slots: Arc<BufferSlots>,
    block_size: BlockSize,
    data_max: usize,
}

/// The counters of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Counts {
    /// Answered requests, errors included.
    pub answered: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes that this end copied between buffers: 0, unless the volume was opened with `retain`.
    pub copied_bytes: u64,
    /// Requests sent again, because their connection died.
    pub sent_again: u64,
    /// Connections that ended.
    pub paths_lost: u64,
    /// Times that [`Queue::wait`] slept.
    pub sleeps: u64,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue")
            .field("depth", &self.depth())
            .field("under_way", &self.under_way())
            .finish_non_exhaustive()
    }
}

impl Queue {
    pub(super) fn new(given: GivenQueue, block_size: BlockSize) -> io::Result<Self> {
        let GivenQueue { parts, memory, spin } = given;
        let data_max = parts.data_max;
        let slots = BufferSlots::new(memory, parts.stride, data_max);
        let slots = slots.ok_or_else(|| io::Error::other("memory without a buffer"))?;
        let polled = Polled::new(parts)?;
        Ok(Self { polled, turns: Turns::new(spin), slots, block_size, data_max })
    }

    /// A buffer, or `None` when all are taken: in requests, or in hands of the program. There are
    /// as many as the queue is [deep](Self::depth), and the
    /// spare ones.
    #[must_use]
    pub fn buffer(&mut self) -> Option<Buffer> {
        self.slots.take()
    }

    /// Buffers that are not taken.
    #[must_use]
    pub fn free_buffers(&self) -> usize {
        self.slots.free()
    }

    /// The depth of the queue: the limit of its requests at once.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.polled.pending().depth()
    }

    /// Submitted requests without a delivered completion.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.polled.pending().len()
    }

    /// Takes a request. The next [`poll`](Self::poll) or [`wait`](Self::wait) sends it, or keeps it
    /// until the target is back: requests submitted together share a message.
    ///
    /// # Errors
    /// [`Refused`], with the request and its buffer: the request is invalid, or the queue is full.
    #[inline]
    pub fn submit(&mut self, request: Request) -> Result<(), Refused> {
        let io = match self.check(&request) {
            Ok(io) => io,
            Err(reason) => return Err(Refused { request, reason }),
        };
        let (token, buffer) = (request.token(), request.into_buffer());
        let submitted = self.polled.submit(io, token, buffer, self.turns.now());
        debug_assert!(submitted.is_ok(), "a free tag: {submitted:?}");
        Ok(())
    }

    fn check(&self, request: &Request) -> Result<crate::engine::io::Io, Reason> {
        if self.polled.pending().next().is_none() {
            return Err(Reason::Full { depth: narrow(self.depth()) });
        }
        if request.buffer().is_some_and(|buffer| !self.slots.has(buffer)) {
            return Err(Reason::ForeignBuffer);
        }
        request.to_io(self.block_size, self.data_max)
    }

    /// Sends the submitted requests, and takes the completions that have arrived, without sleeping.
    /// Completions are added to `done` in the order of their arrival. Returns their number.
    ///
    /// # Errors
    /// The queue cannot go on: drop it, and open the volume again. The loss of the target is no
    /// such error.
    #[inline]
    pub fn poll(&mut self, done: &mut Vec<Completion>) -> io::Result<usize> {
        let turned = self.polled.turn_once(self.turns.now());
        self.taken(done, turned)
    }

    /// Takes the completions that have arrived. An error is returned only without any: it comes
    /// again.
    #[inline]
    fn taken<T>(&mut self, done: &mut Vec<Completion>, turned: io::Result<T>) -> io::Result<usize> {
        match (self.polled.take(done), turned) {
            (0, Err(error)) => Err(error),
            (count, _) => Ok(count),
        }
    }

    /// Sends the submitted requests, and waits for completions, at most so long. The queue polls
    /// for the time of `spin` in the configuration, and then sleeps. Completions are added to
    /// `done`. Returns their number; 0 when the time was over first.
    ///
    /// # Errors
    /// As of [`poll`](Self::poll).
    pub fn wait(&mut self, done: &mut Vec<Completion>, longest: Duration) -> io::Result<usize> {
        let waited = self.wait_for_some(longest);
        self.taken(done, waited)
    }

    fn wait_for_some(&mut self, longest: Duration) -> io::Result<()> {
        self.polled.turn_once(self.turns.now())?;
        let now = Instant::now();
        self.polled.wait_until(now.checked_add(longest).unwrap_or(now + FOREVER));
        while self.turns.next(&mut self.polled)?.is_none() {}
        Ok(())
    }

    /// A descriptor to sleep on, among others of the program: it is readable when a
    /// [`poll`](Self::poll) is due. It must be [armed](Self::arm) before each sleep.
    #[must_use]
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.polled.fd()
    }

    /// Makes [`event_fd`](Self::event_fd) readable at the next event. Returns the longest time that
    /// the program may sleep: after it the program has to [`poll`](Self::poll), readable or not.
    /// `None`: an event has arrived already, so a `poll` is due now.
    ///
    /// # Errors
    /// As of [`poll`](Self::poll).
    pub fn arm(&mut self) -> io::Result<Option<Duration>> {
        self.polled.arm_for(self.turns.now())
    }

    /// The present counters.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let stats = self.polled.driver().stats();
        let counts = stats.snapshot();
        Counts {
            answered: stats.answered(),
            errors: counts.errors,
            read_bytes: counts.read_bytes,
            written_bytes: counts.written_bytes,
            copied_bytes: counts.copied_bytes,
            sent_again: counts.replayed,
            paths_lost: counts.paths_lost,
            sleeps: counts.sleeps,
        }
    }
}

/// As good as indefinitely.
const FOREVER: Duration = Duration::from_secs(365 * 86_400);
