//! [`Replayer`]: writes a [`ReplayLog`] to a volume and flushes it, over a path of its own.
//!
//! It runs when the volume's acknowledged writes may be lost, and before its queues send anything.
//! The pieces of the log do not overlap, so they may be written in any order, several at a time.
//! The replay is done when the FLUSH after them was answered. Until then the log is still needed.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::{PageKind, Readiness, Region};
use rblk_protocol::width::{wide, wide64};
use rblk_protocol::{BlockCount, QueueDepth, Tag};

use crate::admin::Pulse;
use crate::engine::{Engine, PathEnd, QueueStats};
use crate::error::SessionError;
use crate::io::{Io, IoOp};
use crate::path::Path;
use crate::retain::{ReplayLog, What};
use crate::session::QueueWish;

/// Commands under way, at most.
pub const DEPTH: u16 = 16;
/// How long the target may take for an answer. A FLUSH of everything that was written is one of the
/// answers.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);
/// Longest discard or write-zeroes of one command.
const RANGE_BYTES_MAX: u64 = 1 << 30;
/// Some devices lose events; a look now and then costs nothing here.
const NAP: Duration = Duration::from_millis(50);

/// Why a replay failed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The path died, or the target does not answer: another try may succeed.
    #[error("the path for writing again ended: {0:?}")]
    Path(PathEnd),
    /// The target takes too long.
    #[error("the target takes longer than {ANSWER_DEADLINE:?} for a write")]
    TooSlow,
    /// The target refuses a write with that errno: another try will fail, too.
    #[error("the target refuses to write again: errno {0}")]
    Refused(i32),
    /// The system.
    #[error(transparent)]
    System(#[from] SessionError),
}

/// How far a replay is.
#[derive(Debug)]
pub enum Progress {
    /// Something happened.
    Busy,
    /// It waits for the target.
    Idle,
    /// All is durable.
    Done,
}

/// A replay under way, of a log that is borrowed or shared.
#[derive(Debug)]
pub struct Replayer<L: Deref<Target = ReplayLog>> {
    engine: Engine,
    buffers: Arc<Region>,
    stride: usize,
    data_max: usize,
    log: L,
    // The next piece, and how many of its blocks are sent.
    at: usize,
    sent: u64,
    idle: Vec<Tag>,
    ops: Vec<IoOp>,
    flush: Flush,
    last_answer: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flush {
    NotYet,
    Sent,
    Done,
}

/// Memory for a path that a replay is to go over, and that is asked for with this wish.
///
/// # Errors
/// Memory is short.
pub fn buffers(wish: QueueWish) -> Result<Arc<Region>, SessionError> {
    let bytes = usize::from(wish.depth.get()) * wish.buffer_stride();
    Region::allocate(bytes, PageKind::Normal).map_err(|e| SessionError::Memory(e.to_string()))
}

impl<L: Deref<Target = ReplayLog>> Replayer<L> {
    /// Of `log`, over a path that was asked for with `wish` and whose registered memory is
    /// `buffers`.
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
            ops: vec![IoOp::Flush; usize::from(depth.get())],
            flush: Flush::NotYet,
            last_answer: now,
        }
    }

    /// With a pulse: a path that is silent for too long ends as [`PathEnd::Silent`]. Another try
    /// may succeed.
    #[must_use]
    pub fn with_pulse(mut self, pulse: Pulse) -> Self {
        self.engine.set_pulse(Some(pulse));
        self
    }

    /// The next command: as much as one takes, its data in the tag's buffer. `None` when all is
    /// sent.
    fn next_io(&mut self, tag: Tag) -> Option<Io> {
        let size = self.log.block_size();
        let bytes = u64::from(size.bytes());
        let first = self.log.pieces().get(self.at)?;
        let (what, lba) = (first.what, first.lba.0 + self.sent);
        let room = match what {
            What::Data => wide64(self.data_max) / bytes,
            _ => RANGE_BYTES_MAX / bytes,
        };
        let mut blocks = 0;
        // Neighbours of a kind go together.
        while let Some(piece) = self.log.pieces().get(self.at) {
            if piece.what != what || piece.lba.0 + self.sent != lba + blocks || blocks >= room {
                break;
            }
            let take = (piece.count.0 - self.sent).min(room - blocks);
            if what == What::Data {
                let byte = |blocks: u64| wide(blocks * bytes);
                let from = byte(self.sent);
                let data = self.log.data(piece).get(from..from + byte(take)).unwrap_or(&[]);
                self.buffers.write(tag.index() * self.stride + byte(blocks), data);
            }
            blocks += take;
            self.sent += take;
            if self.sent == piece.count.0 {
                self.at += 1;
                self.sent = 0;
            }
        }
        let op = match what {
            What::Data | What::Durable => IoOp::Write,
            What::Discarded => IoOp::Discard,
            What::Zeroed { .. } => IoOp::WriteZeroes,
        };
        let mut io = Io::new(op, lba * bytes, BlockCount(blocks).bytes(size)?, size)?;
        io.may_unmap = what == What::Zeroed { may_unmap: true };
        Some(io)
    }

    fn submit(&mut self, tag: Tag, io: Io) {
        self.ops[tag.index()] = io.op;
        // The tag is idle.
        let _ = self.engine.submit(tag, io);
    }

    /// Sends and takes what can be sent and taken now.
    ///
    /// # Errors
    /// [`ReplayError`]; the replay is over then.
    pub fn turn(&mut self, now: Instant) -> Result<Progress, ReplayError> {
        let mut busy = false;
        if self.flush == Flush::NotYet {
            while let Some(tag) = self.idle.pop() {
                let Some(io) = self.next_io(tag) else {
                    self.idle.push(tag);
                    break;
                };
                self.submit(tag, io);
                busy = true;
            }
            if self.idle.len() == self.ops.len() {
                let flush = Io::new(IoOp::Flush, 0, 0, self.log.block_size());
                if let (Some(tag), Some(io)) = (self.idle.pop(), flush) {
                    self.submit(tag, io);
                    self.flush = Flush::Sent;
                    busy = true;
                }
            }
        }
        let (idle, ops, flush) = (&mut self.idle, &self.ops, &mut self.flush);
        let mut refused = None;
        let mut answers = 0;
        busy |= self.engine.turn(now, |tag, result| {
            idle.push(tag);
            answers += 1;
            match ops[tag.index()] {
                IoOp::Flush if result >= 0 => *flush = Flush::Done,
                // A discard is a hint.
                IoOp::Discard => {}
                _ if result < 0 => refused = Some(-result),
                _ => {}
            }
        });
        if answers > 0 {
            self.last_answer = now;
        }
        if let Some(errno) = refused {
            return Err(ReplayError::Refused(errno));
        }
        if self.flush == Flush::Done {
            return Ok(Progress::Done);
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
    pub(crate) async fn run(mut self) -> Result<(), ReplayError> {
        let system = |source| SessionError::System { what: "the path for writing again", source };
        let readiness = match self.engine.poller_mut() {
            Some(poller) => Some(Readiness::new(poller.event_fds()).map_err(system)?),
            // The engine could not use the path, and the first turn will say so.
            None => None,
        };
        loop {
            match self.turn(Instant::now())? {
                Progress::Done => return Ok(()),
                Progress::Busy => tokio::task::yield_now().await,
                Progress::Idle => {
                    if let Some(poller) = self.engine.poller_mut() {
                        poller.arm().map_err(SessionError::from)?;
                    }
                    // What came between the last look and the arming raises no event.
                    match self.turn(Instant::now())? {
                        Progress::Done => return Ok(()),
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
        // QP, then CQ, then registrations: as everywhere.
        self.engine.disconnect();
        while let Some((_, dead)) = self.engine.take_ended() {
            dead.retire(());
        }
    }
}
