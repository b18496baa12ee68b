//! [`Request`]: one command inside the target, as a state machine without I/O.
//!
//! [`Request::step`] takes an [`Event`] and returns the [`Action`] that it calls for. Nothing else
//! changes the state of a request. The states carry the names of what is waited for:
//!
//! ```text
//! Free -> Admitted -+-> AwaitsLimit | AwaitsAccess -> Admitted
//!                   +-> AwaitsParts -----------------------------+-> AwaitsCredits -> Answered
//!                   +-> AwaitsStore -----------------------------+                      |
//!                   +-> AwaitsFlush -> AwaitsSync ---------------+                      v
//!                   +-> AwaitsHolds -> AwaitsChange -> AwaitsUnholds                 Admitted
//!                   +-> AwaitsZeroing ---------------------------+
//!                   '-> AwaitsControl (admin) -------------------'
//! ```
//!
//! A command that moves data through the cache is cut into [`Part`]s, one for each stripe. A part
//! goes its own way ([`PartState`]), so a part never holds memory while it waits for the memory of
//! another part:
//!
//! ```text
//! READ:   AwaitsMemory -> AwaitsSend -> Done
//! WRITE:  AwaitsMemory -> AwaitsData -> AwaitsStore -> Done
//! ```
//!
//! Invariants:
//! - A failure is answered only when no shard works on the command any more. The first failure
//!   counts.
//! - `Answered` means: the response is posted, or will be posted at the end of the turn. The peer
//!   may use the tag again at once. The memory that the answer is sent from belongs to the
//!   connection by then, until the peer has it.
//! - After [`Event::Abandon`] (the connection ended) a request asks for nothing more and is never
//!   answered. Memory that a shard lends to it afterwards goes back at once ([`Action::GiveBack`]).

#[cfg(test)]
mod tests;

use nix::errno::Errno;
use rblk_protocol::{CommandCapsule, Opcode, Status};

use crate::cache::message::Changed;
use crate::cache::{JobId, Segments};
use crate::data::part::{Part, PartIndex, PartState, Parts};
use crate::volume::ids::VolumeIndex;
use crate::volume::timing::Timing;

/// What a request waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// No command came with this tag yet.
    Free,
    /// A command came; nothing was asked for it yet.
    Admitted,
    /// Its volume or its host is over a limit. Nothing was asked for it yet.
    AwaitsLimit,
    /// No write of its volume may begin now. Nothing was asked for it yet.
    AwaitsAccess,
    /// Its parts are on their way: see [`PartState`].
    AwaitsParts,
    /// The store writes the data of a command that has no parts.
    AwaitsStore,
    /// Every shard hands its dirty blocks to the store (FLUSH).
    AwaitsFlush,
    /// The store makes durable what it has (FLUSH).
    AwaitsSync,
    /// The shards keep others off the range, one shard after the other.
    AwaitsHolds,
    /// The store discards or zeroes the range.
    AwaitsChange,
    /// The shards hear of the change and let others in again.
    AwaitsUnholds,
    /// A range of a memory volume is zeroed, a step in each turn.
    AwaitsZeroing,
    /// Control works on it (admin).
    AwaitsControl,
    /// The outcome is known; the answer needs send credits.
    AwaitsCredits,
    /// Answered.
    Answered,
}

/// The data that goes back with an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Payload {
    /// Only a response.
    None,
    /// Data straight from a memory volume.
    Memory {
        /// First byte in the volume.
        offset: usize,
        /// Bytes.
        len: u32,
    },
    /// Zeros.
    Zeros {
        /// Bytes.
        len: u32,
    },
    /// The reply area of the tag (admin).
    Reply {
        /// Bytes.
        len: u32,
    },
}

/// How a command ended, as the peer will be told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Outcome {
    /// Status of the response.
    pub(crate) status: Status,
    /// Value of the response.
    pub(crate) value: u32,
    /// Data of the answer.
    pub(crate) payload: Payload,
}

impl Outcome {
    /// Success, without data.
    pub(crate) const OK: Self = Self::of(Status::Ok);

    /// A status, without data.
    pub(crate) const fn of(status: Status) -> Self {
        Self { status, value: 0, payload: Payload::None }
    }

    /// Success, with data.
    pub(crate) const fn with(payload: Payload) -> Self {
        Self { status: Status::Ok, value: 0, payload }
    }
}

/// Where the in-capsule data of a command is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct InCapsule {
    /// The receive buffer.
    pub(crate) buffer: u16,
    /// It is in a slot of the cache, not in the memory of the buffer.
    pub(crate) landed: bool,
    /// The place, in its RECV, of the slot that it fills; [`Self::NO_SLOT`] if it fills none.
    pub(crate) slot: u8,
    /// First byte in that memory.
    pub(crate) offset: usize,
}

impl InCapsule {
    /// The data fills no slot of the cache.
    pub(crate) const NO_SLOT: u8 = u8::MAX;
}

/// The bytes of a volume that a command names.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Span {
    /// The volume.
    pub(crate) volume: VolumeIndex,
    /// First byte.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// A range that a shard holds for a discard or zeroing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HeldRange {
    /// The shard.
    pub(crate) shard: u16,
    /// The name of the hold at that shard.
    pub(crate) job: JobId,
}

/// What happened to a request.
#[derive(Debug)]
pub(crate) enum Event<'a> {
    /// A command came with this tag, in message number `message`. Only where
    /// [`Request::may_start`].
    Command {
        /// The command.
        command: &'a CommandCapsule,
        /// Number of the message.
        message: u64,
        /// Its in-capsule data, if it has any.
        data: Option<InCapsule>,
    },
    /// It has to wait for a limit before it begins.
    OverLimit,
    /// It has to wait until writes of its volume may begin.
    WritesHeld,
    /// It has waited for that, and may begin.
    MayBegin,
    /// The command gets one more part.
    Part(Part),
    /// A shard was asked and will answer, for the command or one of its parts.
    Asked,
    /// The own shard's store writes the data of a command without parts.
    StoreAsked,
    /// The store wrote that data well.
    Stored,
    /// Every shard will be asked for its dirty blocks.
    FlushBegan,
    /// The store will be asked to make everything durable.
    SyncBegan,
    /// The shards will be asked to hold the range.
    HoldsBegan,
    /// The store will be asked to discard or zero the range.
    ChangeBegan,
    /// A memory volume is being zeroed.
    ZeroingBegan,
    /// The range of a memory volume is zero.
    Zeroed,
    /// Control has the command.
    Forwarded,
    /// Control answered an abandoned command.
    ControlDone,
    /// Something happened to one of its parts.
    OfPart(PartIndex, PartEvent),
    /// A shard holds the range.
    Held(HeldRange),
    /// Every shard holds the range.
    AllHeld,
    /// A shard did what it was asked for, or could not.
    Done(PartIndex, Result<(), Errno>),
    /// The outcome is known.
    Outcome(Outcome),
    /// The answer is queued.
    Answered,
    /// The connection ended.
    Abandon,
}

/// What happened to a part of a request.
#[derive(Debug)]
pub(crate) enum PartEvent {
    /// The own shard has the bytes of a part of a READ.
    Hit(Segments),
    /// A shard lent the bytes of a part of a READ, or could not.
    Lent(Result<Segments, Errno>),
    /// A shard that was asked reserved memory for a part of a WRITE.
    Reserved(JobId, Segments),
    /// The own shard reserved memory for a part of a WRITE at once.
    ReservedNow(JobId, Segments),
    /// The data of a part goes straight to a memory volume.
    NeedsNoMemory,
    /// A RDMA READ of so many bytes was posted.
    ReadPosted(u32),
    /// A RDMA READ completed.
    ReadDone,
    /// The in-capsule data was copied out.
    Copied,
    /// The shard has the data and will answer when it is written.
    WriteAsked,
    /// The data is not what was sent: it goes nowhere.
    Mismatched,
    /// The data is where it belongs: no shard has to be asked.
    WrittenNow,
    /// A WRITE of so many bytes was queued for a part of a READ.
    Sent(u32),
}

/// What an event calls for. Plain data: what a part owns stays in the part, until the caller takes
/// it ([`Part::take_memory`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "an action that is not carried out leaves the command unanswered"]
pub(crate) enum Action {
    /// Nothing: something else is waited for.
    Wait,
    /// Begin the command: look at it as if it had just come.
    Begin,
    /// The data of a part may come: its memory is there.
    Fetch(PartIndex),
    /// The data of a part is all here: it goes where it belongs.
    Place,
    /// Parts of a READ are there: send what credits allow.
    Send,
    /// All of a part of a READ is queued to be sent: take its memory, and pin it until the peer has
    /// the bytes.
    Pin,
    /// All shards have handed over their dirty blocks: make the store durable.
    Sync,
    /// Ask this shard to hold the range.
    Hold(u16),
    /// Every shard holds the range: change the store.
    Change,
    /// End the holds ([`Request::take_holds`]).
    Unhold(Changed),
    /// Answer with this status.
    Finish(Status),
    /// The connection ended: take what the shard lent or reserved for a part, and give it back.
    GiveBack(PartIndex),
    /// The event cannot happen in this state: a bug, or a device that completes what was never
    /// posted.
    Impossible,
}

/// One command inside the target, found by its tag.
#[derive(Debug)]
pub(crate) struct Request {
    state: State,
    abandoned: bool,
    // Answers of shards that will still come.
    pending: u16,
    command: Option<CommandCapsule>,
    // Until the data was used.
    data: Option<InCapsule>,
    message: u64,
    span: Span,
    outcome: Outcome,
    holds: Vec<HeldRange>,
    parts: Parts,
    timing: Timing,
}

impl Request {
    /// A tag without a command.
    pub(crate) fn new() -> Self {
        Self {
            state: State::Free,
            abandoned: false,
            pending: 0,
            command: None,
            data: None,
            message: 0,
            span: Span::default(),
            outcome: Outcome::OK,
            holds: Vec::new(),
            parts: Parts::default(),
            timing: Timing::default(),
        }
    }

    /// When it came, and what it waited for.
    #[inline]
    pub(crate) fn timing(&mut self) -> &mut Timing {
        &mut self.timing
    }

    /// Whether a new command with this tag is in order: the command before it was answered, and in
    /// an earlier message, since the peer cannot have the answer to a command of this message.
    #[inline]
    pub(crate) fn may_start_in(&self, message: u64) -> bool {
        self.is_answered() && self.message != message
    }

    /// Whether no command waits for its answer.
    #[inline]
    pub(crate) fn is_answered(&self) -> bool {
        matches!(self.state, State::Free | State::Answered)
    }

    /// Whether a shard or control still works on it.
    pub(crate) fn is_executing(&self) -> bool {
        self.pending > 0 || self.state == State::AwaitsControl
    }

    /// Whether a shard still works on it, or holds a range for it.
    pub(crate) fn has_shards(&self) -> bool {
        self.pending > 0 || !self.holds.is_empty()
    }

    /// Whether it is a command that may still change a volume.
    pub(crate) fn may_change(&self, volume: VolumeIndex) -> bool {
        use State::{
            AwaitsChange, AwaitsHolds, AwaitsParts, AwaitsStore, AwaitsUnholds, AwaitsZeroing,
        };
        let writes =
            matches!(self.opcode(), Some(Opcode::Write | Opcode::Discard | Opcode::WriteZeroes));
        let is_begun = match self.state {
            AwaitsParts | AwaitsStore | AwaitsHolds | AwaitsChange | AwaitsUnholds
            | AwaitsZeroing => !self.abandoned,
            _ => false,
        };
        writes && self.span.volume == volume && (is_begun || self.has_shards())
    }

    /// Whether it is a command that was looked at and waits to begin; or waited, if its connection
    /// ended.
    pub(crate) fn waits_to_begin(&self) -> bool {
        matches!(self.state, State::AwaitsLimit | State::AwaitsAccess)
    }

    /// Whether it waits for a limit, or did when its connection ended.
    pub(crate) fn awaits_limit(&self) -> bool {
        self.state == State::AwaitsLimit
    }

    /// Whether parts of it may be sent.
    #[inline]
    pub(crate) fn awaits_parts(&self) -> bool {
        self.state == State::AwaitsParts
    }

    /// Whether its answer waits for send credits.
    pub(crate) fn awaits_credits(&self) -> bool {
        self.state == State::AwaitsCredits
    }

    /// Whether control works on it.
    pub(crate) fn awaits_control(&self) -> bool {
        self.state == State::AwaitsControl
    }

    /// The command.
    #[inline]
    pub(crate) fn command(&self) -> Option<&CommandCapsule> {
        self.command.as_ref()
    }

    /// The opcode of the command.
    #[inline]
    pub(crate) fn opcode(&self) -> Option<Opcode> {
        self.command.as_ref().map(|command| command.opcode)
    }

    /// Where its in-capsule data is, until [`Self::take_data`].
    #[inline]
    pub(crate) fn data(&self) -> Option<InCapsule> {
        self.data
    }

    /// Its in-capsule data was used, or is not needed: the receive buffer is free.
    #[inline]
    pub(crate) fn take_data(&mut self) -> Option<InCapsule> {
        self.data.take()
    }

    /// Keeps in-capsule data that [`Self::take_data`] gave, and that could not be used yet.
    pub(crate) fn keep_data(&mut self, data: InCapsule) {
        self.data = Some(data);
    }

    /// The bytes that it names were checked against the volume. No event: it says nothing of what
    /// is waited for.
    #[inline(always)]
    pub(crate) fn names(&mut self, span: Span) {
        self.span = span;
    }

    /// The bytes that it names.
    #[inline]
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// How it ended, or what failed so far.
    #[inline]
    pub(crate) fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// Its parts.
    #[inline]
    pub(crate) fn parts(&self) -> &[Part] {
        self.parts.as_slice()
    }

    /// Its parts, for what a part owns: memory, room to land in.
    #[inline]
    pub(crate) fn parts_mut(&mut self) -> &mut [Part] {
        self.parts.as_mut_slice()
    }

    /// The first part of a READ that waits to be sent, and whether it is the last of all.
    #[inline]
    pub(crate) fn next_to_send(&self) -> Option<(PartIndex, bool)> {
        let (first, is_only) = self.parts.first_in(PartState::AwaitsSend)?;
        Some((first, is_only && self.pending == 0 && self.outcome.status == Status::Ok))
    }

    /// Whether a READ that failed can be answered: no part waits to be sent or for a shard.
    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.pending == 0 && self.outcome.status != Status::Ok
    }

    /// The ranges that shards hold for it, of which none is left here. The list comes back by
    /// [`Self::reuse_holds`].
    pub(crate) fn take_holds(&mut self) -> Vec<HeldRange> {
        std::mem::take(&mut self.holds)
    }

    /// Keeps the memory of the list for the next command.
    pub(crate) fn reuse_holds(&mut self, mut list: Vec<HeldRange>) {
        list.clear();
        self.holds = list;
    }

    /// Takes an event, and says what it calls for. The only writer of the state.
    #[inline(always)]
    pub(crate) fn step(&mut self, event: Event<'_>) -> Action {
        match event {
            Event::Command { command, message, data } => self.start(command, message, data),
            Event::OverLimit => self.enter(State::AwaitsLimit),
            Event::WritesHeld => self.enter(State::AwaitsAccess),
            Event::MayBegin if self.waits_to_begin() && !self.abandoned => {
                self.state = State::Admitted;
                Action::Begin
            }
            Event::MayBegin => Action::Impossible,
            Event::Part(part) => {
                self.state = State::AwaitsParts;
                self.parts.push(part);
                Action::Wait
            }
            Event::Asked => {
                self.pending += 1;
                Action::Wait
            }
            Event::StoreAsked => {
                self.pending += 1;
                self.enter(State::AwaitsStore)
            }
            Event::Stored => {
                debug_assert!(self.state == State::AwaitsStore);
                self.answered_by_shard();
                self.finish_if_alone()
            }
            Event::FlushBegan => self.enter(State::AwaitsFlush),
            Event::SyncBegan => self.enter(State::AwaitsSync),
            Event::HoldsBegan => {
                self.state = State::AwaitsHolds;
                Action::Hold(0)
            }
            Event::ChangeBegan => self.enter(State::AwaitsChange),
            Event::ZeroingBegan => {
                self.pending += 1;
                self.enter(State::AwaitsZeroing)
            }
            Event::Forwarded => self.enter(State::AwaitsControl),
            Event::ControlDone => self.enter(State::Free),
            Event::OfPart(part, event) => self.step_part(part, event),
            Event::Held(held) => self.on_held(held),
            Event::AllHeld => {
                self.state = State::AwaitsChange;
                Action::Change
            }
            Event::Zeroed => self.on_done(PartIndex::FIRST, Ok(())),
            Event::Done(part, result) => self.on_done(part, result),
            Event::Outcome(outcome) => {
                self.outcome = outcome;
                self.enter(State::AwaitsCredits)
            }
            Event::Answered => self.enter(State::Answered),
            Event::Abandon => {
                self.abandoned = true;
                Action::Wait
            }
        }
    }

    #[inline(always)]
    fn step_part(&mut self, index: PartIndex, event: PartEvent) -> Action {
        match event {
            PartEvent::Hit(memory) => {
                self.parts[index].lend(memory);
                Action::Send
            }
            PartEvent::Lent(result) => self.on_lent(index, result),
            PartEvent::Reserved(job, memory) => {
                self.answered_by_shard();
                self.on_reserved(index, job, memory)
            }
            PartEvent::ReservedNow(job, memory) => self.on_reserved(index, job, memory),
            PartEvent::NeedsNoMemory => {
                self.parts[index].set_state(PartState::AwaitsData);
                Action::Fetch(index)
            }
            PartEvent::ReadPosted(bytes) => {
                self.parts[index].read_posted(bytes);
                Action::Wait
            }
            PartEvent::ReadDone => self.on_read_done(index),
            PartEvent::Copied => {
                self.parts[index].copied();
                Action::Place
            }
            PartEvent::WriteAsked => {
                self.pending += 1;
                self.parts[index].set_state(PartState::AwaitsStore);
                Action::Wait
            }
            PartEvent::Mismatched => {
                if self.outcome.status == Status::Ok {
                    self.outcome.status = Status::DigestMismatch;
                }
                self.parts[index].set_state(PartState::Done);
                self.finish_if_written()
            }
            PartEvent::WrittenNow => {
                self.parts[index].set_state(PartState::Done);
                self.finish_if_written()
            }
            PartEvent::Sent(bytes) if self.parts[index].sent(bytes) => Action::Pin,
            PartEvent::Sent(_) => Action::Wait,
        }
    }

    #[inline(always)]
    fn enter(&mut self, state: State) -> Action {
        self.state = state;
        Action::Wait
    }

    #[inline(always)]
    fn start(&mut self, command: &CommandCapsule, message: u64, data: Option<InCapsule>) -> Action {
        debug_assert!(self.is_answered() && !self.has_shards() && !self.abandoned);
        // Field by field: the lists keep their memory, and the span comes with the volume.
        self.state = State::Admitted;
        self.command = Some(*command);
        self.message = message;
        self.data = data;
        self.outcome = Outcome::OK;
        self.parts.clear();
        Action::Wait
    }

    /// A shard that was asked has answered.
    #[inline(always)]
    fn answered_by_shard(&mut self) {
        debug_assert!(self.pending > 0, "a shard answers what it was not asked: {self:?}");
        self.pending = self.pending.saturating_sub(1);
    }

    fn fail(&mut self, errno: Errno) {
        if self.outcome.status == Status::Ok {
            self.outcome.status = Status::from_store_errno(errno as i32);
        }
    }

    #[inline(always)]
    fn on_lent(&mut self, part: PartIndex, result: Result<Segments, Errno>) -> Action {
        self.answered_by_shard();
        match result {
            Ok(memory) => {
                self.parts[part].lend(memory);
                return if self.abandoned { Action::GiveBack(part) } else { Action::Send };
            }
            Err(errno) => {
                self.parts[part].set_state(PartState::Done);
                self.fail(errno);
            }
        }
        if self.abandoned { Action::Wait } else { Action::Send }
    }

    #[inline]
    fn on_reserved(&mut self, part: PartIndex, job: JobId, memory: Segments) -> Action {
        self.parts[part].reserve(job, memory);
        if self.abandoned { Action::GiveBack(part) } else { Action::Fetch(part) }
    }

    #[inline]
    fn on_read_done(&mut self, part: PartIndex) -> Action {
        match self.parts.get_mut(part).map(Part::read_done) {
            Some(Ok(true)) => Action::Place,
            Some(Ok(false)) => Action::Wait,
            Some(Err(())) | None => Action::Impossible,
        }
    }

    /// One shard after the other, in their order, so that two commands never wait for each other.
    fn on_held(&mut self, held: HeldRange) -> Action {
        self.answered_by_shard();
        self.holds.push(held);
        if self.abandoned {
            self.state = State::AwaitsUnholds;
            return Action::Unhold(Changed::No);
        }
        Action::Hold(held.shard + 1)
    }

    #[inline]
    fn on_done(&mut self, part: PartIndex, result: Result<(), Errno>) -> Action {
        self.answered_by_shard();
        if let Err(errno) = result {
            self.fail(errno);
        }
        match self.state {
            State::AwaitsParts => {
                // Only parts of a WRITE: those of a READ are answered by `Lent`.
                let Some(part) = self.parts.get_mut(part) else { return Action::Impossible };
                part.set_state(PartState::Done);
                self.finish_if_written()
            }
            State::AwaitsFlush if self.pending > 0 => Action::Wait,
            State::AwaitsFlush if self.outcome.status == Status::Ok && !self.abandoned => {
                self.state = State::AwaitsSync;
                Action::Sync
            }
            State::AwaitsChange if !self.holds.is_empty() => {
                self.state = State::AwaitsUnholds;
                let changed = if result.is_ok() { Changed::Yes } else { Changed::Unknown };
                Action::Unhold(changed)
            }
            _ => self.finish_if_alone(),
        }
    }

    #[inline(always)]
    fn finish_if_written(&mut self) -> Action {
        if self.parts.are_done() { self.finish_if_alone() } else { Action::Wait }
    }

    #[inline(always)]
    fn finish_if_alone(&mut self) -> Action {
        if self.pending > 0 || self.abandoned {
            Action::Wait
        } else {
            Action::Finish(self.outcome.status)
        }
    }
}
