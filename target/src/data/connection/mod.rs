//! [`Connection`]: one QP as the target's data thread sees it, with its state.
//!
//! | file | holds |
//! |---|---|
//! | `connection_params.rs` | the parameters from control |
//! | `connection_memory.rs` | the connection's memory |
//! | `layout.rs` | the places in that memory |
//! | `receive.rs` | receive buffers: their users, and their next posts |
//! | `arrived.rs` | messages, and the places of their bytes |
//! | `admitted.rs` | the next step for a command |
//! | `landing.rs` | slots of the cache where messages land |
//! | `queued_sends.rs` | send credits, the WRs of this turn, collected responses |
//! | `reads.rs` | credits for RDMA READs |
//! | `ended_memory.rs` | memory of an ended connection, until its QP is destroyed |
//! | `spare_memory.rs` | memory of ended admin connections, for the next ones |
//! | `pins.rs` | memory that the device may still read |
//! | `bounce.rs` | memory that data passes through (iWARP) |
//! | `liveness.rs` | whether the peer speaks, and takes the data sent to it |
//! | `wr_id.rs` | the purpose of a WR |
//! | `violation.rs` | the reason why a connection ends |
//!
//! A poll group looks a connection up once for each completion or answer of a shard, and passes it
//! down as `&mut Connection`. WRs that the connection queues are posted at the end of the turn
//! ([`Connection::posts`]).

mod admitted;
mod arrived;
mod bounce;
mod connection_memory;
mod connection_params;
mod ended_memory;
mod landing;
pub(crate) mod layout;
mod liveness;
mod pins;
mod queued_sends;
mod reads;
mod receive;
mod spare_memory;
mod violation;
mod wr_id;

use std::time::{Duration, Instant};

use rblk_fabric::{QpIndex, Recvs, Region, RemoteBuffer, Rkey, SendOp, SendWr, Sge, SgeList};
use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{
    CapsuleError, CommandCapsule, CommandList, ConnectionKind, Epoch, Features, Immediate,
    KeyedDescriptor, Mutation, ResponseCapsule, Tag,
};

use crate::cache::Segments;
use crate::data::parts::{Part, PartIndex};
use crate::data::read_ahead::ReadAhead;
use crate::data::request::{CommandOutcome, InCapsule, Payload, Request, RequestEvent};
use crate::volume::ids::{ConnectionId, SessionIndex};

pub(crate) use admitted::AdmittedCommand;
use arrived::Arrived;
pub(crate) use arrived::Message;
pub(crate) use bounce::Bounce;
pub use bounce::BounceMemory;
pub use connection_memory::{ConnectionMemory, NoMemory};
pub use connection_params::{ConnectionParams, ProofDue, progress_max};
pub use ended_memory::EndedMemory;
pub(crate) use landing::Landing;
pub use landing::slots_of_recv;
pub use layout::Layout;
pub use layout::{REPLY_AREA_BYTES, SCRATCH_BYTES};
use liveness::Liveness;
use pins::Pins;
pub(crate) use queued_sends::INLINE_BYTES;
pub(crate) use queued_sends::QueuedSends;
use queued_sends::Responses;
use reads::ReadCredits;
use receive::ReceiveBuffers;
pub use spare_memory::SpareMemory;
pub(crate) use violation::{Served, Violation};
pub(crate) use wr_id::WrKind;

/// Time that an unknown peer has from the accept until its LOGIN is accepted, regardless of its
/// messages.
pub(crate) const STRANGER_TIME: Duration = Duration::from_secs(5);

/// The state of a connection in its life cycle.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Life {
    /// The connection serves commands.
    Live,
    /// The QP is in the error state and control destroys it. Until then the device may touch the
    /// memory lent to it.
    Destroying {
        /// Start of this state.
        since: Instant,
        /// Time of the next warning that it takes long.
        warn_at: Instant,
    },
    /// The QP is destroyed: the device touches no memory any more. Shards may still work for the
    /// connection.
    Destroyed,
}

/// The address of a connection: its name, and its QP at a CQ of the poll group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpPlace {
    /// The connection's name.
    pub(crate) id: ConnectionId,
    /// Index of the poller.
    pub(crate) poller: usize,
    /// The QP there, while the connection lives.
    pub(crate) qp: QpIndex,
}

/// One QP and its state. See the module.
#[derive(Debug)]
pub(crate) struct Connection {
    place: QpPlace,
    params: ConnectionParams,
    life: Life,
    // The connection is in the turn's list to post for.
    is_listed: bool,
    // Block commands are allowed: an I/O connection with an answered self-test.
    takes_blocks: bool,
    liveness: Liveness,
    // Indexed by tag.
    requests: Box<[Request]>,
    receives: ReceiveBuffers,
    sends: QueuedSends,
    reads: ReadCredits,
    pins: Pins,
    // Boxed: only iWARP uses it.
    bounce: Option<Box<Bounce>>,
    read_ahead: ReadAhead,
}

impl Connection {
    /// A connection with a QP that was just attached. `sends_free`: a completed WRITE means that
    /// the peer has the bytes (not so on iWARP). Messages land in the slots of `landing`, if given.
    /// Every receive buffer is queued.
    pub(crate) fn new(
        place: QpPlace,
        mut params: ConnectionParams,
        landing: Option<Landing>,
        sends_free: bool,
        now: Instant,
    ) -> Self {
        let layout = *params.memory.layout();
        let (tags, send_wrs) = (layout.depth().tags(), layout.send_wrs());
        let is_stranger = params.session == SessionIndex::NONE;
        let due = params.proof.as_ref().map(|due| due.within);
        let prove_by = is_stranger.then_some(STRANGER_TIME).or(due).map(|within| now + within);
        let lists = params.features.has(Features::CAPSULE_LISTS);
        let receives = ReceiveBuffers::new(&params.memory, landing);
        // Without bounce memory, the data of an iWARP connection has no place, and its commands end
        // it.
        let bounce = params.bounce.take().and_then(|m| Bounce::new(m, wide(send_wrs)).ok());
        Self {
            place,
            life: Life::Live,
            is_listed: false,
            takes_blocks: false,
            liveness: Liveness::new(prove_by, params.progress_max, now),
            requests: (0..tags).map(|_| Request::new()).collect(),
            receives,
            sends: QueuedSends::new(send_wrs, tags, lists),
            reads: ReadCredits::new(params.reads_out, tags),
            pins: Pins::new(wide(send_wrs), sends_free),
            bounce: bounce.map(Box::new),
            read_ahead: ReadAhead::default(),
            params,
        }
    }

    /// The connection's name.
    #[inline]
    pub(crate) fn id(&self) -> ConnectionId {
        self.place.id
    }

    /// Index of the poller.
    #[inline]
    pub(crate) fn poller(&self) -> usize {
        self.place.poller
    }

    /// The QP, while the connection lives.
    #[inline]
    pub(crate) fn qp(&self) -> QpIndex {
        self.place.qp
    }

    /// The parameters from control.
    #[inline]
    pub(crate) fn params(&self) -> &ConnectionParams {
        &self.params
    }

    /// Returns the parameters to control.
    pub(crate) fn into_params(self) -> ConnectionParams {
        let bounce = self.bounce.map(|bounce| bounce.into_memory());
        ConnectionParams { bounce, ..self.params }
    }

    /// Whether the connection still serves commands.
    #[inline]
    pub(crate) fn is_live(&self) -> bool {
        self.life == Life::Live
    }

    /// The state in the life cycle.
    pub(crate) fn life_mut(&mut self) -> &mut Life {
        &mut self.life
    }

    /// The connection's memory.
    #[inline]
    pub(crate) fn memory(&self) -> &ConnectionMemory {
        &self.params.memory
    }

    #[inline]
    fn layout(&self) -> &Layout {
        self.params.memory.layout()
    }

    /// The request of this tag.
    #[inline]
    pub(crate) fn request(&self, tag: Tag) -> &Request {
        &self.requests[tag.index()]
    }

    /// The request of this tag.
    #[inline]
    pub(crate) fn request_mut(&mut self, tag: Tag) -> &mut Request {
        &mut self.requests[tag.index()]
    }

    /// The command of this tag's request.
    ///
    /// # Errors
    /// A bug: the request has no command.
    #[inline]
    pub(crate) fn command(&self, tag: Tag) -> Result<&CommandCapsule, Violation> {
        self.request(tag).command().ok_or(Violation("a request without its command"))
    }

    /// The parameters from control, and the request of this tag.
    #[inline(always)]
    pub(crate) fn of(&mut self, tag: Tag) -> (&ConnectionParams, &mut Request) {
        (&self.params, &mut self.requests[tag.index()])
    }

    /// All requests.
    pub(crate) fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// All requests.
    pub(crate) fn requests_mut(&mut self) -> &mut [Request] {
        &mut self.requests
    }

    /// The sequential readers.
    #[inline]
    pub(crate) fn read_ahead_mut(&mut self) -> &mut ReadAhead {
        &mut self.read_ahead
    }

    // ---- Messages and commands -----------------------------------------------------------------

    /// A message of this many bytes came in a receive buffer. [`Self::next_command`] takes its
    /// commands; then [`Self::release_message`] releases the buffer.
    ///
    /// # Errors
    /// The message is longer than its buffer.
    #[inline]
    pub(crate) fn begin_message(&mut self, buffer: u16, bytes: u32, now: Instant) -> Served {
        self.liveness.heard(now);
        let layout = self.layout();
        if buffer >= layout.recv_buffers() || wide(bytes) > layout.recv_bytes() {
            return Err(Violation("message longer than its buffer"));
        }
        self.receives.hold(buffer);
        Ok(())
    }

    /// The message that [`Self::begin_message`] took, for its commands. Not the result of that
    /// function: the fields of a value in a `Result` share registers, and each command would pay
    /// for that.
    #[inline(always)]
    pub(crate) fn message(&self, buffer: u16, bytes: u32) -> Message {
        let depth = self.layout().depth();
        Message::new(CommandList::new(bytes, self.params.features, depth), buffer)
    }

    /// The next command of a message; `None` after the last.
    #[inline(always)]
    pub(crate) fn next_command(
        &self,
        message: &mut Message,
    ) -> Option<Result<CommandCapsule, CapsuleError>> {
        self.arrived().next_command(message)
    }

    #[inline(always)]
    fn arrived(&self) -> Arrived<'_> {
        Arrived::new(&self.receives, &self.params.memory)
    }

    /// Releases the buffer of a message. Every command was copied out, but the data of some may
    /// have to wait.
    #[inline]
    pub(crate) fn release_message(&mut self, message: &Message) {
        if message.is_held() {
            self.receives.release(message.buffer());
        }
    }

    /// Admits the command that [`Self::next_command`] last took from this message. Returns its next
    /// step.
    ///
    /// # Errors
    /// The rule that the peer broke.
    #[inline]
    pub(crate) fn admit(
        &mut self,
        command: &CommandCapsule,
        of: &mut Message,
    ) -> Result<AdmittedCommand, Violation> {
        let params = &self.params;
        if command.in_capsule_bytes > params.in_capsule_bytes {
            return Err(Violation("more in-capsule data than the agreed maximum"));
        }
        let message = self.receives.messages();
        if !self.requests[command.tag.index()].may_start_in(message) {
            return Err(Violation("tag used twice"));
        }
        let data = (command.in_capsule_bytes > 0).then(|| self.arrived().data_of(of, command));
        let request = &mut self.requests[command.tag.index()];
        let _ = request.step(RequestEvent::Command { command, message, data });
        if data.is_some() {
            // The message's hold on the buffer passes to the data of its last command.
            if of.is_over() {
                of.hand_buffer_over();
            } else {
                self.receives.share(of.buffer());
            }
        }
        if self.takes_blocks
            && command.opcode.is_block()
            && command.epoch == self.params.epoch
            && command.flags.digest == self.has_digests()
            && command.tag != self.layout().depth().connection_tag()
        {
            return Ok(AdmittedCommand::Block);
        }
        Ok(AdmittedCommand::other(command, &self.params, self.takes_blocks))
    }

    /// The place of a command's in-capsule data, all in one piece, until the data is released.
    #[inline(always)]
    pub(crate) fn data_place(&self, tag: Tag) -> Option<(&Region, usize)> {
        self.request(tag).data().map(|data| self.place_of_data(data))
    }

    /// The place of in-capsule data.
    #[inline(always)]
    pub(crate) fn place_of_data(&self, data: InCapsule) -> (&Region, usize) {
        self.arrived().place_of(data)
    }

    /// Takes the slot that in-capsule data fills, and puts a fresh slot in its place, each given by
    /// its offset in the arena. This uses the data up. `None`: the data fills no slot.
    #[inline(always)]
    pub(crate) fn take_slot(&mut self, data: InCapsule, fresh: usize) -> Option<usize> {
        if data.slot == InCapsule::NO_SLOT {
            return None;
        }
        self.receives.exchange(data, fresh)
    }

    /// Releases in-capsule data that its request no longer has, after its use.
    #[inline(always)]
    pub(crate) fn data_used(&mut self, data: InCapsule) {
        self.receives.release(data.buffer);
    }

    /// Takes the slots where the connection's messages landed, given by their offsets in the arena.
    /// The QP is destroyed, and no command is executing.
    pub(crate) fn take_slots(&mut self) -> Vec<usize> {
        self.receives.take_slots()
    }

    /// Releases a command's in-capsule data, if any, after its use or because it is not needed.
    #[inline]
    pub(crate) fn release_data(&mut self, tag: Tag) {
        if let Some(data) = self.requests[tag.index()].take_data() {
            self.receives.release(data.buffer);
        }
    }

    /// Sets the outcome of a command, and releases its in-capsule data.
    #[inline(always)]
    pub(crate) fn conclude(&mut self, tag: Tag, outcome: CommandOutcome) {
        let request = &mut self.requests[tag.index()];
        let _ = request.step(RequestEvent::Outcome(outcome));
        if let Some(data) = request.take_data() {
            self.receives.release(data.buffer);
        }
    }

    /// Marks a command without data to send back as answered with success, and releases its
    /// in-capsule data. Returns the parameters from control, and the request.
    #[inline(always)]
    pub(crate) fn acknowledge(&mut self, tag: Tag) -> (&ConnectionParams, &mut Request) {
        let request = &mut self.requests[tag.index()];
        let _ = request.step(RequestEvent::Answered);
        if let Some(data) = request.take_data() {
            self.receives.release(data.buffer);
        }
        (&self.params, request)
    }

    // ---- Answers -------------------------------------------------------------------------------

    /// Whether the WRITE of a READ's data also carries the answer.
    #[inline]
    pub(crate) fn has_immediates(&self) -> bool {
        self.params.features.has(Features::WRITE_WITH_IMM)
    }

    /// Whether capsules and data have digests.
    #[inline]
    pub(crate) fn has_digests(&self) -> bool {
        self.params.features.has(Features::DIGEST)
    }

    /// The send queue, for credits and for commands that wait for them.
    #[inline]
    pub(crate) fn sends(&self) -> &QueuedSends {
        &self.sends
    }

    /// The send queue.
    #[inline]
    pub(crate) fn sends_mut(&mut self) -> &mut QueuedSends {
        &mut self.sends
    }

    /// The command that has waited longest for send credits or for room to send from, if there are
    /// enough for its next step.
    #[inline]
    pub(crate) fn next_for_credits(&mut self) -> Option<Tag> {
        // For a READ: its data, its trailer if separate, and its answer.
        let step = if self.has_digests() { 3 } else { 2 };
        if !self.sends.has_waiting() || self.sends.free() < step {
            return None;
        }
        if self.bounce.as_ref().is_some_and(|bounce| bounce.is_outgoing_short()) {
            return None;
        }
        self.sends.next_waiting()
    }

    /// Queues the WRITE of a READ's data, lent by a shard. If the WRITE is the last to read the
    /// lent memory (`ends`), the caller pins that memory with [`Self::pin`] at the returned
    /// position.
    #[inline(always)]
    pub(crate) fn queue_lent(
        &mut self,
        tag: Tag,
        sges: &SgeList,
        remote: RemoteBuffer,
        immediate: Option<Immediate>,
        ends: bool,
    ) -> u64 {
        // Without a scratch to read, only a signaled WR can show that the memory is free.
        let must_signal = ends && !self.pins.has_scratch();
        self.sends.queue_write(tag, sges, remote, immediate, must_signal)
    }

    /// Collects a response that has its credit. True: the list of responses is full, and
    /// [`Self::queue_responses`] must follow.
    #[inline(always)]
    pub(crate) fn add_response(&mut self, response: &ResponseCapsule) -> bool {
        let Responses { first, count } = self.sends.add_response(response.tag);
        self.memory().write_response(first, count, response, self.has_digests());
        self.sends.responses_are_full()
    }

    /// Queues the SEND of the collected responses. Returns their number.
    #[inline(always)]
    pub(crate) fn queue_responses(&mut self) -> usize {
        let Some(Responses { first, count }) = self.sends.take_responses() else { return 0 };
        let sges = SgeList::one(self.memory().responses_sge(first, count));
        self.sends.queue(WrKind::Answer(first), SendOp::Send, &sges, false, true);
        count
    }

    /// Writes control's reply into the reply area of the tag. `None`: the reply is too long for the
    /// area, or for the peer's buffer.
    pub(crate) fn write_reply(&mut self, tag: Tag, words: &[u8]) -> Option<Payload> {
        let buffer = self.request(tag).command().and_then(|command| command.buffer);
        let room = buffer.map_or(0, |buffer| wide(buffer.length));
        if words.len() > room.min(REPLY_AREA_BYTES) {
            return None;
        }
        self.memory().write_reply(tag, words);
        Some(Payload::Reply { len: narrow(words.len()) })
    }

    // ---- RDMA READs of write data --------------------------------------------------------------

    /// Whether another RDMA READ may be queued.
    #[inline]
    pub(crate) fn may_read(&self) -> bool {
        self.reads.is_free() && self.sends.free() > 0
    }

    /// Lets a part wait for a READ credit or a send credit.
    pub(crate) fn wait_for_read(&mut self, tag: Tag, part: PartIndex) {
        self.reads.waiting().push_back((tag, part));
    }

    /// The part that has waited longest for a READ credit or for room to land, if both are free.
    #[inline]
    pub(crate) fn next_for_read(&mut self) -> Option<(Tag, PartIndex)> {
        if self.reads.waiting().is_empty() || !self.may_read() {
            return None;
        }
        if self.bounce.as_ref().is_some_and(|bounce| bounce.is_landing_short()) {
            return None;
        }
        self.reads.waiting().pop_front()
    }

    /// Queues an RDMA READ of write data.
    #[inline]
    pub(crate) fn queue_read(&mut self, tag: Tag, part: PartIndex, sge: Sge, from: RemoteBuffer) {
        self.reads.take();
        self.liveness.keeps(sge.len);
        let (kind, sges) = (WrKind::ReadData(tag, part), SgeList::one(sge));
        let at = self.sends.queue(kind, SendOp::Read(from), &sges, true, false);
        if let Some(bounce) = &mut self.bounce {
            bounce.read_queued(at);
        }
    }

    // ---- Memory that data passes through (iWARP) -----------------------------------------------

    /// The memory through which the connection's data passes, if any.
    #[inline]
    pub(crate) fn bounce(&self) -> Option<&Bounce> {
        self.bounce.as_deref()
    }

    /// Ensures that the data of a part can land: in the memory that its shard lent, or in room of
    /// the connection's own. False: no room, and the part waits for it.
    #[inline]
    pub(crate) fn may_land(&mut self, tag: Tag, index: PartIndex) -> bool {
        self.bounce.is_none() || self.land(tag, index)
    }

    fn land(&mut self, tag: Tag, index: PartIndex) -> bool {
        let Some(bounce) = &mut self.bounce else { return true };
        let part = &mut self.requests[tag.index()].parts_mut()[wide(index.0)];
        if part.landing().is_some() {
            return true;
        }
        let others_wait = bounce.is_landing_short();
        match bounce.land(part.len()) {
            Some(extent) => {
                part.set_landing(extent);
                return true;
            }
            None if others_wait => self.reads.waiting().push_back((tag, index)),
            None => self.reads.waiting().push_front((tag, index)),
        }
        false
    }

    /// Frees the landing room of a part.
    pub(crate) fn leave_landing(&mut self, tag: Tag, index: PartIndex) {
        let part = &mut self.requests[tag.index()].parts_mut()[wide(index.0)];
        if let (Some(extent), Some(bounce)) = (part.take_landing(), &mut self.bounce) {
            bounce.landed(extent);
        }
    }

    /// Frees all landing room: the QP is destroyed.
    pub(crate) fn leave_landings(&mut self) {
        let Some(bounce) = &mut self.bounce else { return };
        let parts = self.requests.iter_mut().flat_map(Request::parts_mut);
        parts.filter_map(Part::take_landing).for_each(|extent| bounce.landed(extent));
    }

    /// Allocates room of the connection's own for the data of the next WRITE, if the WRITE needs
    /// it. False: no room.
    #[inline]
    pub(crate) fn may_prepare(&mut self, bytes: u32) -> bool {
        self.bounce.as_mut().is_none_or(|bounce| bounce.prepare(bytes))
    }

    /// The WRITE of a prepared extent, if any, is queued at this position.
    #[inline]
    pub(crate) fn prepared_is_sent(&mut self, position: u64) {
        if let Some(bounce) = &mut self.bounce
            && bounce.prepared().is_some()
        {
            bounce.sent(position);
        }
    }

    // ---- Memory that the device may still read -------------------------------------------------

    /// Pins memory of this many bytes, which the WRITE at `position` reads.
    #[inline]
    pub(crate) fn pin(&mut self, position: u64, shard: u16, memory: Segments, bytes: u32) {
        self.liveness.keeps(bytes);
        self.pins.pin(position, shard, memory);
    }

    /// Takes the oldest pinned memory of a WRITE up to `position`, with its shard, to give it back.
    #[inline]
    pub(crate) fn unpin(&mut self, position: u64) -> Option<(u16, Segments)> {
        self.pins.unpin(position)
    }

    /// Takes the oldest pinned memory: the QP is destroyed.
    pub(crate) fn unpin_any(&mut self) -> Option<(u16, Segments)> {
        self.pins.unpin(u64::MAX)
    }

    /// A signaled WR completed. Returns the position up to which memory may be unpinned.
    #[inline]
    pub(crate) fn send_completed(&mut self, is_read: bool) -> Option<u64> {
        let done = self.sends.completed();
        (is_read || self.pins.sends_free()).then_some(done)
    }

    /// A send WR completed without error.
    #[inline]
    pub(crate) fn note_progress(&mut self) {
        self.liveness.completed();
    }

    /// An RDMA READ completed: frees its credit, and the copies of WRITEs before it.
    #[inline]
    pub(crate) fn read_completed(&mut self) {
        self.reads.completed();
        if let Some(bounce) = &mut self.bounce {
            bounce.read_completed();
        }
    }

    // Bytes of our memory that the peer has not taken or filled yet.
    fn kept_bytes(&self) -> u64 {
        let parts = self.requests.iter().flat_map(|request| request.parts());
        self.pins.bytes() + parts.map(Part::awaited_bytes).sum::<u64>()
    }

    /// Whether a barrier should free pinned memory now: where completed sends free nothing, only
    /// barriers bound the pinned memory.
    #[inline]
    pub(crate) fn has_much_pinned(&self) -> bool {
        !self.pins.sends_free() && self.has_much_unfreed()
    }

    fn has_much_unfreed(&self) -> bool {
        match &self.bounce {
            Some(bounce) => bounce.wants_barrier(),
            None => self.pins.len() >= self.requests.len() / 2,
        }
    }

    /// The peer's page to read as a barrier behind pinned memory, unless another completion on its
    /// way will free it, or credits are missing.
    pub(crate) fn wants_barrier(&self) -> Option<KeyedDescriptor> {
        let is_freed = match &self.bounce {
            // Sent extents are no shard's memory: no other connection waits for them.
            Some(bounce) => self.pins.has_barrier() || !bounce.wants_barrier(),
            None => {
                let position = self.pins.needs_barrier()?;
                self.pins.sends_free() && self.sends.credits().will_prove(position)
            }
        };
        if self.is_live() && !is_freed && self.may_read() { self.pins.scratch() } else { None }
    }

    /// Queues a READ of this many bytes that serves as a barrier.
    pub(crate) fn queue_barrier(&mut self, scratch: KeyedDescriptor, bytes: u32) {
        self.pins.barrier_queued();
        self.reads.take();
        let remote = RemoteBuffer { addr: scratch.address, rkey: Rkey(scratch.rkey) };
        let page = self.bounce.as_ref().and_then(|bounce| bounce.barrier_sge());
        let sges = SgeList::one(page.unwrap_or_else(|| self.memory().scratch_sge(bytes)));
        let at = self.sends.queue(WrKind::Barrier, SendOp::Read(remote), &sges, true, false);
        if let Some(bounce) = &mut self.bounce {
            bounce.read_queued(at);
        }
    }

    /// The barrier completed.
    pub(crate) fn barrier_done(&mut self) {
        self.pins.barrier_done();
    }

    /// The self-test named a page of the peer that stays readable, for barriers.
    pub(crate) fn set_peer_scratch(&mut self, scratch: KeyedDescriptor) {
        self.pins.set_scratch(KeyedDescriptor { length: SCRATCH_BYTES, ..scratch });
        self.takes_blocks = matches!(self.params.kind, ConnectionKind::Io { .. });
    }

    // ---- Posts ---------------------------------------------------------------------------------

    /// Whether the connection must join the list to post for: it has WRs to send, and is not on the
    /// list. Marks it as listed. RECVs wait for the next sends.
    #[inline]
    pub(crate) fn joins_list(&mut self) -> bool {
        let joins = !self.is_listed && self.sends.has_queued();
        self.is_listed |= joins;
        joins
    }

    /// Marks the connection as not listed. Returns whether it was listed.
    #[inline]
    pub(crate) fn leave_list(&mut self) -> bool {
        std::mem::take(&mut self.is_listed)
    }

    /// The WRs to post: RECVs first, since an answer lets the peer send the next command.
    #[inline]
    pub(crate) fn posts(&self) -> (Recvs<'_>, &[SendWr]) {
        (self.receives.queued(), self.sends.queued())
    }

    /// The queued WRs were posted.
    #[inline]
    pub(crate) fn posted(&mut self) {
        self.receives.clear();
        self.sends.clear();
    }

    // ---- End -----------------------------------------------------------------------------------

    /// The LOGIN was accepted: assigns the connection to its session and sets the silence that ends
    /// it.
    pub(crate) fn adopt(&mut self, session: SessionIndex, epoch: Epoch, silence: Duration) {
        (self.params.session, self.params.epoch) = (session, epoch);
        self.liveness.is_known();
        self.liveness.set_silence_max(silence);
    }

    /// Makes the connection end at the next check for silent peers. Queued answers are sent before.
    pub(crate) fn expel(&mut self, now: Instant) {
        self.liveness.is_not_trusted(now);
    }

    /// The proof in the self-test is right, or none was due. Returns whether this is the first
    /// proof.
    pub(crate) fn is_known(&mut self) -> bool {
        self.liveness.is_known();
        let is_first = !self.pins.has_scratch();
        is_first && self.params.proof.is_some()
    }

    /// The reason why the connection should end now, if its peer is silent or takes no data.
    pub(crate) fn dead_reason(&mut self, now: Instant) -> Option<&'static str> {
        let waits = self.reads.in_flight() > 0 || self.sends.credits().expects_completion();
        let kept = if self.liveness.judges_pace(waits, now) { self.kept_bytes() } else { 0 };
        if self.liveness.is_stuck(waits, kept, now) {
            return Some("its peer neither takes data nor gives any");
        }
        if self.liveness.is_stranger(now) {
            return Some("it did not prove its key in time");
        }
        self.liveness.is_silent(now).then_some("its initiator is silent")
    }

    /// Excludes a time in which this thread did not run.
    pub(crate) fn forgive(&mut self, paused: Duration) {
        self.liveness.forgive(paused);
    }

    /// Ends the service: no WR is posted any more, and no request asks for resources or is
    /// answered. Lent memory stays lent until the QP is destroyed.
    pub(crate) fn end(&mut self, now: Instant, warn_at: Instant) {
        self.life = Life::Destroying { since: now, warn_at };
        self.sends.end();
        self.receives.clear();
        self.reads.waiting().clear();
        for request in &mut *self.requests {
            let _ = request.step(RequestEvent::Abandon);
        }
    }

    /// Whether none of the connection's resources is in use: its QP is destroyed and no command
    /// executes.
    pub(crate) fn is_gone(&self) -> bool {
        // Control holds no resource of a connection while it works on an admin command (it may park
        // one for any time), and its answer then finds that the connection is gone.
        let is_admin = self.params.kind == ConnectionKind::Admin;
        self.life == Life::Destroyed
            && (is_admin
                || Mutation::EpochOrderBurial.is_on()
                || !self.requests.iter().any(Request::is_executing))
    }
}
