//! [`Seals`]: the admin connections with proven keys at both ends. Opens their commands and seals
//! the replies.
//!
//! A command that came in the clear is answered in the clear: KEEP_ALIVE and ASYNC_EVENT are hints.

use std::collections::BTreeMap;

use rblk_protocol::auth::{AuthError, REPLY_SEAL_BYTES, TargetSeal, Ticket};
use rblk_protocol::{CommandCapsule, Opcode, Status, Tag};
use zeroize::Zeroizing;

use super::effect::ConnectionRef;
use crate::volume::ids::AdmissionId;

#[derive(Debug)]
struct Sealed {
    seal: TargetSeal,
    // Commands that were opened and not answered.
    tickets: BTreeMap<Tag, Ticket>,
    // A command did not open: nothing is opened any more.
    is_broken: bool,
}

/// A command for control.
#[derive(Debug)]
pub(super) enum Unsealed {
    /// The command came in the clear.
    Plain,
    /// The opened body.
    Sealed(Zeroizing<Vec<u8>>),
    /// The host did not seal it like this: the connection must end.
    Broken(AuthError),
    /// The connection was broken before, and ends.
    Ignored,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Seals {
    by_connection: BTreeMap<ConnectionRef, Sealed>,
    by_admission: BTreeMap<AdmissionId, ConnectionRef>,
}

impl Seals {
    /// Seals a connection. The LOGIN with that tag has the ticket.
    pub(super) fn begin(
        &mut self,
        id: AdmissionId,
        at: ConnectionRef,
        seal: TargetSeal,
        (tag, ticket): (Tag, Ticket),
    ) {
        self.by_admission.insert(id, at);
        let tickets = BTreeMap::from([(tag, ticket)]);
        self.by_connection.insert(at, Sealed { seal, tickets, is_broken: false });
    }

    /// A connection ended.
    pub(super) fn end(&mut self, id: AdmissionId) {
        if let Some(at) = self.by_admission.remove(&id) {
            self.by_connection.remove(&at);
        }
    }

    /// Opens a command.
    pub(super) fn open(
        &mut self,
        at: ConnectionRef,
        command: &CommandCapsule,
        body: &[u8],
    ) -> Unsealed {
        let Some(sealed) = self.by_connection.get_mut(&at) else { return Unsealed::Plain };
        if sealed.is_broken {
            return Unsealed::Ignored;
        }
        if command.opcode == Opcode::AsyncEvent {
            return Unsealed::Plain;
        }
        match sealed.seal.open_command(command.sequence, &command.to_wire(), body) {
            Ok((plain, ticket)) => {
                sealed.tickets.insert(command.tag, ticket);
                Unsealed::Sealed(plain)
            }
            Err(error) => {
                sealed.is_broken = true;
                Unsealed::Broken(error)
            }
        }
    }

    /// Seals the answer to a command that was sealed. `None`: it goes in the clear.
    pub(super) fn seal(
        &mut self,
        to: ConnectionRef,
        tag: Tag,
        (status, value): (Status, u32),
        payload: &[u8],
    ) -> Option<Vec<u8>> {
        let sealed = self.by_connection.get_mut(&to)?;
        let ticket = sealed.tickets.remove(&tag)?;
        match sealed.seal.seal_reply(ticket, status, value, payload) {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                debug_assert!(false, "a reply of {} bytes: {error}", payload.len());
                // An answer without a seal counts for nothing.
                Some(Vec::new())
            }
        }
    }

    /// The bytes by which the seal makes a reply there longer.
    pub(super) fn overhead(&self, to: ConnectionRef) -> usize {
        if self.by_connection.contains_key(&to) { REPLY_SEAL_BYTES } else { 0 }
    }
}
