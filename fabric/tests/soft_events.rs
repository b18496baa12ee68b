//! Sleeping and waking, many QPs on one poller, and indices that are used again.

mod conformance;
mod soft_pairs;

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use conformance::{Pair, limits, wr};
use rblk_fabric::soft::memory::Conditions;
use rblk_fabric::{
    AcceptParams, Access, Completion, ConnectOptions, ConnectionHello, Device, Listener, Poller,
    QpIndex, RecvWr, Route, SendOp, WcStatus, WrId, soft,
};
use soft_pairs::{loopback, memory_pair, poller, runtime, tcp_pair};

fn readable(poller: &dyn Poller, wait: Duration) -> bool {
    let mut fd =
        libc::pollfd { fd: poller.event_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one valid pollfd.
    unsafe { libc::poll(&raw mut fd, 1, i32::try_from(wait.as_millis()).unwrap()) == 1 }
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
    assert!(p.a.seen.is_empty() && start.elapsed() < Duration::from_secs(5));
    p.until_a(4);
    assert!(p.a.seen.iter().all(|c| c.status == WcStatus::Success));
    let mut both = [vec![0; 16 << 20], vec![0; 16 << 20]];
    from.region().read(0, &mut both[0]);
    window.region().read(0, &mut both[1]);
    assert!(both[0] == both[1]);
}

#[test]
fn many_qps_on_one_poller() {
    const QPS: usize = 9;
    let device = Device::Soft(soft::Device::tcp());
    let (pd_a, pd_b) = (device.alloc_pd().unwrap(), device.alloc_pd().unwrap());
    let ((mut a, handle_a), (mut b, handle_b)) = (poller(&pd_a), poller(&pd_b));
    let region = rblk_fabric::Region::allocate(65536, rblk_fabric::PageKind::Normal).unwrap();
    let (mr_a, mr_b) = (
        pd_a.register(&region, Access::REMOTE).unwrap(),
        pd_b.register(&region, Access::REMOTE).unwrap(),
    );
    let runtime = runtime();
    let join = |a: &mut Box<dyn Poller>, b: &mut Box<dyn Poller>| -> (QpIndex, QpIndex) {
        runtime.block_on(async {
            let mut listener = Listener::bind(&loopback()).await.unwrap();
            let route =
                Route::resolve(listener.address(), &ConnectOptions::default()).await.unwrap();
            let hello = ConnectionHello::default();
            let (established, qp) =
                tokio::join!(route.connect(&pd_a, &handle_a, limits(), &hello), async {
                    let incoming = listener.accept().await.unwrap();
                    let qp =
                        b.attach(incoming.prepare(&pd_b, &handle_b, limits()).unwrap()).unwrap();
                    let sge = mr_b.sge(0, 64).unwrap();
                    b.post_recv(qp, &[RecvWr { id: WrId(qp.0.into()), sge }]).unwrap();
                    let params = AcceptParams {
                        hello: ConnectionHello::default(),
                        reads_out: 1,
                        reads_in: 1,
                    };
                    b.accept(qp, &params).unwrap();
                    qp
                });
            (a.attach(established.unwrap().connection).unwrap(), qp)
        })
    };
    let mut qps: Vec<_> = (0..QPS).map(|_| join(&mut a, &mut b)).collect();
    let mut out = [Completion::default(); 4];
    for round in 0..30usize {
        let sends = a.counters().signaled;
        for (qp_a, _) in &qps {
            a.post_send(*qp_a, &[wr(5, SendOp::Send, mr_a.sge(0, 32).unwrap(), true)]).unwrap();
        }
        assert_eq!(a.counters().signaled, sends + QPS as u64);
        let (mut got, mut done) = (0, 0);
        let start = Instant::now();
        while got < QPS || done < QPS {
            let count = b.poll(&mut out).unwrap();
            for c in &out[..count] {
                assert_eq!((c.status, c.id.0), (WcStatus::Success, c.qp.0.into()));
                let sge = mr_b.sge(0, 64).unwrap();
                b.post_recv(c.qp, &[RecvWr { id: c.id, sge }]).unwrap();
            }
            got += count;
            let count = a.poll(&mut out).unwrap();
            assert!(out[..count].iter().all(|c| c.status == WcStatus::Success));
            done += count;
            assert!(start.elapsed() < Duration::from_secs(10), "round {round}: {got}, {done}");
        }
        // One goes, one comes, and takes its index; the others see nothing of it.
        let (qp_a, qp_b) = qps.remove(round % QPS);
        drop(a.detach(qp_a).unwrap());
        let start = Instant::now();
        while b.poll(&mut out).unwrap() == 0 {
            assert!(start.elapsed() < Duration::from_secs(10));
        }
        assert_eq!((out[0].qp, out[0].status), (qp_b, WcStatus::Flushed));
        drop(b.detach(qp_b).unwrap());
        let fresh = join(&mut a, &mut b);
        assert_eq!(fresh, (qp_a, qp_b));
        qps.push(fresh);
    }
}
