//! [`Lane`]: one QP of a path with the WRs of this turn, its credits, its self-test and its beat.

use std::time::{Duration, Instant};

use rblk_fabric::{
    Poller, PostError, QpIndex, RecvWr, Recvs, Region, SendCredits, SendOp, SendWr, Sge, SgeList,
    WrId,
};
use rblk_protocol::auth::{PROOF_BYTES, QueueProof, TargetProof};
use rblk_protocol::limits::{COMMAND_BYTES, RESPONSE_LIST_BYTES};
use rblk_protocol::width::const_u32;
use rblk_protocol::{
    CommandCapsule, KeyedDescriptor, Opcode, SELF_TEST_BYTES, Sequence, Status, Tag,
    self_test_pattern,
};

use super::PathEnd;
use super::answer::CommandAnswer;
use super::beat::{Beat, Due};
use super::path::{COMMAND_STRIDE, LaneProof, PathLayout, TestedLane};
use super::pulse::Pulse;
use super::stats::QueueStats;
use super::terms::PathTerms;

const COMMAND_LEN: u32 = const_u32(COMMAND_BYTES);
const RESPONSES_LEN: u32 = const_u32(RESPONSE_LIST_BYTES);
const SELF_TEST_LEN: u32 = const_u32(SELF_TEST_BYTES);
const PROOF_LEN: u32 = const_u32(PROOF_BYTES);

/// The upper bits of a WrId: the kind of the WR.
const KIND_RECV: u64 = 0;
const KIND_SEND: u64 = 1;

/// The kind of a completed WR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CompletedWr {
    Send,
    /// A RECV, with its receive slot.
    Recv(u16),
}

impl CompletedWr {
    #[inline]
    pub(super) fn of(id: WrId) -> Self {
        let index = (id.0 & 0xffff) as u16;
        if id.0 >> 16 == KIND_SEND { Self::Send } else { Self::Recv(index) }
    }
}

fn wr_id(kind: u64, index: u16) -> WrId {
    WrId(kind << 16 | u64::from(index))
}

/// The progress of a lane.
#[derive(Clone, Copy)]
enum LanePhase {
    /// The self-test is under way.
    Testing { sequence: Sequence, since: Instant },
    /// The lane can carry requests, once all lanes of the path can.
    Ready,
}

/// The last SEND of the turn, while another command may join it.
#[derive(Clone, Copy)]
struct OpenMessage {
    // Offset of the next capsule.
    next: usize,
    commands: usize,
    // The number of commands with data, and the bytes of their data.
    data: usize,
    data_bytes: u32,
}

impl OpenMessage {
    #[inline]
    fn has_room(&self, terms: &PathTerms) -> bool {
        terms.message_has_room(self.commands, self.data, self.data_bytes)
    }
}

/// The WRs of this turn. They are posted by [`Lane::post`].
struct LaneWrs {
    sends: Vec<SendWr>,
    // Receive slots.
    recvs: Vec<u16>,
    open: Option<OpenMessage>,
    // SENDs that hold several commands, and the commands that joined their first ones.
    lists: u64,
    joined: u64,
}

impl LaneWrs {
    fn new(layout: PathLayout) -> Self {
        Self {
            sends: Vec::with_capacity(layout.send_wrs() as usize),
            recvs: Vec::with_capacity(usize::from(layout.recv_slots())),
            open: None,
            lists: 0,
            joined: 0,
        }
    }
}

/// One QP of a path.
pub(super) struct Lane {
    qp: QpIndex,
    // The start of its slots and of its self-test.
    slots_at: usize,
    scratch_at: usize,
    // By receive slot.
    recvs: Box<[RecvWr]>,
    credits: SendCredits,
    phase: LanePhase,
    beat: Beat,
    // Requests under way on this lane, and the bytes of their data.
    awaited: u32,
    awaited_bytes: u64,
    wrs: LaneWrs,
    // The proof that the target owes in its answer to the self-test.
    theirs: Option<Box<TargetProof>>,
}

impl Lane {
    /// Makes a lane with its RECVs and its self-test queued. The self-test carries the proof if
    /// there is one.
    pub(super) fn begin(
        index: usize,
        qp: QpIndex,
        terms: &PathTerms,
        sequence: Sequence,
        proof: Option<&LaneProof>,
        now: Instant,
    ) -> Self {
        let layout = terms.layout();
        let slots_at = index * layout.bytes();
        let mut lane = Self {
            qp,
            slots_at,
            recvs: recvs(terms, slots_at),
            scratch_at: index * SELF_TEST_BYTES,
            credits: SendCredits::new(layout.send_wrs(), layout.signal_interval()),
            phase: LanePhase::Testing { sequence, since: now },
            beat: Beat::default(),
            awaited: 0,
            awaited_bytes: 0,
            wrs: LaneWrs::new(layout),
            theirs: proof.map(|proof| Box::new(proof.theirs)),
        };
        lane.wrs.recvs.extend(0..layout.recv_slots());
        let scratch = &terms.memory().scratch;
        scratch.region().zero(lane.scratch_at, SELF_TEST_BYTES);
        let remote = scratch.remote(lane.scratch_at);
        let mut command = terms.own_command(Opcode::SelfTest, sequence);
        command.buffer = Some(KeyedDescriptor {
            address: remote.addr,
            length: SELF_TEST_LEN,
            rkey: remote.rkey.0,
        });
        match proof {
            None => lane.queue_command(terms, &command, None),
            Some(proof) => {
                command.in_capsule_bytes = PROOF_LEN;
                lane.queue_proof(terms, &command, &proof.ours);
            }
        }
        lane
    }

    /// A lane that control has tested: every WR is posted.
    pub(super) fn tested(index: usize, tested: TestedLane, terms: &PathTerms) -> Self {
        let (layout, TestedLane { qp, credits }) = (terms.layout(), tested);
        let slots_at = index * layout.bytes();
        Self {
            qp,
            slots_at,
            recvs: recvs(terms, slots_at),
            scratch_at: index * SELF_TEST_BYTES,
            credits,
            phase: LanePhase::Ready,
            beat: Beat::default(),
            awaited: 0,
            awaited_bytes: 0,
            wrs: LaneWrs::new(layout),
            theirs: None,
        }
    }

    /// The parts with which another thread continues the lane. Nothing is queued.
    pub(super) fn into_tested(self) -> TestedLane {
        debug_assert!(self.wrs.sends.is_empty() && self.wrs.recvs.is_empty(), "not posted");
        TestedLane { qp: self.qp, credits: self.credits }
    }

    /// Queues the self-test with its proof, which is beside the capsule in one slot. No command
    /// joins its message.
    fn queue_proof(&mut self, terms: &PathTerms, command: &CommandCapsule, proof: &QueueProof) {
        self.queue_command(terms, command, None);
        let capsule = self.slots_at + capsule_at(terms, command.tag);
        let at = if terms.data_first() { capsule - PROOF_BYTES } else { capsule + COMMAND_BYTES };
        terms.memory().slots.region().write(at, proof.as_bytes());
        if let Some(wr) = self.wrs.sends.last_mut() {
            grow(terms, &mut wr.sges, PROOF_LEN);
            wr.inline = false;
        }
        self.wrs.open = None;
    }

    #[inline]
    pub(super) fn qp(&self) -> QpIndex {
        self.qp
    }

    /// Whether the lane passed its self-test.
    pub(super) fn is_ready(&self) -> bool {
        matches!(self.phase, LanePhase::Ready)
    }

    /// Whether the lane has waited longer than that for its self-test's answer.
    pub(super) fn tests_for_longer(&self, than: Duration, now: Instant) -> bool {
        match self.phase {
            LanePhase::Testing { since, .. } => now.saturating_duration_since(since) > than,
            LanePhase::Ready => false,
        }
    }

    /// A signaled SEND completed.
    #[inline]
    pub(super) fn send_completed(&mut self) {
        self.credits.completed();
    }

    /// A receive slot was filled. The slot is posted again with the other WRs of the turn. Returns
    /// the offset of its bytes in the slots.
    #[inline]
    pub(super) fn received(&mut self, terms: &PathTerms, slot: u16) -> usize {
        self.beat.heard();
        self.wrs.recvs.push(slot);
        self.slots_at + terms.layout().recv_offset(slot)
    }

    /// A request was sent on this lane.
    #[inline]
    pub(super) fn request_sent(&mut self, bytes: u32) {
        self.awaited += 1;
        self.awaited_bytes += u64::from(bytes);
    }

    /// A request of this lane was answered.
    #[inline]
    pub(super) fn request_answered(&mut self, bytes: u32) {
        debug_assert!(self.awaited > 0, "an answer to no request of this lane");
        self.awaited -= 1;
        self.awaited_bytes -= u64::from(bytes);
    }

    /// Requests under way on this lane.
    #[inline]
    pub(super) fn awaited(&self) -> u32 {
        self.awaited
    }

    /// Bytes of the data of requests under way on this lane.
    #[inline]
    pub(super) fn awaited_bytes(&self) -> u64 {
        self.awaited_bytes
    }

    /// The action that the heart-beat asks for, after every arrived completion was taken.
    pub(super) fn check_beat(&mut self, pulse: Pulse, now: Instant) -> Due {
        self.beat.check(pulse, now, self.awaited > 0)
    }

    /// Queues a KEEP_ALIVE. Returns false when the send queue is full: then its slots do not come
    /// back either.
    pub(super) fn ask(&mut self, terms: &PathTerms, sequence: Sequence) -> bool {
        if !self.can_send() {
            return false;
        }
        self.queue_command(terms, &terms.own_command(Opcode::KeepAlive, sequence), None);
        self.beat.asked(sequence);
        true
    }

    /// Takes an answer to a command of the lane itself: its self-test or a KEEP_ALIVE. Returns
    /// whether it completed the self-test.
    pub(super) fn own_answer(
        &mut self,
        terms: &PathTerms,
        answer: &CommandAnswer,
    ) -> Result<bool, PathEnd> {
        match self.phase {
            LanePhase::Testing { sequence, .. } => {
                self.check_self_test(terms, answer, sequence)?;
                self.phase = LanePhase::Ready;
                Ok(true)
            }
            LanePhase::Ready if answer.immediate || !self.beat.take_answer(answer.check) => {
                Err(PathEnd::Protocol("an answer to no command"))
            }
            LanePhase::Ready if answer.status != Status::Ok => {
                Err(PathEnd::Protocol("a KEEP_ALIVE that was refused"))
            }
            LanePhase::Ready => Ok(false),
        }
    }

    /// Checks the self-test's answer. A wrong proof behind the right pattern is no fault of the
    /// verbs.
    fn check_self_test(
        &self,
        terms: &PathTerms,
        answer: &CommandAnswer,
        sequence: Sequence,
    ) -> Result<(), PathEnd> {
        let mut seen = [0; SELF_TEST_BYTES];
        terms.memory().scratch.region().read(self.scratch_at, &mut seen);
        let pattern = self_test_pattern(sequence);
        let compared = if self.theirs.is_some() { TargetProof::AT } else { SELF_TEST_BYTES };
        let works = answer.status == Status::Ok
            && answer.answers(sequence)
            && answer.immediate == terms.with_imm()
            && seen[..compared] == pattern[..compared];
        match &self.theirs {
            _ if !works => Err(PathEnd::SelfTest),
            Some(theirs) if !theirs.is_answer(sequence, &seen) => {
                Err(PathEnd::Protocol("the target did not prove that it knows the session"))
            }
            _ => Ok(()),
        }
    }

    /// Whether a command may be queued.
    #[inline]
    pub(super) fn can_send(&self) -> bool {
        self.wrs.open.is_some() || self.credits.available() > 0
    }

    /// Queues a command: in the last message of the turn if that has room, or in a message of its
    /// own.
    pub(super) fn queue_command(
        &mut self,
        terms: &PathTerms,
        command: &CommandCapsule,
        data: Option<Sge>,
    ) {
        let wrs = &mut self.wrs;
        if let (Some(open), Some(wr)) = (&mut wrs.open, wrs.sends.last_mut()) {
            write_capsule(terms, open.next, command);
            grow(terms, &mut wr.sges, COMMAND_LEN);
            open.next = behind(terms, open.next);
            open.commands += 1;
            wrs.lists += u64::from(open.commands == 2);
            wrs.joined += 1;
            if let Some(data) = data {
                open.data += 1;
                open.data_bytes += data.len;
                // At most three entries.
                wr.inline &= !add_data(terms, &mut wr.sges, data);
            }
            if !open.has_room(terms) {
                wrs.open = None;
            }
            return;
        }
        let offset = self.slots_at + capsule_at(terms, command.tag);
        write_capsule(terms, offset, command);
        let capsule = terms.memory().slots.sge(offset, COMMAND_LEN);
        debug_assert!(
            capsule.is_some(),
            "the slot of tag {} is outside of the slots",
            command.tag.0
        );
        let Some(capsule) = capsule else { return };
        let signaled = self.credits.wants_signal();
        self.credits.take(signaled);
        wrs.sends.push(SendWr {
            id: wr_id(KIND_SEND, command.tag.0),
            op: SendOp::Send,
            sges: match data {
                None => SgeList::one(capsule),
                Some(data) if terms.data_first() => SgeList::two(data, capsule),
                Some(data) => SgeList::two(capsule, data),
            },
            signaled,
            inline: data.is_none(),
        });
        let next = behind(terms, offset);
        let (data, data_bytes) = data.map_or((0, 0), |data| (1, data.len));
        let open = OpenMessage { next, commands: 1, data, data_bytes };
        wrs.open = open.has_room(terms).then_some(open);
    }

    /// Posts the WRs of the turn: one list of RECVs, one of SENDs, each with one doorbell.
    pub(super) fn post(
        &mut self,
        poller: &mut dyn Poller,
        stats: &QueueStats,
    ) -> Result<(), PostError> {
        let wrs = &mut self.wrs;
        if !wrs.recvs.is_empty() {
            stats.recv_doorbells.add(1);
            stats.recvs.add(wrs.recvs.len() as u64);
            let recvs = Recvs { table: &self.recvs, rows: &wrs.recvs };
            let posted = poller.post_recvs(self.qp, recvs);
            wrs.recvs.clear();
            posted?;
        }
        if wrs.sends.is_empty() {
            return Ok(());
        }
        stats.send_doorbells.add(1);
        stats.sends.add(wrs.sends.len() as u64);
        let signaled = wrs.sends.iter().filter(|wr| wr.signaled).count();
        stats.signaled.add(signaled as u64);
        let posted = poller.post_send(self.qp, &wrs.sends);
        wrs.sends.clear();
        // The next command starts a new message.
        wrs.open = None;
        let lists = std::mem::take(&mut wrs.lists);
        stats.lists.add(lists);
        stats.listed.add(lists + std::mem::take(&mut wrs.joined));
        posted
    }
}

/// The RECVs of a lane with its slots from that offset on.
fn recvs(terms: &PathTerms, slots_at: usize) -> Box<[RecvWr]> {
    let recv = |slot| {
        let offset = slots_at + terms.layout().recv_offset(slot);
        let sge = terms.memory().slots.sge(offset, RESPONSES_LEN);
        let sge = sge.unwrap_or_else(|| unreachable!("receive slot {slot} is inside the slots"));
        RecvWr::one(wr_id(KIND_RECV, slot), sge)
    };
    (0..terms.layout().recv_slots()).map(recv).collect()
}

/// Offset, in the slots of a lane, of the first capsule of a message that begins with that tag. If
/// data comes first, the later capsules go before it.
#[inline]
fn capsule_at(terms: &PathTerms, tag: Tag) -> usize {
    let slot = terms.layout().capsule_offset(tag.index());
    if terms.data_first() { slot + COMMAND_STRIDE - COMMAND_BYTES } else { slot }
}

/// Offset of the capsule after the one at `offset`.
#[inline]
fn behind(terms: &PathTerms, offset: usize) -> usize {
    if terms.data_first() { offset - COMMAND_BYTES } else { offset + COMMAND_BYTES }
}

/// Makes the capsules of a message longer by the data written beside them.
#[inline]
fn grow(terms: &PathTerms, sges: &mut SgeList, bytes: u32) {
    if terms.data_first() {
        sges.grow_last_down(bytes);
    } else {
        sges.grow_first(bytes);
    }
}

/// Adds the data of another command: the data of the first command is nearest to an end of the
/// message. Returns false if the message has its largest number of pieces.
#[inline]
fn add_data(terms: &PathTerms, sges: &mut SgeList, data: Sge) -> bool {
    if terms.data_first() { sges.push_before_last(data) } else { sges.push_second(data) }
}

/// Writes a command into its send slot.
#[inline(always)]
fn write_capsule(terms: &PathTerms, offset: usize, command: &CommandCapsule) {
    let slots = terms.memory().slots.region();
    slots.write(offset, &command.to_wire_unsealed());
    if command.flags.digest {
        seal(slots, offset);
    }
}

/// Makes the digest of a command in its slot, so that a command without a digest stays in
/// registers.
#[cold]
#[inline(never)]
fn seal(slots: &Region, offset: usize) {
    let digest = slots
        .sum(offset, COMMAND_BYTES, |bytes| bytes.try_into().map_or(0, CommandCapsule::digest_of));
    slots.write(offset + CommandCapsule::DIGEST_AT, &digest.to_le_bytes());
}
