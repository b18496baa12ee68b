//! [`Engine`]: one I/O queue of the initiator: requests by tag in, outcomes by tag out.
//!
//! Owned by one data thread. It knows neither ublk nor sockets: requests come by
//! [`Engine::submit`], outcomes go to the caller's sink in [`Engine::turn`], and the path is any
//! [`Path`]. Without a path requests wait; when a path dies, everything it had sent waits again and
//! is sent on the next one. A path is used for requests only after its self-test: the verbs that
//! both ends agreed on are tried on it first, and a path that fails there is given back with
//! [`PathEnd::SelfTest`] so that control can ask for less.
//!
//! While it is [held](Engine::hold) it sends nothing, so that a path can be left with nothing on
//! its way. With a [`Pulse`] it gives a path up on which the target owes an answer and says
//! nothing.
//!
//! With a [`Ledger`] the engine keeps account of which acknowledged writes are durable: it decides
//! how each write is sent, may put a FLUSH ahead of one, and has FLUSHes fail that must tell of a
//! loss.
//!
//! Per request: at most one SEND, no completion of its own (the answer proves it), and at most one
//! receive completion: where lists were agreed, the commands of a turn share messages, and so do
//! answers. No allocation, lock or system call of its own.

mod beat;
mod live;
mod stats;

use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::{Completion, FabricError, WcOpcode, WcStatus};
use rblk_protocol::{
    CommandCapsule, Immediate, KeyedDescriptor, Opcode, QueueDepth, ResponseList, Sequence, Status,
    Tag,
};

use crate::admin::Pulse;
use crate::durability::{Answered, Ledger, Plan};
use crate::inflight::Inflight;
use crate::io::{Io, IoOp};
use crate::path::{DeadPath, Path};
use beat::Due;
use live::{Answer, KIND_SEND, Live, Phase};
pub use stats::{QueueCounts, QueueStats};

/// How long the self-test may take.
const SELF_TEST_DEADLINE: Duration = Duration::from_secs(2);
/// Completions taken at once.
const REAP: usize = 64;
const EIO: i32 = 5;
/// Why a path ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathEnd {
    /// The QP died: the peer, the link, or an RDMA error.
    Lost(WcStatus),
    /// The self-test failed or did not come back: an agreed verb does not work here.
    SelfTest,
    /// The target owes an answer and says nothing: see [`Engine::set_pulse`].
    Silent,
    /// The target broke a rule of the protocol.
    Protocol(&'static str),
    /// Control asked for it.
    Dropped,
    /// The path could not be taken over.
    Unusable,
}

/// One I/O queue.
pub struct Engine {
    depth: QueueDepth,
    buffer_stride: usize,
    inflight: Inflight,
    path: Option<Live>,
    ended: Vec<(PathEnd, DeadPath)>,
    pulse: Option<Pulse>,
    // Nothing is sent.
    held: bool,
    // Once set, every request fails with this errno.
    failed: Option<i32>,
    // Some request may wait to be sent.
    backlog: bool,
    ledger: Option<Ledger>,
    // Where completions are reaped to.
    reaped: Box<[Completion]>,
    stats: Arc<QueueStats>,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("depth", &self.depth)
            .field("connected", &self.path.is_some())
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// A queue of `depth` tags whose buffers lie `buffer_stride` bytes apart from the start of
    /// their region.
    #[must_use]
    pub fn new(depth: QueueDepth, buffer_stride: usize, stats: Arc<QueueStats>) -> Self {
        Self {
            depth,
            buffer_stride,
            inflight: Inflight::new(depth),
            path: None,
            ended: Vec::new(),
            pulse: None,
            held: false,
            failed: None,
            backlog: false,
            ledger: None,
            reaped: vec![Completion::default(); REAP].into_boxed_slice(),
            stats,
        }
    }

    /// With an account of what is durable, made for the same depth.
    #[must_use]
    pub fn with_ledger(mut self, ledger: Ledger) -> Self {
        self.ledger = Some(ledger);
        self
    }

    /// How soon a path that does not answer is given up: on one where requests are outstanding and
    /// nothing was heard for `period`, a KEEP_ALIVE goes out, and after `timeout` more without any
    /// answer the path ends with [`PathEnd::Silent`]. A slow store is no silence: the target's data
    /// thread answers. `None`: never.
    pub fn set_pulse(&mut self, pulse: Option<Pulse>) {
        self.pulse = pulse;
    }

    /// While held, requests are taken and wait: nothing is sent, on this path or another, except
    /// the self-test of a new one. What was sent before is answered as ever, and
    /// [`Self::set_failed`] fails what waits.
    pub fn hold(&mut self, held: bool) {
        self.held = held;
        self.backlog = true;
    }

    /// Whether no request is sent and unanswered: ending the path now makes nothing be sent twice.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.inflight.sent() == 0
    }

    /// Ends the present path, so that no more writes are acknowledged, and copies what the queue
    /// retains: acknowledged writes that no FLUSH covered. `None` when it retains nothing.
    pub fn take_stock(&mut self) -> Option<Vec<crate::retain::Retained>> {
        self.disconnect();
        self.ledger.as_ref().and_then(Ledger::unflushed)
    }

    /// Whether requests are being sent.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.path.as_ref().is_some_and(|p| p.ready)
    }

    /// Requests that are not answered.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.inflight.queued() + self.inflight.sent()
    }

    /// Bytes of the data of those.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.inflight.data_bytes()
    }

    /// The path's CQ, for arming and sleeping.
    pub fn poller_mut(&mut self) -> Option<&mut (dyn rblk_fabric::Poller + 'static)> {
        self.path.as_mut().map(|p| &mut *p.poller)
    }

    /// Asks the path's CQ for an event at its next completion: before a sleep, and then look once
    /// more. Returns false when the CQ is broken, as when the device is gone: the path has ended
    /// then.
    pub fn arm(&mut self) -> bool {
        let Some(live) = self.path.as_mut() else { return true };
        let Err(error) = live.poller.arm() else { return true };
        self.cq_broke(&error);
        false
    }

    #[cold]
    fn cq_broke(&mut self, error: &FabricError) {
        tracing::error!(%error, "the completion queue broke: its path ends, and the mount connects again");
        self.end_path(PathEnd::Lost(WcStatus::Other(0)));
    }

    /// Whether a self-test is running, so that the thread must not sleep for long.
    #[must_use]
    pub fn has_deadline(&self) -> bool {
        self.path.as_ref().is_some_and(|p| !p.ready)
    }

    /// A path that ended, for control to destroy. Call it until there is none.
    pub fn take_ended(&mut self) -> Option<(PathEnd, DeadPath)> {
        self.ended.pop()
    }

    /// From now on every request fails with that errno; those that wait do so at the next turn,
    /// those that were sent when they are answered or their path dies. `None` lets requests wait
    /// for a path again.
    pub fn set_failed(&mut self, errno: Option<i32>) {
        self.failed = errno;
        self.backlog = true;
    }

    /// Takes a request. It is sent at the end of the turn, or when there is a path.
    ///
    /// # Errors
    /// The tag is in use or out of bounds: a bug of the caller.
    pub fn submit(&mut self, tag: Tag, io: Io) -> Result<(), crate::inflight::WrongState> {
        self.inflight.queue(tag, io)?;
        if let Some(ledger) = &mut self.ledger {
            ledger.submitted(tag);
        }
        // A FLUSH may have to fail, which only a turn can tell.
        let sendable = self.ledger.is_none() || io.op != IoOp::Flush;
        if sendable && self.is_connected() && !self.held && self.failed.is_none() {
            self.send(tag);
        } else {
            self.backlog = true;
        }
        Ok(())
    }

    /// Takes a new path; a present one ends first. The self-test goes out at once.
    pub fn connect(&mut self, path: Path, now: Instant) {
        if self.path.is_some() {
            self.end_path(PathEnd::Dropped);
        }
        // Room for every tag, and buffers no shorter than what may be asked.
        let fits = path.accept.depth == self.depth
            && path.accept.io_max_bytes as usize >= self.buffer_stride;
        match Live::begin(path, fits, now) {
            Ok(live) => {
                self.path = Some(live);
                self.post();
            }
            Err(dead) => self.ended.push((PathEnd::Unusable, *dead)),
        }
    }

    /// Ends the present path: everything sent waits again.
    pub fn disconnect(&mut self) {
        self.end_path(PathEnd::Dropped);
    }

    fn end_path(&mut self, end: PathEnd) {
        let Some(live) = self.path.take() else { return };
        // What was on its way may get into our memory until the QPs are destroyed: see `Graves`.
        // The keys die with the path.
        let dead = live.end();
        let lost = self.inflight.path_lost();
        if let Some(ledger) = &mut self.ledger {
            ledger.path_lost();
        }
        self.stats.replayed.add(lost as u64);
        self.stats.paths_lost.add(1);
        self.backlog = true;
        self.ended.push((end, dead));
    }

    /// Reaps, answers and posts. `done` gets each outcome: bytes moved (0 for requests without
    /// data) or a negative errno. Returns whether anything happened.
    pub fn turn(&mut self, now: Instant, mut done: impl FnMut(Tag, i32)) -> bool {
        self.stats.turns.add(1);
        let mut busy = self.reap(&mut done);
        if self.path.as_ref().is_some_and(|live| live.tests_for_longer(SELF_TEST_DEADLINE, now)) {
            self.end_path(PathEnd::SelfTest);
        }
        if self.keep_beat(now) {
            // It may be that nothing was read for long, not that nothing came.
            busy |= self.reap(&mut done);
            self.keep_beat(now);
        }
        if self.backlog {
            busy |= self.work_backlog(&mut done);
        }
        self.post();
        busy
    }

    /// Takes what came. Returns whether anything did.
    fn reap(&mut self, done: &mut impl FnMut(Tag, i32)) -> bool {
        let mut busy = false;
        let mut completions = std::mem::take(&mut self.reaped);
        // Bounded, so that new requests get in between.
        for _ in 0..4 {
            let Some(live) = self.path.as_mut() else { break };
            let reaped = match live.poller.poll(&mut completions) {
                Ok(n) => n,
                Err(error) => {
                    self.cq_broke(&error);
                    break;
                }
            };
            self.stats.completions.add(reaped as u64);
            busy |= reaped > 0;
            for completion in &completions[..reaped] {
                if let Err(end) = self.on_completion(completion, done) {
                    self.end_path(end);
                    break;
                }
            }
            if reaped < completions.len() {
                break;
            }
        }
        self.reaped = completions;
        busy
    }

    /// Asks a silent target for an answer, or gives its path up. Called when all that came was
    /// taken, and before anything new is posted: nothing follows a silence that was too long.
    /// Returns whether to take what came once more before that, now that the poller really looks,
    /// and to call this again.
    fn keep_beat(&mut self, now: Instant) -> bool {
        let Some(pulse) = self.pulse else { return false };
        let Some(live) = self.path.as_mut() else { return false };
        let mut look = false;
        for index in live.indices() {
            let (lane, _) = live.lane(index);
            let waits = lane.awaited > 0;
            match lane.beat.check(pulse, now, waits) {
                Due::Nothing => {}
                Due::Ask => {
                    let sequence = live.next_sequence();
                    let (lane, terms) = live.lane(index);
                    if lane.ask(terms, sequence) {
                        self.stats.beats.add(1);
                    }
                }
                Due::Look => look = true,
                Due::Dead => {
                    self.end_path(PathEnd::Silent);
                    return false;
                }
            }
        }
        if look {
            live.poller.clear_event();
        }
        look
    }

    /// Sends or fails what waits.
    fn work_backlog(&mut self, done: &mut impl FnMut(Tag, i32)) -> bool {
        let mut busy = false;
        if let Some(errno) = self.failed {
            for tag in self.inflight.tags() {
                if self.inflight.cancel(tag).is_some() {
                    if let Some(ledger) = &mut self.ledger {
                        ledger.cancelled(tag);
                    }
                    self.stats.errors.add(1);
                    done(tag, -errno);
                    busy = true;
                }
            }
            self.backlog = self.inflight.sent() > 0;
        } else if self.is_connected() && !self.held {
            self.backlog = false;
            for tag in self.inflight.tags() {
                let Some(io) = self.inflight.waiting(tag) else { continue };
                if self.ledger.as_mut().is_some_and(|ledger| ledger.must_fail(tag, &io)) {
                    let _ = self.inflight.cancel(tag);
                    self.stats.flushes.add(1);
                    self.stats.errors.add(1);
                    done(tag, -EIO);
                    busy = true;
                } else {
                    busy |= self.send(tag);
                }
            }
        }
        busy
    }

    /// Sends a request that waits, if it may be sent now. Returns whether it was.
    fn send(&mut self, tag: Tag) -> bool {
        let Some(live) = self.path.as_mut() else { return false };
        let Some(mut io) = self.inflight.waiting(tag) else { return false };
        let in_capsule =
            io.op == IoOp::Write && io.data_bytes <= live.terms.accept.in_capsule_bytes;
        let index = live.choose(if in_capsule { 0 } else { io.data_bytes });
        let (lane, terms) = live.lane(index);
        if !lane.can_send() {
            // Slots come back with a signaled SEND that is on its way.
            self.backlog = true;
            return false;
        }
        let mut command = CommandCapsule::new(io.opcode(), tag, terms.epoch, Sequence(0));
        command.volume = terms.volume;
        let mut data = None;
        match self.ledger.as_mut().map(|ledger| ledger.plan(tag, &io)) {
            Some(Plan::FlushAhead) => {
                self.stats.flushes_ahead.add(1);
                command.opcode = Opcode::Flush;
            }
            Some(Plan::Wait) => {
                self.backlog = true;
                return false;
            }
            plan => {
                if let Some(Plan::Send { fua }) = plan {
                    io.fua = fua;
                }
                command.flags = io.flags();
                command.lba = io.lba;
                command.count = io.count;
                let offset = tag.index() * self.buffer_stride;
                if in_capsule && io.data_bytes > 0 {
                    command.in_capsule_bytes = io.data_bytes;
                    data = terms.memory.sources.sge(offset, io.data_bytes);
                } else if io.data_bytes > 0 {
                    let read = io.op == IoOp::Read;
                    let mr = if read { &terms.memory.sinks } else { &terms.memory.sources };
                    let remote = mr.remote(offset);
                    command.buffer = Some(KeyedDescriptor {
                        address: remote.addr,
                        length: io.data_bytes,
                        rkey: remote.rkey.0,
                    });
                    self.stats.keyed_commands.add(1);
                }
            }
        }
        command.sequence = live.next_sequence();
        let (lane, terms) = live.lane(index);
        lane.queue_command(terms, &command, data);
        live.went(tag, index, io.data_bytes);
        // The tag was waiting a moment ago.
        let _ = self.inflight.send(tag, command.sequence);
        true
    }

    fn on_completion(
        &mut self,
        completion: &Completion,
        done: &mut impl FnMut(Tag, i32),
    ) -> Result<(), PathEnd> {
        let Some(live) = self.path.as_mut() else { return Ok(()) };
        if completion.status != WcStatus::Success {
            return Err(PathEnd::Lost(completion.status));
        }
        let Some(by) = live.find(completion.qp) else {
            return Err(PathEnd::Protocol("completion of an unknown QP"));
        };
        let (lane, terms) = live.lane(by);
        let index = (completion.id.0 & 0xffff) as u16;
        if completion.id.0 >> 16 == KIND_SEND {
            lane.credits.completed();
            return Ok(());
        }
        lane.beat.heard();
        if index >= terms.layout.recv_slots() {
            return Err(PathEnd::Protocol("completion of an unknown RECV"));
        }
        // It is posted when the turn ends.
        lane.queue_recv(terms, index);
        match completion.opcode {
            WcOpcode::RecvWithImm => {
                let imm = Immediate::from_bits(completion.imm);
                if !terms.with_imm || terms.layout.depth.check(imm.tag.0).is_none() {
                    return Err(PathEnd::Protocol(
                        "an immediate that was not agreed or has a bad tag",
                    ));
                }
                self.stats.immediates.add(1);
                let (tag, check) = (imm.tag, imm.check);
                let answer = Answer { by, tag, status: Status::Ok, check, immediate: true };
                self.on_answer(&answer, done)
            }
            WcOpcode::Recv => {
                let unreadable = |_| PathEnd::Protocol("a response that cannot be parsed");
                let bytes = completion.byte_len as usize;
                let mut list = ResponseList::new(bytes, terms.with_lists, terms.layout.depth)
                    .map_err(unreadable)?;
                let at = lane.recv_offset(terms, index);
                while let Some(live) = self.path.as_ref()
                    && let Some(response) = list.take(|from, bytes| {
                        live.terms.memory.slots.region().read(at + from, bytes);
                    })
                {
                    let response = response.map_err(unreadable)?;
                    let (tag, status, check) = (response.tag, response.status, response.check);
                    let answer = Answer { by, tag, status, check, immediate: false };
                    self.on_answer(&answer, done)?;
                }
                Ok(())
            }
            _ => Err(PathEnd::Protocol("a RECV completed as something else")),
        }
    }

    fn on_answer(
        &mut self,
        answer: &Answer,
        done: &mut impl FnMut(Tag, i32),
    ) -> Result<(), PathEnd> {
        let Some(live) = self.path.as_mut() else { return Ok(()) };
        if answer.tag == live.terms.layout.depth.connection_tag() {
            return self.on_own_answer(answer);
        }
        // Before the answer is taken: a request of a path that ends must be left to the next one.
        if answer.immediate
            && self.inflight.awaited(answer.tag).is_some_and(|io| io.op != IoOp::Read)
        {
            return Err(PathEnd::Protocol("an immediate for a command that is no READ"));
        }
        // By another QP it could overtake its data.
        let own = live.went_by(answer.tag, answer.by);
        let io = self
            .inflight
            .answer(answer.tag, |sequence| own && answer.check == (sequence.0 & 0xffff) as u16)
            .map_err(|_| PathEnd::Protocol("an answer to a command that was not sent"))?;
        live.came(answer.by, io.data_bytes);
        let mut status = answer.status;
        if let Some(ledger) = &mut self.ledger {
            let offset = answer.tag.index() * self.buffer_stride;
            let buffers = live.terms.memory.sources.region();
            let copied = &self.stats.copied_bytes;
            let answered = ledger.answered(answer.tag, &io, answer.status, |from, piece| {
                copied.add(piece.len() as u64);
                buffers.read(offset + from, piece);
            });
            // Whoever waits for room may have it now.
            self.backlog |= ledger.has_waiting();
            match answered {
                Answered::Done => {}
                Answered::Lost => status = Status::StoreError,
                Answered::Again => {
                    // The tag is idle now.
                    let _ = self.inflight.queue(answer.tag, io);
                    self.backlog = true;
                    return Ok(());
                }
            }
        }
        let accept = self.path.as_ref().map(|live| &live.terms.accept);
        let inside = accept.is_some_and(|accept| io.data_bytes <= accept.in_capsule_bytes);
        done(answer.tag, self.stats.count(&io, status, inside));
        Ok(())
    }

    /// An answer to one of the connection's own commands.
    fn on_own_answer(&mut self, answer: &Answer) -> Result<(), PathEnd> {
        let Some(live) = self.path.as_mut() else { return Ok(()) };
        let (lane, terms) = live.lane(answer.by);
        match lane.phase {
            Phase::Testing { sequence, .. } => {
                if !lane.passes_self_test(terms, answer, sequence) {
                    return Err(PathEnd::SelfTest);
                }
                live.passed(answer.by);
                self.backlog = true;
                Ok(())
            }
            Phase::Ready if answer.immediate || !lane.beat.take_answer(answer.check) => {
                Err(PathEnd::Protocol("an answer nobody asked for"))
            }
            Phase::Ready if answer.status != Status::Ok => {
                Err(PathEnd::Protocol("a KEEP_ALIVE that was refused"))
            }
            Phase::Ready => Ok(()),
        }
    }

    /// Rings the doorbells: for each lane one list of RECVs, one of SENDs.
    fn post(&mut self) {
        let Some(live) = self.path.as_mut() else { return };
        let mut result = Ok(());
        let (lanes, poller) = live.lanes_mut();
        for lane in lanes {
            if !lane.recvs.is_empty() {
                self.stats.recv_doorbells.add(1);
                self.stats.recvs.add(lane.recvs.len() as u64);
                result = result.and(poller.post_recv(lane.qp, &lane.recvs));
                lane.recvs.clear();
            }
            if result.is_ok() && !lane.sends.is_empty() {
                self.stats.send_doorbells.add(1);
                self.stats.sends.add(lane.sends.len() as u64);
                let signaled = lane.sends.iter().filter(|wr| wr.signaled).count();
                self.stats.signaled.add(signaled as u64);
                result = poller.post_send(lane.qp, &lane.sends);
                let packed = lane.sent();
                self.stats.lists.add(packed.lists);
                self.stats.listed.add(packed.listed);
            }
        }
        if let Err(error) = result {
            tracing::error!(%error, "cannot post");
            self.end_path(PathEnd::Lost(WcStatus::Other(u32::try_from(EIO).unwrap_or(0))));
        }
    }
}
