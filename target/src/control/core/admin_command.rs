//! [`AdminCommand`]: a command on an admin connection, and its [`AdminAnswer`].

use std::time::Instant;

use rblk_protocol::width::narrow;
use rblk_protocol::{CommandCapsule, Status};

use super::effect::ConnectionRef;
use crate::volume::ids::AdmissionId;

/// A command, opened if it came sealed.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdminCommand<'a> {
    /// The connection by which it came, and which takes the reply.
    pub(super) from: ConnectionRef,
    /// The name of that connection.
    pub(super) id: AdmissionId,
    /// The capsule.
    pub(super) capsule: &'a CommandCapsule,
    /// Its in-capsule data.
    pub(super) body: &'a [u8],
    /// The time now.
    pub(super) now: Instant,
}

/// The outcome of an admin command.
pub(super) enum AdminAnswer {
    /// The status, the value and the payload of the reply.
    Now(Status, u32, Vec<u8>),
    /// The reply comes later, or never: the connection is gone.
    Later,
}

/// A reply with nothing but a status.
pub(super) fn refuse(status: Status) -> AdminAnswer {
    AdminAnswer::Now(status, 0, Vec::new())
}

/// A reply with a status and a text.
pub(super) fn refuse_saying(status: Status, text: String) -> AdminAnswer {
    let text = text.into_bytes();
    AdminAnswer::Now(status, narrow(text.len()), text)
}
