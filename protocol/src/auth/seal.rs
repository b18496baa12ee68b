//! [`InitiatorSeal`] and [`TargetSeal`]: the commands of an admin connection and their answers,
//! sealed with the keys of its handshake (ChaCha20-Poly1305).
//!
//! ```text
//! command:  | capsule, 64 | AEAD(to target, sequence, capsule, 64 | body) |
//! reply:    AEAD(to initiator, sequence, status, 2 | reserved, 2 | value, 4 | payload)
//! ```
//!
//! The capsule is sent in the clear, too, because it names the operation. Its twin in the seal must
//! be equal. The nonce is the sequence of the command. So no nonce is used twice: the sequences of
//! an admin connection rise and never wrap, and a [`Ticket`] answers once.

use std::fmt;

use snow::StatelessTransportState;
use zeroize::Zeroizing;

use super::AuthError;
use crate::identifiers::Sequence;
use crate::limits::COMMAND_BYTES;
use crate::status_code::Status;
use crate::width::narrow;

/// Bytes of the tag of Poly1305.
const TAG_BYTES: usize = 16;
/// Bytes of status and value.
const HEAD_BYTES: usize = 8;
/// By how much a sealed body is longer than the body.
pub const COMMAND_SEAL_BYTES: usize = COMMAND_BYTES + TAG_BYTES;
/// By how much a sealed reply is longer than its payload.
pub const REPLY_SEAL_BYTES: usize = HEAD_BYTES + TAG_BYTES;

/// The initiator's end.
pub struct InitiatorSeal(SealKeys);

/// The target's end.
pub struct TargetSeal(SealKeys);

/// The right to answer one command, once.
#[derive(PartialEq, Eq, Debug)]
pub struct Ticket(Sequence);

/// An opened answer. The response capsule is not proven; this value is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SealedReply {
    /// The outcome.
    pub status: Status,
    /// The value of the response.
    pub value: u32,
    /// The reply, which may hold a secret.
    pub payload: Zeroizing<Vec<u8>>,
}

struct SealKeys {
    transport: StatelessTransportState,
    // The sequence of the last command that was sealed, or opened.
    last: Sequence,
}

impl SealKeys {
    /// The next command has that sequence.
    fn next(&mut self, sequence: Sequence) -> Result<(), AuthError> {
        if sequence.0 <= self.last.0 {
            return Err(AuthError::Order);
        }
        self.last = sequence;
        Ok(())
    }

    fn seal(&self, sequence: Sequence, plain: &[u8]) -> Result<Vec<u8>, AuthError> {
        let mut sealed = vec![0; plain.len() + TAG_BYTES];
        let written = self
            .transport
            .write_message(sequence.0.into(), plain, &mut sealed)
            .map_err(|_| AuthError::Length { got: plain.len(), expected: 1 << 16 })?;
        debug_assert_eq!(written, sealed.len());
        Ok(sealed)
    }

    fn open(&self, sequence: Sequence, sealed: &[u8]) -> Result<Zeroizing<Vec<u8>>, AuthError> {
        let bytes = sealed.len().checked_sub(TAG_BYTES).ok_or(AuthError::Seal)?;
        let mut plain = Zeroizing::new(vec![0; bytes]);
        self.transport
            .read_message(sequence.0.into(), sealed, &mut plain)
            .map_err(|_| AuthError::Seal)?;
        Ok(plain)
    }
}

impl InitiatorSeal {
    /// `login` is the sequence of the LOGIN.
    pub(super) fn new(transport: StatelessTransportState, login: Sequence) -> Self {
        Self(SealKeys { transport, last: login })
    }

    /// The bytes behind a capsule: its sealed body. `capsule` already holds their length:
    /// [`COMMAND_SEAL_BYTES`] more than `body`.
    ///
    /// # Errors
    /// [`AuthError::Order`]: a later command was sealed already; a new connection is needed.
    pub fn seal_command(
        &mut self,
        sequence: Sequence,
        capsule: &[u8; COMMAND_BYTES],
        body: &[u8],
    ) -> Result<Vec<u8>, AuthError> {
        self.0.next(sequence)?;
        self.0.seal(sequence, &[capsule.as_slice(), body].concat())
    }

    /// Opens the answer to a command.
    ///
    /// # Errors
    /// [`AuthError::Seal`] and [`AuthError::Field`]: nothing that was said counts.
    pub fn open_reply(&self, sequence: Sequence, sealed: &[u8]) -> Result<SealedReply, AuthError> {
        let plain = self.0.open(sequence, sealed)?;
        let Some((head, payload)) = plain.split_first_chunk::<HEAD_BYTES>() else {
            return Err(AuthError::Seal);
        };
        let [s0, s1, r0, r1, v0, v1, v2, v3] = *head;
        if [r0, r1] != [0; 2] {
            return Err(AuthError::Field("reserved bytes are not zero"));
        }
        let status = Status::from_wire(u16::from_le_bytes([s0, s1])).unwrap_or(Status::Internal);
        let value = u32::from_le_bytes([v0, v1, v2, v3]);
        Ok(SealedReply { status, value, payload: Zeroizing::new(payload.to_vec()) })
    }
}

impl TargetSeal {
    /// `login` is the sequence of the LOGIN.
    pub(super) fn new(transport: StatelessTransportState, login: Sequence) -> (Self, Ticket) {
        (Self(SealKeys { transport, last: login }), Ticket(login))
    }

    /// Opens the body of a command. The capsule is in the clear.
    ///
    /// # Errors
    /// [`AuthError`]: the connection must end.
    pub fn open_command(
        &mut self,
        sequence: Sequence,
        capsule: &[u8; COMMAND_BYTES],
        sealed: &[u8],
    ) -> Result<(Zeroizing<Vec<u8>>, Ticket), AuthError> {
        let plain = self.0.open(sequence, sealed)?;
        let (twin, body) = plain.split_first_chunk::<COMMAND_BYTES>().ok_or(AuthError::Seal)?;
        if twin != capsule {
            return Err(AuthError::Seal);
        }
        self.0.next(sequence)?;
        Ok((Zeroizing::new(body.to_vec()), Ticket(sequence)))
    }

    /// The bytes written into the buffer of a command: its sealed answer, [`REPLY_SEAL_BYTES`]
    /// longer than the payload.
    ///
    /// # Errors
    /// [`AuthError::Length`]: the payload is larger than any admin reply.
    pub fn seal_reply(
        &self,
        ticket: Ticket,
        status: Status,
        value: u32,
        payload: &[u8],
    ) -> Result<Vec<u8>, AuthError> {
        let Ticket(sequence) = ticket;
        let status = narrow::<u32, _>(status as usize).to_le_bytes();
        let plain = Zeroizing::new([status.as_slice(), &value.to_le_bytes(), payload].concat());
        self.0.seal(sequence, &plain)
    }
}

impl fmt::Debug for InitiatorSeal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InitiatorSeal(last {})", self.0.last.0)
    }
}

impl fmt::Debug for TargetSeal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TargetSeal(last {})", self.0.last.0)
    }
}
