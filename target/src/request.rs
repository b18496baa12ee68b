//! [`Request`]: one command inside the target, and the states it goes through.
//!
//! ```text
//! Free -> NeedExtent -> TransferIn -> Execute -> TransferOut/Respond -> Answered -> Free
//! ```
//!
//! A request only moves forward; steps it does not need are skipped. Any failure before `Respond` goes to
//! `Respond` with a status. On a dead QP each request goes to `Free` when nothing it lent out (an arena
//! extent to the store or the device) is in use any more.
//!
//! `Answered` means: the response is posted. The tag may be used by the peer again at once; the extent it was
//! sent from is then not the request's any more but the connection's, until it is known to have left.

use rblk_protocol::{CommandCapsule, Status};

use crate::arena::Extent;
use crate::store::VolumeIndex;

/// Where a request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// No command.
    Free,
    /// Waits for arena memory, first come first served.
    NeedExtent,
    /// Waits for a READ credit, or the READ is on its way.
    TransferIn {
        /// The READ was posted.
        posted: bool,
    },
    /// The store, or control for an admin command, has it.
    Execute,
    /// Waits for send-queue slots to be answered.
    Respond,
    /// Answered; `sent_at` is the position of the last WR in the send queue.
    Answered {
        /// Position in the send queue.
        sent_at: u64,
    },
}

/// How a finished request is answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload {
    /// Only a response.
    None,
    /// Data of the extent to the descriptor, `len` bytes.
    Extent {
        /// Bytes to write.
        len: u32,
    },
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

/// One command inside the target, indexed by its tag.
#[derive(Debug)]
pub struct Request {
    /// Where it is.
    pub state: State,
    /// The command, once parsed.
    pub command: Option<CommandCapsule>,
    /// Receive slot the command arrived in, until it is posted again.
    pub recv_slot: Option<u16>,
    /// Arena memory it holds.
    pub extent: Option<Extent>,
    /// Memory of the READ sink it holds (iWARP).
    pub sink: Option<Extent>,
    /// First byte in the volume.
    pub offset_bytes: u64,
    /// Volume, for block commands.
    pub volume: VolumeIndex,
    /// Outcome so far.
    pub status: Status,
    /// Value of the response.
    pub value: u32,
    /// What goes back.
    pub payload: Payload,
}

impl Request {
    /// An idle entry.
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: State::Free,
            command: None,
            recv_slot: None,
            extent: None,
            sink: None,
            offset_bytes: 0,
            volume: VolumeIndex(0),
            status: Status::Ok,
            value: 0,
            payload: Payload::None,
        }
    }

    /// Whether a new command with this tag is in order: the previous one was answered.
    #[must_use]
    pub fn may_start(&self) -> bool {
        matches!(self.state, State::Free | State::Answered { .. })
    }

    /// Whether the store or control still works on it, so that its memory is not ours.
    #[must_use]
    pub fn is_executing(&self) -> bool {
        self.state == State::Execute
    }

    /// Takes a new command. The caller has released what the old one held.
    pub fn start(&mut self, command: CommandCapsule, recv_slot: u16) {
        debug_assert!(self.may_start() && self.extent.is_none() && self.sink.is_none());
        *self = Self { command: Some(command), recv_slot: Some(recv_slot), ..Self::new() };
    }
}

impl Default for Request {
    fn default() -> Self {
        Self::new()
    }
}
