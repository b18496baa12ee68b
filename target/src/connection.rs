//! [`Connection`]: one QP as the target's data thread sees it: receive slots, credits, request
//! table, and the batches it posts at the end of a turn.
//!
//! Memory of a connection is one [`Region`], registered by control before the connection comes
//! here:
//!
//! ```text
//! | receive slots, depth + 1 + spare | response slots, depth + 1 | reply areas (admin) | scratch |
//! ```
//!
//! A receive slot holds a list of commands and the data behind it, a response slot a list of
//! responses: it is the slot of the first one's tag.
//!
//! Invariants: a receive slot is posted again when the last command of its message was copied out
//! and the data of each was used, which is before the last command with data is answered: RECVs go
//! to the device before sends. So as long as a slot is not posted the peer waits for the answer to
//! one of its commands, and no two slots are of the same command. The peer has at most depth + 1
//! commands outstanding, one of them at least in the message that it sends now: it always finds a
//! slot (RNR cannot happen). A response slot is rewritten only for a new command with its tag,
//! which proves that the peer has the old response and so all of the message it was in.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use rblk_fabric::{
    MemoryRegion, QpIndex, RecvWr, Region, SendCredits, SendOp, SendWr, Sge, SgeList, WrId,
};
use rblk_protocol::limits::{
    ADMIN_DEPTH, COMMAND_BYTES, COMMAND_LIST_BYTES, LIST_MAX, RESPONSE_BYTES, RESPONSE_LIST_BYTES,
};
use rblk_protocol::{
    CommandCapsule, ConnectionKind, Epoch, Features, KeyedDescriptor, Opcode, QueueDepth, Status,
    Tag,
};

use crate::arena::Extent;
use crate::cache::Segments;
use crate::read_ahead::ReadAhead;
use crate::request::Request;

/// Receive slots beyond depth + 1: a margin.
const SPARE_RECVS: usize = 1;
#[allow(clippy::cast_possible_truncation)] // a constant of 16
const RESPONSE_LEN: u32 = RESPONSE_BYTES as u32;
#[allow(clippy::cast_possible_truncation)] // a constant of 16
const LIST_LEN: u32 = LIST_MAX as u32;
/// Bytes of a reply area of an admin connection.
pub const REPLY_AREA_BYTES: usize = 4096;
/// At least every n-th send WR is signaled.
const SIGNAL_INTERVAL: u32 = 16;
/// Bounds of [`ConnectionParams::patience`].
const PATIENCE: (std::time::Duration, std::time::Duration) =
    (std::time::Duration::from_secs(2), std::time::Duration::from_secs(20));
/// An admin connection that says nothing at all, not even LOGIN, ends after this long: its peer may
/// have died unseen.
pub const LOGIN_SILENCE: std::time::Duration = std::time::Duration::from_secs(30);
/// Bytes that a proof READ moves.
pub const SCRATCH_BYTES: u32 = 64;

/// Names a connection of one poll group for as long as anything may refer to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ConnectionId {
    /// Index in the poll group's table.
    pub slot: u16,
    /// Changes with every use of the slot.
    pub generation: u32,
}

/// What a WR was for; packed into its [`WrId`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WrKind {
    /// RECV of a command, with its receive slot.
    Recv(u16),
    /// RDMA READ of write data, for a part of the command.
    ReadData(Tag, u8),
    /// SEND of an answer.
    Answer(Tag),
    /// RDMA WRITE of an answer's data, with or without the answer.
    WriteData(Tag),
    /// READ of the peer's scratch, to learn that everything before it is done.
    Proof,
}

impl WrKind {
    /// Packs it.
    #[must_use]
    pub fn id(self) -> WrId {
        let (kind, part, index) = match self {
            Self::Recv(slot) => (0u64, 0, slot),
            Self::ReadData(tag, part) => (1, part, tag.0),
            Self::Answer(tag) => (2, 0, tag.0),
            Self::Proof => (3, 0, 0),
            Self::WriteData(tag) => (4, 0, tag.0),
        };
        WrId(kind << 24 | u64::from(part) << 16 | u64::from(index))
    }

    /// Unpacks it. `None` for an id that was never made here.
    #[must_use]
    pub fn from_id(id: WrId) -> Option<Self> {
        let (index, part) = ((id.0 & 0xffff) as u16, (id.0 >> 16 & 0xff) as u8);
        Some(match id.0 >> 24 {
            0 => Self::Recv(index),
            1 => Self::ReadData(Tag(index), part),
            2 => Self::Answer(Tag(index)),
            3 => Self::Proof,
            4 => Self::WriteData(Tag(index)),
            _ => return None,
        })
    }

    /// Whether it is an RDMA WRITE or READ: one that needs a key of the peer's memory.
    #[must_use]
    pub fn is_one_sided(self) -> bool {
        matches!(self, Self::ReadData(..) | Self::WriteData(_) | Self::Proof)
    }
}

/// Sizes of a connection's memory and queues: pure arithmetic, used by control to allocate and by
/// the data thread to address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Commands the peer may have outstanding, less the connection's own.
    pub depth: QueueDepth,
    recv_stride: usize,
    recv_len: u32,
    recv_slots: u16,
    responses_at: usize,
    response_stride: usize,
    replies_at: usize,
    scratch_at: usize,
    total: usize,
}

impl Layout {
    /// For a connection with that depth and so much in-capsule data in one message; `admin` ones
    /// have reply areas, others room for lists.
    #[must_use]
    pub fn new(depth: QueueDepth, message_data_bytes: u32, admin: bool) -> Self {
        let (commands, response_stride) = if admin {
            (COMMAND_BYTES, RESPONSE_BYTES)
        } else {
            (COMMAND_LIST_BYTES, RESPONSE_LIST_BYTES)
        };
        let recv_stride = (commands + message_data_bytes as usize).next_multiple_of(64);
        let slots = depth.tags() + SPARE_RECVS;
        let responses_at = recv_stride * slots;
        let replies_at = (responses_at + depth.tags() * response_stride).next_multiple_of(64);
        let scratch_at = replies_at + if admin { depth.tags() * REPLY_AREA_BYTES } else { 0 };
        Self {
            depth,
            recv_stride,
            recv_len: u32::try_from(recv_stride).unwrap_or(u32::MAX),
            recv_slots: u16::try_from(slots).unwrap_or(u16::MAX),
            responses_at,
            response_stride,
            replies_at,
            scratch_at,
            total: scratch_at + SCRATCH_BYTES as usize,
        }
    }

    /// Bytes of memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.total
    }

    /// Bytes of a receive slot: the longest message.
    #[must_use]
    #[inline]
    pub fn recv_bytes(&self) -> usize {
        self.recv_stride
    }

    /// Receive slots.
    #[must_use]
    #[inline]
    pub fn recv_slots(&self) -> u16 {
        self.recv_slots
    }

    /// RECVs that may be posted: one for each receive slot.
    #[must_use]
    pub fn recv_wrs(&self) -> u32 {
        u32::from(self.recv_slots)
    }

    /// Send WRs that may be outstanding: per command a READ, a WRITE and a SEND, and the tail of
    /// unsignaled ones.
    #[must_use]
    pub fn send_wrs(&self) -> u32 {
        3 * u32::try_from(self.depth.tags()).unwrap_or(u32::MAX / 4) + 2 * SIGNAL_INTERVAL
    }

    /// The layout of an admin connection.
    #[must_use]
    pub fn admin() -> Self {
        let depth =
            QueueDepth::new(ADMIN_DEPTH).unwrap_or_else(|| unreachable!("within the bounds"));
        Self::new(depth, rblk_protocol::limits::IN_CAPSULE_DEFAULT_BYTES, true)
    }
}

/// How far a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Life {
    /// Serves.
    Live,
    /// The QP is in the error state and control destroys it. Until then the device may touch what
    /// was lent to it.
    Destroying {
        /// When it began.
        since: Instant,
        /// When to say that it takes long.
        warn_at: Instant,
    },
    /// The QP is destroyed: the device touches nothing any more. Shards may still work for the
    /// connection.
    Destroyed,
}

/// What control hands over.
#[derive(Debug)]
pub struct ConnectionParams {
    /// What it is for.
    pub kind: ConnectionKind,
    /// The session's place in the tables of the poll groups.
    pub session: SessionSlot,
    /// Epoch that its commands must name.
    pub epoch: Epoch,
    /// Sizes.
    pub layout: Layout,
    /// In-capsule bytes agreed.
    pub in_capsule_bytes: u32,
    /// Most data per command agreed.
    pub io_max_bytes: u32,
    /// Features agreed.
    pub features: Features,
    /// READs we may have outstanding.
    pub reads_out: u8,
    /// Runs of memory that one WRITE may gather.
    pub send_sges: u32,
    /// Its memory, registered with the poller's domain.
    pub memory: MemoryRegion,
    /// A connection on which send WRs wait and none completes for this long has ended:
    /// [`patience`].
    pub patience: std::time::Duration,
    /// Who it is, for logs.
    pub peer: String,
}

/// How long the send WRs of a connection may wait, none of them completing, where the initiator
/// wants a dead path seen within `detect`. Devices give a lost message up much sooner; this is for
/// those that do not, and for peers that live and take nothing.
#[must_use]
pub fn patience(detect: Option<std::time::Duration>) -> std::time::Duration {
    detect.map_or(PATIENCE.1, |detect| detect.clamp(PATIENCE.0, PATIENCE.1))
}

/// A session's place in the tables of the poll groups; given by control, used again only after
/// every poll group was told that the old one is gone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SessionSlot(pub u16);

/// What a connection lent to its device: memory that answers were sent from, and that of its
/// commands.
#[derive(Debug)]
pub struct Lent {
    /// See [`Connection::pinned`].
    pub pinned: VecDeque<(u64, u16, Segments)>,
    /// See [`Connection::requests`].
    pub requests: Box<[Request]>,
    /// See [`Connection::proof_sink`].
    pub proof_sink: Option<Extent>,
    /// See [`Connection::poller`].
    pub poller: usize,
}

/// Responses that go out together at the end of the turn, in the response slot of the first one's
/// tag.
#[derive(Clone, Copy, Debug)]
struct Responses {
    first: Tag,
    count: u32,
}

/// What is to be done about a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admitted {
    /// It is for a volume.
    Block,
    /// It is for control.
    Admin,
    /// The pattern is to be written.
    SelfTest,
    /// No more than to answer.
    Answer(Status),
}

/// One QP and everything that belongs to it.
#[derive(Debug)]
pub struct Connection {
    /// Its name.
    pub id: ConnectionId,
    /// Index of its poller.
    pub poller: usize,
    /// Its QP there, while it lives.
    pub qp: QpIndex,
    /// What control handed over.
    pub params: ConnectionParams,
    /// How far it is.
    pub life: Life,
    /// When a command came last, and how long a silence ends the connection.
    pub heard: Instant,
    /// See `heard`; [`LOGIN_SILENCE`] for an admin connection until LOGIN says otherwise, none for
    /// others.
    pub silence: Option<std::time::Duration>,
    /// The self-test was answered: block commands are in order.
    pub tested: bool,
    /// A page of the peer that stays readable, named by the self-test.
    pub peer_scratch: Option<KeyedDescriptor>,
    /// By tag.
    pub requests: Box<[Request]>,
    /// Messages received.
    pub messages: u64,
    // By receive slot that is not posted: commands whose data is in it, and one while its commands
    // are looked at.
    recv_users: Box<[u8]>,
    /// Send-queue slots. What others may take of them is [`Self::free_sends`].
    pub credits: SendCredits,
    // A send-queue slot is kept for them.
    responses: Option<Responses>,
    /// READs posted and not completed.
    pub reads_in_flight: u8,
    /// Parts of requests that wait for a READ credit or slot.
    pub waiting_reads: VecDeque<(Tag, u8)>,
    /// Requests that wait for send-queue slots.
    pub waiting_sends: VecDeque<Tag>,
    /// Lent memory that answers were sent from, with its shard and the position that frees it.
    pub pinned: VecDeque<(u64, u16, Segments)>,
    /// Sequential readers.
    pub read_ahead: ReadAhead,
    /// A completed send WR means that the peer has the bytes. Not so on iWARP, where it only means
    /// that TCP has them and may yet send them from our memory (soft-iWARP does); there only a READ
    /// proves it.
    pub sends_prove: bool,
    /// A proof READ is on its way.
    pub proving: bool,
    /// Where it lands, if not in our scratch (iWARP).
    pub proof_sink: Option<Extent>,
    /// Send WRs that completed without error so far.
    pub completed: u64,
    // What `completed` was when it was last seen to change or nothing was on its way, and when that
    // was.
    progress: (u64, Instant),
    /// In this turn's list of connections to post for.
    pub dirty: bool,
    /// Send WRs of this turn.
    pub sends: Vec<SendWr>,
    /// RECVs of this turn.
    pub recvs: Vec<RecvWr>,
}

impl Connection {
    /// A connection that was just attached to `poller` as `qp`.
    #[must_use]
    pub fn new(
        id: ConnectionId,
        poller: usize,
        qp: QpIndex,
        params: ConnectionParams,
        now: Instant,
    ) -> Self {
        let tags = params.layout.depth.tags();
        let send_wrs = params.layout.send_wrs();
        Self {
            id,
            poller,
            qp,
            life: Life::Live,
            heard: now,
            silence: (params.kind == ConnectionKind::Admin).then_some(LOGIN_SILENCE),
            tested: matches!(params.kind, ConnectionKind::Admin),
            peer_scratch: None,
            requests: (0..tags).map(|_| Request::new()).collect(),
            messages: 0,
            recv_users: vec![0; usize::from(params.layout.recv_slots())].into_boxed_slice(),
            credits: SendCredits::new(send_wrs, SIGNAL_INTERVAL),
            responses: None,
            reads_in_flight: 0,
            waiting_reads: VecDeque::with_capacity(tags),
            waiting_sends: VecDeque::with_capacity(tags),
            pinned: VecDeque::with_capacity(send_wrs as usize),
            read_ahead: ReadAhead::default(),
            sends_prove: true,
            proving: false,
            proof_sink: None,
            completed: 0,
            progress: (0, now),
            dirty: false,
            sends: Vec::with_capacity(send_wrs as usize + 1),
            recvs: Vec::with_capacity(params.layout.recv_wrs() as usize),
            params,
        }
    }

    /// Takes a command of the message that came last. Its data, if it has any, is in that receive
    /// slot from `data_at` on. Returns what is to be done about it.
    ///
    /// # Errors
    /// The rule that the peer broke.
    #[inline]
    pub fn admit(
        &mut self,
        command: &CommandCapsule,
        recv: u16,
        data_at: usize,
    ) -> Result<Admitted, &'static str> {
        let params = &self.params;
        if command.in_capsule_bytes > params.in_capsule_bytes {
            return Err("in-capsule data above what was agreed");
        }
        let request = &mut self.requests[command.tag.index()];
        // Nobody has the answer to a command that is in the same message.
        if !request.may_start() || request.message == self.messages {
            return Err("tag used twice");
        }
        request.start(command, self.messages);
        if command.in_capsule_bytes > 0 {
            (request.recv_slot, request.data_at) = (Some(recv), data_at);
            self.recv_users[usize::from(recv)] += 1;
        }
        if command.epoch != params.epoch {
            return Ok(Admitted::Answer(Status::Fenced));
        }
        if !self.tested && command.opcode != Opcode::SelfTest {
            return Ok(Admitted::Answer(Status::NotReady));
        }
        let connection_tag = command.tag == params.layout.depth.connection_tag();
        Ok(match params.kind {
            ConnectionKind::Io { .. } if connection_tag => match command.opcode {
                Opcode::KeepAlive => Admitted::Answer(Status::Ok),
                Opcode::SelfTest => Admitted::SelfTest,
                _ => Admitted::Answer(Status::InvalidOpcode),
            },
            ConnectionKind::Io { .. } if command.opcode.is_block() => Admitted::Block,
            ConnectionKind::Admin if command.opcode == Opcode::KeepAlive => {
                Admitted::Answer(Status::Ok)
            }
            ConnectionKind::Admin if command.opcode.is_admin() => Admitted::Admin,
            _ => Admitted::Answer(Status::InvalidOpcode),
        })
    }

    /// Its memory.
    #[must_use]
    #[inline]
    pub fn region(&self) -> &Arc<Region> {
        self.params.memory.region()
    }

    /// Whether it still serves.
    #[must_use]
    #[inline]
    pub fn is_live(&self) -> bool {
        self.life == Life::Live
    }

    /// Offset of a receive slot.
    #[must_use]
    #[inline]
    pub fn recv_offset(&self, slot: u16) -> usize {
        usize::from(slot) * self.params.layout.recv_stride
    }

    /// A message came in that slot, and its commands are looked at: until [`Self::release_recv`].
    #[inline]
    pub fn hold_recv(&mut self, slot: u16) {
        self.recv_users[usize::from(slot)] = 1;
    }

    /// One needs the receive slot no more: the commands of its message were copied out, or the data
    /// of one was used. It is queued when nobody does. Returns whether it was.
    #[inline]
    pub fn release_recv(&mut self, slot: u16) -> bool {
        let users = &mut self.recv_users[usize::from(slot)];
        *users -= 1;
        let free = *users == 0;
        if free {
            self.queue_recv(slot);
        }
        free
    }

    /// Releases the receive slot of a command's data, if it has one.
    #[inline]
    pub fn repost_recv(&mut self, tag: Tag) {
        if let Some(recv) = self.requests[tag.index()].recv_slot.take() {
            self.release_recv(recv);
        }
    }

    /// Offset of a command's in-capsule data, as long as it is there.
    #[must_use]
    #[inline]
    pub fn data_offset(&self, tag: Tag) -> Option<usize> {
        let request = &self.requests[tag.index()];
        request.recv_slot.map(|recv| self.recv_offset(recv) + request.data_at)
    }

    /// Offset of an admin reply area.
    #[must_use]
    pub fn reply_offset(&self, tag: Tag) -> usize {
        self.params.layout.replies_at + tag.index() * REPLY_AREA_BYTES
    }

    /// SGE over our own memory.
    ///
    /// # Panics
    /// The range is not inside: a bug of the layout.
    #[must_use]
    #[inline]
    pub fn own_sge(&self, offset: usize, len: u32) -> Sge {
        self.params.memory.sge(offset, len).expect("inside the connection's memory")
    }

    /// SGE of the scratch.
    #[must_use]
    pub fn scratch_sge(&self, len: u32) -> Sge {
        self.own_sge(self.params.layout.scratch_at, len)
    }

    /// Queues a RECV for a slot.
    #[inline(always)]
    pub fn queue_recv(&mut self, slot: u16) {
        let sge = self.own_sge(self.recv_offset(slot), self.params.layout.recv_len);
        self.recvs.push(RecvWr { id: WrKind::Recv(slot).id(), sge });
    }

    /// Send-queue slots that may be taken.
    #[must_use]
    #[inline]
    pub fn free_sends(&self) -> u64 {
        self.credits.available() - u64::from(self.responses.is_some())
    }

    /// Send-queue slots that one more response takes.
    #[must_use]
    #[inline]
    pub fn response_needs(&self) -> u64 {
        u64::from(self.responses.is_none())
    }

    /// Collects a response; it is sent by [`Self::queue_responses`]. True when no other may join
    /// it.
    #[must_use]
    #[inline]
    pub fn add_response(&mut self, tag: Tag, bytes: &[u8; RESPONSE_BYTES]) -> bool {
        let list = self.responses.get_or_insert(Responses { first: tag, count: 0 });
        let (first, at) = (list.first, list.count);
        list.count += 1;
        let full = list.count
            >= if self.params.features.has(Features::CAPSULE_LISTS) { LIST_LEN } else { 1 };
        let offset = self.response_offset(first) + at as usize * RESPONSE_BYTES;
        self.region().write(offset, bytes);
        full
    }

    /// Queues the SEND of the responses collected. It is behind every WR queued so far, so the data
    /// of each arrives first. Returns how many there are.
    #[inline(always)]
    pub fn queue_responses(&mut self) -> u32 {
        let Some(Responses { first, count }) = self.responses.take() else { return 0 };
        let sge = self.own_sge(self.response_offset(first), count * RESPONSE_LEN);
        self.queue_send(WrKind::Answer(first), SendOp::Send, sge, false, true);
        count
    }

    /// Forgets what was queued and not posted.
    pub fn clear_posts(&mut self) {
        self.sends.clear();
        self.recvs.clear();
        self.responses = None;
    }

    fn response_offset(&self, tag: Tag) -> usize {
        self.params.layout.responses_at + tag.index() * self.params.layout.response_stride
    }

    /// Queues a send WR, taking a slot. Returns its position.
    #[inline]
    pub fn queue_send(
        &mut self,
        kind: WrKind,
        op: SendOp,
        sge: Sge,
        must_signal: bool,
        inline: bool,
    ) -> u64 {
        let signaled = must_signal || self.credits.wants_signal();
        self.sends.push(SendWr { id: kind.id(), op, sges: SgeList::one(sge), signaled, inline });
        self.credits.take(signaled)
    }

    /// Queues a send WR that gathers, taking a slot. Returns its position.
    #[inline]
    pub fn queue_send_list(
        &mut self,
        kind: WrKind,
        op: SendOp,
        sges: &SgeList,
        must_signal: bool,
    ) -> u64 {
        let signaled = must_signal || self.credits.wants_signal();
        let (id, sges) = (kind.id(), *sges);
        self.sends.push(SendWr { id, op, sges, signaled, inline: false });
        self.credits.take(signaled)
    }

    /// Writes a response into the tag's slot and returns its SGE.
    #[must_use]
    pub fn response_sge(&self, tag: Tag, bytes: &[u8; RESPONSE_BYTES]) -> Sge {
        let offset = self.response_offset(tag);
        self.region().write(offset, bytes);
        self.own_sge(offset, RESPONSE_LEN)
    }

    /// Whether WRs should have completed long ago. A peer that takes no data would hold memory for
    /// ever.
    pub fn is_stuck(&mut self, now: Instant) -> bool {
        let waits = self.reads_in_flight > 0 || self.credits.expects_completion();
        if !waits || self.completed != self.progress.0 {
            self.progress = (self.completed, now);
        }
        self.is_live() && now.saturating_duration_since(self.progress.1) > self.params.patience
    }

    /// Takes a time in which nobody looked out of [`Self::is_stuck`] and of the peer's silence.
    pub fn forgive(&mut self, paused: std::time::Duration) {
        self.heard += paused;
        self.progress.1 += paused;
    }

    /// Takes what it lent, leaving nothing.
    pub fn take_lent(&mut self) -> Lent {
        Lent {
            pinned: std::mem::take(&mut self.pinned),
            requests: std::mem::take(&mut self.requests),
            proof_sink: self.proof_sink.take(),
            poller: self.poller,
        }
    }

    /// Whether nothing of it is in use any more: its QP is destroyed and nothing executes.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        // Control holds nothing of a connection while it works on an admin command (it may park one
        // for ever), and its answer finds the connection gone.
        let admin = self.params.kind == ConnectionKind::Admin;
        self.life == Life::Destroyed && (admin || !self.requests.iter().any(Request::is_executing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wr_kinds_round_trip() {
        for kind in [
            WrKind::Recv(700),
            WrKind::ReadData(Tag(1024), 7),
            WrKind::Answer(Tag(0)),
            WrKind::WriteData(Tag(1024)),
            WrKind::Proof,
        ] {
            assert_eq!(WrKind::from_id(kind.id()), Some(kind));
            assert!(kind.id().0 <= WrId::MASK);
        }
        assert_eq!(WrKind::from_id(WrId(WrId::MASK)), None);
    }

    #[test]
    fn layout_pieces_do_not_overlap() {
        for (depth, in_capsule, admin) in
            [(1, 0, false), (128, 3 * 4096, false), (1024, 16384, false), (16, 4096, true)]
        {
            let layout = Layout::new(QueueDepth::new(depth).unwrap(), in_capsule, admin);
            let (commands, responses) =
                if admin { (64, 16) } else { (COMMAND_LIST_BYTES, RESPONSE_LIST_BYTES) };
            assert!(layout.recv_stride >= commands + in_capsule as usize);
            assert!(layout.response_stride >= responses);
            assert_eq!(layout.responses_at, layout.recv_stride * usize::from(layout.recv_slots));
            assert!(layout.replies_at >= layout.responses_at + layout.depth.tags() * responses);
            let replies = if admin { layout.depth.tags() * REPLY_AREA_BYTES } else { 0 };
            assert_eq!(layout.scratch_at, layout.replies_at + replies);
            assert_eq!(layout.bytes(), layout.scratch_at + SCRATCH_BYTES as usize);
            assert!(u32::from(layout.recv_slots) > u32::from(depth) + 1);
        }
    }
}
