//! The data thread of one hardware queue: ublk requests to the [`Engine`] and outcomes back.
//!
//! One thread, one ring: it fetches and commits ublk requests, and it is the place to sleep for
//! completions, mail and requests alike. A turn enters the kernel at most once.
//!
//! Without work it looks for more as long as its [`Patience`] says. To sleep it arms the path's CQ,
//! looks once more, and only then waits in the ring, for a bounded time: nothing that completed is
//! slept through.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::mpsc as sync_mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rblk_fabric::PollerCounters;
use rblk_fabric::mailbox::{Receiver, Sender, mailbox};
use rblk_fabric::patience::{Hint, Idle, Patience, SpinMode, measure_wake_cost};
use rblk_protocol::{BlockSize, QueueDepth, Tag};
use tokio::sync::{mpsc, oneshot};

use crate::admin::Pulse;
use crate::durability::Ledger;
use crate::engine::{Engine, PathEnd, QueueStats};
use crate::grave::Grave;
use crate::io::{Io, IoOp};
use crate::path::{DeadPath, Path};
use crate::retain::Retained;
use crate::succession::Succession;
use crate::ublk::Buffers;
use crate::ublk::QueueConfig;
use crate::ublk::{BlockOp, BlockRequest};
use crate::ublk::{Event, Queue, Wait, WatchToken};

const MAIL: WatchToken = WatchToken(0);
const LONG_SLEEP: Duration = Duration::from_secs(60);
const SHORT_SLEEP: Duration = Duration::from_millis(100);
/// How often a thread that waits for the end of a dead path asks for it.
const GRAVE_SLEEP: Duration = Duration::from_millis(1);
/// Turns of the ring in which the last answers get out.
const HAND_BACK_TRIES: u32 = 16;
/// Busy turns after which the poller's counters are published; they are before every sleep.
const PUBLISH_TURNS: u32 = 64;
/// Looks for more answers before those that came are given to the driver, where many are
/// outstanding.
const GATHERINGS: u32 = 3;
const EIO: i32 = 5;
const EINVAL: i32 = 22;

/// Control to queue thread.
#[derive(Debug)]
pub enum ToQueue {
    /// Use this path from now on, or as soon as those before it are destroyed.
    Connect(Box<Path>),
    /// Drop the present path; requests wait.
    Disconnect,
    /// Fail requests with this errno from now on, or as soon as dead paths are destroyed; or let
    /// them wait again.
    Fail(Option<i32>),
    /// Drop the present path, so that no more writes are acknowledged, and answer with copies of
    /// those that no FLUSH covered; `None` when the queue retains nothing.
    TakeStock(oneshot::Sender<Option<Vec<Retained>>>),
    /// Take requests but send none, or send them again. [`FromQueue::Quiet`] tells, once for each
    /// `Hold(true)`, when nothing that was sent is unanswered.
    Hold(bool),
    /// Hold; when nothing that was sent is unanswered, or after that time, drop the path and leave
    /// the device as it is, with what it gave us: its next server gets that. Ends the thread.
    Leave(Duration),
}

/// Queue thread to control.
#[derive(Debug)]
pub enum FromQueue {
    /// A path ended; control destroys what is left of it.
    PathEnded {
        /// Which queue.
        queue: u16,
        /// Why.
        end: PathEnd,
        /// What is left.
        dead: Box<DeadPath>,
        /// To be dropped when that is destroyed.
        grave: Option<Grave>,
    },
    /// The queue is held, and everything it sent is answered.
    Quiet {
        /// Which queue.
        queue: u16,
    },
    /// The thread left: the disk is stopped, control asked for it, or something broke.
    Stopped {
        /// Which queue.
        queue: u16,
        /// What broke, if something did.
        error: Option<String>,
    },
}

/// Control's end of a running queue.
#[derive(Debug)]
pub struct QueueHandle {
    /// Mail to the thread.
    pub mail: Sender<ToQueue>,
    /// Its counters.
    pub stats: Arc<QueueStats>,
    thread: Option<JoinHandle<()>>,
}

impl QueueHandle {
    /// Waits for the thread to end.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // It reported what broke it by `FromQueue::Stopped`.
            let _ = thread.join();
        }
    }
}

/// What a queue thread is made of.
#[derive(Debug)]
pub struct QueueParts {
    /// The ublk queue.
    pub config: QueueConfig,
    /// One buffer per tag.
    pub buffers: Buffers,
    /// Block size of the volume.
    pub block_size: BlockSize,
    /// The account of what is durable, made for the queue's depth; none for a volume that promises
    /// it at once.
    pub ledger: Option<Ledger>,
    /// How soon a path on which the target owes an answer and says nothing is given up.
    pub pulse: Option<Pulse>,
    /// How long to look for work before sleeping.
    pub spin: SpinMode,
    /// For control.
    pub outbox: mpsc::UnboundedSender<FromQueue>,
}

/// Starts the thread and waits until it has fetched every tag.
///
/// # Errors
/// The ublk queue could not be made.
pub fn start(parts: QueueParts) -> io::Result<QueueHandle> {
    let (mail, receiver) = mailbox(64)?;
    let stats = Arc::new(QueueStats::default());
    let engine_stats = Arc::clone(&stats);
    let (ready, is_ready) = sync_mpsc::sync_channel(1);
    let queue = parts.config.queue_id();
    let thread =
        std::thread::Builder::new().name(format!("rblk-queue-{queue}")).spawn(move || {
            let outbox = parts.outbox.clone();
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                run(parts, receiver, engine_stats, &ready)
            }));
            let error = match result {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("it panicked".to_owned()),
            };
            if let Some(error) = &error {
                // Nobody listens any more when the queue was ready already.
                let _ = ready.try_send(Err(io::Error::other(error.clone())));
            }
            let _ = outbox.send(FromQueue::Stopped { queue, error });
        })?;
    match is_ready.recv_timeout(Duration::from_secs(10)) {
        Ok(Ok(())) => Ok(QueueHandle { mail, stats, thread: Some(thread) }),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "a queue thread did not start")),
    }
}

fn run(
    parts: QueueParts,
    mut mail: Receiver<ToQueue>,
    stats: Arc<QueueStats>,
    ready: &sync_mpsc::SyncSender<io::Result<()>>,
) -> io::Result<()> {
    let QueueParts { config, buffers, block_size, ledger, pulse, spin, outbox } = parts;
    let queue_id = config.queue_id();
    let stride = buffers.stride();
    let mut ublk = Queue::new(&config, buffers).map_err(io::Error::other)?;
    // The device's node goes when the last queue is gone.
    drop(config);
    ublk.watch(mail.event_fd(), MAIL).map_err(io::Error::other)?;
    ublk.fetch_all();
    ublk.enter(Wait::No).map_err(io::Error::other)?;
    let _ = ready.send(Ok(()));
    let depth = QueueDepth::new(ublk.depth()).ok_or(io::ErrorKind::InvalidInput)?;
    let mut engine = Engine::new(depth, stride, Arc::clone(&stats));
    if let Some(ledger) = ledger {
        engine = engine.with_ledger(ledger);
    }
    engine.set_pulse(pulse);
    let short_sleep = short_sleep(pulse);
    // Of the path's first descriptor; the second has the next one. None of them is the mail's.
    let mut path_token = 2u32;
    let wake_cost = measure_wake_cost();
    let mut patience = Patience::new(spin, wake_cost);
    let mut published = PollerCounters::default();
    let mut unpublished = 0;
    // Since the last sleep nothing woke the thread: the device may have lost the event.
    let mut timed_out = false;
    let mut stopping = false;
    // Control waits for word that nothing is unanswered.
    let mut tell_quiet = false;
    let mut leave_by = None;
    // What has to wait for the ends of dead paths: their devices may still write to buffers.
    let mut succession = Succession::new(queue_id);
    loop {
        let now = Instant::now();
        let mut busy = false;
        // What clients wait for was done.
        let mut io = false;
        while let Some(message) = mail.receive() {
            busy = true;
            match message {
                ToQueue::Connect(path) => {
                    engine.disconnect();
                    give_back(succession.follow_with(path), queue_id, &outbox);
                }
                ToQueue::Disconnect => {
                    engine.disconnect();
                    give_back(succession.take_next(), queue_id, &outbox);
                }
                ToQueue::Fail(errno) => succession.fail(errno),
                ToQueue::TakeStock(reply) => {
                    // Nobody listens when the try to connect was given up.
                    let _ = reply.send(engine.take_stock());
                }
                ToQueue::Hold(held) => {
                    engine.hold(held || leave_by.is_some());
                    tell_quiet = held;
                }
                ToQueue::Leave(within) => {
                    engine.hold(true);
                    leave_by = Some(now + within);
                }
            }
        }
        if succession.waits() {
            // One that ended just now counts, too, and gives its place up before the next one takes
            // the token.
            send_off(&mut engine, &mut ublk, path_token, &succession, queue_id, &outbox)?;
        }
        if succession.go_on(&mut engine, now) {
            published = PollerCounters::default();
            if let Some(poller) = engine.poller_mut() {
                // Two tokens for each path.
                path_token += 2;
                for (token, fd) in (path_token..).zip(poller.event_fds()) {
                    let Some(fd) = fd else { continue };
                    ublk.watch_asleep(fd.as_raw_fd(), WatchToken(token))
                        .map_err(io::Error::other)?;
                }
            }
        }
        while let Some(event) = ublk.next_event() {
            busy = true;
            match event {
                Event::Request(tag, request) => {
                    // What cannot be sent is answered at once; the tag is ours, so completing it
                    // works.
                    io = true;
                    if let Err(errno) = start_request(&mut engine, tag, &request, block_size) {
                        let _ = ublk.complete(tag, -errno);
                    }
                }
                Event::Watch(MAIL) => mail.clear_event(),
                // A socket that ended is looked at as well.
                Event::Watch(token) | Event::WatchEnded(token, _) if token.0 & !1 == path_token => {
                    if let Some(poller) = engine.poller_mut() {
                        poller.clear_event();
                    }
                }
                Event::Watch(_) | Event::WatchEnded(..) => {}
                Event::Stopping => {
                    stopping = true;
                    // The driver waits for the answers of what it gave us.
                    if leave_by.is_none() {
                        engine.hold(false);
                    }
                }
                Event::TagLost(tag, errno) => {
                    tracing::error!(tag, errno, "the ublk driver refused a command")
                }
            }
        }
        if timed_out {
            timed_out = false;
            if let Some(poller) = engine.poller_mut() {
                poller.clear_event();
            }
        }
        let asked = engine.outstanding();
        let mut complete = |tag: Tag, result| {
            let _ = ublk.complete(tag.0, result);
        };
        busy |= engine.turn(now, &mut complete);
        let mut answers = asked - engine.outstanding();
        if answers > 0 && engine.outstanding() > 4 * answers {
            // Many more are on their way: what comes now gets to the driver with what came.
            for _ in 0..GATHERINGS {
                std::thread::yield_now();
                stats.yields.add(1);
                engine.turn(now, &mut complete);
                answers = asked - engine.outstanding();
                if engine.outstanding() <= 4 * answers || now.elapsed() > wake_cost / 8 {
                    break;
                }
            }
        }
        io |= answers > 0;
        busy |= send_off(&mut engine, &mut ublk, path_token, &succession, queue_id, &outbox)?;
        if tell_quiet && engine.is_quiet() {
            tell_quiet = false;
            let _ = outbox.send(FromQueue::Quiet { queue: queue_id });
        }
        let leaves = leave_by.is_some_and(|by| engine.is_quiet() || now >= by);
        if leaves || stopping && ublk.is_down() {
            engine.disconnect();
            give_back(succession.take_next(), queue_id, &outbox);
            while let Some((end, dead)) = engine.take_ended() {
                tell_end(end, dead, &succession, queue_id, &outbox);
            }
            if leaves {
                hand_back(&mut ublk)?;
            }
            return Ok(());
        }
        if busy {
            patience.worked(now, io);
            unpublished += 1;
            if unpublished >= PUBLISH_TURNS {
                unpublished = 0;
                publish(&mut engine, &mut published, &stats);
            }
        }
        // After I/O that leaves nothing to look for, what the turn has for the driver goes with the
        // sleep: one call.
        let may_wait = !busy || io && engine.is_connected() && !stopping && leave_by.is_none();
        let looks =
            may_wait && engine.is_connected() && patience.next(now, hint(&engine)) == Idle::Look;
        let wait = if looks && !busy {
            // Software devices make progress on this very CPU.
            let given_up = Instant::now();
            std::thread::yield_now();
            patience.yielded(given_up.elapsed());
            stats.yields.add(1);
            Wait::No
        } else if looks || !may_wait {
            Wait::No
        } else {
            let armed = engine.arm();
            // Something may have come between the last look and the arming.
            let asked = engine.outstanding();
            let late = !armed
                | engine.turn(now, |tag, result| {
                    let _ = ublk.complete(tag.0, result);
                });
            if late || mail.has_some() {
                patience.worked(now, engine.outstanding() < asked);
                Wait::No
            } else {
                unpublished = 0;
                publish(&mut engine, &mut published, &stats);
                // With answers outstanding, also a net under devices that lose an event.
                let short = engine.has_deadline() || stopping || engine.outstanding() > 0;
                let sleep = match short {
                    _ if succession.waits() => GRAVE_SLEEP,
                    true => short_sleep,
                    false => LONG_SLEEP,
                };
                // It does not sleep when something is in the ring already. What the kernel has to
                // hand over is no reason not to: it does so before it sleeps, and its word for it
                // may be stale (TASKRUN is set behind the work it tells of), for as long as nothing
                // else comes.
                Wait::For(leave_by.map_or(sleep, |by| sleep.min(by.saturating_duration_since(now))))
            }
        };
        ublk.enter(wait).map_err(io::Error::other)?;
        let ring = ublk.stats();
        stats.ring_enters.set(ring.enters);
        if stats.sleeps.get() != ring.sleeps {
            stats.sleeps.set(ring.sleeps);
            patience.slept(Instant::now());
            timed_out = !ublk.has_event();
        }
    }
}

/// What is under way.
fn hint(engine: &Engine) -> Hint {
    let outstanding = u32::try_from(engine.outstanding()).unwrap_or(u32::MAX);
    Hint { wire_bytes: engine.data_bytes(), outstanding }
}

/// Publishes what the path's poller counted since the last time.
fn publish(engine: &mut Engine, published: &mut PollerCounters, stats: &QueueStats) {
    let Some(poller) = engine.poller_mut() else { return };
    let counters = poller.counters();
    stats.arms.add(counters.arms - published.arms);
    stats.events.add(counters.events - published.events);
    stats.link_calls.add(counters.link_calls - published.link_calls);
    *published = counters;
}

/// Control gets back a path that was never used.
fn give_back(path: Option<Box<Path>>, queue: u16, outbox: &mpsc::UnboundedSender<FromQueue>) {
    let Some(path) = path else { return };
    let Path { poller, connections, memory, .. } = *path;
    let dead = Box::new(DeadPath { connections, poller, memory });
    let _ = outbox.send(FromQueue::PathEnded { queue, end: PathEnd::Dropped, dead, grave: None });
}

/// Takes the path that ended off the ring, and sends it to control. Whether there was one.
fn send_off(
    engine: &mut Engine,
    ublk: &mut Queue,
    path_token: u32,
    succession: &Succession,
    queue_id: u16,
    outbox: &mpsc::UnboundedSender<FromQueue>,
) -> io::Result<bool> {
    let mut any = false;
    while let Some((end, dead)) = engine.take_ended() {
        any = true;
        for token in path_token..=path_token + 1 {
            ublk.unwatch(WatchToken(token));
        }
        // Submits the removal while the descriptor is still open.
        ublk.enter(Wait::No).map_err(io::Error::other)?;
        tell_end(end, dead, succession, queue_id, outbox);
    }
    Ok(any)
}

/// Sends control what is left of a path, with its grave.
fn tell_end(
    end: PathEnd,
    dead: DeadPath,
    succession: &Succession,
    queue: u16,
    outbox: &mpsc::UnboundedSender<FromQueue>,
) {
    let grave = succession.dig(&dead);
    let _ = outbox.send(FromQueue::PathEnded { queue, end, dead: Box::new(dead), grave });
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

/// Gives a request to the engine, or tells an errno.
fn start_request(
    engine: &mut Engine,
    tag: u16,
    request: &BlockRequest,
    block_size: BlockSize,
) -> Result<(), i32> {
    let op = match request.op {
        BlockOp::Read => IoOp::Read,
        BlockOp::Write => IoOp::Write,
        BlockOp::Flush => IoOp::Flush,
        BlockOp::Discard => IoOp::Discard,
        BlockOp::WriteZeroes => IoOp::WriteZeroes,
    };
    let (offset, len) = match op {
        IoOp::Flush => (0, 0),
        _ => {
            (request.start_sector.checked_mul(512).ok_or(EINVAL)?, u64::from(request.sectors) * 512)
        }
    };
    let mut io = Io::new(op, offset, len, block_size).ok_or(EINVAL)?;
    io.fua = request.flags.fua();
    io.may_unmap = !request.flags.no_unmap();
    engine.submit(Tag(tag), io).map_err(|_| EIO)
}
