//! [`Live`]: the path an engine works on: its lanes, each a QP with the WRs of this turn, its
//! credits, its self-test and its beat.

use std::time::{Duration, Instant};

use rblk_fabric::{Poller, QpIndex, RecvWr, SendCredits, SendOp, SendWr, Sge, SgeList, WrId};
use rblk_protocol::limits::{
    COMMAND_BYTES, LANES_MAX, LIST_DATA_MAX, LIST_MAX, RESPONSE_LIST_BYTES,
};
use rblk_protocol::{
    CommandCapsule, Epoch, Features, HelloAccept, KeyedDescriptor, Opcode, SELF_TEST_BYTES,
    Sequence, Status, Tag, VolumeHandle, self_test_pattern,
};

use super::beat::Beat;
use crate::path::{DeadPath, Path, PathLayout, PathMemory};

#[allow(clippy::cast_possible_truncation)] // constants below 100
const COMMAND_LEN: u32 = COMMAND_BYTES as u32;
#[allow(clippy::cast_possible_truncation)] // a constant of 256
const RESPONSES_LEN: u32 = RESPONSE_LIST_BYTES as u32;
#[allow(clippy::cast_possible_truncation)] // constants below 100
const SELF_TEST_LEN: u32 = SELF_TEST_BYTES as u32;

const KIND_RECV: u64 = 0;
/// What the upper bits of a SEND's WrId are.
pub(super) const KIND_SEND: u64 = 1;

fn wr_id(kind: u64, index: u16) -> WrId {
    WrId(kind << 16 | u64::from(index))
}

/// How far a lane is.
#[derive(Clone, Copy)]
pub(super) enum Phase {
    /// Its self-test is under way.
    Testing { sequence: Sequence, since: Instant },
    /// It can carry requests, as soon as all of the path can.
    Ready,
}

/// An answer, whichever way it came.
pub(super) struct Answer {
    pub(super) by: LaneIndex,
    pub(super) tag: Tag,
    pub(super) status: Status,
    pub(super) check: u16,
    pub(super) immediate: bool,
}

/// The last SEND of the turn, as long as another command may join it.
#[derive(Clone, Copy)]
struct OpenList {
    // Offset behind its last capsule.
    end: usize,
    commands: usize,
    // How many of them have data, and how much.
    data: usize,
    data_bytes: u32,
}

impl OpenList {
    /// Whether it has room for any other command, as was agreed.
    fn has_room(&self, accept: &HelloAccept) -> bool {
        let room = if accept.features.has(Features::DATA_LISTS) {
            self.data < LIST_DATA_MAX
                && self.data_bytes + accept.in_capsule_bytes <= accept.message_data_bytes()
        } else {
            self.data == 0
        };
        room && self.commands < LIST_MAX && accept.features.has(Features::CAPSULE_LISTS)
    }
}

/// How many SENDs of the turn hold several commands, and how many are in them.
#[derive(Clone, Copy, Default)]
pub(super) struct Packed {
    pub(super) lists: u64,
    pub(super) listed: u64,
}

/// What all lanes of a path have in common.
pub(super) struct Terms {
    pub(super) memory: PathMemory,
    pub(super) accept: HelloAccept,
    pub(super) epoch: Epoch,
    pub(super) volume: VolumeHandle,
    pub(super) layout: PathLayout,
    lane_bytes: u32,
    pub(super) with_imm: bool,
    /// Messages may hold several capsules.
    pub(super) with_lists: bool,
}

/// One QP with the WRs of this turn.
pub(super) struct Lane {
    pub(super) qp: QpIndex,
    // Where its slots and its self-test begin.
    slots_at: usize,
    scratch_at: usize,
    pub(super) credits: SendCredits,
    pub(super) phase: Phase,
    pub(super) beat: Beat,
    /// Requests on their way here, and the bytes of their data.
    pub(super) awaited: u32,
    pub(super) awaited_bytes: u64,
    pub(super) sends: Vec<SendWr>,
    pub(super) recvs: Vec<RecvWr>,
    packed: Packed,
    open: Option<OpenList>,
}

/// The index of a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LaneIndex(u8);

impl LaneIndex {
    /// The lane of all that is small, and of what is of no lane.
    pub(super) const FIRST: Self = Self(0);
}

pub(super) struct Live {
    pub(super) poller: Box<dyn Poller>,
    pub(super) terms: Terms,
    // Of all lanes: no two commands of a path have the same.
    sequence: Sequence,
    /// Every lane has passed its self-test.
    pub(super) ready: bool,
    lanes: Box<[Lane]>,
    // By tag, of requests that are on their way.
    lane_of: Box<[LaneIndex]>,
}

impl Live {
    /// Takes a path over, with its RECVs and its self-tests ready to be posted. The rest of one
    /// that cannot be had, or does not `fit` the queue, comes back.
    pub(super) fn begin(path: Path, fits: bool, now: Instant) -> Result<Self, Box<DeadPath>> {
        let Path { mut poller, connections, memory, accept, epoch, volume, lane_bytes } = path;
        let layout = PathLayout { depth: accept.depth };
        let fits = fits && (1..=usize::from(LANES_MAX)).contains(&connections.len());
        let mut qps = Vec::with_capacity(connections.len());
        let all = connections.len();
        let mut left = connections.into_iter();
        for connection in left.by_ref() {
            match poller.attach(connection) {
                Ok(qp) => qps.push(qp),
                Err(_) => break,
            }
        }
        if !fits || qps.len() < all {
            for qp in &qps {
                poller.fail(*qp);
            }
            let attached: Vec<_> = qps.iter().filter_map(|qp| poller.detach(*qp)).collect();
            let connections = attached.into_iter().chain(left).collect();
            return Err(Box::new(DeadPath { connections, poller, memory }));
        }
        let mut sequence = Sequence(0);
        let terms = Terms {
            memory,
            with_imm: accept.features.has(Features::WRITE_WITH_IMM),
            with_lists: accept.features.has(Features::CAPSULE_LISTS),
            accept,
            epoch,
            volume,
            layout,
            lane_bytes,
        };
        let lanes = qps.iter().enumerate().map(|(index, qp)| {
            sequence = sequence.next();
            Lane::begin(index, *qp, &terms, sequence, now)
        });
        let lanes = lanes.collect();
        let lane_of = vec![LaneIndex::FIRST; usize::from(accept.depth.get())].into_boxed_slice();
        Ok(Self { poller, terms, sequence, ready: false, lanes, lane_of })
    }

    /// What is left of it: the QPs are in error.
    pub(super) fn end(self) -> DeadPath {
        let Self { mut poller, terms, lanes, .. } = self;
        // All of them first.
        for lane in &lanes {
            poller.fail(lane.qp);
        }
        let connections = lanes.iter().filter_map(|lane| poller.detach(lane.qp)).collect();
        DeadPath { connections, poller, memory: terms.memory }
    }

    /// Index of the lane with that QP.
    pub(super) fn find(&self, qp: QpIndex) -> Option<LaneIndex> {
        (0u8..).zip(&self.lanes).find(|(_, lane)| lane.qp == qp).map(|(at, _)| LaneIndex(at))
    }

    /// A lane that [`Self::find`] or [`Self::choose`] gave.
    pub(super) fn lane(&mut self, index: LaneIndex) -> (&mut Lane, &Terms) {
        (&mut self.lanes[usize::from(index.0)], &self.terms)
    }

    /// The indices of all lanes.
    pub(super) fn indices(&self) -> impl Iterator<Item = LaneIndex> + use<> {
        (0..u8::try_from(self.lanes.len()).unwrap_or(u8::MAX)).map(LaneIndex)
    }

    /// All lanes with what posting takes.
    pub(super) fn lanes_mut(&mut self) -> (impl Iterator<Item = &mut Lane>, &mut dyn Poller) {
        (self.lanes.iter_mut(), &mut *self.poller)
    }

    /// Where a command goes whose data of that size the target moves.
    pub(super) fn choose(&self, keyed_bytes: u32) -> LaneIndex {
        if self.lanes.len() == 1 || keyed_bytes < self.terms.lane_bytes {
            return LaneIndex::FIRST;
        }
        let least = (0u8..).zip(&self.lanes).min_by_key(|(_, lane)| lane.awaited_bytes);
        least.map_or(LaneIndex::FIRST, |(at, _)| LaneIndex(at))
    }

    /// A request went by that lane.
    pub(super) fn went(&mut self, tag: Tag, index: LaneIndex, bytes: u32) {
        self.lane_of[tag.index()] = index;
        let (lane, _) = self.lane(index);
        lane.awaited += 1;
        lane.awaited_bytes += u64::from(bytes);
    }

    /// Whether a request, which is on its way, went by that lane.
    pub(super) fn went_by(&self, tag: Tag, index: LaneIndex) -> bool {
        self.lane_of.get(tag.index()) == Some(&index)
    }

    /// It was answered there.
    pub(super) fn came(&mut self, index: LaneIndex, bytes: u32) {
        let (lane, _) = self.lane(index);
        lane.awaited -= 1;
        lane.awaited_bytes -= u64::from(bytes);
    }

    /// The command after the last one.
    pub(super) fn next_sequence(&mut self) -> Sequence {
        self.sequence = self.sequence.next();
        self.sequence
    }

    /// Whether a lane waits for its self-test's answer for longer than that.
    pub(super) fn tests_for_longer(&self, than: Duration, now: Instant) -> bool {
        let late = |lane: &Lane| match lane.phase {
            Phase::Testing { since, .. } => now.saturating_duration_since(since) > than,
            _ => false,
        };
        !self.ready && self.lanes.iter().any(late)
    }

    /// A lane passed its self-test.
    pub(super) fn passed(&mut self, index: LaneIndex) {
        self.lane(index).0.phase = Phase::Ready;
        self.ready = self.lanes.iter().all(|lane| matches!(lane.phase, Phase::Ready));
    }
}

impl Lane {
    /// With its RECVs and its self-test queued.
    fn begin(index: usize, qp: QpIndex, terms: &Terms, sequence: Sequence, now: Instant) -> Self {
        let layout = terms.layout;
        let mut lane = Self {
            qp,
            slots_at: index * layout.bytes(),
            scratch_at: index * SELF_TEST_BYTES,
            credits: SendCredits::new(layout.send_wrs(), layout.signal_interval()),
            phase: Phase::Testing { sequence, since: now },
            beat: Beat::default(),
            awaited: 0,
            awaited_bytes: 0,
            sends: Vec::with_capacity(layout.send_wrs() as usize),
            recvs: Vec::with_capacity(usize::from(layout.recv_slots())),
            packed: Packed::default(),
            open: None,
        };
        for slot in 0..layout.recv_slots() {
            lane.queue_recv(terms, slot);
        }
        terms.memory.scratch.region().zero(lane.scratch_at, SELF_TEST_BYTES);
        let remote = terms.memory.scratch.remote(lane.scratch_at);
        let mut command = own_command(terms, Opcode::SelfTest, sequence);
        command.buffer = Some(KeyedDescriptor {
            address: remote.addr,
            length: SELF_TEST_LEN,
            rkey: remote.rkey.0,
        });
        lane.queue_command(terms, &command, None);
        lane
    }

    /// Whether the self-test's answer is as it must be.
    pub(super) fn passes_self_test(
        &self,
        terms: &Terms,
        answer: &Answer,
        sequence: Sequence,
    ) -> bool {
        let mut seen = [0; SELF_TEST_BYTES];
        terms.memory.scratch.region().read(self.scratch_at, &mut seen);
        answer.status == Status::Ok
            && answer.check == (sequence.0 & 0xffff) as u16
            && answer.immediate == terms.with_imm
            && seen == self_test_pattern(sequence)
    }

    /// Queues a KEEP_ALIVE. False when the send queue is full: then its slots do not come back
    /// either.
    pub(super) fn ask(&mut self, terms: &Terms, sequence: Sequence) -> bool {
        if !self.can_send() {
            return false;
        }
        self.queue_command(terms, &own_command(terms, Opcode::KeepAlive, sequence), None);
        self.beat.asked(sequence);
        true
    }

    /// Offset of a receive slot.
    pub(super) fn recv_offset(&self, terms: &Terms, slot: u16) -> usize {
        self.slots_at + terms.layout.recv_offset(slot)
    }

    pub(super) fn queue_recv(&mut self, terms: &Terms, slot: u16) {
        let sge = terms.memory.slots.sge(self.recv_offset(terms, slot), RESPONSES_LEN);
        if let Some(sge) = sge {
            self.recvs.push(RecvWr { id: wr_id(KIND_RECV, slot), sge });
        }
    }

    /// Whether a command may be queued.
    pub(super) fn can_send(&self) -> bool {
        self.open.is_some() || self.credits.available() > 0
    }

    /// Queues a command: in the last message of the turn where that has room, or in one of its own.
    /// Data is behind the capsules, that of the first command last.
    pub(super) fn queue_command(
        &mut self,
        terms: &Terms,
        command: &CommandCapsule,
        data: Option<Sge>,
    ) {
        let bytes = command.to_wire();
        let (with_data, data_bytes) = data.map_or((0, 0), |data| (1, data.len));
        if let (Some(mut list), Some(wr)) = (self.open, self.sends.last_mut()) {
            terms.memory.slots.region().write(list.end, &bytes);
            wr.sges.grow_first(COMMAND_LEN);
            list.end += COMMAND_BYTES;
            list.commands += 1;
            list.data += with_data;
            list.data_bytes += data_bytes;
            self.packed.lists += u64::from(list.commands == 2);
            self.packed.listed += if list.commands == 2 { 2 } else { 1 };
            if let Some(data) = data {
                // There are three entries at most.
                wr.inline &= !wr.sges.push_second(data);
            }
            self.open = list.has_room(&terms.accept).then_some(list);
            return;
        }
        let offset = self.slots_at + terms.layout.capsule_offset(command.tag.index());
        terms.memory.slots.region().write(offset, &bytes);
        let Some(capsule) = terms.memory.slots.sge(offset, COMMAND_LEN) else { return };
        let signaled = self.credits.wants_signal();
        self.credits.take(signaled);
        self.sends.push(SendWr {
            id: wr_id(KIND_SEND, command.tag.0),
            op: SendOp::Send,
            sges: data.map_or_else(|| SgeList::one(capsule), |data| SgeList::two(capsule, data)),
            signaled,
            inline: data.is_none(),
        });
        let end = offset + COMMAND_BYTES;
        let list = OpenList { end, commands: 1, data: with_data, data_bytes };
        self.open = list.has_room(&terms.accept).then_some(list);
    }

    /// The SENDs of the turn are posted: what comes next goes into messages of its own.
    pub(super) fn sent(&mut self) -> Packed {
        self.sends.clear();
        self.open = None;
        std::mem::take(&mut self.packed)
    }
}

/// A command of a connection's own, under its tag.
fn own_command(terms: &Terms, opcode: Opcode, sequence: Sequence) -> CommandCapsule {
    CommandCapsule::new(opcode, terms.layout.depth.connection_tag(), terms.epoch, sequence)
}
