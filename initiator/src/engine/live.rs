//! [`Live`]: the path an engine works on: its QP with the WRs of this turn, its credits and sequence, its self-test
//! and its beat.

use std::time::Instant;

use rblk_fabric::{Poller, QpIndex, RecvWr, SendCredits, SendOp, SendWr, Sge, SgeList, WrId};
use rblk_protocol::limits::{COMMAND_BYTES, LIST_DATA_MAX, LIST_MAX, RESPONSE_LIST_BYTES};
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

/// How far a path is.
#[derive(Clone, Copy)]
pub(super) enum Phase {
    /// Its self-test is under way.
    Testing { sequence: Sequence, since: Instant },
    /// It carries requests.
    Ready,
}

/// An answer, whichever way it came.
pub(super) struct Answer {
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

pub(super) struct Live {
    pub(super) poller: Box<dyn Poller>,
    pub(super) qp: QpIndex,
    pub(super) memory: PathMemory,
    pub(super) accept: HelloAccept,
    pub(super) epoch: Epoch,
    pub(super) volume: VolumeHandle,
    pub(super) layout: PathLayout,
    pub(super) credits: SendCredits,
    pub(super) sequence: Sequence,
    pub(super) phase: Phase,
    pub(super) with_imm: bool,
    /// Messages may hold several capsules.
    pub(super) with_lists: bool,
    pub(super) beat: Beat,
    pub(super) sends: Vec<SendWr>,
    pub(super) recvs: Vec<RecvWr>,
    packed: Packed,
    open: Option<OpenList>,
}

impl Live {
    /// Takes a path over, with its RECVs and its self-test ready to be posted. The rest of one that cannot be had,
    /// or does not `fit` the queue, comes back.
    pub(super) fn begin(path: Path, fits: bool, now: Instant) -> Result<Self, Box<DeadPath>> {
        let Path { mut poller, connection, memory, accept, epoch, volume } = path;
        let layout = PathLayout { depth: accept.depth };
        let qp = match poller.attach(connection) {
            Ok(qp) if fits => qp,
            attached => {
                let connection = attached.ok().and_then(|qp| poller.detach(qp));
                return Err(Box::new(DeadPath { connection, poller, memory }));
            }
        };
        let mut live = Self {
            poller,
            qp,
            memory,
            with_imm: accept.features.has(Features::WRITE_WITH_IMM),
            with_lists: accept.features.has(Features::CAPSULE_LISTS),
            accept,
            epoch,
            volume,
            credits: SendCredits::new(layout.send_wrs(), layout.signal_interval()),
            layout,
            sequence: Sequence(0),
            phase: Phase::Testing { sequence: Sequence(1), since: now },
            beat: Beat::default(),
            sends: Vec::with_capacity(layout.send_wrs() as usize),
            recvs: Vec::with_capacity(usize::from(layout.recv_slots())),
            packed: Packed::default(),
            open: None,
        };
        for slot in 0..layout.recv_slots() {
            live.queue_recv(slot);
        }
        live.memory.scratch.region().zero(0, SELF_TEST_BYTES);
        let remote = live.memory.scratch.remote(0);
        let mut command = live.own_command(Opcode::SelfTest);
        command.buffer = Some(KeyedDescriptor {
            address: remote.addr,
            length: SELF_TEST_LEN,
            rkey: remote.rkey.0,
        });
        live.queue_command(&command, None);
        Ok(live)
    }

    /// A command of the connection's own, under its tag.
    fn own_command(&mut self, opcode: Opcode) -> CommandCapsule {
        self.sequence = self.sequence.next();
        CommandCapsule::new(opcode, self.layout.depth.connection_tag(), self.epoch, self.sequence)
    }

    /// Whether the self-test's answer is as it must be.
    pub(super) fn passes_self_test(&self, answer: &Answer, sequence: Sequence) -> bool {
        let mut seen = [0; SELF_TEST_BYTES];
        self.memory.scratch.region().read(0, &mut seen);
        answer.status == Status::Ok
            && answer.check == (sequence.0 & 0xffff) as u16
            && answer.immediate == self.with_imm
            && seen == self_test_pattern(sequence)
    }

    /// Queues a KEEP_ALIVE. False when the send queue is full: then its slots do not come back either.
    pub(super) fn ask(&mut self) -> bool {
        if !self.can_send() {
            return false;
        }
        let command = self.own_command(Opcode::KeepAlive);
        self.queue_command(&command, None);
        self.beat.asked(command.sequence);
        true
    }

    pub(super) fn queue_recv(&mut self, slot: u16) {
        let sge = self.memory.slots.sge(self.layout.recv_offset(slot), RESPONSES_LEN);
        if let Some(sge) = sge {
            self.recvs.push(RecvWr { id: wr_id(KIND_RECV, slot), sge });
        }
    }

    /// Whether a command may be queued.
    pub(super) fn can_send(&self) -> bool {
        self.open.is_some() || self.credits.available() > 0
    }

    /// Queues a command: in the last message of the turn where that has room, or in one of its own. Data is behind the
    /// capsules, that of the first command last.
    pub(super) fn queue_command(&mut self, command: &CommandCapsule, data: Option<Sge>) {
        let bytes = command.to_wire();
        let (with_data, data_bytes) = data.map_or((0, 0), |data| (1, data.len));
        if let (Some(mut list), Some(wr)) = (self.open, self.sends.last_mut()) {
            self.memory.slots.region().write(list.end, &bytes);
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
            self.open = list.has_room(&self.accept).then_some(list);
            return;
        }
        let offset = self.layout.capsule_offset(command.tag.index());
        self.memory.slots.region().write(offset, &bytes);
        let Some(capsule) = self.memory.slots.sge(offset, COMMAND_LEN) else { return };
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
        self.open = list.has_room(&self.accept).then_some(list);
    }

    /// The SENDs of the turn are posted: what comes next goes into messages of its own.
    pub(super) fn sent(&mut self) -> Packed {
        self.sends.clear();
        self.open = None;
        std::mem::take(&mut self.packed)
    }
}
