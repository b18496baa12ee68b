//! [`AdmittedCommand`]: what is to be done about a command that came.

use rblk_protocol::{CommandCapsule, ConnectionKind, Features, Opcode, Status};

use super::params::ConnectionParams;

/// What is to be done about a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AdmittedCommand {
    /// It is for a volume.
    Block,
    /// It is for control.
    Admin,
    /// The pattern is to be written.
    SelfTest,
    /// No more than to answer.
    Answer(Status),
}

impl AdmittedCommand {
    /// Of a command that is not for a volume, or may not be. `takes_blocks`: block commands are in
    /// order on its connection.
    #[inline(never)]
    pub(super) fn other(
        command: &CommandCapsule,
        params: &ConnectionParams,
        takes_blocks: bool,
    ) -> Self {
        if command.epoch != params.epoch {
            return Self::Answer(Status::Fenced);
        }
        let is_tested = takes_blocks || params.kind == ConnectionKind::Admin;
        if !is_tested && command.opcode != Opcode::SelfTest {
            return Self::Answer(Status::NotReady);
        }
        if command.flags.digest != params.features.has(Features::DIGEST) {
            // Not agreed, or missing.
            return Self::Answer(Status::NotSupported);
        }
        let is_connection_tag = command.tag == params.memory.layout().depth().connection_tag();
        match (params.kind, command.opcode) {
            (ConnectionKind::Io { .. }, Opcode::KeepAlive) if is_connection_tag => {
                Self::Answer(Status::Ok)
            }
            (ConnectionKind::Io { .. }, Opcode::SelfTest) if is_connection_tag => Self::SelfTest,
            (ConnectionKind::Admin, Opcode::KeepAlive) => Self::Answer(Status::Ok),
            (ConnectionKind::Admin, opcode) if opcode.is_admin() => Self::Admin,
            _ => Self::Answer(Status::InvalidOpcode),
        }
    }
}
