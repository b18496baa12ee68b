//! [`InitiatorHandshake`] and [`TargetHandshake`]: `Noise_XK_25519_ChaChaPoly_SHA256` over an admin
//! connection (Noise Protocol Framework, revision 34).
//!
//! ```text
//! initiator                                                     target
//!   | == AUTHENTICATE, in capsule: e, es                48 B == > |   knows the key of the target
//!   | < ========================= reply: e, ee          48 B ==== |   has that key
//!   | == LOGIN, in capsule: s, se, LoginRequest        160 B == > |   is that host; no replay
//!   | < ==== sealed reply: LoginReply, session secret  168 B ==== |   has that key, now
//! ```
//!
//! The prologue is both hellos and the carrier, so a hello that was changed on its way makes the
//! first message fail. The roles are in the pattern, so a message that is sent back to its sender
//! fails, too. Messages cannot be told from random bytes, and only the holder of the target's
//! secret key learns the key of the host.
//!
//! Each step takes the handshake, or takes it out of its place: after an error there is nothing to
//! go on with, and the connection ends.

use std::fmt;

use snow::params::NoiseParams;
use snow::{Builder, HandshakeState};

use super::noise::Primitives;
use super::{AuthError, Carrier, Hellos, InitiatorSeal, PublicKey, SecretKey, TargetSeal, Ticket};
use crate::admin_bodies::LoginRequest;
use crate::identifiers::Sequence;

const PATTERN: &str = "Noise_XK_25519_ChaChaPoly_SHA256";
const KEY_BYTES: usize = 32;
const TAG_BYTES: usize = 16;

/// Bytes of the body of AUTHENTICATE, the first message.
pub const FIRST_BYTES: usize = KEY_BYTES + TAG_BYTES;
/// Bytes of the reply to AUTHENTICATE, the second message.
pub const SECOND_BYTES: usize = KEY_BYTES + TAG_BYTES;
/// Bytes of the body of an authenticated LOGIN, the third message.
pub const THIRD_BYTES: usize = KEY_BYTES + TAG_BYTES + LoginRequest::BYTES + TAG_BYTES;

/// The initiator's end, after the first message.
pub struct InitiatorHandshake(HandshakeState);

/// The target's end.
pub struct TargetHandshake(LoginProgress);

/// The result of an authenticated LOGIN, at the target.
#[derive(Debug)]
pub struct LoggedIn {
    /// The key that the host has proven. It is not said that this host may log in.
    pub host: PublicKey,
    /// The key of this target that the host knows it by.
    pub target: PublicKey,
    /// The body of the LOGIN, as of an unauthenticated one.
    pub login: [u8; LoginRequest::BYTES],
    /// Seals all further messages of this connection.
    pub seal: TargetSeal,
    /// The right to answer the LOGIN.
    pub ticket: Ticket,
}

enum LoginProgress {
    Waits { keys: Vec<SecretKey>, prologue: Vec<u8> },
    Answered { state: Box<HandshakeState>, key: PublicKey },
    Over,
}

fn params() -> Result<NoiseParams, AuthError> {
    Ok(PATTERN.parse()?)
}

fn expect(message: &[u8], expected: usize) -> Result<(), AuthError> {
    let got = message.len();
    if got == expected { Ok(()) } else { Err(AuthError::Length { got, expected }) }
}

impl InitiatorHandshake {
    /// Begins: `key` is that of this host, `target` the key that the target has to prove. Returns
    /// the body of AUTHENTICATE.
    ///
    /// # Errors
    /// [`AuthError::Random`].
    pub fn begin(
        key: &SecretKey,
        target: &PublicKey,
        hellos: &Hellos,
        carrier: Carrier,
    ) -> Result<(Self, [u8; FIRST_BYTES]), AuthError> {
        Self::begin_by(key, target, &hellos.prologue(carrier), None)
    }

    fn begin_by(
        key: &SecretKey,
        target: &PublicKey,
        prologue: &[u8],
        ephemeral: Option<&[u8; KEY_BYTES]>,
    ) -> Result<(Self, [u8; FIRST_BYTES]), AuthError> {
        let mut builder = Builder::with_resolver(params()?, Box::new(Primitives))
            .prologue(prologue)?
            .local_private_key(key.bytes())?
            .remote_public_key(target.as_bytes())?;
        if let Some(ephemeral) = ephemeral {
            builder = builder.fixed_ephemeral_key_for_testing_only(ephemeral);
        }
        let mut state = builder.build_initiator()?;
        let mut first = [0; FIRST_BYTES];
        state.write_message(&[], &mut first)?;
        Ok((Self(state), first))
    }

    /// Reads the reply to AUTHENTICATE, which proves the key of the target. Returns the body of the
    /// LOGIN, and the seal for the later messages. `sequence` is that of the LOGIN.
    ///
    /// # Errors
    /// [`AuthError::Handshake`]: the target has not that key.
    pub fn finish(
        mut self,
        second: &[u8],
        login: &[u8; LoginRequest::BYTES],
        sequence: Sequence,
    ) -> Result<([u8; THIRD_BYTES], InitiatorSeal), AuthError> {
        expect(second, SECOND_BYTES)?;
        self.0.read_message(second, &mut [])?;
        let mut third = [0; THIRD_BYTES];
        self.0.write_message(login, &mut third)?;
        Ok((third, InitiatorSeal::new(self.0.into_stateless_transport_mode()?, sequence)))
    }
}

impl TargetHandshake {
    /// Waits for the first message. A target that changes its key has two for a while; more make
    /// each handshake cost more.
    #[must_use]
    pub fn new(keys: &[SecretKey], hellos: &Hellos, carrier: Carrier) -> Self {
        Self(LoginProgress::Waits { keys: keys.to_vec(), prologue: hellos.prologue(carrier) })
    }

    /// Reads the body of AUTHENTICATE. Returns its reply.
    ///
    /// # Errors
    /// [`AuthError`]: the connection must end. [`AuthError::Handshake`]: the initiator expects
    /// another key.
    pub fn read_first(&mut self, first: &[u8]) -> Result<[u8; SECOND_BYTES], AuthError> {
        self.read_first_by(first, None)
    }

    fn read_first_by(
        &mut self,
        first: &[u8],
        ephemeral: Option<&[u8; KEY_BYTES]>,
    ) -> Result<[u8; SECOND_BYTES], AuthError> {
        let LoginProgress::Waits { keys, prologue } =
            std::mem::replace(&mut self.0, LoginProgress::Over)
        else {
            return Err(AuthError::Order);
        };
        expect(first, FIRST_BYTES)?;
        for key in &keys {
            let mut builder = Builder::with_resolver(params()?, Box::new(Primitives))
                .prologue(&prologue)?
                .local_private_key(key.bytes())?;
            if let Some(ephemeral) = ephemeral {
                builder = builder.fixed_ephemeral_key_for_testing_only(ephemeral);
            }
            let mut state = builder.build_responder()?;
            if state.read_message(first, &mut []).is_err() {
                continue;
            }
            let mut second = [0; SECOND_BYTES];
            state.write_message(&[], &mut second)?;
            self.0 = LoginProgress::Answered { state: Box::new(state), key: key.public() };
            return Ok(second);
        }
        Err(AuthError::Handshake)
    }

    /// Reads the body of the LOGIN with that sequence.
    ///
    /// # Errors
    /// [`AuthError`]: the connection must end.
    pub fn read_last(&mut self, third: &[u8], sequence: Sequence) -> Result<LoggedIn, AuthError> {
        let LoginProgress::Answered { mut state, key } =
            std::mem::replace(&mut self.0, LoginProgress::Over)
        else {
            return Err(AuthError::Order);
        };
        expect(third, THIRD_BYTES)?;
        let mut login = [0; LoginRequest::BYTES];
        state.read_message(third, &mut login)?;
        let host: [u8; KEY_BYTES] = state
            .get_remote_static()
            .and_then(|key| key.try_into().ok())
            .ok_or(AuthError::Handshake)?;
        let (seal, ticket) = TargetSeal::new(state.into_stateless_transport_mode()?, sequence);
        Ok(LoggedIn { host: PublicKey::from_bytes(host), target: key, login, seal, ticket })
    }
}

impl fmt::Debug for InitiatorHandshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InitiatorHandshake")
    }
}

impl fmt::Debug for TargetHandshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            LoginProgress::Waits { .. } => "TargetHandshake(waits)",
            LoginProgress::Answered { .. } => "TargetHandshake(answered)",
            LoginProgress::Over => "TargetHandshake(over)",
        })
    }
}

#[cfg(test)]
mod tests;
