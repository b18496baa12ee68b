//! What an owner with much to move may put in front of another owner, counted in bytes.

mod conformance;
mod soft_pairs;

use conformance::{Side, limits, wr};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rblk_fabric::soft::network::{Conditions, End, FaultyWire, Network};
use rblk_fabric::{
    Access, Completion, Connection, Device, MemoryRegion, Owner, Poller, ProtectionDomain, QpIndex,
    RecvWr, SendOp, WrId,
};
use rblk_protocol::width::wide;
use soft_pairs::{poller, soft_handle};

/// Bytes of one WR of the noisy owner.
const LARGE: u32 = 1 << 20;
/// WRs of each of its QPs, in each direction.
const WRS: u64 = 4;
/// QPs of the noisy owner.
const NOISY_QPS: usize = 4;
/// Most bytes that one owner sends in one turn; it receives at most eight times as many.
const SHARE: i64 = 64 << 10;
/// Room of a link: more than all of it, so that the link bounds nothing.
const LINK: usize = 64 << 20;

const QUIET: Owner = Owner(1);
const NOISY: Owner = Owner(2);

/// A target with one poller, and peers.
struct Bed {
    _pd: ProtectionDomain,
    poller: Box<dyn Poller>,
    memory: MemoryRegion,
    peers: Vec<Peer>,
}

struct Peer {
    side: Side,
    memory: MemoryRegion,
    wire: FaultyWire,
    // Of the target's end.
    qp: QpIndex,
}

impl Bed {
    /// One quiet peer, then the noisy ones.
    fn new(noisy: Owner) -> Self {
        let network = Network::new(7);
        network.set_conditions(Conditions { buffer: LINK, ..Conditions::default() });
        let device = Device::Soft(network.device());
        let pd = device.alloc_pd().unwrap();
        let (mut target, handle) = poller(&pd);
        let peers = (0..=NOISY_QPS).map(|at| {
            let peer_pd = device.alloc_pd().unwrap();
            let (mut own, own_handle) = poller(&peer_pd);
            let ends = ((soft_handle(&own_handle), limits()), (soft_handle(&handle), limits()));
            let (one, two, wire) = network.pair(ends.0, ends.1).unwrap();
            let (own_qp, qp) = (
                own.attach(Connection::Soft(one)).unwrap(),
                target.attach(Connection::Soft(two)).unwrap(),
            );
            target.set_owner(qp, if at == 0 { QUIET } else { noisy });
            let side = Side::new(peer_pd, own, own_qp);
            let memory = side.memory(wide(LARGE), Access::REMOTE);
            Peer { side, memory, wire, qp }
        });
        let peers = peers.collect();
        let region =
            rblk_fabric::Region::allocate(wide(LARGE), rblk_fabric::PageKind::Normal).unwrap();
        let memory = pd.register(&region, Access::REMOTE).unwrap();
        Self { _pd: pd, poller: target, memory, peers }
    }

    fn post_recv(&mut self, peer: usize) {
        let sge = self.memory.sge(0, 64).unwrap();
        self.poller.post_recv(self.peers[peer].qp, &[RecvWr::one(WrId(1), sge)]).unwrap();
    }

    /// A peer sends a short message.
    fn ask(&mut self, peer: usize) {
        let Peer { side, memory, .. } = &mut self.peers[peer];
        side.recv(8, memory.sge(0, 64).unwrap());
        side.post(&[wr(9, SendOp::Send, memory.sge(0, 64).unwrap(), true)]);
    }

    /// Polls until a message of this peer is there. Gives the polls.
    fn until_asked(&mut self, peer: usize) -> usize {
        let mut out = [Completion::default(); 64];
        for polls in 1..1000 {
            let count = self.poller.poll(&mut out).unwrap();
            if out[..count].iter().any(|done| done.qp == self.peers[peer].qp) {
                return polls;
            }
            assert!(count > 0 || self.poller.has_more() || polls < 4, "it would sleep");
        }
        panic!("the message of peer {peer} does not arrive");
    }

    /// Bytes that the target moved for all but the first peer: sent, and taken off the link. The
    /// peers receive nothing, and have sent all.
    fn moved(&self) -> i64 {
        let under_way = |wire: &FaultyWire, from| i64::try_from(wire.under_way(from)).unwrap();
        let noisy = self.peers.iter().skip(1);
        noisy.map(|peer| under_way(&peer.wire, End::B) - under_way(&peer.wire, End::A)).sum()
    }

    /// All peers were heard; the noisy ones send all that they have, and the target has as much
    /// to send to them.
    fn flood(&mut self) {
        for peer in 0..self.peers.len() {
            self.post_recv(peer);
            self.ask(peer);
            self.until_asked(peer);
        }
        for Peer { side, memory, qp, .. } in self.peers.iter_mut().skip(1) {
            let of = |region: &MemoryRegion| region.sge(0, LARGE).unwrap();
            for id in 0..WRS {
                side.post(&[wr(id, SendOp::Write(self.memory.remote(0)), of(memory), false)]);
                let out = wr(id, SendOp::Write(memory.remote(0)), of(&self.memory), false);
                self.poller.post_send(*qp, &[out]).unwrap();
            }
        }
    }

    /// Bytes of others that the target moves from a message of the quiet peer to its answer.
    fn in_front(&mut self) -> i64 {
        self.post_recv(0);
        self.ask(0);
        let before = self.moved();
        self.until_asked(0);
        let answer = wr(5, SendOp::Send, self.memory.sge(0, 64).unwrap(), true);
        let sent = self.peers[0].wire.under_way(End::B);
        self.poller.post_send(self.peers[0].qp, &[answer]).unwrap();
        assert!(self.peers[0].wire.under_way(End::B) > sent, "the answer waits");
        let moved = self.moved() - before;
        // It takes the answer, and both are told of what arrived.
        for _ in 0..4 {
            self.peers[0].side.poll();
            self.poller.poll(&mut [Completion::default(); 64]).unwrap();
        }
        moved
    }
}

/// An owner alone is not bounded, however many QPs it has.
#[test]
fn one_owner_is_served_as_fast_as_its_links_take_it() {
    let mut bed = Bed::new(QUIET);
    bed.flood();
    let bytes = bed.in_front();
    assert!(bytes > 4 << 20, "{bytes} bytes");
}

#[test]
fn a_noisy_owner_puts_its_shares_in_front_of_a_quiet_one() {
    let mut bed = Bed::new(NOISY);
    bed.flood();
    let before = bed.moved();
    for round in 0..8 {
        let bytes = bed.in_front();
        assert!(bytes <= 9 * SHARE + 4096, "round {round}: {bytes} bytes in front");
    }
    assert!(bed.moved() > before, "the noisy owner goes on");
}

/// A thread that sleeps while a QP waits for its share would wait for ever.
#[test]
fn the_line_wakes_its_thread() {
    let mut bed = Bed::new(NOISY);
    bed.flood();
    assert!(bed.poller.has_more());
    bed.poller.arm().unwrap();
    let mut out = [Completion::default(); 64];
    for _ in 0..2000 {
        while bed.poller.poll(&mut out).unwrap() > 0 {}
        if !bed.poller.has_more() {
            return;
        }
        let fds = bed.poller.event_fds();
        let mut fds: Vec<_> =
            fds.iter().flatten().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
        assert!(poll(&mut fds, PollTimeout::ZERO).unwrap() > 0, "nothing wakes it");
        drop(fds);
        bed.poller.clear_event();
        bed.poller.arm().unwrap();
    }
    panic!("the line does not end");
}
