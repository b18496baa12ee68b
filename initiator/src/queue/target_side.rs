//! [`TargetSide`]: the side of a queue that faces the target and control: the engine, its paths,
//! the mail of control, and the counters. The other side is whoever makes the requests: the driver
//! ([`crate::front::disk`]), or a program ([`crate::front::program`]). Both
//! use this one, so a disk and a program reconnect, are fenced, retain and check digests by the
//! same code.
//!
//! A turn of a queue is: [`TargetSide::begin`], the requests of the other side,
//! [`TargetSide::turn`], [`TargetSide::end`]. One thread at a time does that.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::Moment;
use rblk_fabric::mailbox::Receiver;
use rblk_protocol::width::narrow;
use rblk_protocol::{QueueDepth, Tag};
use tokio::sync::mpsc;

use super::WatchToken;
use super::paths::Paths;
use super::publisher::Publisher;
use super::watch::Watch;
use super::{FromQueue, ToQueue};
use crate::engine::durability::Ledger;
use crate::engine::pulse::Pulse;
use crate::engine::{Engine, QueueStats};

const LONG_SLEEP: Duration = Duration::from_secs(60);
const SHORT_SLEEP: Duration = Duration::from_millis(100);
/// How often a queue looks at what wakes nobody: whether dead paths are destroyed, and a path for
/// whose watches the system has no descriptors.
const LOOK_SLEEP: Duration = Duration::from_millis(1);
/// Control hears of data that did not come through at most once in this time.
const DIGEST_REPORTS: Duration = Duration::from_secs(1);

/// What the side is made of.
#[derive(Debug)]
pub(crate) struct TargetParts {
    /// The number of the queue.
    pub(crate) queue: u16,
    /// Requests at once.
    pub(crate) depth: QueueDepth,
    /// Bytes from one buffer to the next.
    pub(crate) stride: usize,
    /// Most data of a request: the rest of its buffer is for a trailer.
    pub(crate) data_max: usize,
    /// Memories of other programs that requests may have their data in.
    pub(crate) shared: usize,
    /// The account of what is durable, made for the queue's depth. None for a volume whose writes
    /// are durable when they are answered.
    pub(crate) ledger: Option<Ledger>,
    /// How soon a path is given up on which the target owes an answer and is silent.
    pub(crate) pulse: Option<Pulse>,
    /// From control.
    pub(crate) mail: Receiver<ToQueue>,
    /// To control.
    pub(crate) outbox: mpsc::UnboundedSender<FromQueue>,
    /// Its counters.
    pub(crate) stats: Arc<QueueStats>,
}

/// The side of a queue that faces the target and control.
pub(crate) struct TargetSide {
    queue: u16,
    mail: Receiver<ToQueue>,
    engine: Engine,
    paths: Paths,
    publisher: Publisher,
    // Control waits for word that nothing is unanswered.
    tell_quiet: bool,
    // The queue leaves when nothing is unanswered, or then.
    leave_by: Option<Instant>,
    // When control was last told of data that did not come through.
    told_digests: Option<Instant>,
    // The longest sleep while answers are outstanding.
    short_sleep: Duration,
}

impl TargetSide {
    /// A queue without a path.
    pub(crate) fn new(parts: TargetParts) -> Self {
        let TargetParts { queue, depth, stride, data_max, ledger, pulse, mail, outbox, .. } = parts;
        let stats = parts.stats;
        let mut engine = Engine::new(depth, stride, Arc::clone(&stats))
            .with_data_max(data_max)
            .with_shared(parts.shared);
        if let Some(ledger) = ledger {
            engine = engine.with_ledger(ledger);
        }
        engine.set_pulse(pulse);
        Self {
            queue,
            mail,
            engine,
            paths: Paths::new(queue, outbox),
            publisher: Publisher::new(stats),
            tell_quiet: false,
            leave_by: None,
            told_digests: None,
            short_sleep: short_sleep(pulse),
        }
    }

    /// The engine.
    #[inline]
    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The engine, for requests, holds and arming.
    #[inline]
    pub(crate) fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Whether control is gone: nobody reconnects or beats any more.
    pub(crate) fn is_alone(&self) -> bool {
        self.paths.is_alone()
    }

    /// Whether no path but the present one can touch a buffer any more: every dead one is
    /// destroyed.
    pub(crate) fn has_let_go(&self) -> bool {
        !self.engine.has_ended() && self.paths.has_let_go()
    }

    /// Its counters.
    #[inline]
    pub(crate) fn stats(&self) -> &QueueStats {
        self.publisher.stats()
    }

    /// Readable when mail came in since [`Self::clear_mail`].
    pub(crate) fn mail_fd(&self) -> BorrowedFd<'_> {
        self.mail.as_fd()
    }

    /// Resets the event of the mail, before [`Self::begin`] looks for mail.
    pub(crate) fn clear_mail(&mut self) {
        self.mail.clear_event();
    }

    /// Whether a watch is one of the present path's.
    pub(crate) fn is_of_path(&self, token: WatchToken) -> bool {
        self.paths.is_of_path(token)
    }

    /// Takes the event of the path's CQ, if there is a path.
    pub(crate) fn clear_path_event(&mut self) {
        if let Some(poller) = self.engine.poller_mut() {
            poller.clear_event();
        }
    }

    /// A turn begins: takes the mail, and the next path if it may be taken. Returns whether there
    /// was mail.
    ///
    /// # Errors
    /// What the queue sleeps in broke.
    #[inline]
    pub(crate) fn begin(&mut self, watch: &mut impl Watch, moment: Moment) -> io::Result<bool> {
        let now = moment.instant();
        self.engine.begin_turn(moment);
        let busy = self.take_mail(now);
        if self.paths.is_unwatched() {
            // Nothing says that there is something to look at.
            self.clear_path_event();
        }
        if self.paths.change(&mut self.engine, watch, now)? {
            self.publisher.new_path();
        }
        Ok(busy)
    }

    /// Returns whether there was mail.
    fn take_mail(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(message) = self.mail.receive() {
            any = true;
            match message {
                ToQueue::Connect(path) => {
                    self.engine.disconnect();
                    self.paths.set_next(path);
                }
                ToQueue::Disconnect => {
                    self.engine.disconnect();
                    self.paths.drop_next();
                }
                ToQueue::Fail(errno) => {
                    if errno.is_some() {
                        // First, so that what was sent fails when the path is destroyed, and not
                        // when it ends: its device may touch the buffers until then.
                        self.engine.disconnect();
                    }
                    self.paths.set_failing(errno);
                }
                ToQueue::TakeStock(reply) => {
                    // No one waits for it when the try to connect was given up: no copies are made.
                    if !reply.is_closed() {
                        let _ = reply.send(self.engine.take_stock());
                    }
                }
                ToQueue::Hold(held) => {
                    self.engine.hold(held || self.leave_by.is_some());
                    self.tell_quiet = held;
                }
                ToQueue::Leave(within) => {
                    self.engine.hold(true);
                    self.leave_by = Some(now + within);
                }
            }
        }
        any
    }

    /// One turn of the engine. `done` gets each outcome. Returns whether anything happened, and how
    /// many requests were answered.
    #[inline]
    pub(crate) fn turn(&mut self, now: Moment, done: impl FnMut(Tag, i32)) -> (bool, usize) {
        let before = self.engine.outstanding();
        let busy = self.engine.turn(now, done);
        (busy, before - self.engine.outstanding())
    }

    /// The turn ends: sends control what it has to know. Returns whether a path ended.
    ///
    /// # Errors
    /// What the queue sleeps in broke.
    #[inline]
    pub(crate) fn end(&mut self, watch: &mut impl Watch, now: Instant) -> io::Result<bool> {
        let busy = self.paths.send_off(&mut self.engine, watch)?;
        if self.engine.has_digest_failure() {
            self.tell_digests(now);
        }
        if self.tell_quiet && self.engine.is_quiet() {
            self.tell_quiet = false;
            self.paths.tell(FromQueue::Quiet { queue: self.queue });
        }
        Ok(busy)
    }

    /// Tells control of requests whose data did not come through, at most once in
    /// [`DIGEST_REPORTS`].
    #[cold]
    fn tell_digests(&mut self, now: Instant) {
        let is_due = |at| now.saturating_duration_since(at) >= DIGEST_REPORTS;
        if self.told_digests.is_none_or(is_due)
            && let Some(failure) = self.engine.take_digest_failure()
        {
            self.told_digests = Some(now);
            self.paths.tell(FromQueue::DigestFailure { queue: self.queue, failure });
        }
    }

    /// Control wants the queue to leave, when nothing is unanswered or its time is over.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leave_by.is_some()
    }

    /// Whether it leaves now.
    pub(crate) fn leaves(&self, now: Instant) -> bool {
        self.leave_by.is_some_and(|by| self.engine.is_quiet() || now >= by)
    }

    /// The queue ends: sends every path to control. What it slept in goes at once.
    pub(crate) fn send_all_off(&mut self) {
        while let Some(message) = self.mail.receive() {
            if let ToQueue::Connect(path) = message {
                self.paths.set_next(path);
            }
        }
        self.paths.end(&mut self.engine);
    }

    /// Tells control that the queue has left, for that reason if something broke.
    pub(crate) fn tell_stopped(&self, error: Option<String>) {
        self.paths.tell(FromQueue::Stopped { queue: self.queue, error });
    }

    /// A turn did something.
    #[inline]
    pub(crate) fn after_work(&mut self) {
        self.publisher.after_work(&mut self.engine);
    }

    /// Publishes the counters.
    pub(crate) fn publish(&mut self) {
        self.publisher.publish(&mut self.engine);
    }

    /// Whether something came, apart from answers, that a sleeper has to see.
    pub(crate) fn has_news(&self) -> bool {
        self.mail.has_some() || self.engine.has_ended()
    }

    /// The longest sleep at this time. `short`: also the other side waits for something.
    pub(crate) fn longest_sleep(&self, now: Instant, short: bool) -> Duration {
        // With answers outstanding, a short sleep also helps where a device loses an event.
        let short = short || self.engine.has_deadline() || self.engine.outstanding() > 0;
        let longest = match short {
            _ if self.paths.is_changing() || self.paths.is_unwatched() => LOOK_SLEEP,
            true => self.short_sleep,
            false => LONG_SLEEP,
        };
        let leaves_in = self.leave_by.map(|by| by.saturating_duration_since(now));
        leaves_in.map_or(longest, |leaves_in| longest.min(leaves_in))
    }

    /// What is under way, for the spin policy.
    pub(crate) fn awaited(&self) -> Option<rblk_fabric::spin::Hint> {
        let outstanding = narrow(self.engine.outstanding());
        let wire_bytes = self.engine.data_bytes();
        let hint = rblk_fabric::spin::Hint { wire_bytes, outstanding };
        self.engine.is_connected().then_some(hint)
    }
}

/// How long to sleep while answers are outstanding: a beat must not come late.
fn short_sleep(pulse: Option<Pulse>) -> Duration {
    let least = Duration::from_millis(5);
    pulse.map_or(SHORT_SLEEP, |pulse| (pulse.period / 4).clamp(least, SHORT_SLEEP))
}
