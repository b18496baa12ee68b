//! [`Request`]: one command inside the target, as a state machine without I/O.
//!
//! [`Request::step`] takes a [`RequestEvent`] and returns the [`Action`] to carry out. No other
//! code changes the state of a request. The states are named after the awaited event:
//!
//! ```text
//! Free -> Admitted -+-> AwaitsLimit | AwaitsAccess -> Admitted
//!                   +-> AwaitsParts -----------------------------+-> AwaitsCredits -> Answered
//!                   +-> AwaitsStore -----------------------------+                      |
//!                   +-> AwaitsFlush -> AwaitsSync ---------------+                      v
//!                   +-> AwaitsLocks -> AwaitsChange -> AwaitsUnlocks                 Admitted
//!                   +-> AwaitsZeroing ---------------------------+
//!                   '-> AwaitsControl (admin) -------------------'
//! ```
//!
//! A command that moves data through the cache is cut into [`Part`]s, one for each stripe. Each
//! part has its own state ([`PartState`]), so a part never holds memory while it waits for the
//! memory of another part:
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
//!   may use the tag again at once. From then on the connection owns the memory that the answer is
//!   sent from, until the peer has it.
//! - After [`RequestEvent::Abandon`] (the connection ended) a request asks for nothing more and is
//!   never answered. Memory that a shard lends to it afterwards goes back at once
//!   ([`Action::GiveBack`]).

#[cfg(test)]
mod tests;

use nix::errno::Errno;
use rblk_protocol::{CommandCapsule, Opcode, Status};

use crate::cache::shard_messages::Changed;
use crate::cache::{JobId, Segments};
use crate::data::parts::{Part, PartIndex, PartState, Parts};
use crate::volume::ids::VolumeIndex;
use crate::volume::timing::Timing;

/// The state of a request, named after the awaited event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RequestState {
    /// No command has used this tag yet.
    Free,
    /// A command came, and has not asked for any resource yet.
    Admitted,
    /// The command's volume or host is over a limit. The command has not asked for any resource
    /// yet.
    AwaitsLimit,
    /// Writes of the command's volume are held. The command has not asked for any resource yet.
    AwaitsAccess,
    /// The command's parts are on their way: see [`PartState`].
    AwaitsParts,
    /// The store writes the data of a command without parts.
    AwaitsStore,
    /// Every shard hands its dirty blocks to the store (FLUSH).
    AwaitsFlush,
    /// The store makes its data durable (FLUSH).
    AwaitsSync,
    /// The shards keep others off the range, one shard after the other.
    AwaitsLocks,
    /// The store discards or zeroes the range.
    AwaitsChange,
    /// The shards learn of the change and let others in again.
    AwaitsUnlocks,
    /// A range of a memory volume is zeroed, a step in each turn.
    AwaitsZeroing,
    /// Control works on the command (admin).
    AwaitsControl,
    /// The outcome is known; the answer needs send credits.
    AwaitsCredits,
    /// The answer is queued or posted.
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

/// The result of a command, for its response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CommandOutcome {
    /// Status of the response.
    pub(crate) status: Status,
    /// Value of the response.
    pub(crate) value: u32,
    /// Data of the answer.
    pub(crate) payload: Payload,
}

impl CommandOutcome {
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

/// The place of a command's in-capsule data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct InCapsule {
    /// The receive buffer.
    pub(crate) buffer: u16,
    /// The data is in a slot of the cache, not in the memory of the buffer.
    pub(crate) landed: bool,
    /// The index in its RECV of the slot that the data fills; [`Self::NO_SLOT`] if it fills none.
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

/// A range that a shard locked for a discard or zeroing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LockedRange {
    /// The shard.
    pub(crate) shard: u16,
    /// The name of the lock at that shard.
    pub(crate) job: JobId,
}

/// An event of a request.
#[derive(Debug)]
pub(crate) enum RequestEvent<'a> {
    /// A command came with this tag, in message number `message`. Only valid where
    /// [`Request::may_start_in`].
    Command {
        /// The command.
        command: &'a CommandCapsule,
        /// Number of the message.
        message: u64,
        /// The command's in-capsule data, if any.
        data: Option<InCapsule>,
    },
    /// The command must wait for a limit before it starts.
    OverLimit,
    /// The command must wait until writes of its volume may start.
    WritesHeld,
    /// The command's wait is over, and it may start.
    MayBegin,
    /// The command gets another part.
    Part(Part),
    /// A request was sent to a shard, which will answer, for the command or one of its parts.
    Asked,
    /// The own shard's store starts to write the data of a command without parts.
    StoreAsked,
    /// The store wrote this data without an error.
    Stored,
    /// Every shard will get a request for its dirty blocks.
    FlushBegan,
    /// The store will get a sync.
    SyncBegan,
    /// The shards will get requests to lock the range.
    LocksBegan,
    /// The store will get a discard or zeroing of the range.
    ChangeBegan,
    /// The zeroing of a memory volume starts.
    ZeroingBegan,
    /// The range of a memory volume was zeroed.
    Zeroed,
    /// Control has the command.
    Forwarded,
    /// Control answered an abandoned command.
    ControlDone,
    /// An event of one of the command's parts.
    OfPart(PartIndex, PartEvent),
    /// A shard locked the range.
    Locked(LockedRange),
    /// Every shard locked the range.
    AllLocked,
    /// A shard finished its request, with or without an error.
    Done(PartIndex, Result<(), Errno>),
    /// The outcome is known.
    Outcome(CommandOutcome),
    /// The answer is queued.
    Answered,
    /// The connection ended.
    Abandon,
}

/// An event of a part.
#[derive(Debug)]
pub(crate) enum PartEvent {
    /// The own shard lent the bytes of a part of a READ at once.
    Hit(Segments),
    /// A shard lent the bytes of a part of a READ, or failed.
    Lent(Result<Segments, Errno>),
    /// A shard reserved memory for a part of a WRITE, as an answer.
    Reserved(JobId, Segments),
    /// The own shard reserved memory for a part of a WRITE at once.
    ReservedNow(JobId, Segments),
    /// The data of a part lands directly in a memory volume.
    NeedsNoMemory,
    /// An RDMA READ of this many bytes was posted.
    ReadPosted(u32),
    /// An RDMA READ completed.
    ReadDone,
    /// The in-capsule data was copied out.
    Copied,
    /// The shard got the data, and will answer when it is written.
    WriteAsked,
    /// The data does not match its digest: it is dropped.
    Mismatched,
    /// The data is in its place: no shard needs to write it.
    WrittenNow,
    /// A WRITE of this many bytes was queued for a part of a READ.
    Sent(u32),
}

/// The action that follows an event. Plain data: a part keeps its resources until the caller takes
/// them ([`Part::take_memory`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "an action that is not carried out leaves the command unanswered"]
pub(crate) enum Action {
    /// Nothing to do: the request waits for another event.
    Wait,
    /// Start the command: check it as if it had just come.
    Begin,
    /// A part has its memory: fetch its data.
    Fetch(PartIndex),
    /// A part has all its data: put the data into its place.
    Place,
    /// Parts of a READ are available: send as much as credits allow.
    Send,
    /// A part of a READ is queued completely: take its memory, and pin it until the peer has the
    /// bytes.
    Pin,
    /// All shards have handed their dirty blocks to the store: sync the store.
    Sync,
    /// Ask this shard to lock the range.
    LockRange(u16),
    /// Every shard locked the range: change the store.
    Change,
    /// End the locks ([`Request::take_locks`]).
    UnlockRange(Changed),
    /// Answer with this status.
    Finish(Status),
    /// The connection ended: take the memory that the shard lent or reserved for a part, and give
    /// it back.
    GiveBack(PartIndex),
    /// The event cannot happen in this state: a bug, or a device that completes a WR that was never
    /// posted.
    Impossible,
}

/// One command inside the target, found by its tag.
#[derive(Debug)]
pub(crate) struct Request {
    state: RequestState,
    abandoned: bool,
    // Shards with an answer due.
    pending: u16,
    command: Option<CommandCapsule>,
    // Set until the data is used.
    data: Option<InCapsule>,
    message: u64,
    span: Span,
    outcome: CommandOutcome,
    locks: Vec<LockedRange>,
    parts: Parts,
    timing: Timing,
}

impl Request {
    /// A tag without a command.
    pub(crate) fn new() -> Self {
        Self {
            state: RequestState::Free,
            abandoned: false,
            pending: 0,
            command: None,
            data: None,
            message: 0,
            span: Span::default(),
            outcome: CommandOutcome::OK,
            locks: Vec::new(),
            parts: Parts::default(),
            timing: Timing::default(),
        }
    }

    /// The times of the command's arrival and waits.
    #[inline]
    pub(crate) fn timing(&mut self) -> &mut Timing {
        &mut self.timing
    }

    /// Whether a new command with this tag is allowed: the previous command was answered, and came
    /// in an earlier message, since the peer cannot have the answer to a command of this message.
    #[inline]
    pub(crate) fn may_start_in(&self, message: u64) -> bool {
        self.is_answered() && self.message != message
    }

    /// Whether no command of this tag is unanswered.
    #[inline]
    pub(crate) fn is_answered(&self) -> bool {
        matches!(self.state, RequestState::Free | RequestState::Answered)
    }

    /// Whether a shard or control still works on the command.
    pub(crate) fn is_executing(&self) -> bool {
        self.pending > 0 || self.state == RequestState::AwaitsControl
    }

    /// Whether a shard still works on the command, or keeps a range locked for it.
    pub(crate) fn has_shards(&self) -> bool {
        self.pending > 0 || !self.locks.is_empty()
    }

    /// Whether the command may still change the volume.
    pub(crate) fn may_change(&self, volume: VolumeIndex) -> bool {
        use RequestState::{
            AwaitsChange, AwaitsLocks, AwaitsParts, AwaitsStore, AwaitsUnlocks, AwaitsZeroing,
        };
        let writes =
            matches!(self.opcode(), Some(Opcode::Write | Opcode::Discard | Opcode::WriteZeroes));
        let is_begun = match self.state {
            AwaitsParts | AwaitsStore | AwaitsLocks | AwaitsChange | AwaitsUnlocks
            | AwaitsZeroing => !self.abandoned,
            _ => false,
        };
        writes && self.span.volume == volume && (is_begun || self.has_shards())
    }

    /// Whether the command was checked and waits to start; or waited, if its connection ended.
    pub(crate) fn waits_to_begin(&self) -> bool {
        matches!(self.state, RequestState::AwaitsLimit | RequestState::AwaitsAccess)
    }

    /// Whether the command waits for a limit, or did when its connection ended.
    pub(crate) fn awaits_limit(&self) -> bool {
        self.state == RequestState::AwaitsLimit
    }

    /// Whether parts of the command may be sent.
    #[inline]
    pub(crate) fn awaits_parts(&self) -> bool {
        self.state == RequestState::AwaitsParts
    }

    /// Whether the answer waits for send credits.
    pub(crate) fn awaits_credits(&self) -> bool {
        self.state == RequestState::AwaitsCredits
    }

    /// Whether control works on the command.
    pub(crate) fn awaits_control(&self) -> bool {
        self.state == RequestState::AwaitsControl
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

    /// The place of the in-capsule data, until [`Self::take_data`].
    #[inline]
    pub(crate) fn data(&self) -> Option<InCapsule> {
        self.data
    }

    /// Takes the in-capsule data, after its use or because it is not needed: the receive buffer can
    /// be released.
    #[inline]
    pub(crate) fn take_data(&mut self) -> Option<InCapsule> {
        self.data.take()
    }

    /// Puts back in-capsule data from [`Self::take_data`] that could not be used yet.
    pub(crate) fn keep_data(&mut self, data: InCapsule) {
        self.data = Some(data);
    }

    /// Sets the bytes that the command names, checked against the volume. Not an event: this does
    /// not change the state.
    #[inline(always)]
    pub(crate) fn names(&mut self, span: Span) {
        self.span = span;
    }

    /// The bytes that the command names.
    #[inline]
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// The outcome, or the failure so far.
    #[inline]
    pub(crate) fn outcome(&self) -> CommandOutcome {
        self.outcome
    }

    /// Its parts.
    #[inline]
    pub(crate) fn parts(&self) -> &[Part] {
        self.parts.as_slice()
    }

    /// The parts, to change their resources: memory, room to land.
    #[inline]
    pub(crate) fn parts_mut(&mut self) -> &mut [Part] {
        self.parts.as_mut_slice()
    }

    /// The first part of a READ that waits to be sent, and whether no other part is left after it.
    #[inline]
    pub(crate) fn next_to_send(&self) -> Option<(PartIndex, bool)> {
        let (first, is_only) = self.parts.first_in(PartState::AwaitsSend)?;
        Some((first, is_only && self.pending == 0 && self.outcome.status == Status::Ok))
    }

    /// Whether a failed READ can be answered: no part waits for a shard.
    #[inline]
    pub(crate) fn has_failed(&self) -> bool {
        self.pending == 0 && self.outcome.status != Status::Ok
    }

    /// Takes the ranges that shards locked for the command. The list returns by
    /// [`Self::reuse_locks`].
    pub(crate) fn take_locks(&mut self) -> Vec<LockedRange> {
        std::mem::take(&mut self.locks)
    }

    /// Keeps the memory of the list for the next command.
    pub(crate) fn reuse_locks(&mut self, mut list: Vec<LockedRange>) {
        list.clear();
        self.locks = list;
    }

    /// Handles an event, and returns the action that follows. The only writer of the state.
    #[inline(always)]
    pub(crate) fn step(&mut self, event: RequestEvent<'_>) -> Action {
        match event {
            RequestEvent::Command { command, message, data } => self.start(command, message, data),
            RequestEvent::OverLimit => self.enter(RequestState::AwaitsLimit),
            RequestEvent::WritesHeld => self.enter(RequestState::AwaitsAccess),
            RequestEvent::MayBegin if self.waits_to_begin() && !self.abandoned => {
                self.state = RequestState::Admitted;
                Action::Begin
            }
            RequestEvent::MayBegin => Action::Impossible,
            RequestEvent::Part(part) => {
                self.state = RequestState::AwaitsParts;
                self.parts.push(part);
                Action::Wait
            }
            RequestEvent::Asked => {
                self.pending += 1;
                Action::Wait
            }
            RequestEvent::StoreAsked => {
                self.pending += 1;
                self.enter(RequestState::AwaitsStore)
            }
            RequestEvent::Stored => {
                debug_assert!(self.state == RequestState::AwaitsStore);
                self.answered_by_shard();
                self.finish_if_alone()
            }
            RequestEvent::FlushBegan => self.enter(RequestState::AwaitsFlush),
            RequestEvent::SyncBegan => self.enter(RequestState::AwaitsSync),
            RequestEvent::LocksBegan => {
                self.state = RequestState::AwaitsLocks;
                Action::LockRange(0)
            }
            RequestEvent::ChangeBegan => self.enter(RequestState::AwaitsChange),
            RequestEvent::ZeroingBegan => {
                self.pending += 1;
                self.enter(RequestState::AwaitsZeroing)
            }
            RequestEvent::Forwarded => self.enter(RequestState::AwaitsControl),
            RequestEvent::ControlDone => self.enter(RequestState::Free),
            RequestEvent::OfPart(part, event) => self.step_part(part, event),
            RequestEvent::Locked(range) => self.on_locked(range),
            RequestEvent::AllLocked => {
                self.state = RequestState::AwaitsChange;
                Action::Change
            }
            RequestEvent::Zeroed => self.on_done(PartIndex::FIRST, Ok(())),
            RequestEvent::Done(part, result) => self.on_done(part, result),
            RequestEvent::Outcome(outcome) => {
                self.outcome = outcome;
                self.enter(RequestState::AwaitsCredits)
            }
            RequestEvent::Answered => self.enter(RequestState::Answered),
            RequestEvent::Abandon => {
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
    fn enter(&mut self, state: RequestState) -> Action {
        self.state = state;
        Action::Wait
    }

    #[inline(always)]
    fn start(&mut self, command: &CommandCapsule, message: u64, data: Option<InCapsule>) -> Action {
        debug_assert!(self.is_answered() && !self.has_shards() && !self.abandoned);
        // Field by field: the lists keep their capacity, and the span comes with the volume.
        self.state = RequestState::Admitted;
        self.command = Some(*command);
        self.message = message;
        self.data = data;
        self.outcome = CommandOutcome::OK;
        self.parts.clear();
        Action::Wait
    }

    /// A shard answered its request.
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

    /// Locks one shard after the other, in their order, so that two commands never wait for each
    /// other.
    fn on_locked(&mut self, range: LockedRange) -> Action {
        self.answered_by_shard();
        self.locks.push(range);
        if self.abandoned {
            self.state = RequestState::AwaitsUnlocks;
            return Action::UnlockRange(Changed::No);
        }
        Action::LockRange(range.shard + 1)
    }

    #[inline]
    fn on_done(&mut self, part: PartIndex, result: Result<(), Errno>) -> Action {
        self.answered_by_shard();
        if let Err(errno) = result {
            self.fail(errno);
        }
        match self.state {
            RequestState::AwaitsParts => {
                // Only parts of a WRITE: a part of a READ is answered by `Lent`.
                let Some(part) = self.parts.get_mut(part) else { return Action::Impossible };
                part.set_state(PartState::Done);
                self.finish_if_written()
            }
            RequestState::AwaitsFlush if self.pending > 0 => Action::Wait,
            RequestState::AwaitsFlush if self.outcome.status == Status::Ok && !self.abandoned => {
                self.state = RequestState::AwaitsSync;
                Action::Sync
            }
            RequestState::AwaitsChange if !self.locks.is_empty() => {
                self.state = RequestState::AwaitsUnlocks;
                let changed = if result.is_ok() { Changed::Yes } else { Changed::Unknown };
                Action::UnlockRange(changed)
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
