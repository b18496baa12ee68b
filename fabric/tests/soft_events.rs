//! Sleeping and waking, many QPs on one poller, and indices that are used again.

mod conformance;
mod soft_pairs;

use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use conformance::{Pair, limits, wr};
use rblk_fabric::soft::network::Conditions;
use rblk_fabric::{
    AcceptParams, Access, Completion, ConnectOptions, ConnectionHello, Device, Listener,
    MemoryRegion, Poller, PollerHandle, ProtectionDomain, QpIndex, RecvWr, Route, SendOp, WcStatus,
    WrId, soft,
};
use soft_pairs::{loopback, memory_pair, poller, runtime, tcp_pair};

fn readable(poller: &dyn Poller, wait: Duration) -> bool {
    let mut fds = poller.event_fds().map(|fd| {
        // The kernel skips the entry of a descriptor that is none.
        let fd = fd.map_or(-1, |fd| fd.as_raw_fd());
        libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
    });
    // SAFETY: two valid pollfds.
    unsafe { libc::poll(fds.as_mut_ptr(), 2, i32::try_from(wait.as_millis()).unwrap()) > 0 }
}

fn drained(poller: &mut dyn Poller, out: &mut [Completion]) -> usize {
    let mut count = 0;
    loop {
        match poller.poll(out).unwrap() {
            0 => return count,
            more => count += more,
        }
    }
}

/// One that goes off after its answer leaves its peer in no doubt.
fn settles_what_it_owes(mut p: Pair) {
    let from = p.a.memory(4096, Access::REMOTE);
    let to = p.b.memory(4096, Access::REMOTE);
    let mut out = [Completion::default(); 8];
    for round in 0..50 {
        p.b.recv(1, to.sge(0, 64).unwrap());
        p.a.post(&[wr(2, SendOp::Send, from.sge(0, 64).unwrap(), true)]);
        let deadline = Instant::now() + Duration::from_secs(5);
        while p.b.poller.poll(&mut out).unwrap() == 0 {
            assert!(Instant::now() < deadline, "round {round}: the message");
        }
        for _ in 0..20 {
            assert_eq!(p.a.poller.poll(&mut out).unwrap(), 0, "round {round}: it is not told yet");
        }
        p.b.poller.send_owed_acks();
        while p.a.poller.poll(&mut out).unwrap() == 0 {
            assert!(Instant::now() < deadline, "round {round}: the completion");
        }
    }
}

#[test]
fn what_is_owed_leaves_before_a_pause() {
    settles_what_it_owes(tcp_pair(limits(), limits()));
}

fn sleeps_and_wakes(mut p: Pair) {
    let from = p.a.memory(4096, Access::REMOTE);
    let to = p.b.memory(4096, Access::REMOTE);
    let mut out = [Completion::default(); 8];
    for round in 0..50 {
        p.b.recv(1, to.sge(0, 64).unwrap());
        assert_eq!(drained(p.b.poller.as_mut(), &mut out), 0);
        p.b.poller.arm().unwrap();
        assert_eq!(p.b.poller.poll(&mut out).unwrap(), 0);
        assert!(!readable(p.b.poller.as_ref(), Duration::ZERO), "round {round}: nothing is there");
        p.a.post(&[wr(2, SendOp::Send, from.sge(0, 64).unwrap(), true)]);
        assert!(readable(p.b.poller.as_ref(), Duration::from_secs(5)), "round {round}: the event");
        p.b.poller.clear_event();
        assert_eq!(drained(p.b.poller.as_mut(), &mut out), 1, "round {round}");
        // The acknowledgement goes out by itself before b sleeps again.
        p.b.poller.arm().unwrap();
        p.until_a(round + 1);
    }
    // An event by the owner's own doing.
    p.b.recv(7, to.sge(0, 64).unwrap());
    p.b.poller.arm().unwrap();
    assert_eq!(p.b.poller.poll(&mut out).unwrap(), 0);
    p.b.poller.fail(p.b.qp);
    assert!(readable(p.b.poller.as_ref(), Duration::ZERO));
    p.b.poller.clear_event();
    assert_eq!(p.b.poller.poll(&mut out).unwrap(), 1);
    assert_eq!((out[0].id, out[0].status), (WrId(7), WcStatus::Flushed));
    // A dead QP keeps nobody awake.
    p.b.poller.arm().unwrap();
    assert_eq!(p.b.poller.poll(&mut out).unwrap(), 0);
    assert!(!readable(p.b.poller.as_ref(), Duration::ZERO));
}

#[test]
fn sleeps_and_wakes_over_tcp() {
    sleeps_and_wakes(tcp_pair(limits(), limits()));
}

#[test]
fn sleeps_and_wakes_in_memory() {
    sleeps_and_wakes(memory_pair(1, Conditions::default(), limits(), limits()).0);
}

/// A peer that does not poll: bytes pile up, nothing blocks, and all arrives in the end.
#[test]
fn a_slow_peer_blocks_nobody() {
    let mut p = tcp_pair(limits(), limits());
    let from = p.a.memory(16 << 20, Access::REMOTE);
    let window = p.b.memory(16 << 20, Access::REMOTE);
    conformance::fill(&from, 3);
    let start = Instant::now();
    for id in 0..4 {
        let whole = from.sge(0, 16 << 20).unwrap();
        p.a.post(&[wr(id, SendOp::Write(window.remote(0)), whole, true)]);
    }
    for _ in 0..100 {
        p.a.poll();
    }
    assert!(p.a.seen.is_empty() && start.elapsed() < Duration::from_secs(20));
    p.until_a(4);
    assert!(p.a.seen.iter().all(|c| c.status == WcStatus::Success));
    let mut both = [vec![0; 16 << 20], vec![0; 16 << 20]];
    from.region().read(0, &mut both[0]);
    window.region().read(0, &mut both[1]);
    assert!(both[0] == both[1]);
}

/// Two pollers over TCP, with any number of QPs between them.
struct Crowd {
    runtime: tokio::runtime::Runtime,
    a: (ProtectionDomain, Box<dyn Poller>, PollerHandle, MemoryRegion),
    b: (ProtectionDomain, Box<dyn Poller>, PollerHandle, MemoryRegion),
}

impl Crowd {
    fn new() -> Self {
        let end = || {
            let pd = Device::Soft(soft::Device::tcp()).alloc_pd().unwrap();
            let (poller, handle) = poller(&pd);
            let region =
                rblk_fabric::Region::allocate(65536, rblk_fabric::PageKind::Normal).unwrap();
            let memory = pd.register(&region, Access::REMOTE).unwrap();
            (pd, poller, handle, memory)
        };
        Self { runtime: runtime(), a: end(), b: end() }
    }

    /// Another QP, with one RECV at b; the index at each end.
    fn join(&mut self) -> (QpIndex, QpIndex) {
        let Self { runtime, a, b } = self;
        runtime.block_on(async {
            let mut listener = Listener::bind(&loopback()).await.unwrap();
            let route =
                Route::resolve(listener.address(), &ConnectOptions::default()).await.unwrap();
            let hello = ConnectionHello::default();
            let (established, qp) =
                tokio::join!(route.connect(&a.0, &a.2, limits(), &hello), async {
                    let incoming = listener.accept().await.unwrap();
                    let qp = b.1.attach(incoming.prepare(&b.0, &b.2, limits()).unwrap()).unwrap();
                    let sge = b.3.sge(0, 64).unwrap();
                    b.1.post_recv(qp, &[RecvWr::one(WrId(qp.0.into()), sge)]).unwrap();
                    let params = AcceptParams {
                        hello: ConnectionHello::default(),
                        reads_out: 1,
                        reads_in: 1,
                    };
                    b.1.accept(qp, &params).unwrap();
                    qp
                });
            (a.1.attach(established.unwrap().connection).unwrap(), qp)
        })
    }

    fn send(&mut self, qp: QpIndex) {
        let sge = self.a.3.sge(0, 32).unwrap();
        self.a.1.post_send(qp, &[wr(5, SendOp::Send, sge, true)]).unwrap();
    }

    /// Polls b once; whose messages came. Their RECVs are posted again.
    fn heard(&mut self) -> Vec<QpIndex> {
        let mut out = [Completion::default(); 4];
        let count = self.b.1.poll(&mut out).unwrap();
        for c in &out[..count] {
            assert_eq!((c.status, c.id.0), (WcStatus::Success, c.qp.0.into()));
            let sge = self.b.3.sge(0, 64).unwrap();
            self.b.1.post_recv(c.qp, &[RecvWr::one(c.id, sge)]).unwrap();
        }
        out[..count].iter().map(|c| c.qp).collect()
    }
}

#[test]
fn many_qps_on_one_poller() {
    const QPS: usize = 9;
    let mut crowd = Crowd::new();
    let mut qps: Vec<_> = (0..QPS).map(|_| crowd.join()).collect();
    let mut out = [Completion::default(); 4];
    for round in 0..30usize {
        let sends = crowd.a.1.counters().signaled;
        for (qp_a, _) in &qps {
            crowd.send(*qp_a);
        }
        assert_eq!(crowd.a.1.counters().signaled, sends + QPS as u64);
        let (mut got, mut done) = (0, 0);
        let start = Instant::now();
        while got < QPS || done < QPS {
            got += crowd.heard().len();
            let count = crowd.a.1.poll(&mut out).unwrap();
            assert!(out[..count].iter().all(|c| c.status == WcStatus::Success));
            done += count;
            assert!(start.elapsed() < Duration::from_secs(10), "round {round}: {got}, {done}");
        }
        // One goes, one comes, and takes its index; the others see nothing of it.
        let (qp_a, qp_b) = qps.remove(round % QPS);
        drop(crowd.a.1.detach(qp_a).unwrap());
        let start = Instant::now();
        while crowd.b.1.poll(&mut out).unwrap() == 0 {
            assert!(start.elapsed() < Duration::from_secs(10));
        }
        assert_eq!((out[0].qp, out[0].status), (qp_b, WcStatus::Flushed));
        drop(crowd.b.1.detach(qp_b).unwrap());
        let fresh = crowd.join();
        assert_eq!(fresh, (qp_a, qp_b));
        qps.push(fresh);
    }
}

/// Not every turn asks a QP that was silent for long: it is heard all the same, soon by whoever
/// looks and at once by whoever sleeps.
#[test]
fn the_silent_are_heard() {
    for qps in [1, 2, 4] {
        let mut crowd = Crowd::new();
        let qps: Vec<_> = (0..qps).map(|_| crowd.join()).collect();
        for (speaker, heard_at) in &qps {
            // The first QP is busy meanwhile, or nobody is.
            for busy in [true, false] {
                for _ in 0..2000 {
                    if busy && speaker != &qps[0].0 {
                        crowd.send(qps[0].0);
                        while crowd.heard().is_empty() {}
                        let mut out = [Completion::default(); 4];
                        while crowd.a.1.poll(&mut out).unwrap() == 0 {
                            crowd.heard();
                        }
                    }
                    crowd.heard();
                }
                crowd.send(*speaker);
                let mut looks = 0;
                while !crowd.heard().contains(heard_at) {
                    looks += 1;
                    std::thread::yield_now();
                    assert!(looks < 10_000, "{qps:?}: {speaker:?} is not heard");
                }
            }
            // Asleep.
            for _ in 0..3000 {
                crowd.heard();
            }
            crowd.b.1.arm().unwrap();
            assert!(crowd.heard().is_empty() && !readable(crowd.b.1.as_ref(), Duration::ZERO));
            crowd.send(*speaker);
            assert!(readable(crowd.b.1.as_ref(), Duration::from_secs(5)));
            crowd.b.1.clear_event();
            assert_eq!(crowd.heard(), [*heard_at]);
        }
    }
}

/// A QP alone is watched by its own socket; what was said earlier of where to watch stays true.
#[test]
fn old_descriptors_wake_too() {
    let mut crowd = Crowd::new();
    let nobody = crowd.b.1.event_fds().map(|fd| fd.map(|fd| fd.as_raw_fd()));
    assert!(nobody[0].is_some() && nobody[1].is_none());
    let wakes = |crowd: &mut Crowd, fds: [Option<RawFd>; 2], qp: QpIndex| {
        crowd.b.1.arm().unwrap();
        assert!(crowd.heard().is_empty());
        crowd.send(qp);
        let mut fds =
            fds.map(|fd| libc::pollfd { fd: fd.unwrap_or(-1), events: libc::POLLIN, revents: 0 });
        // SAFETY: two valid pollfds.
        let woken = unsafe { libc::poll(fds.as_mut_ptr(), 2, 5000) };
        assert!(woken > 0, "{fds:?}");
        crowd.b.1.clear_event();
        assert_eq!(crowd.heard().len(), 1);
    };
    let (one, _) = crowd.join();
    wakes(&mut crowd, nobody, one);
    let alone = crowd.b.1.event_fds().map(|fd| fd.map(|fd| fd.as_raw_fd()));
    assert!(alone[0] == nobody[0] && alone[1].is_some());
    wakes(&mut crowd, alone, one);
    let (two, second) = crowd.join();
    wakes(&mut crowd, alone, one);
    wakes(&mut crowd, alone, two);
    let both = crowd.b.1.event_fds().map(|fd| fd.map(|fd| fd.as_raw_fd()));
    assert_eq!(both, nobody);
    drop(crowd.b.1.detach(second));
    wakes(&mut crowd, both, one);
    assert!(crowd.b.1.event_fds()[1].is_some());
}
