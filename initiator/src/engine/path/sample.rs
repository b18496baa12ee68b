//! Paths of the in-memory network, for tests.

use rblk_fabric::soft::network::{FaultyWire, Network};
use rblk_fabric::{Device, PollerHandle, ProtectionDomain};
use rblk_protocol::{InstanceId, Nonce, Version};

use super::*;

/// Limit of the requests at once.
pub(crate) const DEPTH: u16 = 4;
/// Limit of the data of one request.
pub(crate) const DATA_MAX: usize = 16 << 10;

/// A path with a silent target, and its cable. Without a cable there is no QP.
pub(crate) fn path(
    network: &Network,
    buffers: &Arc<Region>,
    cabled: bool,
) -> (Path, Option<FaultyWire>) {
    let domain = || Device::Soft(network.device()).alloc_pd().unwrap();
    let (pd, far) = (domain(), domain());
    let depth = QueueDepth::new(DEPTH).unwrap();
    let layout = PathLayout { depth };
    let (poller, handle) = pd.poller(1024).unwrap();
    let (mut connections, mut wire) = (Vec::new(), None);
    if cabled {
        let (_, far_handle) = far.poller(1024).unwrap();
        let limits = layout.qp_limits(0, 4, Features::default());
        let (near, _, cable) =
            network.pair((soft(&handle), limits), (soft(&far_handle), limits)).unwrap();
        connections.push(Connection::Soft(near));
        wire = Some(cable);
    }
    let accept = HelloAccept {
        version: Version::NEWEST,
        depth,
        features: Features::default(),
        in_capsule_bytes: 4096,
        io_max_bytes: narrow(DATA_MAX),
        instance: InstanceId::default(),
        nonce: Nonce::default(),
    };
    let path = Path {
        poller,
        connections,
        proofs: Vec::new(),
        tested: None,
        memory: register(&pd, buffers, layout),
        accept,
        epoch: Epoch(1),
        volume: VolumeHandle(1),
        lane_bytes: 1,
        way: WayIndex::FIRST,
        way_terms: WayTerms::default(),
    };
    (path, wire)
}

fn register(pd: &ProtectionDomain, buffers: &Arc<Region>, layout: PathLayout) -> PathMemory {
    PathMemory::register(pd, &Arc::clone(buffers).into(), layout, 1).unwrap()
}

#[allow(irrefutable_let_patterns, reason = "verbs may be built in or not")]
fn soft(handle: &PollerHandle) -> &rblk_fabric::soft::PollerHandle {
    let PollerHandle::Soft(handle) = handle else { unreachable!("the network is soft") };
    handle
}
