//! [`Engine`]: one I/O queue of the initiator: requests by tag in, outcomes by tag out.
//!
//! One data thread owns an engine. The engine knows neither ublk nor sockets: requests come by
//! [`Engine::submit`], outcomes go to the caller's sink in [`Engine::turn`], and the path is any
//! [`Path`]. Without a path requests wait. When a path dies, every request sent on it waits again,
//! and is sent on the next path. A path is used for requests only after its self-test, which tries
//! the agreed verbs. A path that fails the test is given back with [`PathEnd::SelfTest`], so that
//! control can ask for fewer features.
//!
//! A queue with [several ways](Engine::allow_ways) has several paths at once
//! ([`way_paths`]).
//!
//! While it is [held](Engine::hold) it sends nothing, so that a path can be left with nothing under
//! way. With a [`Pulse`] it gives up a path on which the target owes an answer and is silent.
//!
//! With a [`Ledger`] the engine keeps account of which acknowledged writes are durable: the ledger
//! decides how each write is sent, may put a FLUSH ahead of a write, and fails the FLUSHes that
//! must report a loss.
//!
//! Where digests were agreed, the data of a READ is checked before the request is answered, and a
//! request with damaged data is sent once again ([`digests`]).
//!
//! Per request: at most one SEND, no completion of its own (the answer proves it), and at most one
//! receive completion: where lists were agreed, the commands of a turn share messages, and so do
//! answers. No allocation, lock or system call of its own.

mod active_path;
mod answer;
mod beat;
mod digests;
pub mod durability;
pub mod inflight;
pub mod io;
mod lane;
mod latency;
pub mod path;
mod path_end;
pub mod pulse;
mod stats;
mod terms;
mod tested;
mod way_paths;
pub mod ways;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::{Completion, FabricError, Poller, Region, WcStatus};
use rblk_protocol::limits::READ_TRAILER_BYTES;
use rblk_protocol::{Features, Opcode, QueueDepth, Sequence, Status, Tag};
use rblk_runtime::{Micros, Moment};

use self::durability::{Answered, Ledger, SendPlan};
use self::inflight::{Inflight, WrongState};
use self::io::{Io, IoOp};
use self::path::{DataMemory, DataPlace, DeadPath, Path};
use self::pulse::Pulse;
use self::ways::WayIndex;
use self::ways::limbo::OldCopy;
use active_path::{ActivePath, BeatDue, LaneArrival, broken};
use answer::CommandAnswer;
pub use digests::DigestFailure;
use digests::{AnswerVerdict, Digests};
pub use latency::QueueLatency;
use latency::RequestTimes;
pub use path_end::PathEnd;
pub use stats::QueueStats;
use way_paths::WayPaths;

/// Time limit of the self-test.
const SELF_TEST_DEADLINE: Duration = Duration::from_secs(2);
/// Completions taken at once.
const REAP: usize = 64;
/// Limit of the polls in one turn, so that new requests are taken in between.
const REAPS: u32 = 4;
const EIO: i32 = 5;

/// The state of unsent requests.
#[derive(Debug, Default)]
struct UnsentState {
    // Requests are held back.
    held: bool,
    // Every request fails with this errno.
    failing: Option<i32>,
    // A turn may have to send or fail some request.
    backlog: bool,
    // A new request may be sent at once, by the one path of the queue.
    open: bool,
}

impl UnsentState {
    /// Whether a new request may be sent at once.
    #[inline]
    fn lets_send(&self) -> bool {
        !self.held && self.failing.is_none()
    }
}

/// One I/O queue.
pub struct Engine {
    depth: QueueDepth,
    buffer_stride: usize,
    // The place of each tag's data.
    places: Box<[DataPlace]>,
    // The number of memories of other programs that every path has registered.
    shared: usize,
    // These memories, if they may be replaced.
    memories: Option<Arc<[Arc<Region>]>>,
    // Limit of the data of one request: the rest of a buffer is for its trailer.
    data_max: usize,
    inflight: Inflight,
    // The present path: the only one of a queue with one way.
    path: Option<ActivePath>,
    // The other paths of a queue with several ways.
    ways: Option<Box<WayPaths>>,
    // Some path has passed its self-test.
    connected: bool,
    // Some path has not.
    testing: bool,
    ended: Vec<(PathEnd, DeadPath)>,
    pulse: Option<Pulse>,
    waiting: UnsentState,
    ledger: Option<Ledger>,
    digests: Digests,
    // The array for reaped completions.
    reaped: Box<[Completion]>,
    // The start of the turn.
    now: Micros,
    times: RequestTimes,
    stats: Arc<QueueStats>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("depth", &self.depth)
            .field("connected", &self.connected)
            .field("waiting", &self.waiting)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// A queue of `depth` tags, with buffers at intervals of `buffer_stride` bytes from the start
    /// of their region.
    #[must_use]
    pub fn new(depth: QueueDepth, buffer_stride: usize, stats: Arc<QueueStats>) -> Self {
        Self {
            depth,
            buffer_stride,
            places: (0..usize::from(depth.get()))
                .map(|tag| DataPlace::own(tag * buffer_stride))
                .collect(),
            shared: 0,
            memories: None,
            data_max: buffer_stride,
            inflight: Inflight::new(depth),
            path: None,
            ways: None,
            connected: false,
            testing: false,
            ended: Vec::new(),
            pulse: None,
            waiting: UnsentState::default(),
            ledger: None,
            digests: Digests::new(depth),
            reaped: vec![Completion::default(); REAP].into_boxed_slice(),
            // Before the first turn, any time is correct.
            now: Micros::default(),
            times: RequestTimes::new(depth),
            stats,
        }
    }

    /// Leaves room for trailers: a request has at most `data_max` bytes of data. Without this,
    /// paths with digests are not usable.
    #[must_use]
    pub fn with_data_max(mut self, data_max: usize) -> Self {
        self.data_max = data_max.min(self.buffer_stride);
        self
    }

    /// Lets requests have their data in so many memories of other programs. A path that has not
    /// registered all of them is not usable, and neither is one with digests.
    #[must_use]
    pub fn with_shared(mut self, memories: usize) -> Self {
        self.shared = memories;
        self
    }

    /// Replaces the memories of other programs that requests may have their data in. A present path
    /// ends: it has registered others. A next path that was not made with these memories is not
    /// usable.
    pub(crate) fn replace_shared(&mut self, memories: &Arc<[Arc<Region>]>) {
        self.disconnect();
        self.shared = memories.len();
        self.memories = Some(Arc::clone(memories));
    }

    /// Whether a path has registered the memories that requests may have their data in.
    fn has_memories(&self, path: &Path) -> bool {
        let have = &path.memory.shared;
        have.len() == self.shared
            && self.memories.as_ref().is_none_or(|memories| {
                let same = |(have, is): (&DataMemory, _)| Arc::ptr_eq(have.sinks.region(), is);
                have.iter().zip(memories.iter()).all(same)
            })
    }

    /// Adds an account of durable writes, made for the same depth.
    #[must_use]
    pub fn with_ledger(mut self, ledger: Ledger) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// Sets when a silent path is given up. If requests are outstanding on a path and no answer
    /// came for `period`, a KEEP_ALIVE is sent. After `timeout` more without any answer the path
    /// ends with [`PathEnd::Silent`]. A slow store is no silence: the target's data thread answers.
    /// `None`: never.
    pub fn set_pulse(&mut self, pulse: Option<Pulse>) {
        self.pulse = pulse;
    }

    /// While held, requests are taken and wait: nothing is sent, on this path or another, except
    /// the self-test of a new one. Sent requests are answered as always, and [`Self::set_failed`]
    /// fails the waiting ones.
    pub fn hold(&mut self, held: bool) {
        self.waiting.held = held;
        self.waiting.backlog = true;
        self.look_at_paths();
    }

    /// Whether every sent request is answered: if the path ends now, nothing is sent twice.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.inflight.sent() == 0
    }

    /// Ends the present path, so that no more writes are acknowledged, and copies the queue's
    /// retained writes: those acknowledged without a later FLUSH. `None` when it retains nothing.
    pub fn take_stock(&mut self) -> Option<Vec<durability::retain::Retained>> {
        self.disconnect();
        self.ledger.as_ref().and_then(Ledger::unflushed)
    }

    /// Whether requests are being sent.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.connected
    }

    /// A path has come, was tested or has ended, or requests are held or not.
    #[cold]
    fn look_at_paths(&mut self) {
        let parked = self.ways.iter().flat_map(|ways| ways.parked());
        self.testing = self.path.iter().chain(parked).any(|path| !path.is_ready());
        self.connected = match &self.ways {
            Some(ways) => ways.are_connected(),
            None => self.path.as_ref().is_some_and(ActivePath::is_ready),
        };
        self.waiting.open = self.connected && self.ways.is_none() && self.waiting.lets_send();
    }

    /// Unanswered requests.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.inflight.queued() + self.inflight.sent()
    }

    /// Bytes of their data.
    #[must_use]
    pub(crate) fn data_bytes(&self) -> u64 {
        self.inflight.data_bytes()
    }

    /// The CQ of the present path, for arming and sleeping.
    pub(crate) fn poller_mut(&mut self) -> Option<&mut (dyn Poller + 'static)> {
        self.path.as_mut().map(ActivePath::poller_mut)
    }

    /// The CQ of each path, with its way.
    #[inline]
    pub(crate) fn each_poller(
        &mut self,
        mut each: impl FnMut(WayIndex, &mut (dyn Poller + 'static)),
    ) {
        if let Some(path) = &mut self.path {
            each(path.way(), path.poller_mut());
        }
        let Some(ways) = &mut self.ways else { return };
        for path in ways.parked_mut() {
            each(path.way(), path.poller_mut());
        }
    }

    /// The CQ of the path of that way.
    pub(crate) fn poller_of(&mut self, way: WayIndex) -> Option<&mut (dyn Poller + 'static)> {
        self.path_of(way).map(ActivePath::poller_mut)
    }

    /// Asks the CQ of each path for an event at its next completion: call it before a sleep, and
    /// poll once more afterwards. Returns false when a CQ is broken, for example after the removal
    /// of the device: the path has ended then.
    pub fn arm(&mut self) -> bool {
        if self.ways.is_some() {
            return self.arm_ways();
        }
        let Some(path) = self.path.as_mut() else { return true };
        let Err(error) = path.poller_mut().arm() else { return true };
        self.cq_broke(&error);
        false
    }

    /// Descriptors to sleep on, of the path of a queue with one way: one of them is readable when
    /// an armed CQ has a completion.
    #[must_use]
    pub fn event_fds(&self) -> [Option<BorrowedFd<'_>>; 2] {
        self.path.as_ref().map_or([None, None], |path| path.poller().event_fds())
    }

    /// Takes the events. Call it after each sleep.
    pub fn clear_event(&mut self) {
        self.each_poller(|_, poller| poller.clear_event());
    }

    #[cold]
    fn cq_broke(&mut self, error: &FabricError) {
        tracing::error!(%error, "the completion queue broke: its path ends, and the mount connects again");
        self.end_path(PathEnd::Lost(WcStatus::Other(0)));
    }

    /// Whether a self-test is running, so that the thread must not sleep for long.
    #[must_use]
    #[inline]
    pub(crate) fn has_deadline(&self) -> bool {
        self.testing
    }

    /// Whether [`Self::take_ended`] returns an end.
    #[must_use]
    pub(crate) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Whether [`Self::take_digest_failure`] returns a failure.
    #[must_use]
    pub(crate) fn has_digest_failure(&self) -> bool {
        self.digests.has_failure()
    }

    /// Requests that failed since the last call because their data was damaged twice.
    pub fn take_digest_failure(&mut self) -> Option<DigestFailure> {
        self.digests.take_failure()
    }

    /// The next path that ended, for control to destroy. Call it until it returns `None`.
    pub fn take_ended(&mut self) -> Option<(PathEnd, DeadPath)> {
        self.ended.pop()
    }

    /// Fails every request with that errno: waiting requests at the next turn, sent ones when they
    /// are answered or their path dies. `None` lets requests wait for a path again.
    pub fn set_failed(&mut self, errno: Option<i32>) {
        self.waiting.failing = errno;
        self.waiting.backlog = true;
        self.look_at_paths();
    }

    /// Takes a request. It is sent at the end of the turn, or once there is a path.
    ///
    /// # Errors
    /// The tag is in use or out of bounds: a bug of the caller.
    pub fn submit(&mut self, tag: Tag, io: Io) -> Result<(), WrongState> {
        self.inflight.queue(tag, io)?;
        self.times.came(tag, self.now);
        if let Some(ledger) = &mut self.ledger {
            ledger.submitted(tag);
        }
        // A FLUSH may have to fail; only a turn decides that.
        let sendable = self.ledger.is_none() || io.op != IoOp::Flush;
        if sendable && self.waiting.open {
            self.send(tag, io);
        } else if sendable && self.connected && self.waiting.lets_send() {
            self.send_by_choice(tag, io);
        } else {
            self.waiting.backlog = true;
        }
        Ok(())
    }

    /// Like [`Self::submit`], for a request with its data at `place`: for callers that have more
    /// buffers than tags, and for data in [shared memory](Self::with_shared). In the queue's own
    /// memory the place is a whole buffer; elsewhere it has at least the bytes of the request.
    ///
    /// # Errors
    /// As of [`Self::submit`]; or the memory does not exist.
    pub fn submit_at(&mut self, tag: Tag, io: Io, place: DataPlace) -> Result<(), WrongState> {
        if !self.inflight.is_idle(tag) || !place.memory.is_of(self.shared) {
            return Err(WrongState(tag.0));
        }
        self.places[tag.index()] = place;
        self.submit(tag, io)
    }

    /// Takes a FLUSH of this end, for which no user waits: it reports no loss.
    ///
    /// # Errors
    /// As of [`Self::submit_at`].
    pub(crate) fn submit_unasked_flush(
        &mut self,
        tag: Tag,
        flush: Io,
        place: DataPlace,
    ) -> Result<(), WrongState> {
        self.submit_at(tag, flush, place)?;
        if let Some(ledger) = &mut self.ledger {
            ledger.unasked(tag);
        }
        Ok(())
    }

    /// Moves the data of an unanswered request to another place, while there is no path.
    pub(crate) fn replace(&mut self, tag: Tag, place: DataPlace) {
        debug_assert!(!self.connected && !self.testing && place.memory.is_of(self.shared));
        if let Some(old) = self.places.get_mut(tag.index()) {
            *old = place;
        }
    }

    /// The place of a tag's own buffer, in a queue without [spare](Self::submit_at) buffers.
    #[inline]
    pub(crate) fn buffer_of(&self, tag: Tag) -> DataPlace {
        DataPlace::own(tag.index() * self.buffer_stride)
    }

    /// Takes a new path; all others end first. The self-test is sent at once. On a path that [was
    /// tested](Path::test), requests are sent instead. The target has ended every epoch before that
    /// of the path.
    pub fn connect(&mut self, path: Path, now: Instant) {
        self.disconnect();
        if self.ways.is_some() {
            self.end_all_limbo();
            self.present(path.way);
        } else if !path.accept.features.has(Features::DIGEST) {
            self.digests.clear();
        }
        self.take_path(path, now);
    }

    /// Takes a path as the present one. There is none.
    fn take_path(&mut self, path: Path, now: Instant) {
        // The path needs room for every tag, and buffers for the longest request.
        let digests = path.accept.features.has(Features::DIGEST);
        let room = self.buffer_stride - self.data_max;
        let has_room = self.shared == 0 && room >= READ_TRAILER_BYTES;
        let fits = path.accept.depth == self.depth
            && path.accept.io_max_bytes as usize >= self.data_max
            && self.has_memories(&path)
            && (!digests || has_room);
        let way = path.way;
        match ActivePath::begin(path, fits, now) {
            Ok(path) => {
                self.waiting.backlog |= path.is_ready();
                if let Some(ways) = &mut self.ways {
                    ways.has_path(&path);
                }
                self.path = Some(path);
                self.look_at_paths();
                self.post();
            }
            Err(dead) => {
                if let Some(ways) = &mut self.ways {
                    // Its place takes no other path before this one is over.
                    ways.died(way, dead.is_touched());
                }
                self.ended.push((PathEnd::Unusable, *dead));
            }
        }
    }

    /// Ends every path, if there is one: every sent request waits again.
    pub fn disconnect(&mut self) {
        self.end_paths(PathEnd::Dropped);
    }

    /// Ends the paths of a queue that waits no longer for answers. Control gets the end, and
    /// connects again.
    pub(crate) fn give_up_path(&mut self) {
        self.end_paths(PathEnd::GivenUp);
    }

    fn end_paths(&mut self, end: PathEnd) {
        self.end_path(end);
        for way in self.way_places().iter() {
            self.present(way);
            self.end_path(end);
        }
    }

    /// Fails the waiting requests once. No device may touch their buffers: dead paths are
    /// destroyed. Returns whether a request failed.
    pub(crate) fn cancel_waiting(&mut self, errno: i32, mut done: impl FnMut(Tag, i32)) -> bool {
        self.fail_waiting(errno, &mut done)
    }

    fn end_path(&mut self, end: PathEnd) {
        // Without a path there is nothing to end.
        let Some(path) = self.path.take() else { return };
        // Requests under way may still write into our memory until the QPs are destroyed: see
        // `Undestroyed`. The keys die with the path.
        self.stats.digest_mismatches.add(u64::from(end == PathEnd::Corrupted));
        let way = path.way();
        let Self { inflight, ledger, ways, .. } = self;
        let lost = inflight.path_lost(|tag, io| {
            if !path.carries(tag) {
                return false;
            }
            let was_flush = ledger.as_mut().is_some_and(|ledger| ledger.command_lost(tag));
            if let Some(ways) = ways {
                let op = if was_flush { IoOp::Flush } else { io.op };
                ways.keep_copy(tag, OldCopy { way, op });
            }
            true
        });
        let dead = path.end();
        if let Some(ways) = ways {
            ways.died(way, dead.is_touched());
        }
        self.stats.replayed.add(lost as u64);
        self.stats.paths_lost.add(1);
        self.stats.bad_records.add(dead.poller.counters().bad_records);
        self.waiting.backlog = true;
        self.ended.push((end, dead));
        self.look_at_paths();
    }

    /// Sets the time of the turn, for requests that are submitted before [`Self::turn`].
    #[inline]
    pub fn begin_turn(&mut self, now: impl Into<Moment>) {
        self.now = now.into().us();
    }

    /// Reaps, answers and posts. `done` gets each outcome: bytes moved (0 for requests without
    /// data) or a negative errno. Returns whether the turn did any work.
    pub fn turn(&mut self, now: impl Into<Moment>, mut done: impl FnMut(Tag, i32)) -> bool {
        let moment = now.into();
        self.begin_turn(moment);
        let now = moment.instant();
        self.stats.turns.add(1);
        if self.ways.is_some() {
            return self.turn_ways(now, &mut done);
        }
        let mut busy = self.reap(&mut done);
        if self.testing {
            self.check_self_test(now);
        }
        if self.keep_beat(now) {
            // Perhaps answers came and were not read for long.
            busy |= self.reap(&mut done);
            self.keep_beat(now);
        }
        if self.waiting.backlog {
            busy |= self.work_backlog(&mut done);
        }
        self.post();
        busy
    }

    /// Ends a path if its self-test takes too long.
    #[cold]
    fn check_self_test(&mut self, now: Instant) {
        if self.path.as_ref().is_some_and(|path| path.tests_for_longer(SELF_TEST_DEADLINE, now)) {
            self.end_path(PathEnd::SelfTest);
        }
    }

    /// Takes completions. Returns whether there were any.
    #[inline(always)]
    fn reap(&mut self, done: &mut impl FnMut(Tag, i32)) -> bool {
        match self.poll() {
            0 => false,
            reaped => {
                self.take_reaped(reaped, done);
                true
            }
        }
    }

    /// Reaps completions. Returns their number; 0 without a path.
    #[inline(always)]
    fn poll(&mut self) -> usize {
        let Some(path) = self.path.as_mut() else { return 0 };
        match path.poller_mut().poll(&mut self.reaped) {
            Ok(reaped) => reaped,
            Err(error) => {
                self.cq_broke(&error);
                0
            }
        }
    }

    /// Handles the reaped completions, and those that arrive meanwhile.
    #[inline(never)]
    fn take_reaped(&mut self, mut reaped: usize, done: &mut impl FnMut(Tag, i32)) {
        for round in 1.. {
            self.stats.completions.add(reaped as u64);
            let completions = std::mem::take(&mut self.reaped);
            for completion in &completions[..reaped] {
                if let Err(end) = self.on_completion(completion, done) {
                    self.end_path(end);
                    break;
                }
            }
            self.reaped = completions;
            if reaped < self.reaped.len() || round == REAPS {
                return;
            }
            reaped = self.poll();
        }
    }

    /// Asks a silent target for an answer, or gives its path up. Returns whether to poll once more
    /// before that, now for real, and to call this again.
    #[inline(always)]
    fn keep_beat(&mut self, now: Instant) -> bool {
        let (Some(pulse), Some(path)) = (self.pulse, self.path.as_mut()) else { return false };
        let due = path.keep_beat(pulse, now);
        self.on_beat(&due)
    }

    /// The same, when the present path has said what is due.
    #[inline(always)]
    fn on_beat(&mut self, due: &BeatDue) -> bool {
        match *due {
            BeatDue::Nothing { asked } => {
                self.stats.beats.add(asked);
                false
            }
            BeatDue::Look { asked } => {
                self.stats.beats.add(asked);
                true
            }
            BeatDue::Dead => {
                self.end_path(PathEnd::Silent);
                false
            }
        }
    }

    /// Sends or fails the waiting requests. Returns whether there were any.
    fn work_backlog(&mut self, done: &mut impl FnMut(Tag, i32)) -> bool {
        if let Some(errno) = self.waiting.failing {
            self.fail_waiting(errno, done)
        } else if self.is_connected() && !self.waiting.held {
            self.send_waiting(done)
        } else {
            false
        }
    }

    fn fail_waiting(&mut self, errno: i32, done: &mut impl FnMut(Tag, i32)) -> bool {
        let mut busy = false;
        for tag in self.inflight.tags() {
            if self.cancel(tag) {
                done(tag, -errno);
                busy = true;
            }
        }
        // Sent requests may have to fail when their path dies.
        self.waiting.backlog = self.inflight.sent() > 0;
        busy
    }

    /// Removes a waiting request: it has failed. Returns whether there was one.
    pub(crate) fn cancel(&mut self, tag: Tag) -> bool {
        let Some(io) = self.inflight.cancel(tag) else { return false };
        if let Some(ledger) = &mut self.ledger {
            ledger.cancelled(tag);
        }
        self.digests.cancelled(tag);
        if let Some(ways) = &mut self.ways {
            ways.forget_copy(tag);
        }
        self.stats.count_unsent(io.op);
        true
    }

    fn send_waiting(&mut self, done: &mut impl FnMut(Tag, i32)) -> bool {
        let mut busy = false;
        self.waiting.backlog = false;
        for tag in self.inflight.tags() {
            let Some(io) = self.inflight.waiting(tag) else { continue };
            if self.ledger.as_mut().is_some_and(|ledger| ledger.must_fail(tag, &io)) {
                let _ = self.inflight.cancel(tag);
                self.digests.cancelled(tag);
                self.stats.count_unsent(io.op);
                done(tag, -EIO);
                busy = true;
            } else if self.send_waiting_by_any(tag, io) {
                self.times.sent_later(tag, self.now);
                busy = true;
            }
        }
        busy
    }

    fn send_waiting_by_any(&mut self, tag: Tag, io: Io) -> bool {
        match self.ways {
            None => self.send(tag, io),
            Some(_) => self.send_by_choice(tag, io),
        }
    }

    /// Sends the waiting request of a tag by the present path, if that is possible now. Returns
    /// whether it was sent.
    fn send(&mut self, tag: Tag, mut io: Io) -> bool {
        let Some(path) = self.path.as_mut() else {
            debug_assert!(false, "tag {} cannot be sent: no path", tag.0);
            return false;
        };
        let in_capsule = path.terms().is_in_capsule(&io);
        let lane = path.choose(if in_capsule { 0 } else { io.data_bytes });
        if !path.can_send(lane) {
            // Slots come back with a signaled SEND under way.
            self.waiting.backlog = true;
            return false;
        }
        let mut command = path.terms().volume_command(io.opcode(), tag);
        let data = match self.ledger.as_mut().map(|ledger| ledger.plan(tag, &io)) {
            Some(SendPlan::Wait) => {
                self.waiting.backlog = true;
                return false;
            }
            Some(SendPlan::FlushAhead) => {
                self.stats.flushes_ahead.add(1);
                command.opcode = Opcode::Flush;
                None
            }
            plan => {
                if let Some(SendPlan::Send { fua }) = plan {
                    io.fua = fua;
                }
                let place = self.places[tag.index()];
                path.terms().describe(&mut command, &io, in_capsule, place)
            }
        };
        if command.buffer.is_some() {
            self.stats.keyed_commands.add(1);
        }
        command.sequence = path.next_sequence();
        if path.terms().with_digests() {
            // With digests all data is in the queue's own buffers: see `connect`.
            let DataPlace { offset, .. } = self.places[tag.index()];
            let buffers = path.terms().memory().buffers.sources.region();
            if command.opcode == Opcode::Read {
                digests::expect(&mut command, io.data_bytes, buffers, offset);
            } else {
                self.digests.seal(&mut command, &io, buffers, offset);
            }
        }
        path.send(lane, &command, data, io.data_bytes);
        let sent = self.inflight.send(tag, command.sequence);
        debug_assert!(sent.is_ok(), "tag {} waited a moment ago", tag.0);
        true
    }

    fn on_completion(
        &mut self,
        completion: &Completion,
        done: &mut impl FnMut(Tag, i32),
    ) -> Result<(), PathEnd> {
        let Some(path) = self.path.as_mut() else {
            debug_assert!(false, "a completion without a path");
            return Ok(());
        };
        match path.take(completion)? {
            LaneArrival::None => Ok(()),
            LaneArrival::Immediate(answer) => {
                self.stats.immediates.add(1);
                self.on_answer(&answer, done)
            }
            LaneArrival::Responses { by, mut list, at } => {
                while let Some(path) = self.path.as_ref()
                    && let Some(answer) = path.next_answer(by, &mut list, at)
                {
                    self.on_answer(&answer?, done)?;
                }
                Ok(())
            }
        }
    }

    #[inline]
    fn on_answer(
        &mut self,
        answer: &CommandAnswer,
        done: &mut impl FnMut(Tag, i32),
    ) -> Result<(), PathEnd> {
        let Some(path) = self.path.as_mut() else {
            debug_assert!(false, "an answer without a path");
            return Ok(());
        };
        if answer.tag == path.terms().connection_tag() {
            if path.own_answer(answer)? {
                self.lane_is_tested();
            }
            return Ok(());
        }
        // On another QP an answer could overtake its data.
        let own = path.went_by(answer.tag, answer.by);
        let (mut sent, mut rule) = (Sequence(0), "an answer to a command that was not sent");
        // If the answer is not taken, the request stays for the next path.
        let taken = self.inflight.answer(answer.tag, |io, sequence| {
            sent = sequence;
            if answer.immediate && !path.terms().may_end_read(io, answer.written) {
                rule = "an immediate for no READ, or with no data or too much";
                return false;
            }
            own && answer.answers(sequence)
        });
        let Ok(io) = taken else { return Err(broken(rule)) };
        path.answered(answer.by, io.data_bytes);
        let inside = path.terms().fits_capsule(io.data_bytes);
        let mut status = answer.status;
        if path.terms().with_digests() {
            match (io.op, status) {
                (IoOp::Write, Status::Ok) => self.digests.written(answer.tag),
                (IoOp::Read, Status::Ok) if self.came_whole(answer.tag, io.data_bytes, sent) => {
                    self.digests.came(answer.tag);
                }
                (IoOp::Read | IoOp::Write, _) => match self.after_error(answer, &io) {
                    AnswerVerdict::Done(checked) => status = checked,
                    AnswerVerdict::Again => return Ok(()),
                },
                _ => {}
            }
        }
        if let Some(status) = self.account(answer.tag, status, &io) {
            self.times.answered(answer.tag, io.op, self.now, &self.stats.latency);
            done(answer.tag, self.stats.count(&io, status, inside));
        }
        Ok(())
    }

    /// A lane of the present path has passed its self-test.
    #[cold]
    #[inline(never)]
    fn lane_is_tested(&mut self) {
        self.waiting.backlog = true;
        if let (Some(ways), Some(path)) = (&mut self.ways, &self.path) {
            ways.has_path(path);
        }
        self.look_at_paths();
    }

    /// Whether the data of an answered READ belongs to this command and is whole.
    #[inline(never)]
    fn came_whole(&self, tag: Tag, len: u32, sent: Sequence) -> bool {
        let Some(path) = &self.path else { return false };
        // With digests all data is in the queue's own buffers: see `connect`.
        let DataPlace { offset, .. } = self.places[tag.index()];
        let buffers = path.terms().memory().buffers.sinks.region();
        digests::is_whole(len, sent, buffers, offset)
    }

    /// Returns the fate of a read or a write after an error status. A request that is sent again
    /// waits for its turn.
    #[cold]
    #[inline(never)]
    fn after_error(&mut self, answer: &CommandAnswer, io: &Io) -> AnswerVerdict {
        let verdict = self.digests.answered(answer.tag, io, answer.status);
        match verdict {
            AnswerVerdict::Again => {
                self.stats.digest_mismatches.add(1);
                self.stats.digest_retries.add(1);
                self.wait_again(answer.tag, io);
            }
            AnswerVerdict::Done(Status::DigestMismatch) => self.stats.digest_mismatches.add(1),
            AnswerVerdict::Done(_) => {}
        }
        verdict
    }

    /// Puts an answered request back, to be sent again.
    fn wait_again(&mut self, tag: Tag, io: &Io) {
        let queued = self.inflight.queue(tag, *io);
        debug_assert!(queued.is_ok(), "tag {} was answered a moment ago", tag.0);
        self.waiting.backlog = true;
    }

    /// Passes an answer to the ledger. Returns the status of the request; `None`, if it waits
    /// again, because the answer was to the FLUSH ahead of it.
    #[inline(always)]
    fn account(&mut self, tag: Tag, status: Status, io: &Io) -> Option<Status> {
        let (Some(ledger), Some(path)) = (&mut self.ledger, &self.path) else {
            return Some(status);
        };
        let (places, copied) = (&self.places, &self.stats.copied_bytes);
        let answered = ledger.answered(tag, io, status, |from, piece| {
            let place = places[tag.index()];
            let buffers = path.terms().memory().data(place.memory).sources.region();
            copied.add(piece.len() as u64);
            buffers.read(place.offset + from, piece);
        });
        // A request that waits for room may have it now.
        self.waiting.backlog |= ledger.has_waiting();
        match answered {
            Answered::Done => Some(status),
            Answered::Lost => Some(Status::StoreError),
            Answered::Again => {
                self.wait_again(tag, io);
                None
            }
        }
    }

    /// Rings the doorbells: for each lane one list of RECVs, and one of SENDs.
    fn post(&mut self) {
        // Without a path no WR was queued.
        let Some(path) = self.path.as_mut().filter(|path| path.has_wrs()) else { return };
        if let Err(error) = path.post(&self.stats) {
            tracing::error!(%error, "cannot post");
            self.end_path(PathEnd::Lost(WcStatus::Other(EIO.unsigned_abs())));
        }
    }
}
