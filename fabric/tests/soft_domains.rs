//! QPs of several protection domains on one poller: each knows the memory of its own domain only.
//! And the rule of iWARP for the sinks of READs.

use rblk_fabric::soft::network::Network;
use rblk_fabric::{
    Access, Completion, Connection, Device, MemoryRegion, PageKind, Poller, PollerHandle,
    ProtectionDomain, QpIndex, QpLimits, Region, RemoteBuffer, SendOp, SendWr, SgeList, WcStatus,
    WrId,
};

const LIMITS: QpLimits = QpLimits {
    send_wrs: 8,
    recv_wrs: 8,
    send_sges: 1,
    recv_sges: 1,
    inline_bytes: 0,
    reads_out: 4,
    reads_in: 4,
};

fn soft(
    handle: &PollerHandle,
    pd: &ProtectionDomain,
) -> (rblk_fabric::soft::PollerHandle, rblk_fabric::soft::ProtectionDomain) {
    match (handle, pd) {
        (PollerHandle::Soft(handle), ProtectionDomain::Soft(pd)) => (handle.clone(), pd.clone()),
        #[cfg(feature = "verbs")]
        _ => panic!("another provider"),
    }
}

fn memory(pd: &ProtectionDomain, access: Access, byte: u8) -> MemoryRegion {
    let region = Region::allocate(4096, PageKind::Normal).unwrap();
    region.write(0, &[byte; 4096]);
    pd.register(&region, access).unwrap()
}

fn first(mr: &MemoryRegion) -> u8 {
    let mut byte = [0];
    mr.region().read(0, &mut byte);
    byte[0]
}

/// A poller with two QPs, of two domains of which none is the poller's, and a peer of each.
struct Bed {
    poller: Box<dyn Poller>,
    domains: [ProtectionDomain; 2],
    qps: [QpIndex; 2],
    far: Box<dyn Poller>,
    far_domain: ProtectionDomain,
    far_qps: [QpIndex; 2],
}

impl Bed {
    fn new(network: &Network) -> Self {
        let device = Device::Soft(network.device());
        let [pd, far_domain, one, two] = [(); 4].map(|()| device.alloc_pd().unwrap());
        let (mut poller, handle) = pd.poller(64).unwrap();
        let (mut far, far_handle) = far_domain.poller(64).unwrap();
        let (far_handle, _) = soft(&far_handle, &far_domain);
        let mut join = |domain: &ProtectionDomain| {
            let (handle, domain) = soft(&handle, domain);
            let ends = network.pair_in((&far_handle, LIMITS), (&handle, LIMITS), &domain);
            let (a, b, _) = ends.unwrap();
            let far_qp = far.attach(Connection::Soft(a)).unwrap();
            (far_qp, poller.attach(Connection::Soft(b)).unwrap())
        };
        let (ends_one, ends_two) = (join(&one), join(&two));
        Self {
            poller,
            domains: [one, two],
            qps: [ends_one.1, ends_two.1],
            far,
            far_domain,
            far_qps: [ends_one.0, ends_two.0],
        }
    }

    /// How a WR of the peer of that QP ends.
    fn by_peer(&mut self, at: usize, op: SendOp, from: &MemoryRegion) -> WcStatus {
        let wr = wr(op, from);
        self.far.post_send(self.far_qps[at], &[wr]).unwrap();
        end(&mut self.far, &mut self.poller)
    }

    /// How a WR of that QP ends.
    fn by_us(&mut self, at: usize, op: SendOp, memory: &MemoryRegion) -> WcStatus {
        let wr = wr(op, memory);
        self.poller.post_send(self.qps[at], &[wr]).unwrap();
        end(&mut self.poller, &mut self.far)
    }
}

fn wr(op: SendOp, memory: &MemoryRegion) -> SendWr {
    let sges = SgeList::one(memory.sge(0, 64).unwrap());
    SendWr { id: WrId(1), op, sges, signaled: true, inline: false }
}

fn end(of: &mut Box<dyn Poller>, other: &mut Box<dyn Poller>) -> WcStatus {
    for _ in 0..1000 {
        let mut one = [Completion::default()];
        let _ = other.poll(&mut [Completion::default()]).unwrap();
        if of.poll(&mut one).unwrap() == 1 {
            return one[0].status;
        }
    }
    panic!("it does not end");
}

#[test]
fn a_peer_reaches_memory_of_the_domain_of_its_queue_pair_only() {
    let mut bed = Bed::new(&Network::new(1));
    let source = memory(&bed.far_domain, Access::LOCAL_READ, 7);
    let [one, two] = [0, 1].map(|at| memory(&bed.domains[at], Access::REMOTE, 1));
    assert_ne!(one.rkey(), two.rkey(), "keys of one device differ");
    for (at, own, other) in [(0, &one, &two), (1, &two, &one)] {
        let to = |mr: &MemoryRegion| SendOp::Write(mr.remote(0));
        assert_eq!(bed.by_peer(at, to(own), &source), WcStatus::Success);
        assert_eq!(first(own), 7);
        own.region().write(0, &[1]);
        assert_eq!(bed.by_peer(at, to(other), &source), WcStatus::RemoteAccess);
        assert_eq!(first(other), 1);
    }
}

#[test]
fn a_queue_pair_uses_memory_of_its_own_domain_only() {
    let mut bed = Bed::new(&Network::new(2));
    let target = memory(&bed.far_domain, Access::REMOTE, 1);
    let remote: RemoteBuffer = target.remote(0);
    let [one, two] = [0, 1].map(|at| memory(&bed.domains[at], Access::LOCAL_WRITE, 9));
    assert_eq!(bed.by_us(0, SendOp::Write(remote), &one), WcStatus::Success);
    assert_eq!(first(&target), 9);
    assert_eq!(bed.by_us(0, SendOp::Write(remote), &two), WcStatus::LocalProtection);
    assert_eq!(bed.by_us(1, SendOp::Read(remote), &one), WcStatus::LocalProtection);
}

#[test]
fn on_iwarp_a_read_lands_only_where_the_peer_may_write() {
    let writable = Access { remote_write: true, ..Access::LOCAL_WRITE };
    for (iwarp, access, status) in [
        (false, Access::LOCAL_WRITE, WcStatus::Success),
        (true, writable, WcStatus::Success),
        (true, Access::LOCAL_WRITE, WcStatus::LocalProtection),
    ] {
        let network = if iwarp { Network::with_iwarp_rules(3) } else { Network::new(3) };
        let mut bed = Bed::new(&network);
        let source = memory(&bed.far_domain, Access::REMOTE, 5);
        let sink = memory(&bed.domains[0], access, 0);
        assert_eq!(bed.by_us(0, SendOp::Read(source.remote(0)), &sink), status, "{iwarp}");
        assert_eq!(first(&sink), if status == WcStatus::Success { 5 } else { 0 });
    }
}
