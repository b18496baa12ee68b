//! [`QueueThread`]: ublk requests to the [`Engine`], and outcomes back.
//!
//! One thread, one ring: the thread fetches and commits ublk requests by it, and sleeps in it for
//! completions, mail and requests alike. A turn enters the kernel at most once; when the thread
//! sleeps and how, [`rblk_fabric::data_thread`] says.

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::data_thread::{DataThread, Found, Turn, Woken};
use rblk_fabric::mailbox::Receiver;
use rblk_fabric::spin::Hint;
use rblk_fabric::{Moment, PollerCounters};
use rblk_protocol::width::narrow;
use rblk_protocol::{BlockSize, QueueDepth, Tag};

use super::gathering::Gathering;
use super::paths::{MAIL, Paths};
use super::{FromQueue, QueueParts, ToQueue};
use crate::admin::Pulse;
use crate::engine::{Engine, QueueStats};
use crate::io::{Io, IoOp};
use crate::ublk::{BlockOp, BlockRequest, Event, Queue, Wait};

const LONG_SLEEP: Duration = Duration::from_secs(60);
const SHORT_SLEEP: Duration = Duration::from_millis(100);
/// How often a thread that waits for dead paths to be destroyed asks whether they are.
const DESTROY_SLEEP: Duration = Duration::from_millis(1);
/// Looks after an arming, at most, where each finds answers of many requests.
const LATE_LOOKS: u32 = 4;
/// Turns of the ring in which the last answers get out.
const HAND_BACK_TRIES: u32 = 16;
/// Busy turns after which the poller's counters are published. They are published before every
/// sleep, too.
const PUBLISH_TURNS: u32 = 64;
/// Control hears of data that did not come through at most once in this time.
const DIGEST_REPORTS: Duration = Duration::from_secs(1);
const EIO: i32 = 5;
const EINVAL: i32 = 22;

/// The data thread of one hardware queue.
pub(super) struct QueueThread {
    mail: Receiver<ToQueue>,
    ublk: Queue,
    engine: Engine,
    paths: Paths,
    ending: Ending,
    publisher: Publisher,
    gathering: Gathering,
    queue: u16,
    block_size: BlockSize,
    // When control was last told of data that did not come through.
    told_digests: Option<Instant>,
    // The longest sleep while answers are outstanding.
    short_sleep: Duration,
}

/// How far the end of the thread is.
#[derive(Default)]
struct Ending {
    // The disk is being stopped.
    stopping: bool,
    // Control waits for word that nothing is unanswered.
    tell_quiet: bool,
    // The thread leaves when nothing is unanswered, or then.
    leave_by: Option<Instant>,
}

/// Which counters of the path's poller are published.
struct Publisher {
    stats: Arc<QueueStats>,
    published: PollerCounters,
    busy_turns: u32,
}

impl QueueThread {
    /// Makes the queue, which has fetched every tag then. On the thread that runs it.
    pub(super) fn new(
        parts: QueueParts,
        mail: Receiver<ToQueue>,
        stats: Arc<QueueStats>,
    ) -> io::Result<Self> {
        let QueueParts { config, buffers, data_max, block_size, ledger, pulse, outbox, .. } = parts;
        // Timers of this thread are exact: a gathering is shorter than the usual 50 µs of slack.
        let _ = nix::sys::prctl::set_timerslack(1);
        let queue = config.queue_id();
        let stride = buffers.stride();
        let mut ublk = Queue::new(&config, buffers).map_err(io::Error::other)?;
        // The device's node goes when the last queue is gone.
        drop(config);
        ublk.watch(mail.event_fd(), MAIL).map_err(io::Error::other)?;
        ublk.fetch_all();
        ublk.enter(Wait::No).map_err(io::Error::other)?;
        let depth = QueueDepth::new(ublk.depth()).ok_or(io::ErrorKind::InvalidInput)?;
        let mut engine = Engine::new(depth, stride, Arc::clone(&stats)).with_data_max(data_max);
        if let Some(ledger) = ledger {
            engine = engine.with_ledger(ledger);
        }
        engine.set_pulse(pulse);
        Ok(Self {
            mail,
            ublk,
            engine,
            paths: Paths::new(queue, outbox),
            ending: Ending::default(),
            publisher: Publisher { stats, published: PollerCounters::default(), busy_turns: 0 },
            gathering: Gathering::default(),
            queue,
            block_size,
            told_digests: None,
            short_sleep: short_sleep(pulse),
        })
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
                ToQueue::Fail(errno) => self.paths.set_failing(errno),
                ToQueue::TakeStock(reply) => {
                    // No one waits for it when the try to connect was given up.
                    let _ = reply.send(self.engine.take_stock());
                }
                ToQueue::Hold(held) => {
                    self.engine.hold(held || self.ending.leave_by.is_some());
                    self.ending.tell_quiet = held;
                }
                ToQueue::Leave(within) => {
                    self.engine.hold(true);
                    self.ending.leave_by = Some(now + within);
                }
            }
        }
        any
    }

    /// Takes what the ring has.
    fn take_events(&mut self, now: Instant) -> Found {
        let mut found = Found::Nothing;
        while let Some(event) = self.ublk.next_event() {
            match event {
                Event::Request(tag, request) => {
                    found = Found::Io;
                    self.take_request(tag, &request, now);
                    continue;
                }
                Event::Watch(MAIL) => self.mail.clear_event(),
                // A socket that ended is looked at as well.
                Event::Watch(token) | Event::WatchEnded(token, _)
                    if self.paths.is_of_path(token) =>
                {
                    self.clear_path_event();
                }
                // Of an earlier path.
                Event::Watch(_) | Event::WatchEnded(..) => {}
                Event::Stopping => {
                    self.ending.stopping = true;
                    // The driver waits for the answers of what it gave us.
                    if self.ending.leave_by.is_none() {
                        self.engine.hold(false);
                    }
                }
                Event::TagLost(tag, errno) => {
                    tracing::error!(tag, errno, "the ublk driver refused a command")
                }
            }
            if found == Found::Nothing {
                found = Found::Work;
            }
        }
        found
    }

    /// Gives a request to the engine. What cannot be sent is answered at once.
    fn take_request(&mut self, tag: u16, request: &BlockRequest, now: Instant) {
        let submitted = to_io(request, self.block_size)
            .ok_or(EINVAL)
            .and_then(|io| self.engine.submit(Tag(tag), io).map_err(|_| EIO));
        match submitted {
            Ok(()) => self.gathering.request(Tag(tag), now),
            Err(errno) => answer(&mut self.ublk, Tag(tag), -errno),
        }
    }

    /// Takes the event of the path's CQ, if there is a path.
    fn clear_path_event(&mut self) {
        if let Some(poller) = self.engine.poller_mut() {
            poller.clear_event();
        }
    }

    /// One turn of the engine. Returns whether anything happened, and how many requests were
    /// answered.
    fn turn_engine(&mut self, now: Moment) -> (bool, usize) {
        let before = self.engine.outstanding();
        let Self { engine, ublk, gathering, .. } = self;
        let busy = engine.turn(now, |tag, result| {
            gathering.answer(tag, now.instant());
            answer(ublk, tag, result);
        });
        (busy, before - self.engine.outstanding())
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

    /// Whether the thread ends now. Its paths are with control then.
    fn ends(&mut self, now: Instant) -> io::Result<bool> {
        let leaves = self.ending.leave_by.is_some_and(|by| self.engine.is_quiet() || now >= by);
        if !(leaves || self.ending.stopping && self.ublk.is_down()) {
            return Ok(false);
        }
        self.paths.end(&mut self.engine);
        if leaves {
            hand_back(&mut self.ublk)?;
        }
        Ok(true)
    }
}

impl DataThread for QueueThread {
    type End = ();
    type Error = io::Error;

    fn turn(&mut self, moment: Moment) -> io::Result<ControlFlow<(), Turn>> {
        let now = moment.instant();
        self.engine.begin_turn(moment);
        let mut busy = self.take_mail(now);
        if self.paths.change(&mut self.engine, &mut self.ublk, now)? {
            self.publisher.published = PollerCounters::default();
        }
        let events = self.take_events(now);
        let (did, answers) = self.turn_engine(moment);
        busy |= did | (events != Found::Nothing);
        busy |= self.paths.send_off(&mut self.engine, &mut self.ublk)?;
        if self.engine.has_digest_failure() {
            self.tell_digests(now);
        }
        if self.ending.tell_quiet && self.engine.is_quiet() {
            self.ending.tell_quiet = false;
            self.paths.tell(FromQueue::Quiet { queue: self.queue });
        }
        if self.ends(now)? {
            return Ok(ControlFlow::Break(()));
        }
        let found = Found::of(busy, events == Found::Io || answers > 0);
        if busy {
            self.publisher.after_work(&mut self.engine);
        }
        // After I/O that leaves nothing to look for, the answers for the driver go with the sleep:
        // one system call.
        let may_sleep = match found {
            Found::Nothing => true,
            Found::Work => false,
            Found::Io => {
                let Ending { stopping, leave_by, .. } = &self.ending;
                self.engine.is_connected() && !stopping && leave_by.is_none()
            }
        };
        Ok(ControlFlow::Continue(Turn { found, may_sleep }))
    }

    fn awaited(&mut self) -> Option<Hint> {
        let outstanding = narrow(self.engine.outstanding());
        let hint = Hint { wire_bytes: self.engine.data_bytes(), outstanding };
        self.engine.is_connected().then_some(hint)
    }

    fn arm(&mut self) {
        // The path of a CQ that cannot be armed has ended: the look finds that.
        let _ = self.engine.arm();
    }

    fn look_again(&mut self, now: Moment) -> Found {
        for _ in 0..LATE_LOOKS {
            let (busy, answers) = self.turn_engine(now);
            let found = Found::of(busy, answers > 0);
            if self.mail.has_some() || self.engine.has_ended() {
                return Found::of(true, answers > 0);
            }
            if found != Found::Io || !self.gathering.is_many(self.engine.outstanding()) {
                return found;
            }
            // Many more are under way: these answers, too, go to the driver with the sleep. The CQ
            // is armed, so the next look can be the last.
        }
        Found::Io
    }

    fn publish(&mut self, _: Instant) {
        self.publisher.publish(&mut self.engine);
    }

    fn longest_sleep(&self, now: Instant) -> Duration {
        // With answers outstanding, a short sleep also helps where a device loses an event.
        let short =
            self.engine.has_deadline() || self.ending.stopping || self.engine.outstanding() > 0;
        let longest = match short {
            _ if self.paths.is_changing() => DESTROY_SLEEP,
            true => self.short_sleep,
            false => LONG_SLEEP,
        };
        let leaves_in = self.ending.leave_by.map(|by| by.saturating_duration_since(now));
        leaves_in.map_or(longest, |leaves_in| longest.min(leaves_in))
    }

    fn enter(&mut self, sleep: Option<Duration>) -> io::Result<Woken> {
        let wait = match sleep {
            None => Wait::No,
            Some(longest) => self.gathering.wait(longest, self.engine.outstanding()),
        };
        self.ublk.enter(wait).map_err(io::Error::other)?;
        let (ring, stats) = (self.ublk.stats(), &self.publisher.stats);
        stats.ring_enters.set(ring.enters);
        if stats.sleeps.get() == ring.sleeps {
            return Ok(Woken::DidNotSleep);
        }
        stats.sleeps.set(ring.sleeps);
        Ok(if self.ublk.has_event() { Woken::ByEvent } else { Woken::ByTime })
    }

    fn ask_devices(&mut self) {
        self.clear_path_event();
    }

    fn yielded(&mut self) {
        self.publisher.stats.yields.add(1);
    }
}

impl Publisher {
    /// A turn did something.
    fn after_work(&mut self, engine: &mut Engine) {
        self.busy_turns += 1;
        if self.busy_turns >= PUBLISH_TURNS {
            self.publish(engine);
        }
    }

    /// Publishes what the path's poller counted since the last time.
    fn publish(&mut self, engine: &mut Engine) {
        self.busy_turns = 0;
        self.stats.in_flight.set(engine.outstanding() as u64);
        // What the last path counted since then is not published.
        let Some(poller) = engine.poller_mut() else { return };
        let (counters, published) = (poller.counters(), &self.published);
        self.stats.arms.add(counters.arms - published.arms);
        self.stats.events.add(counters.events - published.events);
        self.stats.link_calls.add(counters.link_calls - published.link_calls);
        self.published = counters;
    }
}

/// Answers a request that the driver gave us.
fn answer(ublk: &mut Queue, tag: Tag, result: i32) {
    let answered = ublk.complete(tag.0, result);
    debug_assert!(answered.is_ok(), "{answered:?}");
}

/// How long to sleep while answers are outstanding: a beat must not come late.
fn short_sleep(pulse: Option<Pulse>) -> Duration {
    let least = Duration::from_millis(5);
    pulse.map_or(SHORT_SLEEP, |pulse| (pulse.period / 4).clamp(least, SHORT_SLEEP))
}

/// Tells the driver of every answered request, before the ring goes with those that are not.
fn hand_back(ublk: &mut Queue) -> io::Result<()> {
    for _ in 0..HAND_BACK_TRIES {
        ublk.enter(Wait::No).map_err(io::Error::other)?;
        if !ublk.needs_enter() {
            break;
        }
        // The kernel wants its completions reaped first. A request among them stays the driver's.
        while ublk.next_event().is_some() {}
    }
    Ok(())
}

/// A request of the driver as the engine takes it. `None`, if it is not whole blocks.
fn to_io(request: &BlockRequest, block_size: BlockSize) -> Option<Io> {
    let op = match request.op {
        BlockOp::Read => IoOp::Read,
        BlockOp::Write => IoOp::Write,
        BlockOp::Flush => IoOp::Flush,
        BlockOp::Discard => IoOp::Discard,
        BlockOp::WriteZeroes => IoOp::WriteZeroes,
    };
    let (offset, len) = match op {
        IoOp::Flush => (0, 0),
        _ => (request.start_sector.checked_mul(512)?, u64::from(request.sectors) * 512),
    };
    let mut io = Io::new(op, offset, len, block_size)?;
    io.fua = request.flags.fua();
    io.may_unmap = !request.flags.no_unmap();
    Some(io)
}
