//! [`ConnectionParams`]: what control hands over with a connection.

use std::sync::Arc;
use std::time::Duration;

use rblk_fabric::ACCEPTED_DETECT_MAX;
use rblk_protocol::auth::{Hellos, QueueKey};
use rblk_protocol::{ConnectionKind, Epoch, Features};

use super::bounce::BounceMemory;
use super::spare_memory::SpareMemory;
use crate::data::connection::connection_memory::ConnectionMemory;
use crate::volume::ids::{AdmissionId, SessionIndex};
use crate::volume::traffic::IoStats;

/// Bounds of [`progress_max`].
const PROGRESS_MAX: (Duration, Duration) = (Duration::from_secs(2), ACCEPTED_DETECT_MAX);

/// What control hands over.
#[derive(Debug)]
pub struct ConnectionParams {
    /// What it is for.
    pub kind: ConnectionKind,
    /// Its name for control.
    pub admission: AdmissionId,
    /// The session; [`SessionIndex::NONE`] of an admin connection before its LOGIN is accepted.
    pub session: SessionIndex,
    /// Epoch that its commands must name.
    pub epoch: Epoch,
    /// What its self-test must prove, for an I/O connection that has to. Its key is cleared from
    /// memory with the connection.
    pub proof: Option<Box<ProofDue>>,
    /// In-capsule bytes agreed.
    pub in_capsule_bytes: u32,
    /// Most data per command agreed.
    pub io_max_bytes: u32,
    /// Features agreed.
    pub features: Features,
    /// READs that the target may have outstanding.
    pub reads_out: u8,
    /// Runs of memory that one WRITE may gather.
    pub send_sges: u32,
    /// Slots of the cache that each of its RECVs may name ([`super::Landing`]). 0: messages land in
    /// its own memory.
    pub landing_slots: u32,
    /// Its memory, registered in the domain of its QP.
    pub memory: ConnectionMemory,
    /// Where the memory goes when the connection has ended, if it is of use to others.
    pub spares: Option<SpareMemory>,
    /// Memory that its data passes through, on devices where that must be (iWARP). The domain of
    /// the QP is then its own.
    pub bounce: Option<BounceMemory>,
    /// A connection on which send WRs wait and none completes for this long has ended:
    /// [`progress_max`].
    pub progress_max: Duration,
    /// Where its block commands are counted.
    pub io: Arc<IoStats>,
    /// The initiator's name and address, for logs.
    pub peer: String,
}

/// What an I/O connection has to prove.
#[derive(Debug)]
pub struct ProofDue {
    /// The key of its session, epoch and queue.
    pub key: QueueKey,
    /// Its hellos, as they are sent.
    pub hellos: Hellos,
    /// The time that it has for it, from the accept.
    pub within: Duration,
}

/// How long the send WRs of a connection may wait, none of them completing, where the initiator
/// wants a dead path seen within `detect`. Devices give a lost message up much sooner; this limit
/// is for devices that do not, and for peers that live and take nothing. What an initiator asks for
/// shortens the limit and does not lengthen it: what such a peer keeps is missed by others.
///
/// A peer that is slow and takes what it is sent lives: at the lowest pace that a peer may have, a
/// WR completes at least every four seconds (`SendQueue::queue_write`).
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
