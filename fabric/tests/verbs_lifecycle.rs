//! Verbs objects come and go in any order, and leave nothing behind.
//!
//! Run like `verbs_conformance`.
#![cfg(feature = "verbs")]

mod conformance;
mod verbs_pair;

use std::fs;
use std::time::{Duration, Instant};

use conformance::{Pair, limits};
use rblk_fabric::{Access, Address, ConnectOptions, ConnectionHello, Listener, Route, WcStatus};
use verbs_pair::{address, control, pair, pair_async};

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
fn nothing_is_left() {
    let Some(address) = address() else { return };
    drop(pair(&address, limits(), limits()));
    let before = descriptors();
    for round in 0..40 {
        let Pair { mut a, mut b, .. } = pair(&address, limits(), limits());
        let memory = a.memory(1 << 16, Access::REMOTE);
        a.recv(1, memory.sge(0, 64).unwrap());
        // The pieces die in any order: what they rest on stays as long as it must.
        match round % 5 {
            0 => drop((a, b, memory)),
            1 => drop((memory, b, a)),
            2 => {
                let connection = a.poller.detach(a.qp).unwrap();
                drop((a, memory, b));
                drop(connection);
            }
            3 => {
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
fn a_stale_region_is_not_reached_inline() {
    let Some(address) = address() else { return };
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

#[test]
fn many_wait_and_none_is_lost() {
    let Some(address) = address() else { return };
    let mut listener = control().block_on(Listener::bind(&address)).unwrap();
    let to = listener.address().clone();
    let asking: Vec<_> = (0..20u8)
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
            let incoming = control().block_on(listener.accept()).unwrap();
            let first = incoming.hello().0[0];
            incoming.reject(&ConnectionHello(vec![first]));
            first
        })
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..20).collect::<Vec<_>>());
    for (i, ask) in asking.into_iter().enumerate() {
        match control().block_on(ask).unwrap() {
            Err(rblk_fabric::FabricError::Rejected { hello, .. }) => {
                assert_eq!(usize::from(hello[0]), i);
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

#[test]
fn connections_outlive_their_runtime() {
    let Some(address) = address() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut p = runtime.block_on(pair_async(&address, limits(), limits()));
    let start = Instant::now();
    drop(runtime);
    assert!(start.elapsed() < Duration::from_secs(1), "the runtime was held up");
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
fn giving_up_leaves_nothing() {
    let Some(address) = address() else { return };
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
    assert!(matches!(ended, Err(rblk_fabric::FabricError::TimedOut { .. })), "{ended:?}");
    assert!(start.elapsed() < Duration::from_secs(3));
    drop(listener);
    eventually("descriptors are left open", || descriptors() <= before);
}
