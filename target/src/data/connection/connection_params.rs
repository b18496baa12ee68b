//! [`ConnectionParams`]: the parameters of a connection from control.

use std::sync::Arc;
use std::time::Duration;

use rblk_fabric::ACCEPTED_DETECT_MAX;
use rblk_protocol::auth::{Hellos, QueueKey};
use rblk_protocol::{ConnectionKind, Epoch, Features};

use super::bounce::BounceMemory;
use super::spare_memory::SpareMemory;
use crate::data::connection::connection_memory::ConnectionMemory;
use crate::volume::ids::{AdmissionId, SessionIndex};
use rblk_operate::target::traffic::IoStats;

/// Bounds of [`progress_max`].
const PROGRESS_MAX: (Duration, Duration) = (Duration::from_secs(2), ACCEPTED_DETECT_MAX);

/// The parameters of a connection from control.
#[derive(Debug)]
pub struct ConnectionParams {
    /// The kind of connection.
    pub kind: ConnectionKind,
    /// The connection's name for control.
    pub admission: AdmissionId,
    /// The session; [`SessionIndex::NONE`] of an admin connection before its LOGIN is accepted.
    pub session: SessionIndex,
    /// Epoch that its commands must name.
    pub epoch: Epoch,
    /// The proof due in the self-test of an I/O connection. Its key is cleared from memory with the
    /// connection.
    pub proof: Option<Box<ProofDue>>,
    /// Agreed in-capsule bytes.
    pub in_capsule_bytes: u32,
    /// Agreed limit of data per command.
    pub io_max_bytes: u32,
    /// Agreed features.
    pub features: Features,
    /// READs that the target may have outstanding.
    pub reads_out: u8,
    /// Runs of memory that one WRITE may gather.
    pub send_sges: u32,
    /// Slots of the cache that each RECV may name ([`super::Landing`]). 0: messages land in the
    /// connection's own memory.
    pub landing_slots: u32,
    /// The connection's memory, registered in the domain of its QP.
    pub memory: ConnectionMemory,
    /// Takes the memory after the connection's end, if others can reuse it.
    pub spares: Option<SpareMemory>,
    /// Memory through which the connection's data passes, on devices that need it (iWARP). The QP
    /// then has a domain of its own.
    pub bounce: Option<BounceMemory>,
    /// A connection on which send WRs wait and none completes for this long is ended:
    /// [`progress_max`].
    pub progress_max: Duration,
    /// The counters of the connection's block commands.
    pub io: Arc<IoStats>,
    /// The initiator's name and address, for logs.
    pub peer: String,
}

/// The proof that is due from an I/O connection.
#[derive(Debug)]
pub struct ProofDue {
    /// The key of the connection's session, epoch and queue.
    pub key: QueueKey,
    /// The connection's hellos in wire format.
    pub hellos: Hellos,
    /// Time for the proof, from the accept.
    pub within: Duration,
}

/// Time that the send WRs of a connection may wait without a completion, for an initiator that
/// wants a dead path detected within `detect`. Devices give up a lost message much sooner; this
/// limit is for devices that do not, and for live peers that take no data. An initiator's wish can
/// only shorten the limit: others need the memory that such a peer keeps.
///
/// A slow peer that takes its data lives: at the lowest allowed pace, a WR completes at least every
/// four seconds (`QueuedSends::queue_write`).
#[must_use]
pub fn progress_max(detect: Option<Duration>) -> Duration {
    detect.map_or(PROGRESS_MAX.1, |detect| detect.clamp(PROGRESS_MAX.0, PROGRESS_MAX.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_shortens_the_time_without_progress_and_never_lengthens_it() {
        let of = |seconds| progress_max(Some(Duration::from_secs(seconds))).as_secs();
        assert_eq!([0, 1, 2, 3, 5, 6, 20, 100_000].map(of), [2, 2, 2, 3, 5, 5, 5, 5]);
        assert_eq!(progress_max(None), Duration::from_secs(5));
    }
}
