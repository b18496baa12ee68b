//! The proofs of a toy target, good and bad.

use std::collections::BTreeMap;

use rblk_protocol::auth::{
    Carrier, Hellos, LoggedIn, SecretKey, SessionSecret, TargetHandshake, TargetSeal, Ticket,
};
use rblk_protocol::{CommandCapsule, LoginRequest, Opcode, Status, Tag};

/// The keys of a toy, and its misbehaviour.
#[derive(Clone)]
pub(super) struct Proofs {
    pub(super) keys: Vec<SecretKey>,
    /// The answers after LOGIN are sealed.
    pub(super) seals: bool,
    /// The status of every LOGIN without a seal, if any.
    pub(super) refuses: Option<Status>,
}

/// The content of a command.
pub(super) enum Opened {
    Body(Vec<u8>),
    /// Answer like this.
    Answer(Status, Vec<u8>),
    /// The connection must end.
    Broken,
}

/// One admin connection of a toy with keys.
pub(super) struct Prover {
    proofs: Proofs,
    handshake: TargetHandshake,
    seal: Option<TargetSeal>,
    // Of each command without an answer.
    tickets: BTreeMap<Tag, Ticket>,
}

/// The secret of every session.
pub(super) fn secret() -> SessionSecret {
    SessionSecret::from_bytes(&[7; 32])
}

impl Prover {
    pub(super) fn new(proofs: Proofs, hellos: &Hellos) -> Self {
        let handshake = TargetHandshake::new(&proofs.keys, hellos, Carrier::Tcp);
        Self { proofs, handshake, seal: None, tickets: BTreeMap::new() }
    }

    pub(super) fn open(&mut self, command: &CommandCapsule, body: &[u8]) -> Opened {
        match (command.opcode, &mut self.seal) {
            (Opcode::Authenticate, None) => match self.handshake.read_first(body) {
                Ok(second) => Opened::Answer(Status::Ok, second.to_vec()),
                Err(_) => Opened::Answer(Status::NotAllowed, Vec::new()),
            },
            (Opcode::Login, None) => match self.handshake.read_last(body, command.sequence) {
                Ok(_) if self.proofs.refuses.is_some() => {
                    Opened::Answer(self.proofs.refuses.unwrap(), Vec::new())
                }
                Ok(LoggedIn { login, seal, ticket, .. }) => {
                    assert!(LoginRequest::from_wire(&login).is_ok());
                    self.seal = Some(seal);
                    self.tickets.insert(command.tag, ticket);
                    Opened::Body(login.to_vec())
                }
                Err(_) => Opened::Broken,
            },
            (Opcode::KeepAlive | Opcode::AsyncEvent, _) => Opened::Body(Vec::new()),
            (_, Some(seal)) => {
                let opened = seal.open_command(command.sequence, &command.to_wire(), body);
                let Ok((body, ticket)) = opened else { return Opened::Broken };
                if self.proofs.seals {
                    self.tickets.insert(command.tag, ticket);
                }
                Opened::Body(body.to_vec())
            }
            (_, None) => Opened::Broken,
        }
    }

    /// The answer to the command of a tag, sealed, if this toy seals it.
    pub(super) fn seal(
        &mut self,
        tag: Tag,
        status: Status,
        value: u32,
        payload: &[u8],
    ) -> Option<Vec<u8>> {
        let ticket = self.tickets.remove(&tag)?;
        Some(self.seal.as_ref()?.seal_reply(ticket, status, value, payload).unwrap())
    }
}
