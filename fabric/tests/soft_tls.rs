//! Encrypted TCP connections. What the kernel must do for them is tested where it can: tests that
//! need TLS of the kernel are ignored, and `cargo xtask test` runs them in the lab. By hand, on a
//! kernel with TLS: `cargo test -p rblk-fabric --test soft_tls -- --ignored`.

mod conformance;
mod soft_pairs;
mod soft_proxy;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Instant;

use conformance::{Expect, Pair, Side, bytes_of, fill, limits, remote_wrap_around, run, wr};
use nix::sys::socket::{setsockopt, sockopt};
use rblk_fabric::soft::network::Conditions;
use rblk_fabric::soft::tls::kernel_has_tls;
use rblk_fabric::soft::{Device as SoftDevice, network::Network};
use rblk_fabric::{
    AcceptParams, Access, Address, CipherKey, CipherKeys, ConnectOptions, Connection,
    ConnectionHello, Device, FabricError, Listener, RemoteBuffer, Rkey, Route, SendOp, WcStatus,
};
use soft_pairs::{loopback, memory_pair, poller, runtime, soft_handle, tcp_pair, tcp_pair_with};
use soft_proxy::{Fault, Proxy, Sender};

/// What the bytes of the key of a direction are.
const A_TO_B: u8 = 0x51;
const B_TO_A: u8 = 0x52;

fn cipher(seed: u8) -> CipherKey {
    CipherKey::new(&[seed; CipherKey::KEY], &[seed ^ 0xff; CipherKey::IV])
}

fn keys_of_a() -> CipherKeys {
    CipherKeys { send: cipher(A_TO_B), receive: cipher(B_TO_A) }
}

fn keys_of_b() -> CipherKeys {
    CipherKeys { send: cipher(B_TO_A), receive: cipher(A_TO_B) }
}

fn secured_pair() -> Pair {
    tcp_pair_with(limits(), limits(), [Some(keys_of_a()), Some(keys_of_b())], Clone::clone)
}

fn secured_through(proxy: &mut Option<Proxy>) -> Pair {
    let keys = [Some(keys_of_a()), Some(keys_of_b())];
    tcp_pair_with(limits(), limits(), keys, |to| proxy.insert(Proxy::new(to)).address())
}

fn expect() -> Expect {
    Expect {
        rnr: WcStatus::RnrRetryExceeded,
        read_depth_refused: true,
        responder_dies: true,
        peer_death: vec![WcStatus::Flushed, WcStatus::RetryExceeded],
        dead_region: true,
        refusal_is_told: true,
        refusal_may_be_lost: false,
        immediates: true,
    }
}

fn bad_records(side: &Side) -> u64 {
    side.poller.counters().bad_records
}

#[test]
fn the_device_says_what_the_kernel_says() {
    let found = kernel_has_tls();
    assert_eq!(Device::Soft(SoftDevice::tcp()).encrypts(), found.is_ok());
    assert!(!Device::Soft(Network::new(1).device()).encrypts());
}

/// Without TLS in the kernel both ends get the words of the probe, and the peer is refused in
/// plain. With TLS both ends work.
#[test]
fn both_ends_are_told_why_or_work() {
    let found = kernel_has_tls();
    runtime().block_on(async {
        let mut listener = Listener::bind(&loopback()).await.unwrap();
        let address = listener.address().clone();
        let connect = async {
            let pd = Device::Soft(SoftDevice::tcp()).alloc_pd().unwrap();
            let (_poller, handle) = poller(&pd);
            let route = Route::resolve(&address, &ConnectOptions::default()).await.unwrap();
            route.connect(&pd, &handle, limits(), &ConnectionHello(vec![1])).await
        };
        let accept = async {
            let pd = Device::Soft(SoftDevice::tcp()).alloc_pd().unwrap();
            let (mut poller, handle) = poller(&pd);
            let mut incoming = listener.accept().await.unwrap();
            incoming.refuse_with(ConnectionHello(b"no TLS here".to_vec()));
            let mut connection = incoming.prepare(&pd, &handle, limits()).unwrap();
            let secured = connection.secure(keys_of_b());
            if secured.is_ok() {
                let qp = poller.attach(connection).unwrap();
                let hello = ConnectionHello(vec![2]);
                poller.accept(qp, &AcceptParams { hello, reads_out: 4, reads_in: 4 }).unwrap();
            }
            // The poller has the connection, which ends with the poller.
            (poller, secured)
        };
        let (established, (_poller, secured)) = tokio::join!(connect, accept);
        match found {
            Ok(()) => {
                secured.unwrap();
                established.unwrap().secure(keys_of_a()).unwrap();
            }
            Err(lack) => {
                let text = secured.unwrap_err().to_string();
                assert!(text.contains(" 127.0.0.1:"), "{text}");
                assert!(text.ends_with(&lack.to_string()), "{text}");
                let refused = established.unwrap_err();
                assert!(
                    matches!(&refused, FabricError::Rejected { hello, .. } if hello == b"no TLS here"),
                    "{refused}"
                );
            }
        }
    });
}

#[test]
fn what_is_not_over_tcp_is_refused() {
    let (mut pair, _wire, _network) = memory_pair(1, Conditions::default(), limits(), limits());
    let qp = pair.a.qp;
    // A connection that ended.
    let Some(mut ended) = pair.a.poller.detach(qp) else { panic!("it was attached") };
    assert!(matches!(ended.secure(keys_of_a()), Err(FabricError::Call { call: "secure", .. })));
    // One that did not.
    let network = Network::new(1);
    let pd = Device::Soft(network.device()).alloc_pd().unwrap();
    let (_poller, handle) = poller(&pd);
    let soft = soft_handle(&handle);
    let (one, _two, _wire) = network.pair((soft, limits()), (soft, limits())).unwrap();
    let text = Connection::Soft(one).secure(keys_of_a()).unwrap_err().to_string();
    assert!(text.contains("only tcp:// connections can be encrypted"), "{text}");
}

#[test]
#[ignore = "needs TLS of the kernel: `cargo xtask test` runs it in the lab"]
fn kernel_conformance_over_tls() {
    kernel_has_tls().unwrap();
    run(&expect(), |_, _| secured_pair());
    remote_wrap_around(&mut secured_pair(), &expect());
}

/// A large message of each kind, in records of all sizes that come in parts.
#[test]
#[ignore = "needs TLS of the kernel: `cargo xtask test` runs it in the lab"]
fn kernel_large_messages_in_parts() {
    let mut proxy = None;
    let mut pair = secured_through(&mut proxy);
    let Some(proxy) = proxy else { panic!("the pair goes through it") };
    proxy.set(Sender::Connector, Fault::Crumbs);
    proxy.set(Sender::Listener, Fault::Crumbs);
    for (round, len) in (0..).zip([1usize, 31, 16_383, 16_384, 16_385, 70_001, 300_000]) {
        let size = u32::try_from(len).unwrap();
        let ours = pair.a.memory(len, Access::REMOTE);
        let theirs = pair.b.memory(2 * len, Access::REMOTE);
        fill(&ours, round);
        pair.b.recv(u64::from(round), theirs.sge(len, size).unwrap());
        let (id, sge) = (u64::from(round) * 10, ours.sge(0, size).unwrap());
        let (seen_a, seen_b) = (pair.a.seen.len(), pair.b.seen.len());
        pair.a.post(&[
            wr(id, SendOp::Write(theirs.remote(0)), sge, false),
            wr(id + 1, SendOp::Send, sge, true),
        ]);
        pair.until_a(seen_a + 1);
        pair.until_b(seen_b + 1);
        let back = pair.a.memory(len, Access::REMOTE);
        pair.a.post(&[wr(
            id + 2,
            SendOp::Read(theirs.remote(len)),
            back.sge(0, size).unwrap(),
            true,
        )]);
        pair.until_a(seen_a + 2);
        let expected = bytes_of(&ours, 0, len);
        assert!(bytes_of(&theirs, 0, len) == expected, "WRITE of {len}");
        assert!(bytes_of(&theirs, len, len) == expected, "SEND of {len}");
        assert!(bytes_of(&back, 0, len) == expected, "READ of {len}");
    }
    let seen = pair.a.seen.iter().chain(&pair.b.seen);
    assert!(seen.into_iter().all(|c| c.status == WcStatus::Success));
    assert_eq!((bad_records(&pair.a), bad_records(&pair.b)), (0, 0));
}

/// Bytes of a message of [`send_until`].
const MESSAGE: usize = 40_000;

/// Posts SENDs from a. Those that b was told of have what was sent.
fn send_until(pair: &mut Pair, what: &str, holds: impl FnMut(&Pair) -> bool) {
    let (count, len) = (7, u32::try_from(MESSAGE).unwrap());
    let ours = pair.a.memory(MESSAGE, Access::REMOTE);
    let theirs = pair.b.memory(count * MESSAGE, Access::REMOTE);
    fill(&ours, 9);
    let expected = bytes_of(&ours, 0, MESSAGE);
    for at in 0..count {
        pair.b.recv(at.try_into().unwrap(), theirs.sge(at * MESSAGE, len).unwrap());
    }
    let sge = ours.sge(0, len).unwrap();
    let wrs: Vec<_> =
        (0..count).map(|at| wr(at.try_into().unwrap(), SendOp::Send, sge, true)).collect();
    pair.a.post(&wrs);
    pair.until(what, holds);
    pair.settle();
    for completion in pair.b.seen.iter().filter(|c| c.status == WcStatus::Success) {
        let at = usize::try_from(completion.id.0).unwrap() * MESSAGE;
        assert!(bytes_of(&theirs, at, MESSAGE) == expected, "a wrong message was delivered");
    }
}

/// As [`send_until`]: until both ends found that the other is dead.
fn send_until_dead(pair: &mut Pair) {
    let failed = |side: &Side| side.seen.iter().any(|c| c.status != WcStatus::Success);
    send_until(pair, "both ends to find out", |pair| failed(&pair.a) && failed(&pair.b));
}

#[test]
#[ignore = "needs TLS of the kernel: `cargo xtask test` runs it in the lab"]
fn kernel_a_changed_record_is_found() {
    // Version, length (both bytes), content and tag of the first record, and the records behind it.
    // The first record is full: 5 + 16384 + 17 bytes.
    for at in [1, 2, 3, 4, 5, 6, 40, 5000, 16_390, 16_405, 16_407, 16_500, 30_000, 41_000, 100_000]
    {
        let mut proxy = None;
        let mut pair = secured_through(&mut proxy);
        let Some(proxy) = proxy else { panic!("the pair goes through it") };
        eprintln!("byte {at}");
        let at_in_stream = proxy.sent(Sender::Connector) + at;
        proxy.set(Sender::Connector, Fault::Flip { at: at_in_stream });
        send_until_dead(&mut pair);
        assert_eq!((bad_records(&pair.a), bad_records(&pair.b)), (0, 1), "byte {at}");
        let delivered = pair.b.seen.iter().filter(|c| c.status == WcStatus::Success).count();
        assert!(delivered <= at / MESSAGE, "byte {at}: {delivered} messages");
    }
}

#[test]
#[ignore = "needs TLS of the kernel: `cargo xtask test` runs it in the lab"]
fn kernel_a_record_twice_or_not_at_all_is_found() {
    for fault in [Fault::Twice { at: 0 }, Fault::Omit { at: 0 }, Fault::Twice { at: 50_000 }] {
        let mut proxy = None;
        let mut pair = secured_through(&mut proxy);
        let Some(proxy) = proxy else { panic!("the pair goes through it") };
        proxy.set(Sender::Connector, fault.behind(proxy.sent(Sender::Connector)));
        send_until_dead(&mut pair);
        assert_eq!((bad_records(&pair.a), bad_records(&pair.b)), (0, 1), "{fault:?}");
    }
}

/// The type in front of a record says nothing: TLS 1.3 has the true one inside. The kernel does not
/// look at it, so a change of it harms nobody.
#[test]
#[ignore = "needs TLS of the kernel: `cargo xtask test` runs it in the lab"]
fn kernel_a_changed_outer_type_changes_nothing() {
    let mut proxy = None;
    let mut pair = secured_through(&mut proxy);
    let Some(proxy) = proxy else { panic!("the pair goes through it") };
    proxy.set(Sender::Connector, Fault::Flip { at: proxy.sent(Sender::Connector) });
    send_until(&mut pair, "all messages", |pair| pair.b.seen.len() == 7);
    assert!(pair.b.seen.iter().all(|c| c.status == WcStatus::Success));
}

/// The other direction: what a READ brings.
#[test]
#[ignore = "needs TLS of the kernel: `cargo xtask test` runs it in the lab"]
fn kernel_a_changed_answer_is_found() {
    let mut proxy = None;
    let mut pair = secured_through(&mut proxy);
    let Some(proxy) = proxy else { panic!("the pair goes through it") };
    let (ours, theirs) =
        (pair.a.memory(1 << 18, Access::REMOTE), pair.b.memory(1 << 18, Access::REMOTE));
    fill(&theirs, 3);
    proxy.set(Sender::Listener, Fault::Flip { at: proxy.sent(Sender::Listener) + 70_000 });
    pair.a.post(&[wr(1, SendOp::Read(theirs.remote(0)), ours.sge(0, 1 << 18).unwrap(), true)]);
    pair.until_a(1);
    assert_eq!(pair.a.outcome(), [(1, WcStatus::RetryExceeded)]);
    assert_eq!((bad_records(&pair.a), bad_records(&pair.b)), (1, 0));
}

#[test]
#[ignore = "needs TLS of the kernel: `cargo xtask test` runs it in the lab"]
fn kernel_a_wrong_key_delivers_nothing() {
    let a_and_b = |a: Option<CipherKeys>, b: Option<CipherKeys>| {
        tcp_pair_with(limits(), limits(), [a, b], Clone::clone)
    };
    let other = || CipherKeys { send: cipher(7), receive: cipher(8) };
    for (what, mut pair, found_by_b) in [
        ("another key", a_and_b(Some(other()), Some(keys_of_b())), 1),
        ("the keys of the other end", a_and_b(Some(keys_of_b()), Some(keys_of_b())), 1),
        ("plain bytes", a_and_b(None, Some(keys_of_b())), 1),
        // b reads frames, and a record is none.
        ("records to a plain end", a_and_b(Some(keys_of_a()), None), 0),
    ] {
        send_until_dead(&mut pair);
        assert!(pair.b.seen.iter().all(|c| c.status != WcStatus::Success), "{what}");
        assert_eq!(bad_records(&pair.b), found_by_b, "{what}");
    }
}

/// A refusal goes out behind answers that fill the socket, and the end of the stream behind the
/// refusal. All of it arrives.
#[test]
#[ignore = "needs TLS of the kernel: `cargo xtask test` runs it in the lab"]
fn kernel_a_refusal_behind_much_data_arrives() {
    for round in 0..3 {
        let mut pair = secured_pair();
        let (ours, theirs) =
            (pair.a.memory(8 << 20, Access::REMOTE), pair.b.memory(8 << 20, Access::REMOTE));
        let bad = RemoteBuffer { rkey: Rkey(!theirs.rkey().0), ..theirs.remote(0) };
        pair.a.post(&[
            wr(1, SendOp::Read(theirs.remote(0)), ours.sge(0, 8 << 20).unwrap(), true),
            wr(2, SendOp::Write(bad), ours.sge(0, 64).unwrap(), true),
        ]);
        // b alone, so that its socket fills.
        for _ in 0..100 {
            pair.b.poll();
        }
        pair.until_a(2);
        let told = [(1, WcStatus::Success), (2, WcStatus::RemoteAccess)];
        assert_eq!(pair.a.outcome(), told, "round {round}");
    }
}

/// Lets the same words go over the wire, and returns what both ends sent.
fn words_on_the_wire(keys: [Option<CipherKeys>; 2], words: &[u8]) -> [Vec<u8>; 2] {
    let mut proxy = None;
    let mut pair =
        tcp_pair_with(limits(), limits(), keys, |to| proxy.insert(Proxy::new(to)).address());
    let len = u32::try_from(words.len()).unwrap();
    let (ours, theirs) =
        (pair.a.memory(words.len(), Access::REMOTE), pair.b.memory(words.len(), Access::REMOTE));
    ours.region().write(0, words);
    let sge = ours.sge(0, len).unwrap();
    pair.b.recv(1, theirs.sge(0, len).unwrap());
    pair.a.post(&[wr(2, SendOp::Send, sge, true)]);
    pair.until_b(1);
    pair.a.post(&[wr(3, SendOp::Write(theirs.remote(0)), sge, true)]);
    pair.a.post(&[wr(4, SendOp::Read(theirs.remote(0)), sge, true)]);
    pair.until_a(3);
    assert_eq!(bytes_of(&theirs, 0, words.len()), words);
    let Some(proxy) = proxy else { panic!("the pair goes through it") };
    [proxy.stream(Sender::Connector), proxy.stream(Sender::Listener)]
}

#[test]
#[ignore = "needs TLS of the kernel: `cargo xtask test` runs it in the lab"]
fn kernel_the_wire_shows_nothing() {
    let words = b"forty-two blocks of the payroll. ".repeat(200);
    let needle = &words[..33];
    let has = |stream: &[u8], needle: &[u8]| stream.windows(needle.len()).any(|w| w == needle);
    // Plain, to see that the test can find them.
    for stream in words_on_the_wire([None, None], &words) {
        assert!(has(&stream, needle));
    }
    let secured = words_on_the_wire([Some(keys_of_a()), Some(keys_of_b())], &words);
    for (stream, handshake) in secured.iter().zip([20 + 3, 16 + 148]) {
        // The handshake is plain, and nothing behind it.
        assert_eq!(&stream[..8], b"rblkSOFT");
        assert_eq!(&stream[handshake..handshake + 3], [23, 3, 3], "a record of TLS 1.3");
        assert!(!has(stream, &needle[..8]));
    }
}

/// A peer of our framing that has the keys and uses the socket itself.
fn raw_peer(to: &Address, keys: &StreamKeysOfTest) -> TcpStream {
    let mut stream = TcpStream::connect((to.host.as_str(), to.port)).unwrap();
    let mut request = b"rblkSOFT\x01\0\x04\x04".to_vec();
    request.extend(5000_u32.to_le_bytes());
    request.extend([0, 0, 0, 0]);
    stream.write_all(&request).unwrap();
    let mut reply = [0; 16];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!((reply[10], reply[13]), (1, 0), "accepted, without a hello");
    setsockopt(&stream, sockopt::TcpUlp::default(), b"tls").unwrap();
    let info = libc::tls12_crypto_info_chacha20_poly1305 {
        info: libc::tls_crypto_info {
            version: libc::TLS_1_3_VERSION,
            cipher_type: libc::TLS_CIPHER_CHACHA20_POLY1305,
        },
        iv: [keys.send ^ 0xff; 12],
        key: [keys.send; 32],
        salt: [],
        rec_seq: [0; 8],
    };
    setsockopt(&stream, sockopt::TcpTlsTx, &sockopt::TlsCryptoInfo::Chacha20Poly1305(info))
        .unwrap();
    stream
}

/// What a raw peer encrypts with.
struct StreamKeysOfTest {
    send: u8,
}

/// Sends a record of a type that is not data (tls(7): `TLS_SET_RECORD_TYPE`).
fn send_record(stream: &TcpStream, kind: u8, content: &[u8]) {
    // SAFETY: all zeroes is a valid value of both; the control message has room for its header and
    // one byte, and `content` and `control` live over the call.
    unsafe {
        let mut control = [0_u64; 4];
        let mut message: libc::msghdr = std::mem::zeroed();
        let mut piece =
            libc::iovec { iov_base: content.as_ptr().cast_mut().cast(), iov_len: content.len() };
        message.msg_iov = &raw mut piece;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = usize::try_from(libc::CMSG_SPACE(1)).unwrap();
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_TLS;
        (*header).cmsg_type = libc::TLS_SET_RECORD_TYPE;
        (*header).cmsg_len = usize::try_from(libc::CMSG_LEN(1)).unwrap();
        *libc::CMSG_DATA(header) = kind;
        let sent = libc::sendmsg(stream.as_raw_fd(), &raw const message, 0);
        assert_eq!(usize::try_from(sent), Ok(content.len()));
    }
}

/// A peer that has the keys sends what no rblk sends: an alert, a handshake, a frame of garbage.
#[test]
#[ignore = "needs TLS of the kernel: `cargo xtask test` runs it in the lab"]
fn kernel_records_that_are_not_data_end_the_connection() {
    for (kind, content, bad) in
        [(21, &[2, 80][..], 1), (22, &[24, 0, 0, 1, 0][..], 1), (23, &[0xff; 32][..], 0)]
    {
        let device = Device::Soft(SoftDevice::tcp());
        let pd = device.alloc_pd().unwrap();
        let (mut poller, handle) = poller(&pd);
        let (side, stream) = runtime().block_on(async {
            let mut listener = Listener::bind(&loopback()).await.unwrap();
            let address = listener.address().clone();
            let peer =
                std::thread::spawn(move || raw_peer(&address, &StreamKeysOfTest { send: A_TO_B }));
            let incoming = listener.accept().await.unwrap();
            let mut connection = incoming.prepare(&pd, &handle, limits()).unwrap();
            connection.secure(keys_of_b()).unwrap();
            let qp = poller.attach(connection).unwrap();
            let hello = ConnectionHello::default();
            poller.accept(qp, &AcceptParams { hello, reads_out: 4, reads_in: 4 }).unwrap();
            (Side::new(pd, poller, qp), peer.join().unwrap())
        });
        let mut side = side;
        let memory = side.memory(4096, Access::REMOTE);
        side.recv(1, memory.sge(0, 4096).unwrap());
        send_record(&stream, kind, content);
        let start = Instant::now();
        while side.seen.is_empty() {
            side.poll();
            assert!(start.elapsed().as_secs() < 20, "type {kind}: nothing happened");
        }
        assert_eq!(side.outcome(), [(1, WcStatus::Flushed)], "type {kind}");
        assert_eq!(bad_records(&side), bad, "type {kind}");
    }
}

/// Sends one message after another, and returns calls into the link and MiB/s.
fn traffic(pair: &mut Pair, count: u64, len: u32) -> (u64, f64) {
    let bytes = usize::try_from(len).unwrap();
    let (ours, theirs) =
        (pair.a.memory(bytes, Access::REMOTE), pair.b.memory(bytes + 64, Access::REMOTE));
    let calls =
        |pair: &Pair| pair.a.poller.counters().link_calls + pair.b.poller.counters().link_calls;
    let remote: RemoteBuffer = theirs.remote(0);
    let (before, start) = (calls(pair), Instant::now());
    for id in 0..count {
        pair.b.recv(id, theirs.sge(bytes, 64).unwrap());
        pair.a.post(&[
            wr(id, SendOp::Write(remote), ours.sge(0, len).unwrap(), false),
            wr(id, SendOp::Send, ours.sge(0, 64).unwrap(), true),
        ]);
        let (seen_a, seen_b) = (pair.a.seen.len(), pair.b.seen.len());
        pair.until("a message", |p| p.a.seen.len() > seen_a && p.b.seen.len() > seen_b);
    }
    #[allow(clippy::cast_precision_loss, reason = "printed")]
    let rate = (count * u64::from(len)) as f64 / start.elapsed().as_secs_f64() / f64::from(1 << 20);
    (calls(pair) - before, rate)
}

/// An encrypted connection needs no more system calls than a plain one. The speed is printed.
#[test]
#[ignore = "needs TLS of the kernel: `cargo xtask test` runs it in the lab"]
fn kernel_calls_are_those_of_a_plain_connection() {
    for (count, len) in [(400, 64), (400, 4 << 10), (200, 128 << 10), (40, 1 << 20)] {
        let plain = traffic(&mut tcp_pair(limits(), limits()), count, len);
        let secured = traffic(&mut secured_pair(), count, len);
        eprintln!(
            "{count} messages of {len} bytes: {} calls, {:.1} MiB/s plain; {} calls, {:.1} MiB/s encrypted",
            plain.0, plain.1, secured.0, secured.1
        );
        // What a socket holds of a large message, and so what a call moves, depends on the host.
        if len <= 128 << 10 {
            assert!(secured.0 * 2 <= plain.0 * 3, "{len} bytes");
        }
    }
}
