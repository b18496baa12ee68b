//! [`AdmittedCommand`]: the next step for a command that came.

use rblk_protocol::{CommandCapsule, ConnectionKind, Features, Opcode, Status};

use super::connection_params::ConnectionParams;

/// The next step for a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AdmittedCommand {
    /// A block command for a volume.
    Block,
    /// An admin command, for control.
    Admin,
    /// A self-test: write the pattern.
    SelfTest,
    /// Only answer with this status.
    Answer(Status),
}

impl AdmittedCommand {
    /// The next step for any other command. `takes_blocks`: the connection may use block commands.
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
            // The feature is not agreed, or the digest is missing.
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
