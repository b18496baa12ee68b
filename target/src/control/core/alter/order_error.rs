//! [`OrderError`]: why a change of a volume is refused.

use rblk_protocol::Name;

/// Why an order is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OrderError {
    /// The name is taken.
    #[error("there is a volume {0} already")]
    Exists(Name),
    /// The volume is not served.
    #[error("there is no such volume; `rblk-target volume list` shows all")]
    Unknown,
    /// Hosts have it.
    #[error("{volume} is in use: {}", users.join(", "))]
    InUse {
        /// The volume.
        volume: Name,
        /// The hosts that have it open or may come back.
        users: Vec<String>,
    },
    /// Another order is under way.
    #[error("{0} is being changed already; try again when that is done")]
    Busy(Name),
    /// The target stops.
    #[error("the target is stopping")]
    Stopping,
    /// The volume would lose data.
    #[error(
        "{volume} would lose the data behind its new end: it has {was} bytes, and {bytes} are fewer; --shrink does it"
    )]
    Smaller {
        /// The volume.
        volume: Name,
        /// Bytes now.
        was: u64,
        /// Bytes asked for.
        bytes: u64,
    },
    /// A host could not learn of a loss.
    #[error(
        "{volume} cannot become write-back while hosts have it open, since they would not hear of writes that a crash \
         loses: unmount it first ({})", users.join(", ")
    )]
    WriteBackInUse {
        /// The volume.
        volume: Name,
        /// The hosts that have it open or may come back.
        users: Vec<String>,
    },
}
