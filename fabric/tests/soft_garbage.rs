//! Bytes that no rblk would send: before the handshake, instead of it, and after it. Nothing
//! panics, nothing hangs, nobody else is disturbed.

mod conformance;
mod soft_pairs;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use conformance::{limits, wr};
use proptest::prelude::*;
use rblk_fabric::soft::network::{Conditions, End, Network};
use rblk_fabric::{
    AcceptParams, Access, Address, ConnectOptions, ConnectionHello, Device, FabricError, Listener,
    QpLimits, Route, Scheme, SendOp, WcStatus, soft,
};
use soft_pairs::{loopback, memory_pair, poller, runtime};

fn local(port: u16) -> Address {
    Address { scheme: Scheme::Tcp, host: "127.0.0.1".to_owned(), port }
}

/// How long anything may take before a test gives up.
const PATIENCE: Duration = Duration::from_secs(20);

async fn connect(address: &Address, hello: &[u8]) -> Result<rblk_fabric::Established, FabricError> {
    connect_within(PATIENCE, address, hello).await
}

async fn connect_within(
    timeout: Duration,
    address: &Address,
    hello: &[u8],
) -> Result<rblk_fabric::Established, FabricError> {
    let pd = Device::Soft(soft::Device::tcp()).alloc_pd().unwrap();
    let (_poller, handle) = poller(&pd);
    let options = ConnectOptions { timeout, ..ConnectOptions::default() };
    let route = Route::resolve(address, &options).await?;
    route.connect(&pd, &handle, limits(), &ConnectionHello(hello.to_vec())).await
}

#[test]
fn who_answers_is_told_apart() {
    let runtime = runtime();
    // Nobody: the port of who connected is nobody else's, and nobody listens there.
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = TcpStream::connect(other.local_addr().unwrap()).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = runtime.block_on(connect(&local(port), &[])).unwrap_err();
    assert!(
        matches!(&error, FabricError::Unreachable { reason, .. } if reason.contains("start rblk-target"))
    );
    // Others.
    for (speech, is_foreign) in [
        (&b"SSH-2.0-x\r\n"[..], true),
        (b"H", true),
        (b"rblkSOFT\xff\xff\0\0\0\0\0\0\0\0", true),
        (b"rblkSOFT\x01\0\x09\0\0\0\0\0", true),
        (b"rblkSOFT\x01\0\x01\0\0\xff\0\0", true),
        (b"", false),
    ] {
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = other.local_addr().unwrap().port();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = other.accept().unwrap();
            stream.write_all(speech).unwrap();
            if is_foreign {
                // Does not close: the foreign speech alone must be enough.
                let _ = stream.read(&mut [0; 1000]);
                let _ = stream.read(&mut [0; 1000]);
            }
        });
        let error = runtime.block_on(connect(&local(port), &[])).unwrap_err();
        match error {
            FabricError::NotRblk { .. } => assert!(is_foreign, "{speech:?}"),
            FabricError::Unreachable { .. } => assert!(!is_foreign, "{speech:?}"),
            other => panic!("{speech:?}: {other}"),
        }
        thread.join().unwrap();
    }
    // One that says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = local(silent.local_addr().unwrap().port());
    let soon = Duration::from_secs(1);
    let error = runtime.block_on(connect_within(soon, &address, &[])).unwrap_err();
    assert!(matches!(error, FabricError::TimedOut { .. }), "{error}");
    // A hello that is too long.
    let error = runtime.block_on(connect(&address, &[0; 57])).unwrap_err();
    assert!(matches!(error, FabricError::Limit { .. }), "{error}");
}

#[test]
fn rejections_carry_their_words() {
    runtime().block_on(async {
        let mut listener = Listener::bind(&loopback()).await.unwrap();
        let address = listener.address().clone();
        let reject = async {
            listener.accept().await.unwrap().reject(&ConnectionHello(vec![7; 148]));
        };
        let (error, ()) = tokio::join!(connect(&address, b"hi"), reject);
        assert!(
            matches!(error.unwrap_err(), FabricError::Rejected { hello, .. } if hello == [7; 148])
        );
        // Dropped unanswered, as Incoming and as prepared QP: rejected too.
        let drop_it = async { drop(listener.accept().await.unwrap()) };
        let (error, ()) = tokio::join!(connect(&address, b"hi"), drop_it);
        assert!(matches!(error.unwrap_err(), FabricError::Busy { .. }));
        let prepare_only = async {
            let pd = Device::Soft(soft::Device::tcp()).alloc_pd().unwrap();
            let (mut own, handle) = poller(&pd);
            let prepared =
                listener.accept().await.unwrap().prepare(&pd, &handle, limits()).unwrap();
            let qp = own.attach(prepared).unwrap();
            drop(own.detach(qp));
        };
        let (error, ()) = tokio::join!(connect(&address, b"hi"), prepare_only);
        assert!(matches!(error.unwrap_err(), FabricError::Busy { .. }));
        // With the words that were left for that case, cut to what a reply may have.
        for prepares in [false, true] {
            let leave = async {
                let mut incoming = listener.accept().await.unwrap();
                incoming.refuse_with(ConnectionHello(vec![9; 149]));
                if prepares {
                    let pd = Device::Soft(soft::Device::tcp()).alloc_pd().unwrap();
                    let (_own, handle) = poller(&pd);
                    drop(incoming.prepare(&pd, &handle, limits()).unwrap());
                }
            };
            let (error, ()) = tokio::join!(connect(&address, b"hi"), leave);
            let error = error.unwrap_err();
            assert!(
                matches!(&error, FabricError::Rejected { hello, .. } if *hello == [9; 148]),
                "{prepares}: {error:?}"
            );
        }
        // Limits are refused on both sides, and mixing is.
        let pd = Device::Soft(soft::Device::tcp()).alloc_pd().unwrap();
        let other = Device::Soft(Network::new(1).device()).alloc_pd().unwrap();
        let (mut small, handle) = pd.poller(8).unwrap();
        let (_p, foreign) = poller(&other);
        let refuse = async {
            let huge = QpLimits { send_wrs: 1 << 20, ..limits() };
            let error = listener.accept().await.unwrap().prepare(&pd, &handle, huge).unwrap_err();
            assert!(matches!(error, FabricError::Limit { .. }));
        };
        let (error, ()) = tokio::join!(connect(&address, b"hi"), refuse);
        assert!(matches!(error.unwrap_err(), FabricError::Busy { .. }));
        let mix = async {
            let incoming = listener.accept().await.unwrap();
            assert!(matches!(
                incoming.prepare(&pd, &foreign, limits()),
                Err(FabricError::Mixed(_))
            ));
        };
        let (error, ()) = tokio::join!(connect(&address, b"hi"), mix);
        assert!(matches!(error.unwrap_err(), FabricError::Busy { .. }));
        // A CQ of 8 has no room for 8 + 8.
        let no_room = async {
            let prepared =
                listener.accept().await.unwrap().prepare(&pd, &handle, limits()).unwrap();
            assert!(matches!(small.attach(prepared), Err(FabricError::Limit { asked: 16, .. })));
        };
        let (error, ()) = tokio::join!(connect(&address, b"hi"), no_room);
        assert!(matches!(error.unwrap_err(), FabricError::Busy { .. }));
    });
}

/// Peers that stall or talk nonsense, more than are handled at once, and one that behaves.
#[test]
fn bad_peers_delay_nobody() {
    let runtime = runtime();
    runtime.block_on(async {
        let mut listener = Listener::bind(&loopback()).await.unwrap();
        let address = listener.address().clone();
        let port = address.port;
        // Who waits until those are given up, waits for 5 s. It may be that this thread was not run
        // for long, so not once.
        for last in [false, false, true] {
            let mut bad = Vec::new();
            for i in 0..300usize {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                match i % 3 {
                    0 => {}
                    1 => stream.write_all(b"rblkSOFT\x01").unwrap(),
                    _ => stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap(),
                }
                bad.push(stream);
                // Takes them off the backlog; cancelled every time, which must lose nothing.
                let _ = tokio::time::timeout(Duration::from_micros(300), listener.accept()).await;
            }
            let start = Instant::now();
            let (result, ()) = tokio::join!(connect(&address, b"good"), async {
                let incoming = listener.accept().await.unwrap();
                assert_eq!(incoming.hello().0, b"good");
                incoming.reject(&ConnectionHello(vec![1]));
            });
            assert!(matches!(result, Err(FabricError::Rejected { hello, .. }) if hello == [1]));
            if start.elapsed() < Duration::from_secs(2) {
                return;
            }
            assert!(!last, "{:?}", start.elapsed());
        }
    });
}

/// A frame with plausible fields, or not.
fn frame() -> impl Strategy<Value = Vec<u8>> {
    let small = prop_oneof![Just(0u32), 1..5u32, Just(64), any::<u32>()];
    let header = (
        0..10u8,
        0..3u8,
        prop_oneof![9 => Just(0u8), 1 => any::<u8>()],
        prop::array::uniform5(small),
        any::<u64>(),
    )
        .prop_map(|(kind, flags, reserved, words, addr)| {
            let mut bytes = vec![kind, flags, reserved, 0];
            bytes.extend(words.iter().flat_map(|w| w.to_le_bytes()));
            bytes.extend(addr.to_le_bytes());
            bytes
        });
    prop_oneof![3 => header, 1 => prop::collection::vec(any::<u8>(), 1..200)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn garbage_in_the_stream_fails_that_qp_only(seed: u64, frames in prop::collection::vec(frame(), 1..30)) {
        let conditions = Conditions { fragment: seed & 1 == 0, ..Conditions::default() };
        let (mut p, wire, _network) = memory_pair(seed, conditions, limits(), limits());
        let memory = p.b.memory(4096, Access::REMOTE);
        let from = p.a.memory(4096, Access::REMOTE);
        p.b.recv(1, memory.sge(0, 64).unwrap());
        let op = SendOp::Read(from.remote(0));
        p.b.post(&[wr(2, op, memory.sge(64, 64).unwrap(), true)]);
        for frame in &frames {
            wire.inject(End::A, frame);
            p.drive();
        }
        p.settle();
        p.b.poller.fail(p.b.qp);
        p.settle();
        // Whatever happened, everything completed once.
        prop_assert_eq!(p.b.seen.len(), 2);
        prop_assert!(p.b.seen.iter().any(|c| c.id.0 == 2));
    }
}

#[test]
fn garbage_over_tcp_after_the_handshake() {
    let runtime = runtime();
    let pd = Device::Soft(soft::Device::tcp()).alloc_pd().unwrap();
    let (mut own, handle) = poller(&pd);
    runtime.block_on(async {
        let mut listener = Listener::bind(&loopback()).await.unwrap();
        let port = listener.address().port;
        let mut request = b"rblkSOFT\x01\0\x04\x04".to_vec();
        request.extend(5000u32.to_le_bytes());
        request.extend([0, 0, 0, 0]);
        let mut streams = Vec::new();
        for early in [false, true] {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.write_all(&request).unwrap();
            let incoming = listener.accept().await.unwrap();
            let qp = own.attach(incoming.prepare(&pd, &handle, limits()).unwrap()).unwrap();
            let region =
                rblk_fabric::Region::allocate(4096, rblk_fabric::PageKind::Normal).unwrap();
            let mr = pd.register(&region, Access::REMOTE).unwrap();
            let sge = mr.sge(0, 64).unwrap();
            own.post_recv(qp, &[rblk_fabric::RecvWr::one(rblk_fabric::WrId(qp.0.into()), sge)])
                .unwrap();
            let params =
                AcceptParams { hello: ConnectionHello::default(), reads_out: 4, reads_in: 4 };
            if early {
                // Speaks before it was accepted.
                stream.write_all(&[0; 100]).unwrap();
            } else {
                own.accept(qp, &params).unwrap();
                let mut reply = [0; 16];
                stream.read_exact(&mut reply).unwrap();
                assert_eq!(&reply[..8], b"rblkSOFT");
                stream.write_all(&[0xa5; 100]).unwrap();
            }
            let mut out = [rblk_fabric::Completion::default(); 4];
            let start = Instant::now();
            while own.poll(&mut out).unwrap() == 0 {
                assert!(start.elapsed() < Duration::from_secs(10), "the RECV flushes");
            }
            assert_eq!((out[0].qp, out[0].status), (qp, WcStatus::Flushed));
            assert!(early || own.accept(qp, &params).is_err());
            streams.push(stream);
        }
    });
}
