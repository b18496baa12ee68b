//! [`Replayer`]: writes a [`ReplayLog`] to a volume and flushes it, over a path of its own.
//!
//! A replay runs when the volume's acknowledged writes may be lost, and before its queues send
//! anything. The pieces of the log do not overlap, so they may be written in any order, several at
//! a time. The replay is done when the FLUSH after them was answered. Until then the log is still
//! needed.
//!
//! A block that the target refuses takes no other block with it: a command of several blocks that
//! is refused is sent again in halves, and the rest of the log and the FLUSH follow.
//! [`ReplayOutcome`] is the result. A takeover of the volume by another host is no answer to a
//! write: it ends the replay and settles nothing. A missing volume is an answer: a store with a
//! missing device reports that of a volume that still exists. The caller asks LIST which of the two
//! it is.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::{PageKind, Readiness, Region};
use rblk_protocol::width::{wide, wide64};
use rblk_protocol::{BlockCount, Lba, QueueDepth, Status, Tag};

use super::error::SessionError;
use super::session::QueueWish;
use crate::engine::durability::retain::{RangeContent, ReplayLog};
use crate::engine::io::{Io, IoOp};
use crate::engine::path::Path;
use crate::engine::pulse::Pulse;
use crate::engine::{Engine, PathEnd, QueueStats};

/// Limit of the commands under way.
pub const DEPTH: u16 = 16;
/// Time for an answer of the target. One of the answers is to a FLUSH of everything that was
/// written.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);
/// Longest discard or write-zeroes of one command.
const RANGE_BYTES_MAX: u64 = 1 << 30;
/// Limit of the halvings of refused commands in one replay. Enough for some dozen bad places; a
/// store that refuses everything is not asked about every block.
const CUTS_MAX: u32 = 1024;
/// Some devices lose events; a poll now and then costs nothing here.
const NAP: Duration = Duration::from_millis(50);

/// The reason why a replay failed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The path died, or the target does not answer: another try may succeed.
    #[error("the path for writing again ended: {0:?}")]
    Path(PathEnd),
    /// The target takes too long.
    #[error("the target takes longer than {ANSWER_DEADLINE:?} for a write")]
    TooSlow,
    /// Another host has the volume: OPEN will return that. This proves nothing about the writes.
    #[error("another host has the volume")]
    Fenced,
    /// The system.
    #[error(transparent)]
    System(#[from] SessionError),
}

/// The progress of a replay.
#[derive(Debug)]
pub enum Progress {
    /// Work was done.
    Busy,
    /// The replay waits for the target.
    Idle,
    /// Every command was answered, the FLUSH included.
    Done(ReplayOutcome),
}

/// The result of a replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReplayOutcome {
    /// All writes are durable.
    Durable,
    /// The target has all writes. The FLUSH failed with that errno (positive).
    Unflushed(i32),
    /// The target refused some blocks. It has all others; they are durable if the FLUSH after them
    /// succeeded.
    Refused {
        /// The number of refused blocks.
        blocks: u64,
        /// The errno of the first refusal (positive).
        errno: i32,
        /// The FLUSH succeeded.
        flushed: bool,
    },
}

/// Neighbouring blocks of one command.
#[derive(Clone, Copy, Debug)]
struct Run {
    what: RangeContent,
    lba: u64,
    blocks: u64,
}

/// The command sent under a tag.
#[derive(Clone, Copy, Debug)]
enum Sent {
    Nothing,
    Flush,
    Run(Run),
}

/// A running replay of a borrowed or shared log.
#[derive(Debug)]
pub struct Replayer<L: Deref<Target = ReplayLog>> {
    engine: Engine,
    buffers: Arc<Region>,
    stride: usize,
    data_max: usize,
    log: L,
    // The next piece, and the number of its blocks already sent.
    at: usize,
    sent: u64,
    idle: Vec<Tag>,
    by_tag: Vec<Sent>,
    flush: ReplayFlush,
    refusals: Refusals,
    last_answer: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReplayFlush {
    NotYet,
    Sent,
    // Answered, with an errno or 0.
    Done(i32),
}

/// The target's refusals.
#[derive(Debug, Default)]
struct Refusals {
    // Halves of refused commands, to send again.
    halves: Vec<Run>,
    cuts: u32,
    blocks: u64,
    errno: Option<i32>,
    // An answer that ends the replay, and is none to a write.
    fenced: bool,
}

impl ReplayOutcome {
    /// Whether a change or removal of the volume just now may be the cause.
    #[must_use]
    pub(crate) fn may_be_of_change(self) -> bool {
        match self {
            Self::Durable => false,
            Self::Unflushed(errno) => errno == Status::VolumeGone.errno(),
            Self::Refused { .. } => true,
        }
    }
}

impl Refusals {
    /// Records a command that was answered with that errno.
    fn add(&mut self, run: Run, errno: i32) {
        if run.what == RangeContent::Discarded {
            // A discard is a hint.
        } else if run.blocks > 1 && self.cuts < CUTS_MAX {
            self.cuts += 1;
            let head = Run { blocks: run.blocks / 2, ..run };
            let (lba, blocks) = (run.lba + head.blocks, run.blocks - head.blocks);
            self.halves.extend([Run { lba, blocks, ..run }, head]);
        } else {
            self.blocks += run.blocks;
            self.errno.get_or_insert(errno);
        }
    }

    fn outcome(&self, flush_errno: i32) -> ReplayOutcome {
        match (self.errno, flush_errno) {
            (Some(errno), flush) => {
                ReplayOutcome::Refused { blocks: self.blocks, errno, flushed: flush == 0 }
            }
            (None, 0) => ReplayOutcome::Durable,
            (None, errno) => ReplayOutcome::Unflushed(errno),
        }
    }
}

/// Allocates memory for the path of a replay, which is requested with this wish.
///
/// # Errors
/// There is not enough memory.
pub fn buffers(wish: QueueWish) -> Result<Arc<Region>, SessionError> {
    let bytes = usize::from(wish.depth.get()) * wish.buffer_stride();
    Region::allocate(bytes, PageKind::Normal).map_err(|e| SessionError::Memory(e.to_string()))
}

impl<L: Deref<Target = ReplayLog>> Replayer<L> {
    /// A replay of `log`, over a path that was requested with `wish` and that has `buffers`
    /// registered.
    #[must_use]
    pub fn new(log: L, path: Path, buffers: Arc<Region>, wish: QueueWish, now: Instant) -> Self {
        // The target may grant less now than it did.
        let depth = QueueDepth::new(path.accept.depth.get().min(wish.depth.get()));
        let depth = depth.unwrap_or(wish.depth);
        let data_max = wide(path.accept.io_max_bytes.min(wish.io_max_bytes));
        let stride = wish.buffer_stride();
        let mut engine =
            Engine::new(depth, stride, Arc::new(QueueStats::default())).with_data_max(data_max);
        engine.connect(path, now);
        Self {
            engine,
            buffers,
            stride,
            data_max,
            log,
            at: 0,
            sent: 0,
            idle: (0..depth.get()).map(Tag).collect(),
            by_tag: vec![Sent::Nothing; usize::from(depth.get())],
            flush: ReplayFlush::NotYet,
            refusals: Refusals::default(),
            last_answer: now,
        }
    }

    /// Adds a pulse: a path with too long a silence ends as [`PathEnd::Silent`]. Another try may
    /// succeed.
    #[must_use]
    pub fn with_pulse(mut self, pulse: Pulse) -> Self {
        self.engine.set_pulse(Some(pulse));
        self
    }

    /// The blocks of the next command: as many as one takes. `None` when all were sent.
    fn next_run(&mut self) -> Option<Run> {
        if let Some(half) = self.refusals.halves.pop() {
            return Some(half);
        }
        let bytes = u64::from(self.log.block_size().bytes());
        let first = self.log.pieces().get(self.at)?;
        let (what, lba) = (first.what, first.lba.0 + self.sent);
        let room = match what {
            RangeContent::Data => wide64(self.data_max) / bytes,
            _ => RANGE_BYTES_MAX / bytes,
        }
        .max(1);
        let mut blocks = 0;
        // Adjacent pieces of one kind go together.
        while let Some(piece) = self.log.pieces().get(self.at) {
            if piece.what != what || piece.lba.0 + self.sent != lba + blocks || blocks >= room {
                break;
            }
            let take = (piece.count.0 - self.sent).min(room - blocks);
            blocks += take;
            self.sent += take;
            if self.sent == piece.count.0 {
                self.at += 1;
                self.sent = 0;
            }
        }
        (blocks > 0).then_some(Run { what, lba, blocks })
    }

    /// The command of a run. Its data is in the tag's buffer then.
    fn io_of(&self, tag: Tag, run: Run) -> Option<Io> {
        let Run { what, lba, blocks } = run;
        let size = self.log.block_size();
        let bytes = u64::from(size.bytes());
        if what == RangeContent::Data {
            let (mut at, end) = (lba, lba + blocks);
            for piece in self.log.pieces_from(Lba(lba)) {
                if at >= end {
                    break;
                }
                let skipped = wide((at - piece.lba.0) * bytes);
                let take = wide((end.min(piece.lba.0 + piece.count.0) - at) * bytes);
                let data = self.log.data(piece).get(skipped..skipped + take).unwrap_or(&[]);
                let place = tag.index() * self.stride + wide((at - lba) * bytes);
                self.buffers.write(place, data);
                at = piece.lba.0 + piece.count.0;
            }
        }
        let op = match what {
            RangeContent::Data | RangeContent::Durable => IoOp::Write,
            RangeContent::Discarded => IoOp::Discard,
            RangeContent::Zeroed { .. } => IoOp::WriteZeroes,
        };
        let mut io = Io::new(op, lba * bytes, BlockCount(blocks).bytes(size)?, size)?;
        io.may_unmap = what == RangeContent::Zeroed { may_unmap: true };
        Some(io)
    }

    fn submit(&mut self, tag: Tag, sent: Sent, io: Io) {
        self.by_tag[tag.index()] = sent;
        // The tag is idle.
        let _ = self.engine.submit(tag, io);
    }

    /// Sends commands for idle tags. Returns whether there were any.
    fn send(&mut self) -> bool {
        let mut any = false;
        if self.flush != ReplayFlush::NotYet {
            return any;
        }
        while let Some(tag) = self.idle.pop() {
            let Some(run) = self.next_run() else {
                self.idle.push(tag);
                break;
            };
            any = true;
            match self.io_of(tag, run) {
                Some(io) => self.submit(tag, Sent::Run(run), io),
                // The range is too long for a command.
                None => {
                    self.refusals.add(run, Status::OutOfRange.errno());
                    self.idle.push(tag);
                }
            }
        }
        if self.idle.len() == self.by_tag.len() {
            let flush = Io::new(IoOp::Flush, 0, 0, self.log.block_size());
            if let (Some(tag), Some(io)) = (self.idle.pop(), flush) {
                self.submit(tag, Sent::Flush, io);
                self.flush = ReplayFlush::Sent;
                any = true;
            }
        }
        any
    }

    /// Sends commands and takes answers.
    ///
    /// # Errors
    /// [`ReplayError`]; the replay is over then, and settles nothing.
    pub fn turn(&mut self, now: Instant) -> Result<Progress, ReplayError> {
        let mut busy = self.send();
        let Self { idle, by_tag, flush, refusals, .. } = self;
        let mut answers = 0;
        busy |= self.engine.turn(now, |tag, result| {
            idle.push(tag);
            answers += 1;
            let errno = if result < 0 { -result } else { 0 };
            match std::mem::replace(&mut by_tag[tag.index()], Sent::Nothing) {
                Sent::Flush | Sent::Run(_) if errno == Status::Fenced.errno() => {
                    refusals.fenced = true;
                }
                Sent::Flush => *flush = ReplayFlush::Done(errno),
                Sent::Run(run) if errno > 0 => refusals.add(run, errno),
                Sent::Run(_) | Sent::Nothing => {}
            }
        });
        if answers > 0 {
            self.last_answer = now;
        }
        if self.refusals.fenced {
            return Err(ReplayError::Fenced);
        }
        if let ReplayFlush::Done(errno) = self.flush {
            return Ok(Progress::Done(self.refusals.outcome(errno)));
        }
        if let Some((end, dead)) = self.engine.take_ended() {
            dead.retire(());
            return Err(ReplayError::Path(end));
        }
        if now.saturating_duration_since(self.last_answer) > ANSWER_DEADLINE {
            return Err(ReplayError::TooSlow);
        }
        Ok(if busy { Progress::Busy } else { Progress::Idle })
    }

    /// Runs to the end, on a control task.
    ///
    /// # Errors
    /// [`ReplayError`].
    pub(crate) async fn run(mut self) -> Result<ReplayOutcome, ReplayError> {
        let system = |source| SessionError::System { what: "the path for writing again", source };
        let readiness = match self.engine.poller_mut() {
            Some(poller) => Some(Readiness::new(poller.event_fds()).map_err(system)?),
            // The engine could not use the path; the first turn will return that.
            None => None,
        };
        loop {
            match self.turn(Instant::now())? {
                Progress::Done(outcome) => return Ok(outcome),
                Progress::Busy => tokio::task::yield_now().await,
                Progress::Idle => {
                    if let Some(poller) = self.engine.poller_mut() {
                        poller.arm().map_err(SessionError::from)?;
                    }
                    // A completion between the last poll and the arming raises no event.
                    match self.turn(Instant::now())? {
                        Progress::Done(outcome) => return Ok(outcome),
                        Progress::Busy => continue,
                        Progress::Idle => {}
                    }
                    match &readiness {
                        Some(readiness) => {
                            if let Ok(ready) = tokio::time::timeout(NAP, readiness.readable()).await
                            {
                                ready.map_err(system)?;
                            }
                        }
                        None => tokio::time::sleep(NAP).await,
                    }
                    if let Some(poller) = self.engine.poller_mut() {
                        poller.clear_event();
                    }
                }
            }
        }
    }
}

impl<L: Deref<Target = ReplayLog>> Drop for Replayer<L> {
    fn drop(&mut self) {
        // The usual order: QP, CQ, registrations.
        self.engine.disconnect();
        while let Some((_, dead)) = self.engine.take_ended() {
            dead.retire(());
        }
    }
}
