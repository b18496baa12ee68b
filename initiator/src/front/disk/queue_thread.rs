//! [`QueueThread`]: ublk requests to the [`Engine`](crate::engine::Engine), and outcomes back.
//!
//! One thread, one ring: the thread fetches and commits ublk requests by it, and sleeps in it for
//! completions, mail and requests alike. A turn enters the ring at most once; when the thread
//! sleeps and how, [`rblk_runtime::data_thread`] says.

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_protocol::width::wide;
use rblk_protocol::{BlockSize, QueueDepth, Tag};
use rblk_runtime::Moment;
use rblk_runtime::data_thread::{DataThread, Found, Turn, Woken};
use rblk_runtime::mailbox::Receiver;
use rblk_runtime::spin::Hint;

use super::QueueParts;
use super::gathering::Gathering;
use crate::engine::QueueStats;
use crate::engine::inflight::WrongState;
use crate::engine::io::{Io, IoOp};
use crate::engine::path::{DataPlace, MemoryIndex};
use crate::front::ublk::{BlockOp, BlockRequest, DataAt, TurnSleep, UblkEvent, UblkQueue};
use crate::queue::{EngineDriver, EngineDriverParts, MAIL, ToQueue};

/// Limit of the polls after an arming, while each finds answers of many requests.
const LATE_LOOKS: u32 = 4;
/// Limit of the turns of the ring that hand the last answers over.
const HAND_BACK_TRIES: u32 = 16;
/// The longest sleep of a queue that leaves: its gate opens without an event.
const GATE_LOOK: Duration = Duration::from_millis(1);
const EIO: i32 = 5;
const EINVAL: i32 = 22;

/// The data thread of one hardware queue.
pub(super) struct QueueThread {
    ublk: UblkQueue,
    driver: EngineDriver,
    gathering: Gathering,
    block_size: BlockSize,
    // Requests may have their data in the memory of other programs.
    shares_memory: bool,
    // The disk is being stopped.
    stopping: bool,
}

impl QueueThread {
    /// Makes the queue, and fetches every tag. Call it on the queue's own thread.
    pub(super) fn new(
        parts: QueueParts,
        mail: Receiver<ToQueue>,
        stats: Arc<QueueStats>,
    ) -> io::Result<Self> {
        let QueueParts {
            config, buffers, data_max, block_size, ledger, ways, pulse, outbox, ..
        } = parts;
        let shared = parts.shared.len();
        // Timers of this thread are exact: a gathering is shorter than the usual 50 µs of slack.
        let _ = nix::sys::prctl::set_timerslack(1);
        let queue = config.queue_id();
        let stride = buffers.stride();
        let mut ublk =
            UblkQueue::new(&config, buffers).map_err(io::Error::other)?.with_shared(parts.shared);
        // The device's node goes with its last queue.
        drop(config);
        ublk.watch(mail.event_fd(), MAIL).map_err(io::Error::other)?;
        ublk.fetch_all();
        ublk.enter(TurnSleep::No).map_err(io::Error::other)?;
        let depth = QueueDepth::new(ublk.depth()).ok_or(io::ErrorKind::InvalidInput)?;
        let driver = EngineDriver::new(EngineDriverParts {
            queue,
            depth,
            stride,
            data_max,
            shared,
            ledger,
            ways,
            pulse,
            mail,
            outbox,
            stats,
        });
        let (gathering, stopping) = (Gathering::default(), false);
        Ok(Self { ublk, driver, gathering, block_size, stopping, shares_memory: shared > 0 })
    }

    /// Ends the work of a thread that has run. The thread may end afterwards.
    pub(super) fn end(self) {
        let Self { ublk, driver, .. } = self;
        if driver.is_leaving()
            && let Err(error) = ublk.leave()
        {
            tracing::warn!(%error, "the kernel may have lost a request: maybe no program can serve the disk until this host restarts");
        }
    }

    /// Takes the events of the ring.
    fn take_events(&mut self, now: Instant) -> Found {
        let mut found = Found::Nothing;
        while let Some(event) = self.ublk.next_event() {
            match event {
                UblkEvent::Request(tag, request) => {
                    found = Found::Io;
                    self.take_request(tag, &request, now);
                    continue;
                }
                UblkEvent::Watch(MAIL) => self.driver.clear_mail(),
                // A socket that ended is checked, too.
                UblkEvent::Watch(token) | UblkEvent::WatchEnded(token, _) => {
                    self.driver.clear_event_of(token);
                }
                UblkEvent::Stopping => {
                    self.stopping = true;
                    // The driver waits for the answers to its requests.
                    if !self.driver.is_leaving() {
                        self.driver.engine_mut().hold(false);
                    }
                }
                UblkEvent::TagLost(tag, errno) => {
                    tracing::error!(tag, errno, "the ublk driver refused a command")
                }
            }
            if found == Found::Nothing {
                found = Found::Work;
            }
        }
        found
    }

    /// Gives a request to the engine, or answers it at once if it cannot be sent.
    fn take_request(&mut self, tag: u16, request: &BlockRequest, now: Instant) {
        let submitted = to_io(request, self.block_size)
            .ok_or(EINVAL)
            .and_then(|io| self.submit(Tag(tag), io, request.data).map_err(|_| EIO));
        match submitted {
            Ok(()) => self.gathering.request(Tag(tag), now),
            Err(errno) => answer(&mut self.ublk, Tag(tag), -errno),
        }
    }

    /// Gives the engine a request with its data at `data`.
    #[inline]
    fn submit(&mut self, tag: Tag, io: Io, data: DataAt) -> Result<(), WrongState> {
        if !self.shares_memory {
            return self.driver.engine_mut().submit(tag, io);
        }
        let place = match data {
            DataAt::Buffer => self.driver.engine().buffer_of(tag),
            DataAt::Shared { index, offset } => {
                self.driver.stats().shared_memory_bytes.add(io.data_bytes.into());
                let memory = MemoryIndex::shared(index).ok_or(WrongState(tag.0))?;
                DataPlace { memory, offset: wide(offset) }
            }
        };
        self.driver.engine_mut().submit_at(tag, io, place)
    }

    /// One turn of the engine. Returns whether it did any work, and the number of answered
    /// requests.
    fn turn_engine(&mut self, now: Moment) -> (bool, usize) {
        let Self { driver, ublk, gathering, .. } = self;
        driver.turn(now, |tag, result| {
            gathering.answer(tag, now.instant());
            answer(ublk, tag, result);
        })
    }

    /// Whether the thread ends now. Control has its paths then.
    fn ends(&mut self, now: Instant) -> io::Result<bool> {
        let leaves = self.driver.leaves(now) && self.ublk.may_leave();
        if !(leaves || self.stopping && self.ublk.is_down()) {
            return Ok(false);
        }
        self.driver.send_all_off();
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
        let mut busy = self.driver.begin(&mut self.ublk, moment)?;
        let events = self.take_events(now);
        let (did, answers) = self.turn_engine(moment);
        busy |= did | (events != Found::Nothing);
        busy |= self.driver.end(&mut self.ublk, now)?;
        if self.ends(now)? {
            return Ok(ControlFlow::Break(()));
        }
        let found = Found::of(busy, events == Found::Io || answers > 0);
        if busy {
            self.driver.after_work();
        }
        // If no more work is expected after I/O, the answers for the driver go with the sleep: one
        // system call.
        let may_sleep = match found {
            Found::Nothing => true,
            Found::Work => false,
            Found::Io => {
                self.driver.engine().is_connected() && !self.stopping && !self.driver.is_leaving()
            }
        };
        Ok(ControlFlow::Continue(Turn { found, may_sleep }))
    }

    fn awaited(&mut self) -> Option<Hint> {
        self.driver.awaited()
    }

    fn arm(&mut self) {
        // The path of a CQ that cannot be armed has ended: the next poll finds that.
        let _ = self.driver.engine_mut().arm();
    }

    fn look_again(&mut self, now: Moment) -> Found {
        for _ in 0..LATE_LOOKS {
            let (busy, answers) = self.turn_engine(now);
            let found = Found::of(busy, answers > 0);
            if self.driver.has_news() {
                return Found::of(true, answers > 0);
            }
            if found != Found::Io || !self.gathering.is_many(self.driver.engine().outstanding()) {
                return found;
            }
            // Many more requests are under way: these answers, too, go to the driver with the
            // sleep. The CQ is armed, so the next poll can be the last.
        }
        Found::Io
    }

    fn publish(&mut self, _: Moment) {
        self.driver.publish();
    }

    fn has_software_device(&mut self) -> bool {
        self.driver.has_software_device()
    }

    fn longest_sleep(&self, now: Instant) -> Duration {
        let longest = self.driver.longest_sleep(now, self.stopping);
        if self.driver.is_leaving() { longest.min(GATE_LOOK) } else { longest }
    }

    fn enter(&mut self, sleep: Option<Duration>) -> io::Result<Woken> {
        let wait = match sleep {
            None => TurnSleep::No,
            Some(longest) => self.gathering.wait(longest, self.driver.engine().outstanding()),
        };
        self.ublk.enter(wait).map_err(io::Error::other)?;
        let (ring, stats) = (self.ublk.stats(), self.driver.stats());
        stats.ring_enters.set(ring.enters);
        if stats.sleeps.get() == ring.sleeps {
            return Ok(Woken::DidNotSleep);
        }
        stats.sleeps.set(ring.sleeps);
        Ok(if self.ublk.has_event() { Woken::ByEvent } else { Woken::ByTime })
    }

    fn ask_devices(&mut self) {
        self.driver.clear_path_events();
    }

    fn yielded(&mut self) {
        self.driver.stats().yields.add(1);
    }
}

/// Answers a request of the driver.
fn answer(ublk: &mut UblkQueue, tag: Tag, result: i32) {
    let answered = ublk.complete(tag.0, result);
    debug_assert!(answered.is_ok(), "{answered:?}");
}

/// Hands every answered request to the driver, before the ring goes with the unanswered ones.
fn hand_back(ublk: &mut UblkQueue) -> io::Result<()> {
    for _ in 0..HAND_BACK_TRIES {
        ublk.enter(TurnSleep::No).map_err(io::Error::other)?;
        if !ublk.needs_enter() {
            break;
        }
        // The kernel needs its completions reaped first. A request among them stays with the
        // driver.
        while ublk.next_event().is_some() {}
    }
    Ok(())
}

/// A request of the driver for the engine. `None`, if it is not whole blocks.
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
