//! [`SessionError`]: the reasons why a session, or a command in it, fails.

use std::io;
use std::time::Duration;

use rblk_fabric::{AddressError, FabricError};
use rblk_protocol::auth::AuthError;
use rblk_protocol::{HelloReject, Opcode, RejectReason, Status};

/// The reason why a session, or a command on its admin connection, failed. The text names the
/// object and the fix.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// Not an address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The fabric failed.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The target refused the connection.
    #[error("{address} refused the connection: {}", refusal(.reject))]
    Refused {
        /// The target.
        address: String,
        /// The reply.
        reject: HelloReject,
    },
    /// The target refused a command.
    #[error("{what}: {}{}", told(*.status, .text), hint(*.status))]
    Status {
        /// The request.
        what: String,
        /// The answer.
        status: Status,
        /// The target's text, maybe empty.
        text: String,
    },
    /// This host may not go on with the volume: another host held it since, or the target cannot
    /// rule that out. The target's text says which.
    #[error("fenced from volume `{volume}`: {by}")]
    Fenced {
        /// The volume.
        volume: String,
        /// The target's text.
        by: String,
    },
    /// The peer does not speak rblk.
    #[error(
        "{address} does not speak rblk: {reason}. Is this the port of rblk-target (7720 for rdma://, 7721 for tcp://)?"
    )]
    NotRblk {
        /// The peer.
        address: String,
        /// The fault in its bytes.
        reason: String,
    },
    /// The target does not agree to digests, which the mount requires.
    #[error(
        "{address} does not agree to digests: its device gathers too little for one. Set digest = \"auto\", or use another address"
    )]
    NoDigests {
        /// The target.
        address: String,
    },
    /// The volume does not exist at the target.
    #[error("{address} has no volume `{volume}`. It has: {has}")]
    NoSuchVolume {
        /// The target.
        address: String,
        /// The requested volume.
        volume: String,
        /// The volumes of the target.
        has: String,
    },
    /// No answer in time.
    #[error("the target did not answer {what:?} in time")]
    TimedOut {
        /// The command.
        what: Opcode,
    },
    /// No address could be connected in time.
    #[error("no answer from {address} within {after:?}: {last}")]
    Unreachable {
        /// The addresses.
        address: String,
        /// The time spent.
        after: Duration,
        /// The last error.
        last: String,
    },
    /// The connection died.
    #[error("the connection was lost ({0})")]
    Lost(String),
    /// The target does not prove its key.
    #[error(
        "{address} does not prove its key, and target_keys asks for it: set auth = \"required\" and key_file there, \
         or remove target_keys here"
    )]
    NoProof {
        /// The target.
        address: String,
    },
    /// A connection over TCP would not be encrypted, but the configuration requires it.
    #[error("the connection to {address} cannot be encrypted (encrypt = \"required\"): {why}")]
    NotEncrypted {
        /// The target.
        address: String,
        /// The missing feature, and the end that lacks it.
        why: String,
    },
    /// The target has none of the required keys.
    #[error(
        "{address} does not prove the key of target_keys ({keys}): another target answers there, or it has a new \
         key. `rblk-target key show` prints its key there"
    )]
    WrongTargetKey {
        /// The target.
        address: String,
        /// The keys.
        keys: String,
    },
    /// The target does not know the key of this host.
    #[error(
        "{address} does not let in the key of this host, {key}: add it to a [[host]] of the target"
    )]
    HostNotAllowed {
        /// The target.
        address: String,
        /// The public key of this host.
        key: String,
    },
    /// The answer has no proof that it is the target's.
    #[error("the answer to {what:?} ({status}) is not proven to be the target's")]
    Unproven {
        /// The command.
        what: Opcode,
        /// The status of the answer.
        status: Status,
    },
    /// A refusal of the connection reports that the session is lost, but has no proof.
    #[error("{address} refused the connection ({text}), and did not prove that it is the target")]
    UnprovenLoss {
        /// The address.
        address: String,
        /// The text of the refusal.
        text: String,
    },
    /// The proofs of this host cannot be made.
    #[error(transparent)]
    Auth(#[from] AuthError),
    /// The target broke a rule.
    #[error("the target broke the protocol: {0}")]
    Protocol(&'static str),
    /// Memory.
    #[error("{0}")]
    Memory(String),
    /// The system.
    #[error("{what}: {source}")]
    System {
        /// The failed action.
        what: &'static str,
        /// The reason for the failure.
        source: io::Error,
    },
}

fn refusal(reject: &HelloReject) -> String {
    let hint = match reject.reason {
        Some(RejectReason::Version) => "; install matching versions of rblk on both hosts",
        Some(RejectReason::ShuttingDown) => "; try again when it has restarted",
        Some(RejectReason::LimitReached) => "; free sessions or memory there",
        Some(RejectReason::NotAllowed) => {
            "; name the key of the target by --target-key, or target_keys in a file. This host needs a key \
             (`rblk-initiator key new`), and the target has to let it in (`rblk-target host add`)"
        }
        Some(RejectReason::NotEncrypted) => {
            "; write encrypt = \"auto\" here, and `modprobe tls` on both hosts"
        }
        _ => "",
    };
    format!("{}{hint}", reject.text)
}

/// Whether a refusal means that the session is gone.
fn lost(reject: &HelloReject) -> bool {
    matches!(reject.reason, Some(RejectReason::NoSuchSession | RejectReason::StaleEpoch))
}

/// A status with the target's text. A text about a store, or about the target's records, stands
/// alone.
fn told(status: Status, text: &str) -> String {
    match status {
        Status::StoreError if !text.is_empty() => text.to_owned(),
        _ if text.is_empty() => status.to_string(),
        _ => format!("{status} ({text})"),
    }
}

fn hint(status: Status) -> &'static str {
    match status {
        Status::InUse => {
            "; unmount it there, or take it over with --take-over, which fences that host"
        }
        Status::NotAllowed => "; change the rights of this host in its [[host]] of the target",
        _ => "",
    }
}

impl SessionError {
    /// Whether a later try may succeed.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Fabric(
                FabricError::NoVerbs(_)
                | FabricError::MemlockTooSmall { .. }
                | FabricError::Environment(_),
            )
            | Self::Address(_) => false,
            Self::Refused { reject, .. } => !matches!(
                reject.reason,
                Some(
                    RejectReason::Version
                        | RejectReason::NotAllowed
                        | RejectReason::Malformed
                        | RejectReason::NotEncrypted
                )
            ),
            Self::Status { status, .. } => {
                matches!(
                    status,
                    Status::ShuttingDown
                        | Status::TimedOut
                        | Status::Internal
                        // Other mounts of this host may end.
                        | Status::LimitReached
                )
            }
            Self::NoSuchVolume { .. }
            | Self::Memory(_)
            | Self::Fenced { .. }
            | Self::NoProof { .. }
            | Self::NotEncrypted { .. }
            | Self::WrongTargetKey { .. }
            | Self::HostNotAllowed { .. } => false,
            _ => true,
        }
    }

    /// Whether the target does not know the session, or knows it in a higher epoch: a new session
    /// is needed. The error does not concern the volume: see [`Self::Fenced`].
    #[must_use]
    pub fn is_session_gone(&self) -> bool {
        match self {
            Self::Refused { reject, .. } => lost(reject),
            Self::Status { status, .. } => matches!(status, Status::NoSuchSession | Status::Fenced),
            _ => false,
        }
    }

    /// Converts an error of a peer that has to prove that it is the target, and has not: the peer
    /// cannot report that a session is gone, so only this try fails.
    pub(crate) fn before_proof(self) -> Self {
        match self {
            Self::Refused { address, reject } if lost(&reject) => {
                Self::UnprovenLoss { address, text: reject.text }
            }
            error => error,
        }
    }

    /// The exit code.
    #[must_use]
    pub fn exit(&self) -> rblk_config::Exit {
        use rblk_config::Exit;
        match self {
            Self::Address(_) => Exit::Usage,
            Self::Fabric(
                FabricError::NoDevice
                | FabricError::Environment(_)
                | FabricError::MemlockTooSmall { .. }
                | FabricError::NoVerbs(_),
            ) => Exit::HostLacks,
            Self::Fabric(
                FabricError::Unreachable { .. }
                | FabricError::TimedOut { .. }
                | FabricError::Busy { .. }
                | FabricError::NotRblk { .. },
            )
            | Self::Unreachable { .. }
            | Self::TimedOut { .. }
            | Self::Unproven { .. }
            | Self::UnprovenLoss { .. }
            | Self::NotRblk { .. }
            | Self::Lost(_) => Exit::Unreachable,
            Self::Refused { .. }
            | Self::Status { .. }
            | Self::NoSuchVolume { .. }
            | Self::NoProof { .. }
            | Self::NotEncrypted { .. }
            | Self::WrongTargetKey { .. }
            | Self::HostNotAllowed { .. }
            | Self::Fenced { .. } => Exit::Refused,
            _ => Exit::Failure,
        }
    }
}
