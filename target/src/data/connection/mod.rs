//! [`Connection`]: one QP as the target's data thread sees it, and everything that belongs to it.
//!
//! | file | what it keeps |
//! |---|---|
//! | `params.rs` | what control hands over |
//! | `memory.rs` | the connection's memory |
//! | `layout.rs` | where everything is in that memory |
//! | `receive.rs` | receive buffers: whose data is in them, and when they are posted again |
//! | `arrived.rs` | messages, and where their bytes are |
//! | `admitted.rs` | what is to be done about a command |
//! | `landing.rs` | slots of the cache where messages land |
//! | `send_queue.rs` | send credits, the WRs of this turn, collected responses |
//! | `reads.rs` | credits for RDMA READs |
//! | `ended_memory.rs` | memory of a connection that ended, until its QP is destroyed |
//! | `spare_memory.rs` | memory of ended admin connections, for the next ones |
//! | `pins.rs` | memory that the device may still read |
//! | `bounce.rs` | memory that data passes through (iWARP) |
//! | `liveness.rs` | whether the peer speaks and takes what is sent |
//! | `wr_id.rs` | what a WR was for |
//! | `violation.rs` | why a connection ends |
//!
//! A poll group looks a connection up once for each completion or answer of a shard, and hands it
//! down as `&mut Connection`. What the connection queues is posted at the end of the turn
//! ([`Connection::posts`]).

mod admitted;
mod arrived;
mod bounce;
mod connection_memory;
mod ended_memory;
mod landing;
pub(crate) mod layout;
mod liveness;
mod params;
mod pins;
mod reads;
mod receive;
mod send_queue;
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
use crate::data::part::{Part, PartIndex};
use crate::data::read_ahead::ReadAhead;
use crate::data::request::{Event, InCapsule, Outcome, Payload, Request};
use crate::volume::ids::{ConnectionId, SessionIndex};

pub(crate) use admitted::AdmittedCommand;
use arrived::Arrived;
pub(crate) use arrived::Message;
pub(crate) use bounce::Bounce;
pub use bounce::BounceMemory;
pub use connection_memory::{ConnectionMemory, NoMemory};
pub use ended_memory::EndedMemory;
pub(crate) use landing::Landing;
pub use landing::slots_of_recv;
pub use layout::Layout;
pub use layout::{REPLY_AREA_BYTES, SCRATCH_BYTES};
use liveness::Liveness;
pub use params::{ConnectionParams, ProofDue, progress_max};
use pins::Pins;
use reads::ReadCredits;
use receive::ReceiveBuffers;
pub(crate) use send_queue::INLINE_BYTES;
use send_queue::Responses;
pub(crate) use send_queue::SendQueue;
pub use spare_memory::SpareMemory;
pub(crate) use violation::{Served, Violation};
pub(crate) use wr_id::WrKind;

/// A stranger has so long from the accept until its LOGIN is accepted, whatever it says.
pub(crate) const STRANGER_TIME: Duration = Duration::from_secs(5);

/// How far a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Life {
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

/// Where a connection is: its name, and its QP at a CQ of the poll group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpPlace {
    /// Its name.
    pub(crate) id: ConnectionId,
    /// Index of its poller.
    pub(crate) poller: usize,
    /// Its QP there, while it lives.
    pub(crate) qp: QpIndex,
}

/// One QP and everything that belongs to it. See the module.
#[derive(Debug)]
pub(crate) struct Connection {
    place: QpPlace,
    params: ConnectionParams,
    life: Life,
    // It is in the turn's list of connections to post for.
    is_listed: bool,
    // Block commands are in order: it is an I/O connection whose self-test was answered.
    takes_blocks: bool,
    liveness: Liveness,
    // By tag.
    requests: Box<[Request]>,
    receives: ReceiveBuffers,
    sends: SendQueue,
    reads: ReadCredits,
    pins: Pins,
    // Boxed: only iWARP has one.
    bounce: Option<Box<Bounce>>,
    read_ahead: ReadAhead,
}

impl Connection {
    /// A connection whose QP was just attached. `sends_prove` says that a completed WRITE proves
    /// that the peer has the bytes (not so on iWARP). Messages land in the slots of `landing`, if
    /// there are some. Every receive buffer is queued.
    pub(crate) fn new(
        place: QpPlace,
        mut params: ConnectionParams,
        landing: Option<Landing>,
        sends_prove: bool,
        now: Instant,
    ) -> Self {
        let layout = *params.memory.layout();
        let (tags, send_wrs) = (layout.depth().tags(), layout.send_wrs());
        let is_stranger = params.session == SessionIndex::NONE;
        let due = params.proof.as_ref().map(|due| due.within);
        let prove_by = is_stranger.then_some(STRANGER_TIME).or(due).map(|within| now + within);
        let lists = params.features.has(Features::CAPSULE_LISTS);
        let receives = ReceiveBuffers::new(&params.memory, landing);
        // Without one, the data of such a connection has no place, and its commands end it.
        let bounce = params.bounce.take().and_then(|m| Bounce::new(m, wide(send_wrs)).ok());
        Self {
            place,
            life: Life::Live,
            is_listed: false,
            takes_blocks: false,
            liveness: Liveness::new(prove_by, params.progress_max, now),
            requests: (0..tags).map(|_| Request::new()).collect(),
            receives,
            sends: SendQueue::new(send_wrs, tags, lists),
            reads: ReadCredits::new(params.reads_out, tags),
            pins: Pins::new(wide(send_wrs), sends_prove),
            bounce: bounce.map(Box::new),
            read_ahead: ReadAhead::default(),
            params,
        }
    }

    /// Its name.
    #[inline]
    pub(crate) fn id(&self) -> ConnectionId {
        self.place.id
    }

    /// Index of its poller.
    #[inline]
    pub(crate) fn poller(&self) -> usize {
        self.place.poller
    }

    /// Its QP, while it lives.
    #[inline]
    pub(crate) fn qp(&self) -> QpIndex {
        self.place.qp
    }

    /// What control handed over.
    #[inline]
    pub(crate) fn params(&self) -> &ConnectionParams {
        &self.params
    }

    /// What control handed over, to be given back.
    pub(crate) fn into_params(self) -> ConnectionParams {
        let bounce = self.bounce.map(|bounce| bounce.into_memory());
        ConnectionParams { bounce, ..self.params }
    }

    /// Whether it still serves.
    #[inline]
    pub(crate) fn is_live(&self) -> bool {
        self.life == Life::Live
    }

    /// How far it is.
    pub(crate) fn life_mut(&mut self) -> &mut Life {
        &mut self.life
    }

    /// Its memory.
    #[inline]
    pub(crate) fn memory(&self) -> &ConnectionMemory {
        &self.params.memory
    }

    #[inline]
    fn layout(&self) -> &Layout {
        self.params.memory.layout()
    }

    /// The request with this tag.
    #[inline]
    pub(crate) fn request(&self, tag: Tag) -> &Request {
        &self.requests[tag.index()]
    }

    /// The request with this tag.
    #[inline]
    pub(crate) fn request_mut(&mut self, tag: Tag) -> &mut Request {
        &mut self.requests[tag.index()]
    }

    /// The command of the request with this tag.
    ///
    /// # Errors
    /// A bug: there is none.
    #[inline]
    pub(crate) fn command(&self, tag: Tag) -> Result<&CommandCapsule, Violation> {
        self.request(tag).command().ok_or(Violation("a request without its command"))
    }

    /// What control handed over with it, and the request with this tag.
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

    /// Sequential readers.
    #[inline]
    pub(crate) fn read_ahead_mut(&mut self) -> &mut ReadAhead {
        &mut self.read_ahead
    }

    // ---- Messages and commands -----------------------------------------------------------------

    /// A message of so many bytes came in that receive buffer. Its commands are taken with
    /// [`Self::next_command`]; then the buffer is released with [`Self::release_message`].
    ///
    /// # Errors
    /// It is longer than its buffer.
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

    /// The message that [`Self::begin_message`] took, for its commands. Not its result: the fields
    /// of a value in a `Result` share registers, and each command would pay for that.
    #[inline(always)]
    pub(crate) fn message(&self, buffer: u16, bytes: u32) -> Message {
        let depth = self.layout().depth();
        Message::new(CommandList::new(bytes, self.params.features, depth), buffer)
    }

    /// The next command of a message; `None` behind the last.
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

    /// Every command of the message was copied out. The data of some may have to wait.
    #[inline]
    pub(crate) fn release_message(&mut self, message: &Message) {
        if message.is_held() {
            self.receives.release(message.buffer());
        }
    }

    /// Takes the command that [`Self::next_command`] gave last of that message. Returns what is to
    /// be done about it.
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
            return Err(Violation("in-capsule data above what was agreed"));
        }
        let message = self.receives.messages();
        if !self.requests[command.tag.index()].may_start_in(message) {
            return Err(Violation("tag used twice"));
        }
        let data = (command.in_capsule_bytes > 0).then(|| self.arrived().data_of(of, command));
        let request = &mut self.requests[command.tag.index()];
        let _ = request.step(Event::Command { command, message, data });
        if data.is_some() {
            // What holds the buffer for the message goes on to the data of its last command.
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

    /// Where a command's in-capsule data is, as long as it is there: all of it in one piece.
    #[inline(always)]
    pub(crate) fn data_place(&self, tag: Tag) -> Option<(&Region, usize)> {
        self.request(tag).data().map(|data| self.place_of_data(data))
    }

    /// Where in-capsule data is.
    #[inline(always)]
    pub(crate) fn place_of_data(&self, data: InCapsule) -> (&Region, usize) {
        self.arrived().place_of(data)
    }

    /// Takes the slot that in-capsule data fills, and puts a fresh one in its place, each by its
    /// offset in the arena. The data is used by that. `None`: it fills none.
    #[inline(always)]
    pub(crate) fn take_slot(&mut self, data: InCapsule, fresh: usize) -> Option<usize> {
        if data.slot == InCapsule::NO_SLOT {
            return None;
        }
        self.receives.exchange(data, fresh)
    }

    /// In-capsule data that is no request's any more was used.
    #[inline(always)]
    pub(crate) fn data_used(&mut self, data: InCapsule) {
        self.receives.release(data.buffer);
    }

    /// The slots where its messages landed, by their offsets in the arena. Its QP is destroyed, and
    /// no command executes.
    pub(crate) fn take_slots(&mut self) -> Vec<usize> {
        self.receives.take_slots()
    }

    /// The in-capsule data of a command, if it has any, was used or is not needed.
    #[inline]
    pub(crate) fn release_data(&mut self, tag: Tag) {
        if let Some(data) = self.requests[tag.index()].take_data() {
            self.receives.release(data.buffer);
        }
    }

    /// A command has its outcome, and its in-capsule data is not needed any more.
    #[inline(always)]
    pub(crate) fn conclude(&mut self, tag: Tag, outcome: Outcome) {
        let request = &mut self.requests[tag.index()];
        let _ = request.step(Event::Outcome(outcome));
        if let Some(data) = request.take_data() {
            self.receives.release(data.buffer);
        }
    }

    /// A command that has no data to send back is answered well, and its in-capsule data is not
    /// needed any more. Returns what control handed over, and the request.
    #[inline(always)]
    pub(crate) fn acknowledge(&mut self, tag: Tag) -> (&ConnectionParams, &mut Request) {
        let request = &mut self.requests[tag.index()];
        let _ = request.step(Event::Answered);
        if let Some(data) = request.take_data() {
            self.receives.release(data.buffer);
        }
        (&self.params, request)
    }

    // ---- Answers -------------------------------------------------------------------------------

    /// Whether the WRITE of a READ's data carries the answer, too.
    #[inline]
    pub(crate) fn has_immediates(&self) -> bool {
        self.params.features.has(Features::WRITE_WITH_IMM)
    }

    /// Whether capsules and data have digests.
    #[inline]
    pub(crate) fn has_digests(&self) -> bool {
        self.params.features.has(Features::DIGEST)
    }

    /// Its send queue, for credits and for commands that wait for them.
    #[inline]
    pub(crate) fn sends(&self) -> &SendQueue {
        &self.sends
    }

    /// Its send queue.
    #[inline]
    pub(crate) fn sends_mut(&mut self) -> &mut SendQueue {
        &mut self.sends
    }

    /// The command that has waited longest for send credits, or for room to send from, where there
    /// are enough for its next step.
    #[inline]
    pub(crate) fn next_for_credits(&mut self) -> Option<Tag> {
        // Of a READ: its data, its trailer where that goes apart, and its answer.
        let step = if self.has_digests() { 3 } else { 2 };
        if !self.sends.has_waiting() || self.sends.free() < step {
            return None;
        }
        if self.bounce.as_ref().is_some_and(|bounce| bounce.is_outgoing_short()) {
            return None;
        }
        self.sends.next_waiting()
    }

    /// Queues the WRITE of a READ's data, lent by a shard. If it `ends` the lent memory, that is
    /// pinned with [`Self::pin`] at the position returned.
    #[inline(always)]
    pub(crate) fn queue_lent(
        &mut self,
        tag: Tag,
        sges: &SgeList,
        remote: RemoteBuffer,
        immediate: Option<Immediate>,
        ends: bool,
    ) -> u64 {
        // Without a scratch to read, only a signaled WR can prove that the memory is free.
        let must_signal = ends && !self.pins.has_scratch();
        self.sends.queue_write(tag, sges, remote, immediate, must_signal)
    }

    /// Collects a response, for which there is a credit. True: the list of responses is full, and
    /// must be queued with [`Self::queue_responses`].
    #[inline(always)]
    pub(crate) fn add_response(&mut self, response: &ResponseCapsule) -> bool {
        let Responses { first, count } = self.sends.add_response(response.tag);
        self.memory().write_response(first, count, response, self.has_digests());
        self.sends.responses_are_full()
    }

    /// Queues the SEND of the responses collected. Returns how many there are.
    #[inline(always)]
    pub(crate) fn queue_responses(&mut self) -> usize {
        let Some(Responses { first, count }) = self.sends.take_responses() else { return 0 };
        let sges = SgeList::one(self.memory().responses_sge(first, count));
        self.sends.queue(WrKind::Answer(first), SendOp::Send, &sges, false, true);
        count
    }

    /// Writes the words of control into the reply area of the tag. `None`: they are too long for
    /// it, or for the peer's buffer.
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

    /// A part waits for a READ credit or a send credit.
    pub(crate) fn wait_for_read(&mut self, tag: Tag, part: PartIndex) {
        self.reads.waiting().push_back((tag, part));
    }

    /// The part that has waited longest for a READ credit, or for room to land, where there is one.
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

    /// Queues a RDMA READ of write data.
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

    /// The memory that its data passes through, where it has some.
    #[inline]
    pub(crate) fn bounce(&self) -> Option<&Bounce> {
        self.bounce.as_deref()
    }

    /// Sees to it that the data of a part has where to land, which is the memory that its shard
    /// lent, or room of the connection's own. False: there is none, and the part waits for it.
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

    /// What a part had to land in is free.
    pub(crate) fn leave_landing(&mut self, tag: Tag, index: PartIndex) {
        let part = &mut self.requests[tag.index()].parts_mut()[wide(index.0)];
        if let (Some(extent), Some(bounce)) = (part.take_landing(), &mut self.bounce) {
            bounce.landed(extent);
        }
    }

    /// The QP is destroyed: nothing lands any more.
    pub(crate) fn leave_landings(&mut self) {
        let Some(bounce) = &mut self.bounce else { return };
        let parts = self.requests.iter_mut().flat_map(Request::parts_mut);
        parts.filter_map(Part::take_landing).for_each(|extent| bounce.landed(extent));
    }

    /// Sees to it that the data of the next WRITE has a place of the connection's own to be sent
    /// from, if it needs one. False: there is none.
    #[inline]
    pub(crate) fn may_prepare(&mut self, bytes: u32) -> bool {
        self.bounce.as_mut().is_none_or(|bounce| bounce.prepare(bytes))
    }

    /// The WRITE of what was prepared, if anything was, is queued at that position.
    #[inline]
    pub(crate) fn prepared_is_sent(&mut self, position: u64) {
        if let Some(bounce) = &mut self.bounce
            && bounce.prepared().is_some()
        {
            bounce.sent(position);
        }
    }

    // ---- Memory that the device may still read -------------------------------------------------

    /// Pins memory, of so many bytes, that the WRITE at `position` reads.
    #[inline]
    pub(crate) fn pin(&mut self, position: u64, shard: u16, memory: Segments, bytes: u32) {
        self.liveness.keeps(bytes);
        self.pins.pin(position, shard, memory);
    }

    /// The oldest pinned memory of a WRITE up to `position`, with its shard: it goes back.
    #[inline]
    pub(crate) fn unpin(&mut self, position: u64) -> Option<(u16, Segments)> {
        self.pins.unpin(position)
    }

    /// The oldest pinned memory of all: the QP is destroyed.
    pub(crate) fn unpin_any(&mut self) -> Option<(u16, Segments)> {
        self.pins.unpin(u64::MAX)
    }

    /// A signaled WR completed. Returns the position up to which memory may be unpinned.
    #[inline]
    pub(crate) fn send_completed(&mut self, is_read: bool) -> Option<u64> {
        let done = self.sends.completed();
        (is_read || self.pins.sends_prove()).then_some(done)
    }

    /// A send WR completed without error.
    #[inline]
    pub(crate) fn note_progress(&mut self) {
        self.liveness.completed();
    }

    /// A RDMA READ completed: its credit is free, and what was copied and sent before it has left.
    #[inline]
    pub(crate) fn read_completed(&mut self) {
        self.reads.completed();
        if let Some(bounce) = &mut self.bounce {
            bounce.read_completed();
        }
    }

    // Bytes of our memory that the peer has not taken yet, or not filled.
    fn kept_bytes(&self) -> u64 {
        let parts = self.requests.iter().flat_map(|request| request.parts());
        self.pins.bytes() + parts.map(Part::awaited_bytes).sum::<u64>()
    }

    /// Whether memory should be seen to come back: where sends prove nothing, nothing else bounds
    /// what is pinned.
    #[inline]
    pub(crate) fn has_much_pinned(&self) -> bool {
        !self.pins.sends_prove() && self.has_much_unproven()
    }

    fn has_much_unproven(&self) -> bool {
        match &self.bounce {
            Some(bounce) => bounce.wants_proof(),
            None => self.pins.len() >= self.requests.len() / 2,
        }
    }

    /// The page of the peer to read as a proof that what is pinned was sent, unless another
    /// completion on its way will prove it, or credits are missing.
    pub(crate) fn wants_proof(&self) -> Option<KeyedDescriptor> {
        let proven = match &self.bounce {
            // What was sent is no shard's memory: nobody else waits for it.
            Some(bounce) => self.pins.is_proving() || !bounce.wants_proof(),
            None => {
                let position = self.pins.needs_proof()?;
                self.pins.sends_prove() && self.sends.credits().will_prove(position)
            }
        };
        if self.is_live() && !proven && self.may_read() { self.pins.scratch() } else { None }
    }

    /// Queues a READ of so many bytes that only proves.
    pub(crate) fn queue_proof(&mut self, scratch: KeyedDescriptor, bytes: u32) {
        self.pins.proof_queued();
        self.reads.take();
        let remote = RemoteBuffer { addr: scratch.address, rkey: Rkey(scratch.rkey) };
        let page = self.bounce.as_ref().and_then(|bounce| bounce.proof_sge());
        let sges = SgeList::one(page.unwrap_or_else(|| self.memory().scratch_sge(bytes)));
        let at = self.sends.queue(WrKind::Proof, SendOp::Read(remote), &sges, true, false);
        if let Some(bounce) = &mut self.bounce {
            bounce.read_queued(at);
        }
    }

    /// The proof READ completed.
    pub(crate) fn proof_done(&mut self) {
        self.pins.proof_done();
    }

    /// The self-test named a page of the peer that stays readable.
    pub(crate) fn set_peer_scratch(&mut self, scratch: KeyedDescriptor) {
        self.pins.set_scratch(KeyedDescriptor { length: SCRATCH_BYTES, ..scratch });
        self.takes_blocks = matches!(self.params.kind, ConnectionKind::Io { .. });
    }

    // ---- Posts ---------------------------------------------------------------------------------

    /// Whether it must be put on the list of connections to post for: it has something to send, and
    /// is not on the list. It is from now on. RECVs wait for the next sends.
    #[inline]
    pub(crate) fn joins_list(&mut self) -> bool {
        let joins = !self.is_listed && self.sends.has_queued();
        self.is_listed |= joins;
        joins
    }

    /// It left the list of connections to post for. Whether it was there.
    #[inline]
    pub(crate) fn leave_list(&mut self) -> bool {
        std::mem::take(&mut self.is_listed)
    }

    /// What to post: RECVs first, since an answer lets the peer send the next command.
    #[inline]
    pub(crate) fn posts(&self) -> (Recvs<'_>, &[SendWr]) {
        (self.receives.queued(), self.sends.queued())
    }

    /// What was queued is posted.
    #[inline]
    pub(crate) fn posted(&mut self) {
        self.receives.clear();
        self.sends.clear();
    }

    // ---- Its end -------------------------------------------------------------------------------

    /// Its LOGIN was accepted: it is of that session, and ends when it is silent for longer than
    /// this.
    pub(crate) fn adopt(&mut self, session: SessionIndex, epoch: Epoch, silence: Duration) {
        (self.params.session, self.params.epoch) = (session, epoch);
        self.liveness.is_known();
        self.liveness.set_silence_max(silence);
    }

    /// It ends at the next look for silent peers. The answers that are queued go out before.
    pub(crate) fn expel(&mut self, now: Instant) {
        self.liveness.is_not_trusted(now);
    }

    /// The proof of its self-test is right, or need not be. Returns whether this is the first time.
    pub(crate) fn is_known(&mut self) -> bool {
        self.liveness.is_known();
        let is_first = !self.pins.has_scratch();
        is_first && self.params.proof.is_some()
    }

    /// Why the connection should end by now, if its peer is silent or takes nothing.
    pub(crate) fn dead_reason(&mut self, now: Instant) -> Option<&'static str> {
        let waits = self.reads.in_flight() > 0 || self.sends.credits().expects_completion();
        let kept = if self.liveness.judges_pace(waits, now) { self.kept_bytes() } else { 0 };
        if self.liveness.is_stuck(waits, kept, now) {
            return Some("its peer neither takes data nor gives any");
        }
        if self.liveness.is_stranger(now) {
            return Some("it has not proven in time who it is");
        }
        self.liveness.is_silent(now).then_some("its initiator is silent")
    }

    /// Does not count a time in which this thread did not run.
    pub(crate) fn forgive(&mut self, paused: Duration) {
        self.liveness.forgive(paused);
    }

    /// It serves no more: nothing is posted, and no request asks for anything more or is answered.
    /// What was lent stays lent until the QP is destroyed.
    pub(crate) fn end(&mut self, now: Instant, warn_at: Instant) {
        self.life = Life::Destroying { since: now, warn_at };
        self.sends.end();
        self.receives.clear();
        self.reads.waiting().clear();
        for request in &mut *self.requests {
            let _ = request.step(Event::Abandon);
        }
    }

    /// Whether nothing of it is in use any more: its QP is destroyed and nothing executes.
    pub(crate) fn is_gone(&self) -> bool {
        // Control holds nothing of a connection while it works on an admin command (it may park one
        // indefinitely), and its answer finds the connection gone.
        let is_admin = self.params.kind == ConnectionKind::Admin;
        self.life == Life::Destroyed
            && (is_admin
                || Mutation::EpochOrderBurial.is_on()
                || !self.requests.iter().any(Request::is_executing))
    }
}
