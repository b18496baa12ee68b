//! [`Polled`]: a queue that its program drives, turn by turn: requests of the program to the
//! engine, and completions back. The program's thread is the data thread of the queue.

use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rblk_protocol::Tag;
use rblk_runtime::Moment;
use rblk_runtime::data_thread::{DataThread, Found, Turn, Woken};
use rblk_runtime::spin::Hint;

use super::pending_requests::PendingRequests;
use super::{Buffer, Completion};
use crate::engine::inflight::WrongState;
use crate::engine::io::Io;
use crate::engine::path::DataPlace;
use crate::queue::{DescriptorWatch, EngineDriver, EngineDriverParts, Epoll, MAIL};

/// A queue that a program drives.
pub(super) struct Polled {
    driver: EngineDriver,
    epoll: Epoll,
    pending: PendingRequests,
    done: Vec<Completion>,
    // The end of the wait.
    until: Instant,
    // The program may have slept on the epoll: its events must be taken.
    may_have_slept: bool,
}

impl Polled {
    /// A queue without a path.
    ///
    /// # Errors
    /// The system has no descriptor.
    pub(super) fn new(parts: EngineDriverParts) -> io::Result<Self> {
        let pending = PendingRequests::new(parts.depth);
        let mut epoll = Epoll::new()?;
        let driver = EngineDriver::new(parts);
        epoll.watch(driver.mail_fd(), MAIL)?;
        let done = Vec::with_capacity(pending.depth());
        Ok(Self { driver, epoll, pending, done, until: Instant::now(), may_have_slept: false })
    }

    /// The requests that are under way.
    #[inline]
    pub(super) fn pending(&self) -> &PendingRequests {
        &self.pending
    }

    /// The engine driver.
    pub(super) fn driver(&self) -> &EngineDriver {
        &self.driver
    }

    /// Readable when a turn is due.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Takes a request under the [next](PendingRequests::next) tag. It is posted with the next
    /// turn.
    #[inline]
    pub(super) fn submit(
        &mut self,
        io: Io,
        token: u64,
        buffer: Option<Buffer>,
        now: Moment,
    ) -> Result<(), WrongState> {
        let tag = self.pending.next().ok_or(WrongState(u16::MAX))?;
        let offset = buffer.as_ref().map_or(0, Buffer::offset);
        // First, so that no buffer is handed back while the engine has its request.
        self.pending.put(token, buffer);
        let engine = self.driver.engine_mut();
        engine.begin_turn(now);
        engine.submit_at(tag, io, DataPlace::own(offset))
    }

    /// One turn. Completions are kept for [`Self::take`].
    ///
    /// # Errors
    /// The epoll broke, or control is gone.
    #[inline]
    pub(super) fn turn_once(&mut self, moment: Moment) -> io::Result<Found> {
        if self.may_have_slept {
            self.take_events(Duration::ZERO)?;
        }
        let mut busy = self.driver.begin(&mut self.epoll, moment)?;
        let (did, answers) = self.turn_engine(moment);
        busy |= did;
        busy |= self.driver.end(&mut self.epoll, moment.instant())?;
        if busy {
            self.driver.after_work();
            if self.pending.len() == 0 {
                self.driver.send_owed_acks();
            }
        } else {
            // Also for programs that never sleep.
            self.not_alone()?;
        }
        Ok(Found::of(busy, answers > 0))
    }

    #[inline]
    fn turn_engine(&mut self, moment: Moment) -> (bool, usize) {
        let Self { driver, pending, done, .. } = self;
        driver.turn(moment, |tag: Tag, result| done.extend(pending.take(tag, result)))
    }

    /// Takes the events of the epoll, and waits at most that long for the first. Returns whether
    /// there was one.
    fn take_events(&mut self, longest: Duration) -> io::Result<bool> {
        self.may_have_slept = false;
        let Self { driver, epoll, .. } = self;
        let found = epoll.wait(longest, |token| match token {
            MAIL => driver.clear_mail(),
            token => driver.clear_event_of(token),
        })?;
        self.not_alone()?;
        Ok(found)
    }

    fn not_alone(&self) -> io::Result<()> {
        match self.driver.is_alone() {
            true => Err(io::Error::other("the control thread of the volume ended: open it again")),
            false => Ok(()),
        }
    }

    /// Moves the completions to `done`. Returns their number.
    #[inline]
    pub(super) fn take(&mut self, done: &mut Vec<Completion>) -> usize {
        let taken = self.done.len();
        done.append(&mut self.done);
        taken
    }

    /// Arms the devices to make the [descriptor](Self::fd) readable. Returns the longest time that
    /// the program may sleep; `None` if a turn is due first.
    ///
    /// # Errors
    /// As of [`Self::turn_once`].
    pub(super) fn arm_for(&mut self, moment: Moment) -> io::Result<Option<Duration>> {
        if self.may_have_slept {
            self.take_events(Duration::ZERO)?;
        }
        self.arm();
        self.may_have_slept = true;
        let found = self.look_again(moment);
        if found != Found::Nothing || !self.done.is_empty() {
            return Ok(None);
        }
        self.driver.publish();
        Ok(Some(self.driver.longest_sleep(moment.instant(), false)))
    }

    /// Starts a wait: turns go on until there are completions, or until that time.
    pub(super) fn wait_until(&mut self, until: Instant) {
        self.until = until;
    }
}

impl DataThread for Polled {
    type End = ();
    type Error = io::Error;

    fn turn(&mut self, moment: Moment) -> io::Result<ControlFlow<(), Turn>> {
        if !self.done.is_empty() || moment.instant() >= self.until {
            return Ok(ControlFlow::Break(()));
        }
        let found = self.turn_once(moment)?;
        Ok(ControlFlow::Continue(Turn { found, may_sleep: found == Found::Nothing }))
    }

    fn awaited(&mut self) -> Option<Hint> {
        self.driver.awaited()
    }

    fn arm(&mut self) {
        // The path of a CQ that cannot be armed has ended: the next poll finds that.
        let _ = self.driver.engine_mut().arm();
    }

    fn look_again(&mut self, now: Moment) -> Found {
        let (busy, answers) = self.turn_engine(now);
        Found::of(busy || self.driver.has_news(), answers > 0)
    }

    fn publish(&mut self, _: Moment) {
        self.driver.publish();
    }

    fn has_software_device(&mut self) -> bool {
        self.driver.has_software_device()
    }

    fn longest_sleep(&self, now: Instant) -> Duration {
        let longest = self.driver.longest_sleep(now, false);
        longest.min(self.until.saturating_duration_since(now))
    }

    fn enter(&mut self, sleep: Option<Duration>) -> io::Result<Woken> {
        let Some(longest) = sleep else { return Ok(Woken::DidNotSleep) };
        self.driver.stats().sleeps.add(1);
        Ok(if self.take_events(longest)? { Woken::ByEvent } else { Woken::ByTime })
    }

    fn ask_devices(&mut self) {
        self.driver.clear_path_events();
    }

    fn yielded(&mut self) {
        self.driver.stats().yields.add(1);
    }
}

impl Drop for Polled {
    /// Control gets the paths, and destroys them. Memory that their devices may still touch is
    /// mapped until then, because the registrations hold it.
    fn drop(&mut self) {
        self.driver.send_all_off();
        self.driver.tell_stopped(None);
    }
}
