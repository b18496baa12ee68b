//! The identities of both ends of a session, and their proofs. Pure: bytes in, bytes out; no I/O,
//! no clock. Random bytes are the only input from the system.
//!
//! An end *is* its key: [`SecretKey`] stays in a file of its host, [`PublicKey`] goes into the
//! configuration of the other end.
//!
//! 1. On an admin connection both ends prove their keys: [`InitiatorHandshake`],
//!    [`TargetHandshake`]. Both hellos are part of it.
//! 2. From LOGIN on, the messages on it are sealed: [`InitiatorSeal`], [`TargetSeal`]. Only
//!    KEEP_ALIVE and ASYNC_EVENT are not: they are hints.
//! 3. The answer to LOGIN brings a [`SessionSecret`]. By it the ends of each I/O connection prove
//!    in the self-test that they belong to the session: [`QueueKey`].
//! 4. Over TCP the kernel may encrypt an I/O connection with [`StreamKeys`].
//!
//! No command on blocks carries a proof: RDMA moves its data past every check in software. The
//! attacks that a network can still make on a proven connection are in docs/internals/wire.md.

mod base32;
mod error;
mod handshake;
mod hellos;
mod key_pair;
mod noise;
mod queue_proof;
mod seal;
mod session_secret;
mod stream_keys;

pub use error::AuthError;
pub use handshake::{
    FIRST_BYTES, InitiatorHandshake, LoggedIn, SECOND_BYTES, THIRD_BYTES, TargetHandshake,
};
pub use hellos::{Carrier, Hellos};
pub use key_pair::{KEY_BYTES, KeyError, PublicKey, SecretKey};
pub use queue_proof::{PROOF_BYTES, QueueKey, QueueProof, TargetProof};
pub use seal::{
    COMMAND_SEAL_BYTES, InitiatorSeal, REPLY_SEAL_BYTES, SealedReply, TargetSeal, Ticket,
};
pub use session_secret::{SECRET_BYTES, SessionSecret};
pub use stream_keys::{StreamKey, StreamKeys};
