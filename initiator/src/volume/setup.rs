//! [`Setup`]: the parameters with which a mount reaches its volume, apart from a living session. A
//! process with the setup and the [`Facts`](super::course::Facts) can serve the device and
//! reconnect, whether it opened the volume itself or read the note of the process before it.

use std::sync::Arc;

use rblk_config::{DigestWish, MountConfig};
use rblk_fabric::{Address, Region};
use rblk_protocol::{Features, Name};

use super::session::{Credentials, HostIdentity, QueueWish, Session};
use super::shared_memory::SharedMemory;
use crate::engine::path::Path;
use rblk_operate::mount::configured::KeysFile;

/// The parameters with which a mount reaches its volume.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// The volume's name.
    pub(crate) volume_name: Name,
    /// The target's addresses, in the order of preference.
    pub(crate) addresses: Vec<Address>,
    /// The identity of this host towards the target.
    pub(crate) host: HostIdentity,
    /// The keys by which both ends prove their identity, if the mount asks for it. Read when this
    /// process takes the mount up, and at each reload; no note holds them.
    pub(crate) credentials: Option<Arc<Credentials>>,
    /// The file with the keys that the target may prove.
    pub(crate) keys_file: Option<KeysFile>,
    /// The wish of every queue: the values that the target granted first.
    pub(crate) wish: QueueWish,
    /// Hardware queues.
    pub(crate) queues: u16,
    /// Memory of each queue: `wish.depth` buffers of `wish.buffer_stride()` bytes. At least
    /// `queues` of them. `None` for a queue that has left.
    pub(crate) buffers: Vec<Option<Arc<Region>>>,
    /// Memory of other programs for the target's data transfers.
    pub(crate) shared: SharedMemory,
    /// Control tests the paths of the queues: the program that drives the queues may not drive them
    /// in time.
    pub(crate) tests_paths: bool,
    /// The connection in use, or last in use; for people.
    pub(crate) endpoint: Endpoint,
}

/// The identity of this host towards the target.
#[derive(Clone, Debug)]
pub(crate) struct KnownBy {
    /// The claimed identity.
    pub(crate) host: HostIdentity,
    /// The keys that prove it.
    pub(crate) credentials: Option<Arc<Credentials>>,
}

impl KnownBy {
    pub(crate) fn credentials(&self) -> Option<&Credentials> {
        self.credentials.as_deref()
    }
}

impl Setup {
    /// The identity of this host towards the target.
    pub(super) fn known_by(&self) -> KnownBy {
        KnownBy { host: self.host, credentials: self.credentials.clone() }
    }
}

/// Whether the queues of a mount ask for digests: never where data is in the memory of other
/// programs, since the digest of a READ would land there, behind the data.
pub(crate) fn digest_wish(config: &MountConfig, shared: &SharedMemory) -> DigestWish {
    if shared.is_empty() { config.digest } else { DigestWish::Off }
}

/// The credentials that a configuration asks for. `None` if it names no key of the target: then
/// neither end proves its identity.
///
/// # Errors
/// The key file is missing, is no key file, or others may read it.
pub(crate) fn credentials_of(config: &MountConfig) -> anyhow::Result<Option<Arc<Credentials>>> {
    let Some(key) = config.secret_key()? else { return Ok(None) };
    let credentials = Credentials::new(key, config.target_keys.clone())?;
    Ok(Some(Arc::new(credentials.encrypting(config.transport.encrypt))))
}

/// A connection to the target, in words for people.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Endpoint {
    /// The target's address.
    pub(crate) address: String,
    /// This host's RDMA device.
    pub(crate) rdma_device: String,
    /// The transport of the messages.
    pub(crate) transport: String,
    /// Every I/O connection is encrypted.
    pub(crate) is_encrypted: bool,
}

impl Endpoint {
    /// The connection of a session with these paths.
    pub(crate) fn of<'p>(session: &Session, paths: impl IntoIterator<Item = &'p Path>) -> Self {
        let caps = session.device().caps();
        let mut paths = paths.into_iter().peekable();
        Self {
            address: session.address.to_string(),
            rdma_device: caps.name.clone(),
            transport: caps.transport.to_string(),
            // All lanes of a path have the features of its first lane.
            is_encrypted: paths.peek().is_some()
                && paths.all(|path| path.accept.features.has(Features::ENCRYPT)),
        }
    }
}
