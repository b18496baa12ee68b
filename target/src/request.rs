//! [`Request`]: one command inside the target, and the states it goes through.
//!
//! ```text
//! Free -> Working -> Respond -> Answered -> Free
//!      -> Execute (admin)  '
//! ```
//!
//! A block command that needs memory or the store is cut into [`Part`]s, one per stripe of the
//! cache, each of which goes its own way: asked of its shard, landed or sent, done. So a part never
//! holds memory while it waits for that of another. Any failure leads to `Respond` with a status
//! once no shard works on the command any more. On a dead QP a request goes to `Free` when nothing
//! it lent out is in use any more.
//!
//! `Answered` means: the response is posted, or will be at the end of the turn. The tag may be used
//! by the peer again at once; the memory it was sent from is then not the request's any more but
//! the connection's, until it is known to have left.

use rblk_protocol::{CommandCapsule, Status};

use crate::arena::Extent;
use crate::cache::{JobId, Segments};
use crate::store::VolumeIndex;

/// Where a request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// No command.
    Free,
    /// Its parts are with their shards, or their data is on its way.
    Working,
    /// Control has it (admin).
    Execute,
    /// Waits for send-queue slots to be answered.
    Respond,
    /// Answered.
    Answered,
}

/// How a finished request is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload {
    /// Only a response.
    None,
    /// Data straight from a memory volume.
    Memory {
        /// Which volume.
        volume: VolumeIndex,
        /// First byte.
        offset: usize,
        /// Bytes to write.
        len: u32,
    },
    /// Zeros.
    Zeros {
        /// Bytes to write.
        len: u32,
    },
    /// The tag's reply area (admin).
    Reply {
        /// Bytes to write.
        len: u32,
    },
}

/// How far a part is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Step {
    /// Nothing more to do.
    #[default]
    Done,
    /// A shard works on it, or is about to.
    Asked,
    /// Its memory is there; its data comes by RDMA READ.
    Landing,
    /// Its data is there, to be sent.
    Ready,
}

/// The bytes of a command that one shard has.
#[derive(Debug, Default)]
pub struct Part {
    /// First byte in the volume.
    pub offset: u64,
    /// First byte in the command's data.
    pub at: u32,
    /// Bytes.
    pub len: u32,
    /// The shard.
    pub shard: u16,
    /// How far it is.
    pub step: Step,
    /// What the shard lent.
    pub memory: Segments,
    /// The shard's reservation, for a write.
    pub job: Option<JobId>,
    /// Memory of the READ sink it holds (iWARP).
    pub sink: Option<Extent>,
    /// READs posted and not completed.
    pub reads: u16,
    /// Bytes for which WRs were posted.
    pub posted: u32,
}

/// A range that is held at a shard for a discard or zeroing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// The shard.
    pub shard: u16,
    /// Its name there.
    pub job: JobId,
}

/// One command inside the target, indexed by its tag.
#[derive(Debug)]
pub struct Request {
    /// Where it is.
    pub state: State,
    /// The command, once parsed.
    pub command: Option<CommandCapsule>,
    /// Receive slot that the command's in-capsule data is in, until it was used.
    pub recv_slot: Option<u16>,
    /// Where in that slot.
    pub data_at: usize,
    /// Number of the message it came in.
    pub message: u64,
    /// Bytes of the volume, for block commands.
    pub offset_bytes: u64,
    /// See `offset_bytes`.
    pub len_bytes: u64,
    /// Volume, for block commands.
    pub volume: VolumeIndex,
    /// Outcome so far.
    pub status: Status,
    /// Value of the response.
    pub value: u32,
    /// What goes back.
    pub payload: Payload,
    /// Answers of shards that will still come.
    pub pending: u16,
    /// Ranges held so far.
    pub holds: Vec<Held>,
    // Kept from command to command for their memory.
    parts: Vec<Part>,
    count: usize,
}

impl Request {
    /// An idle entry.
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: State::Free,
            command: None,
            recv_slot: None,
            data_at: 0,
            message: 0,
            offset_bytes: 0,
            len_bytes: 0,
            volume: VolumeIndex(0),
            status: Status::Ok,
            value: 0,
            payload: Payload::None,
            pending: 0,
            holds: Vec::new(),
            parts: Vec::new(),
            count: 0,
        }
    }

    /// Whether a new command with this tag is in order: the previous one was answered.
    #[must_use]
    pub fn may_start(&self) -> bool {
        matches!(self.state, State::Free | State::Answered)
    }

    /// Whether a shard or control still works on it, so that its memory is not ours.
    #[must_use]
    pub fn is_executing(&self) -> bool {
        self.state == State::Execute || self.pending > 0
    }

    /// Takes a new command, of that message. Whatever the old one held was given back.
    #[inline]
    pub fn start(&mut self, command: &CommandCapsule, message: u64) {
        debug_assert!(self.may_start() && self.pending == 0 && self.holds.is_empty());
        debug_assert!(self.parts().iter().all(|p| p.memory.is_empty() && p.sink.is_none()));
        // Field by field: the lists stay where they are, and the range is set with its volume.
        self.state = State::Free;
        self.command = Some(*command);
        self.message = message;
        self.recv_slot = None;
        self.status = Status::Ok;
        self.value = 0;
        self.payload = Payload::None;
        self.count = 0;
    }

    /// Its parts.
    #[must_use]
    #[inline]
    pub fn parts(&self) -> &[Part] {
        &self.parts[..self.count]
    }

    /// Its parts.
    #[inline]
    pub fn parts_mut(&mut self) -> &mut [Part] {
        &mut self.parts[..self.count]
    }

    /// Adds a part.
    #[inline]
    pub fn add_part(&mut self, part: Part) {
        if let Some(place) = self.parts.get_mut(self.count) {
            *place = part;
        } else {
            self.parts.push(part);
        }
        self.count += 1;
    }

    /// Whether all parts of a write are done.
    #[must_use]
    #[inline]
    pub fn is_written(&self) -> bool {
        self.pending == 0 && self.parts().iter().all(|p| p.step == Step::Done)
    }

    /// The first failure counts.
    pub fn fail(&mut self, status: Status) {
        if self.status == Status::Ok {
            self.status = status;
        }
    }
}

impl Default for Request {
    fn default() -> Self {
        Self::new()
    }
}
