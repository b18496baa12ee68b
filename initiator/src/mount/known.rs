//! [`Known`]: what a mount knows of its volume apart from a living session. A process that has it
//! can serve the device and have the session again, whether it opened the volume itself or was told
//! by the process before it.

use std::sync::Arc;

use rblk_fabric::{Address, Region};
use rblk_protocol::{Epoch, InstanceId, Name, OpenReply, SessionId};

use crate::session::{HostIdentity, QueueWish};

/// What a mount knows of its volume.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// The volume's name.
    pub(super) volume_name: Name,
    /// The target's addresses, in the order of preference.
    pub(super) addresses: Vec<Address>,
    /// Who we are to the target.
    pub(super) host: HostIdentity,
    /// The answer to the last OPEN. Its generation is the one to come back with.
    pub(super) volume: OpenReply,
    /// The last session, and the highest epoch that was ever asked for in it; `None` when it is
    /// gone.
    pub(super) resume: Option<(SessionId, Epoch)>,
    /// The target's run at that OPEN.
    pub(super) instance: InstanceId,
    /// The target's name.
    pub(super) target_name: Name,
    /// What every queue asks for: what the target granted the first time.
    pub(super) wish: QueueWish,
    /// Hardware queues.
    pub(super) queues: u16,
    /// Memory of each queue, `wish.depth` buffers of `wish.io_max_bytes`. At least `queues` of
    /// them.
    pub(super) buffers: Vec<Arc<Region>>,
    /// The address in use, or last in use; for people.
    pub(super) address: String,
    /// RDMA device in use, or last in use; for people.
    pub(super) rdma_device: String,
    /// What carries the messages; for people.
    pub(super) transport: String,
    /// Who holds the volume instead: this mount was fenced, and will never serve it again.
    pub(super) fenced: Option<String>,
}
