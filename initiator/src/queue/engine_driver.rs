//! [`EngineDriver`]: the half of a queue that faces the target and control: the engine, its paths,
//! the mail of control, and the counters. A front makes the requests: the kernel's driver
//! ([`disk`](crate::front::disk)), a guest ([`vhost`](crate::front::vhost)) or a program
//! ([`program`](crate::front::program)). All use this half, so disks, guests and programs
//! reconnect, are fenced, retain and check digests by the same code.
//!
//! A turn of a queue is: [`EngineDriver::begin`], the requests of the front,
//! [`EngineDriver::turn`], [`EngineDriver::end`]. One thread at a time runs it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_protocol::width::narrow;
use rblk_protocol::{QueueDepth, Tag};
use rblk_runtime::Moment;
use rblk_runtime::mailbox::Receiver;
use tokio::sync::mpsc;

use super::DescriptorToken;
use super::descriptor_watch::DescriptorWatch;
use super::publisher::CounterPublisher;
use super::queue_paths::Paths;
use super::{FromQueue, ToQueue};
use crate::engine::durability::Ledger;
use crate::engine::pulse::Pulse;
use crate::engine::ways::choice::ChoicePolicy;
use crate::engine::{Engine, QueueStats};

const LONG_SLEEP: Duration = Duration::from_secs(60);
const SHORT_SLEEP: Duration = Duration::from_millis(100);
/// How often a queue polls sources that cannot wake it: the destruction of dead paths, and a path
/// that the system has no descriptors to watch.
const LOOK_SLEEP: Duration = Duration::from_millis(1);
/// Control hears of damaged data at most once in this time.
const DIGEST_REPORTS: Duration = Duration::from_secs(1);

/// The parts of the engine driver.
#[derive(Debug)]
pub(crate) struct EngineDriverParts {
    /// The number of the queue.
    pub(crate) queue: u16,
    /// Limit of the requests at once.
    pub(crate) depth: QueueDepth,
    /// Bytes from one buffer to the next.
    pub(crate) stride: usize,
    /// Limit of the data of a request: the rest of its buffer is for a trailer.
    pub(crate) data_max: usize,
    /// Memories of other programs that requests may have their data in.
    pub(crate) shared: usize,
    /// The account of durable writes, made for the queue's depth. `None` for a volume with durable
    /// acknowledged writes.
    pub(crate) ledger: Option<Ledger>,
    /// How requests are spread, for a queue that may have several ways.
    pub(crate) ways: Option<ChoicePolicy>,
    /// The time until a path with a silent target is given up while answers are outstanding.
    pub(crate) pulse: Option<Pulse>,
    /// From control.
    pub(crate) mail: Receiver<ToQueue>,
    /// To control.
    pub(crate) outbox: mpsc::UnboundedSender<FromQueue>,
    /// The counters of the queue.
    pub(crate) stats: Arc<QueueStats>,
}

/// The half of a queue that faces the target and control.
pub(crate) struct EngineDriver {
    queue: u16,
    mail: Receiver<ToQueue>,
    engine: Engine,
    paths: Paths,
    publisher: CounterPublisher,
    // Control waits for the report that every request is answered.
    tell_quiet: bool,
    // The queue leaves once every request is answered, or at this time.
    leave_by: Option<Instant>,
    // The time of the last report to control about damaged data.
    told_digests: Option<Instant>,
    // The longest sleep while answers are outstanding.
    short_sleep: Duration,
}

impl EngineDriver {
    /// A queue without a path.
    pub(crate) fn new(parts: EngineDriverParts) -> Self {
        let EngineDriverParts {
            queue,
            depth,
            stride,
            data_max,
            ledger,
            ways,
            pulse,
            mail,
            outbox,
            ..
        } = parts;
        let stats = parts.stats;
        let mut engine = Engine::new(depth, stride, Arc::clone(&stats))
            .with_data_max(data_max)
            .with_shared(parts.shared);
        if let Some(ledger) = ledger {
            engine = engine.with_ledger(ledger);
        }
        if let Some(policy) = ways {
            engine.allow_ways(queue, policy);
        }
        engine.set_pulse(pulse);
        Self {
            queue,
            mail,
            engine,
            paths: Paths::new(queue, outbox),
            publisher: CounterPublisher::new(stats),
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

    /// Whether control is gone: the path is not reconnected, and no heart-beat is kept.
    pub(crate) fn is_alone(&self) -> bool {
        self.paths.is_alone()
    }

    /// Whether only the present path can touch a buffer: every dead one is destroyed.
    pub(crate) fn has_let_go(&self) -> bool {
        !self.engine.has_ended() && self.paths.has_let_go()
    }

    /// The counters of the queue.
    #[inline]
    pub(crate) fn stats(&self) -> &QueueStats {
        self.publisher.stats()
    }

    /// Readable after mail, until [`Self::clear_mail`].
    pub(crate) fn mail_fd(&self) -> BorrowedFd<'_> {
        self.mail.as_fd()
    }

    /// Resets the event of the mail, before [`Self::begin`] checks for mail.
    pub(crate) fn clear_mail(&mut self) {
        self.mail.clear_event();
    }

    /// Takes the event of the CQ that a watch is of, if its path has not ended.
    pub(crate) fn clear_event_of(&mut self, token: DescriptorToken) {
        if let Some(way) = self.paths.way_of(token)
            && let Some(poller) = self.engine.poller_of(way)
        {
            poller.clear_event();
        }
    }

    /// Takes the event of the CQ of every path.
    pub(crate) fn clear_path_events(&mut self) {
        self.engine.clear_event();
    }

    /// The queue may not be driven for a while. A target that waits for acknowledgements would then
    /// give its connections up.
    #[inline]
    pub(crate) fn send_owed_acks(&mut self) {
        self.engine.each_poller(|_, poller| poller.send_owed_acks());
    }

    /// Starts a turn: takes the mail, and the next path if that is possible. Returns whether there
    /// was mail.
    ///
    /// # Errors
    /// The epoll or ring of the queue broke.
    #[inline]
    pub(crate) fn begin(
        &mut self,
        watch: &mut impl DescriptorWatch,
        moment: Moment,
    ) -> io::Result<bool> {
        let now = moment.instant();
        self.engine.begin_turn(moment);
        let busy = self.take_mail(now);
        if self.paths.is_unwatched() {
            // No descriptor reports completions: poll.
            self.clear_path_events();
        }
        let new = self.paths.change(&mut self.engine, watch, now)?;
        if !new.is_empty() {
            new.iter().for_each(|way| self.publisher.new_path(way));
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
                    self.paths.drop_joins();
                    self.paths.set_next(path);
                }
                ToQueue::Join(path) => self.paths.set_join(path),
                ToQueue::EndWay(way) => {
                    self.engine.end_way(way);
                    self.paths.drop_join(way);
                }
                ToQueue::WayDropped(way) => self.engine.way_dropped(way),
                ToQueue::Disconnect => {
                    self.engine.disconnect();
                    self.paths.drop_joins();
                    self.paths.drop_next();
                }
                ToQueue::Fail(errno) => {
                    if errno.is_some() {
                        // Disconnect first, so that sent requests fail when the path is destroyed,
                        // and not when it ends: its device may touch the buffers until then.
                        self.engine.disconnect();
                    }
                    self.paths.set_failing(errno);
                }
                ToQueue::TakeStock(reply) => {
                    // Copies are made only for a live receiver: the try to connect may have been
                    // given up.
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

    /// One turn of the engine. `done` gets each outcome. Returns whether the turn did any work, and
    /// the number of answered requests.
    #[inline]
    pub(crate) fn turn(&mut self, now: Moment, done: impl FnMut(Tag, i32)) -> (bool, usize) {
        let before = self.engine.outstanding();
        let busy = self.engine.turn(now, done);
        (busy, before - self.engine.outstanding())
    }

    /// The turn ends: sends control its reports. Returns whether a path ended.
    ///
    /// # Errors
    /// The epoll or ring of the queue broke.
    #[inline]
    pub(crate) fn end(
        &mut self,
        watch: &mut impl DescriptorWatch,
        now: Instant,
    ) -> io::Result<bool> {
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

    /// Reports requests with damaged data to control, at most once in [`DIGEST_REPORTS`].
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

    /// Whether control asked the queue to leave: it leaves once every request is answered, or at
    /// its deadline.
    pub(crate) fn is_leaving(&self) -> bool {
        self.leave_by.is_some()
    }

    /// Whether the queue leaves now.
    pub(crate) fn leaves(&self, now: Instant) -> bool {
        self.leave_by.is_some_and(|by| self.engine.is_quiet() || now >= by)
    }

    /// The queue ends: sends every path to control. The sleeper is destroyed at once.
    pub(crate) fn send_all_off(&mut self) {
        while let Some(message) = self.mail.receive() {
            match message {
                ToQueue::Connect(path) => self.paths.set_next(path),
                ToQueue::Join(path) => self.paths.set_join(path),
                _ => {}
            }
        }
        self.paths.end(&mut self.engine);
    }

    /// Reports to control that the queue has left, with the error if there was one.
    pub(crate) fn tell_stopped(&self, error: Option<String>) {
        self.paths.tell(FromQueue::Stopped { queue: self.queue, error });
    }

    /// Counts a busy turn.
    #[inline]
    pub(crate) fn after_work(&mut self) {
        self.publisher.after_work(&mut self.engine);
    }

    /// Publishes the counters.
    pub(crate) fn publish(&mut self) {
        self.publisher.publish(&mut self.engine);
    }

    /// Whether a sleeper has work besides answers: mail, or a path that ended.
    pub(crate) fn has_news(&self) -> bool {
        self.mail.has_some() || self.engine.has_ended()
    }

    /// The longest sleep at this time. `short`: the front waits, too.
    pub(crate) fn longest_sleep(&self, now: Instant, short: bool) -> Duration {
        // With answers outstanding, a short sleep also helps on a device that loses an event.
        let short = short || self.engine.has_deadline() || self.engine.outstanding() > 0;
        let longest = match short {
            _ if self.paths.is_changing() || self.paths.is_unwatched() => LOOK_SLEEP,
            true => self.short_sleep,
            false => LONG_SLEEP,
        };
        let leaves_in = self.leave_by.map(|by| by.saturating_duration_since(now));
        leaves_in.map_or(longest, |leaves_in| longest.min(leaves_in))
    }

    /// Whether the device of the path does its work in threads of this host.
    pub(crate) fn has_software_device(&mut self) -> bool {
        let mut is_software = false;
        self.engine.each_poller(|_, poller| is_software |= poller.caps().kernel_software);
        is_software
    }

    /// The work in flight, for the spin policy.
    pub(crate) fn awaited(&self) -> Option<rblk_runtime::spin::Hint> {
        let outstanding = narrow(self.engine.outstanding());
        let wire_bytes = self.engine.data_bytes();
        let hint = rblk_runtime::spin::Hint { wire_bytes, outstanding };
        self.engine.is_connected().then_some(hint)
    }
}

/// The longest sleep while answers are outstanding: a beat must not come late.
fn short_sleep(pulse: Option<Pulse>) -> Duration {
    let least = Duration::from_millis(5);
    pulse.map_or(SHORT_SLEEP, |pulse| (pulse.period / 4).clamp(least, SHORT_SLEEP))
}
