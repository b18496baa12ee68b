//! Verbs objects come and go in any order, and leave nothing behind.
//!
//! Run like `verbs_conformance`.
#![cfg(feature = "verbs")]

mod conformance;
mod verbs_pair;

use std::fs;
use std::net::{Ipv6Addr, SocketAddr};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use conformance::{Pair, limits};
use rblk_fabric::{
    AcceptParams, Access, Address, Completion, ConnectOptions, ConnectionHello, FabricError,
    ListenOptions, Listener, PageKind, Poller, QpLimits, RecvWr, Region, Route, Scheme, WcStatus,
    WrId,
};
use verbs_pair::{address, control, pair, pair_async};

/// The address to test on. One test at a time: the tests count what the process has open, and
/// librdmacm opens every device there is.
fn turn() -> (Address, MutexGuard<'static, ()>) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    (address(), turn)
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Waits until it holds: some things end on tasks and threads of their own.
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn nothing_is_left() {
    let (address, _turn) = turn();
    drop(pair(&address, limits(), limits()));
    let before = descriptors();
    for round in 0..40 {
        let Pair { mut a, mut b, .. } = pair(&address, limits(), limits());
        let memory = a.memory(1 << 16, Access::REMOTE);
        a.recv(1, memory.sge(0, 64).unwrap());
        // The pieces die in any order: what they rest on stays as long as it must.
        match round % 6 {
            0 => drop((a, b, memory)),
            1 => drop((memory, b, a)),
            2 => {
                let connection = a.poller.detach(a.qp).unwrap();
                drop((a, memory, b));
                drop(connection);
            }
            3 => {
                a.poller.fail(a.qp);
                let connection = a.poller.detach(a.qp).unwrap();
                connection.retire((a.poller, memory));
                // Later than the domain, too.
                drop((b, a.pd));
            }
            4 => {
                b.poller.fail(b.qp);
                drop((b, a.pd, memory, a.poller));
            }
            _ => {
                let connection = b.poller.detach(b.qp).unwrap();
                std::thread::spawn(move || drop(connection)).join().unwrap();
                drop((a.poller, b.poller, a.pd, b.pd, memory));
            }
        }
    }
    eventually("descriptors are left open", || descriptors() <= before);
}

#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn a_stale_region_is_not_reached_inline() {
    let (address, _turn) = turn();
    let Pair { mut a, mut b, .. } = pair(&address, limits(), limits());
    let inbox = b.memory(4096, Access::LOCAL_WRITE);
    b.recv(1, inbox.sge(0, 64).unwrap());
    let memory = a.memory(4096, Access::LOCAL_READ);
    let mut wr = conformance::wr(1, rblk_fabric::SendOp::Send, memory.sge(0, 32).unwrap(), true);
    wr.inline = true;
    a.post(&[wr]);
    let region = std::sync::Arc::downgrade(memory.region());
    while a.poll() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(a.seen[0].status, WcStatus::Success);
    // The poller remembers the region but does not keep it.
    drop(memory);
    assert!(region.upgrade().is_none());
    // Its memory is unmapped now: the payload must be left to the device, which refuses the key.
    a.post(&[wr]);
    while a.poll() == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_ne!(a.seen[1].status, WcStatus::Success);
}

/// A QP's room in the CQ is nobody's until it is destroyed and the CQ was read empty: its flushes
/// may come as long as it lives, and rxe leaves them in the CQ.
#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn room_in_a_completion_queue_is_free_after_the_destroy() {
    let (address, _turn) = turn();
    let mut listener = control().block_on(Listener::bind(&address)).unwrap();
    let to = listener.address().clone();
    let route = || control().block_on(Route::resolve(&to, &ConnectOptions::default())).unwrap();
    let device = route().device();
    let pd = device.alloc_pd().unwrap();
    // Room for two, or what the device makes of it.
    let (mut poller, handle) = pd.poller(32).unwrap();
    let far_pd = device.alloc_pd().unwrap();
    let (mut far, far_handle) = far_pd.poller(4096).unwrap();
    let mut connect = || {
        let accepting = async {
            let incoming = listener.accept().await.unwrap();
            let qp = far.attach(incoming.prepare(&far_pd, &far_handle, limits()).unwrap()).unwrap();
            let params =
                AcceptParams { hello: ConnectionHello(vec![4]), reads_out: 4, reads_in: 4 };
            far.accept(qp, &params).unwrap();
        };
        let hello = ConnectionHello(vec![1]);
        let connecting = route().connect(&pd, &handle, limits(), &hello);
        control().block_on(async { tokio::join!(connecting, accepting).0 }).unwrap().connection
    };
    let mut attached = Vec::new();
    let limit = loop {
        match poller.attach(connect()) {
            Ok(qp) => attached.push(qp),
            Err(FabricError::Limit { limit, .. }) => break limit,
            Err(error) => panic!("{error}"),
        }
        assert!(attached.len() < 64, "a CQ without an end");
    };
    assert_eq!(attached.len() as u64, limit / 16, "8 and 8 WRs each");
    let region = Region::allocate(4096, PageKind::Normal).unwrap();
    let memory = pd.register(&region, Access::LOCAL_WRITE).unwrap();
    let recvs = |_| RecvWr::one(WrId(1), memory.sge(0, 64).unwrap());
    let qp = attached[0];
    poller.post_recv(qp, &(0..8).map(recvs).collect::<Vec<_>>()).unwrap();
    poller.fail(qp);
    let dead = poller.detach(qp).unwrap();
    let mut out = [Completion::default(); 64];
    let mut read_empty = |poller: &mut Box<dyn Poller>| {
        for _ in 0..20 {
            assert_eq!(poller.poll(&mut out).unwrap(), 0, "it has no index any more");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    // It lives: whatever was read, more may come.
    read_empty(&mut poller);
    assert!(matches!(poller.attach(connect()), Err(FabricError::Limit { .. })), "not destroyed");
    drop(dead);
    assert!(matches!(poller.attach(connect()), Err(FabricError::Limit { .. })), "not read");
    read_empty(&mut poller);
    let again = poller.attach(connect()).unwrap();
    assert!(matches!(poller.attach(connect()), Err(FabricError::Limit { .. })), "for one only");
    // Nothing of the first one is the other's, which has its index.
    assert_eq!(again, qp);
    assert_eq!(poller.poll(&mut out).unwrap(), 0);
}

#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn many_wait_and_none_is_lost() {
    let (address, _turn) = turn();
    let mut listener = control().block_on(Listener::bind(&address)).unwrap();
    let to = listener.address().clone();
    // Bytes that are all 0 are the kernel's own refusal.
    let asking: Vec<_> = (1..=20u8)
        .map(|i| {
            let to = to.clone();
            control().spawn(async move {
                let route = Route::resolve(&to, &ConnectOptions::default()).await.unwrap();
                let pd = route.device().alloc_pd().unwrap();
                let (_poller, handle) = pd.poller(64).unwrap();
                route.connect(&pd, &handle, limits(), &ConnectionHello(vec![i])).await.map(drop)
            })
        })
        .collect();
    let mut seen: Vec<u8> = (0..20)
        .map(|_| {
            let mut incoming = control().block_on(listener.accept()).unwrap();
            let first = incoming.hello().0[0];
            let reason = ConnectionHello(vec![first]);
            match first % 3 {
                0 => incoming.reject(&reason),
                1 => incoming.refuse_with(reason),
                _ => {
                    incoming.refuse_with(reason);
                    let pd = incoming.device().alloc_pd().unwrap();
                    let (_poller, handle) = pd.poller(64).unwrap();
                    drop(incoming.prepare(&pd, &handle, limits()).unwrap());
                }
            }
            first
        })
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, (1..=20).collect::<Vec<_>>());
    for (i, ask) in asking.into_iter().enumerate() {
        match control().block_on(ask).unwrap() {
            Err(FabricError::Rejected { hello, .. }) => {
                assert_eq!(usize::from(hello[0]), i + 1);
            }
            other => panic!("{other:?}"),
        }
    }
    // Waiting requests are refused when the listener goes; the port is free again.
    let ask = {
        let to = to.clone();
        control().spawn(async move {
            let route = Route::resolve(&to, &ConnectOptions::default()).await.unwrap();
            let pd = route.device().alloc_pd().unwrap();
            let (_poller, handle) = pd.poller(64).unwrap();
            route.connect(&pd, &handle, limits(), &ConnectionHello(vec![1])).await.map(drop)
        })
    };
    std::thread::sleep(Duration::from_millis(200));
    drop(listener);
    assert!(control().block_on(ask).unwrap().is_err());
    let again = Address { port: to.port, ..address };
    drop(control().block_on(Listener::bind(&again)).unwrap());
}

/// Nobody accepts, and more ask than may wait: those are told what the listener was given for that,
/// and not that nothing listens there.
#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn a_full_backlog_says_what_it_was_given() {
    const BACKLOG: usize = 128;
    const MORE: usize = 12;
    let (address, _turn) = turn();
    let options =
        ListenOptions { busy: ConnectionHello(b"busy".to_vec()), ..ListenOptions::default() };
    let listener = control().block_on(Listener::bind_with(&address, &options)).unwrap();
    let to = listener.address().clone();
    let options = ConnectOptions { timeout: Duration::from_secs(60), ..ConnectOptions::default() };
    let ended = std::sync::Arc::new(Mutex::new(Vec::new()));
    let asking: Vec<_> = (0..BACKLOG + MORE)
        .map(|_| {
            let (to, options, ended) = (to.clone(), options.clone(), ended.clone());
            control().spawn(async move {
                let route = Route::resolve(&to, &options).await.unwrap();
                let pd = route.device().alloc_pd().unwrap();
                let (_poller, handle) = pd.poller(16).unwrap();
                let asked = route.connect(&pd, &handle, limits(), &ConnectionHello(vec![1])).await;
                ended.lock().unwrap().push(asked.map(drop));
            })
        })
        .collect();
    eventually("nobody is refused", || ended.lock().unwrap().len() >= MORE);
    for asked in ended.lock().unwrap().iter() {
        match asked {
            Err(FabricError::Rejected { hello, .. }) => assert!(hello.starts_with(b"busy")),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(ended.lock().unwrap().len(), MORE, "the others wait");
    drop(listener);
    for ask in asking {
        control().block_on(ask).unwrap();
    }
}

/// The interface of an address, and its link-local address.
fn link_local(address: &Address) -> (String, Ipv6Addr) {
    let ip = |words: &[&str]| {
        let said = Command::new("ip").args(words).output().unwrap().stdout;
        String::from_utf8(said).unwrap()
    };
    let of_host = ip(&["-o", "addr", "show", "to", &address.host]);
    let interface = of_host.split_whitespace().nth(1).expect("an interface").to_owned();
    let all = ip(&["-o", "-6", "addr", "show", "dev", &interface, "scope", "link"]);
    let found = all.split_whitespace().nth(3).and_then(|a| a.split('/').next()?.parse().ok());
    (interface, found.expect("a link-local address"))
}

#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn link_local_addresses_keep_their_interface() {
    let (address, _turn) = turn();
    let (interface, ip) = link_local(&address);
    let address = Address { host: format!("{ip}%{interface}"), ..address };
    let mut listener = control().block_on(Listener::bind(&address)).unwrap();
    let taken = listener.address().clone();
    let error = control().block_on(Listener::bind(&taken)).unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
    // The local address is named without its interface.
    let bind = Some(SocketAddr::from((ip, 0)));
    let options = ConnectOptions { bind, ..ConnectOptions::default() };
    let route = control().block_on(Route::resolve(&taken, &options)).unwrap();
    let pd = route.device().alloc_pd().unwrap();
    let (_poller, handle) = pd.poller(64).unwrap();
    let hello = ConnectionHello(vec![1]);
    let asking = route.connect(&pd, &handle, limits(), &hello);
    let refusing = async {
        listener.accept().await.unwrap().reject(&ConnectionHello(vec![7]));
    };
    let asked = control().block_on(async { tokio::join!(asking, refusing).0 });
    let is_heard =
        matches!(&asked, Err(FabricError::Rejected { hello, .. }) if hello.starts_with(&[7]));
    assert!(is_heard, "{asked:?}");
}

#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn connections_outlive_their_runtime() {
    let (address, _turn) = turn();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut p = runtime.block_on(pair_async(&address, limits(), limits()));
    let start = Instant::now();
    drop(runtime);
    assert!(start.elapsed() < Duration::from_secs(4), "the runtime was held up");
    let from = p.a.memory(4096, Access::LOCAL_READ);
    let to = p.b.memory(4096, Access::LOCAL_WRITE);
    p.b.recv(1, to.sge(0, 64).unwrap());
    let wr = conformance::wr(1, rblk_fabric::SendOp::Send, from.sge(0, 64).unwrap(), true);
    p.a.post(&[wr]);
    p.until_b(1);
    assert_eq!(p.b.seen[0].status, WcStatus::Success);
    drop(p);
}

#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn giving_up_leaves_nothing() {
    let (address, _turn) = turn();
    let before = {
        drop(pair(&address, limits(), limits()));
        descriptors()
    };
    let listener = control().block_on(Listener::bind(&address)).unwrap();
    let to = listener.address().clone();
    // Nobody accepts: the wait ends by its deadline.
    let options =
        ConnectOptions { timeout: Duration::from_millis(300), ..ConnectOptions::default() };
    let start = Instant::now();
    let ended = control().block_on(async {
        let route = Route::resolve(&to, &options).await.unwrap();
        let pd = route.device().alloc_pd().unwrap();
        let (_poller, handle) = pd.poller(64).unwrap();
        route.connect(&pd, &handle, limits(), &ConnectionHello::default()).await.map(drop)
    });
    assert!(matches!(ended, Err(FabricError::TimedOut { .. })), "{ended:?}");
    // Of the 5 s that it has by default.
    assert!(start.elapsed() < Duration::from_secs(4));
    drop(listener);
    eventually("descriptors are left open", || descriptors() <= before);
}

/// A cable without latency to a host that knows IP and no RDMA. It and its near end are gone when
/// dropped.
struct Neighbour;

impl Neighbour {
    const SPACE: &str = "rblkquick";
    const NEAR: &str = "rblkq0";
    const FAR: &str = "rblkq1";
    const DEVICE: &str = "rblkqrxe";
    const HOST: &str = "198.18.77.2";

    /// Whether the host is there with all of it; else says what is missing.
    fn new() -> Self {
        Self::remove();
        let neighbour = Self;
        // Built in, maybe.
        let _ = Command::new("modprobe").args(["-q", "-a", "veth", "rdma_rxe"]).output();
        let (space, near, far) = (Self::SPACE, Self::NEAR, Self::FAR);
        for words in [
            format!("ip netns add {space}"),
            format!("ip link add {near} type veth peer name {far}"),
            format!("ip link set {far} netns {space}"),
            format!("ip addr add 198.18.77.1/24 dev {near}"),
            format!("ip link set {near} up"),
            format!("ip -n {space} addr add {}/24 dev {far}", Self::HOST),
            format!("ip -n {space} link set {far} up"),
            format!("rdma link add {} type rxe netdev {near}", Self::DEVICE),
        ] {
            Self::run(&words);
        }
        neighbour
    }

    fn run(words: &str) {
        let mut each = words.split(' ');
        let done = Command::new(each.next().unwrap()).args(each).output();
        let done = done.unwrap_or_else(|error| panic!("`{words}`: {error}"));
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(
            done.status.success(),
            "`{words}`: {said}This test needs root, veth and Soft-RoCE; `cargo xtask test` has them"
        );
    }

    fn remove() {
        let _ = Command::new("rdma").args(["link", "del", Self::DEVICE]).output();
        // The far end goes with the near one.
        for words in [["link", "del", Self::NEAR], ["netns", "del", Self::SPACE]] {
            let _ = Command::new("ip").args(words).output();
        }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        Self::remove();
    }
}

#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn an_answer_to_arp_before_the_kernel_waits_for_it_is_seen() {
    let (_, _turn) = turn();
    // By another process: librdmacm keeps a device open as long as the process lives, and one that
    // is open cannot be removed.
    const CHILD: &str = "RBLK_TEST_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let _neighbour = Neighbour::new();
        let done = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "an_answer_to_arp_before_the_kernel_waits_for_it_is_seen"])
            .args(["--ignored", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let said = [&done.stdout[..], &done.stderr].map(String::from_utf8_lossy).concat();
        assert!(done.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let resolve = |host: &str| {
        let to = Address { scheme: Scheme::Rdma, host: host.to_owned(), port: 7720 };
        let options = ConnectOptions::default();
        control().block_on(async { Route::resolve(&to, &options).await })
    };
    // One call that waits for all of its time may or may not be seen to end before the deadline.
    for _ in 0..3 {
        Neighbour::run(&format!("ip neigh flush dev {}", Neighbour::NEAR));
        let start = Instant::now();
        let found = resolve(Neighbour::HOST);
        println!("found in {:.1?}", start.elapsed());
        assert_eq!(found.unwrap().device().caps().name, Neighbour::DEVICE);
    }
    // Asked again and again, one who is not there is still given up in time.
    let before = descriptors();
    let ended = resolve("198.18.77.3").map(drop);
    assert!(matches!(ended, Err(FabricError::TimedOut { .. })), "{ended:?}");
    eventually("descriptors are left open", || descriptors() <= before);
}

#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn limits_of_the_device_are_named() {
    let (address, _turn) = turn();
    let resolve =
        || control().block_on(Route::resolve(&address, &ConnectOptions::default())).unwrap();
    let (route, again) = (resolve(), resolve());
    let device = route.device();
    assert!(device.same_as(&again.device()), "two routes by one device are two devices");
    let pd = device.alloc_pd().unwrap();
    let entries = device.caps().max_cq_entries.saturating_add(1);
    assert!(matches!(pd.poller(entries), Err(FabricError::Limit { .. })), "a CQ that is too long");
    let (_poller, handle) = pd.poller(16).unwrap();
    let too_many = QpLimits { send_wrs: device.caps().max_wrs.saturating_add(1), ..limits() };
    let hello = ConnectionHello::default();
    let connected = control().block_on(route.connect(&pd, &handle, too_many, &hello));
    assert!(matches!(connected.map(drop), Err(FabricError::Limit { .. })), "a QP that is too deep");
}

#[test]
#[ignore = "needs an RDMA device: `cargo xtask test` runs it in the lab"]
fn addresses_that_lead_nowhere_are_unreachable() {
    let (address, _turn) = turn();
    let listener = control().block_on(Listener::bind(&address)).unwrap();
    let unused =
        Address { port: listener.address().port.wrapping_add(1), ..listener.address().clone() };
    let options = ConnectOptions::default();
    let refused = control().block_on(async {
        let route = Route::resolve(&unused, &options).await.unwrap();
        let pd = route.device().alloc_pd().unwrap();
        let (_poller, handle) = pd.poller(16).unwrap();
        route.connect(&pd, &handle, limits(), &ConnectionHello::default()).await.map(drop)
    });
    assert!(
        matches!(&refused, Err(FabricError::Unreachable { reason, .. }) if reason.contains("nothing listens")),
        "{refused:?}"
    );
    for host in ["127.0.0.1", "203.0.113.7", "no-such-name.invalid"] {
        let away = Address { host: host.to_owned(), ..address.clone() };
        let found = control().block_on(Route::resolve(&away, &options)).map(drop);
        assert!(
            matches!(found, Err(FabricError::Unreachable { .. } | FabricError::TimedOut { .. })),
            "{host}: {found:?}"
        );
    }
}
