//! Connected pairs of the software provider.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use rblk_fabric::soft::network::{Conditions, FaultyWire, Network};
use rblk_fabric::soft::{Device as SoftDevice, PollerHandle as SoftHandle};
use rblk_fabric::{
    AcceptParams, Address, CipherKeys, ConnectOptions, Connection, ConnectionHello, Device,
    Listener, Poller, PollerHandle, ProtectionDomain, QpLimits, Route, Scheme,
};

use crate::conformance::{Pair, Side};

/// An address of this host with a port of the system's choice.
pub fn loopback() -> Address {
    Address { scheme: Scheme::Tcp, host: "127.0.0.1".to_owned(), port: 0 }
}

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

pub fn poller(pd: &ProtectionDomain) -> (Box<dyn Poller>, PollerHandle) {
    pd.poller(1024).unwrap()
}

pub fn soft_handle(handle: &PollerHandle) -> &SoftHandle {
    match handle {
        PollerHandle::Soft(handle) => handle,
        #[cfg(feature = "verbs")]
        PollerHandle::Verbs(_) => unreachable!("a soft device's poller"),
    }
}

/// a connected to b over TCP; a is the one that connects.
pub fn tcp_pair(a: QpLimits, b: QpLimits) -> Pair {
    tcp_pair_with(a, b, [None, None], Clone::clone)
}

/// As [`tcp_pair`], with keys for a and for b, and through what `through` puts in front of the
/// listener.
pub fn tcp_pair_with(
    a: QpLimits,
    b: QpLimits,
    keys: [Option<CipherKeys>; 2],
    through: impl FnOnce(&Address) -> Address,
) -> Pair {
    let [keys_a, keys_b] = keys;
    let runtime = runtime();
    let device = Device::Soft(SoftDevice::tcp());
    let (pd_a, pd_b) = (device.alloc_pd().unwrap(), device.alloc_pd().unwrap());
    let ((mut poller_a, handle_a), (mut poller_b, handle_b)) = (poller(&pd_a), poller(&pd_b));
    let (qp_a, qp_b) = runtime.block_on(async {
        let mut listener = Listener::bind(&loopback()).await.unwrap();
        let address = through(listener.address());
        let route = Route::resolve(&address, &ConnectOptions::default()).await.unwrap();
        let hello = ConnectionHello(vec![1, 2, 3]);
        let connecting = route.connect(&pd_a, &handle_a, a, &hello);
        let accepting = async {
            let incoming = listener.accept().await.unwrap();
            assert_eq!(incoming.hello().0, [1, 2, 3]);
            assert_eq!(incoming.peer_reads(), (a.reads_in, a.reads_out));
            let mut connection = incoming.prepare(&pd_b, &handle_b, b).unwrap();
            if let Some(keys) = keys_b {
                connection.secure(keys).unwrap();
            }
            let qp = poller_b.attach(connection).unwrap();
            let hello = ConnectionHello(vec![4; 148]);
            poller_b
                .accept(qp, &AcceptParams { hello, reads_out: b.reads_out, reads_in: b.reads_in })
                .unwrap();
            qp
        };
        let (established, qp_b) = tokio::join!(connecting, accepting);
        let mut established = established.unwrap();
        assert_eq!(established.hello.0, [4; 148]);
        assert_eq!(established.reads_out, a.reads_out.min(b.reads_in));
        if let Some(keys) = keys_a {
            established.secure(keys).unwrap();
        }
        (poller_a.attach(established.connection).unwrap(), qp_b)
    });
    Pair {
        a: Side::new(pd_a, poller_a, qp_a),
        b: Side::new(pd_b, poller_b, qp_b),
        tick: Box::new(|| {}),
    }
}

/// a connected to b in memory.
pub fn memory_pair(
    seed: u64,
    conditions: Conditions,
    a: QpLimits,
    b: QpLimits,
) -> (Pair, FaultyWire, Network) {
    let network = Network::new(seed);
    network.set_conditions(conditions);
    let (pair, wire) = pair_on(&network, a, b);
    (pair, wire, network)
}

/// a connected to b on a network.
pub fn pair_on(network: &Network, a: QpLimits, b: QpLimits) -> (Pair, FaultyWire) {
    let device = Device::Soft(network.device());
    let (pd_a, pd_b) = (device.alloc_pd().unwrap(), device.alloc_pd().unwrap());
    let ((mut poller_a, handle_a), (mut poller_b, handle_b)) = (poller(&pd_a), poller(&pd_b));
    let (one, two, wire) =
        network.pair((soft_handle(&handle_a), a), (soft_handle(&handle_b), b)).unwrap();
    let qp_a = poller_a.attach(Connection::Soft(one)).unwrap();
    let qp_b = poller_b.attach(Connection::Soft(two)).unwrap();
    let clock = network.clone();
    let pair = Pair {
        a: Side::new(pd_a, poller_a, qp_a),
        b: Side::new(pd_b, poller_b, qp_b),
        tick: Box::new(move || clock.advance(1)),
    };
    (pair, wire)
}
