//! Connected pairs over rdma_cm, on the device that has the address `RBLK_TEST_RDMA_ADDR`.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::env;
use std::sync::OnceLock;
use std::time::Duration;

use rblk_fabric::{
    AcceptParams, Address, ConnectOptions, ConnectionHello, Listener, QpLimits, Route, Scheme,
};
use tokio::runtime::Handle;

use crate::conformance::{Pair, Side};

const HOW: &str =
    "set RBLK_TEST_RDMA_ADDR to the IP address of an RDMA device of this host, for one of
    ip link add v0 type dummy; ip addr add 10.9.0.1/24 dev v0; ip link set v0 up mtu 4500
    rdma link add rxe0 type rxe netdev v0
with RBLK_TEST_RDMA_ADDR=10.9.0.1";

/// The address to test on.
pub fn address() -> Address {
    let host = env::var("RBLK_TEST_RDMA_ADDR")
        .unwrap_or_else(|_| panic!("no RDMA device to test on: {HOW}"));
    Address { scheme: Scheme::Rdma, host, port: 0 }
}

/// A control runtime on a thread of its own, so that CM events are served while a test polls.
pub fn control() -> &'static Handle {
    static CONTROL: OnceLock<Handle> = OnceLock::new();
    CONTROL.get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let handle = runtime.handle().clone();
        std::thread::spawn(move || runtime.block_on(std::future::pending::<()>()));
        handle
    })
}

/// a connected to b; a is the one that connects.
pub fn pair(address: &Address, a: QpLimits, b: QpLimits) -> Pair {
    control().block_on(pair_async(address, a, b))
}

pub async fn pair_async(address: &Address, a: QpLimits, b: QpLimits) -> Pair {
    let mut listener = Listener::bind(address).await.unwrap();
    let route = Route::resolve(listener.address(), &ConnectOptions::default()).await.unwrap();
    let device = route.device();
    let (pd_a, pd_b) = (device.alloc_pd().unwrap(), device.alloc_pd().unwrap());
    let (mut poller_a, handle_a) = pd_a.poller(64).unwrap();
    let (mut poller_b, handle_b) = pd_b.poller(64).unwrap();
    let hello = ConnectionHello(vec![1, 2, 3]);
    let connecting = route.connect(&pd_a, &handle_a, a, &hello);
    let accepting = async {
        let incoming = listener.accept().await.unwrap();
        assert!(incoming.device().same_as(&device));
        assert_eq!(incoming.hello().0[..3], [1, 2, 3]);
        assert_eq!(incoming.peer_reads(), (a.reads_in, a.reads_out));
        let connection = incoming.prepare(&pd_b, &handle_b, b).unwrap();
        let qp = poller_b.attach(connection).unwrap();
        let hello = ConnectionHello(vec![4; ConnectionHello::REPLY_MAX]);
        let params = AcceptParams { hello, reads_out: b.reads_out, reads_in: b.reads_in };
        poller_b.accept(qp, &params).unwrap();
        qp
    };
    let (established, qp_b) = tokio::join!(connecting, accepting);
    let established = established.unwrap();
    assert_eq!(established.hello.0[..148], [4; 148]);
    assert_eq!(established.reads_out, a.reads_out.min(b.reads_in));
    let qp_a = poller_a.attach(established.connection).unwrap();
    Pair {
        a: Side::new(pd_a, poller_a, qp_a),
        b: Side::new(pd_b, poller_b, qp_b),
        // The kernel's workers need the processor that a polling test would keep.
        tick: Box::new(|| std::thread::sleep(Duration::from_micros(200))),
    }
}
