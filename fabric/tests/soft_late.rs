//! The network whose QPs are over only when they are destroyed, as on cards: what was under way
//! lands late.

mod conformance;
mod soft_pairs;

use conformance::{Pair, limits, wr};
use rblk_fabric::soft::network::{End, FaultyWire, Network};
use rblk_fabric::{Access, MemoryRegion, SendOp, WcStatus};
use soft_pairs::pair_on;

const OLD: u8 = 0x11;
/// Longest time after the end until something lands.
const TICKS: u64 = 64;

fn set(memory: &MemoryRegion) {
    memory.region().write(0, &vec![OLD; memory.region().len()]);
}

fn first(memory: &MemoryRegion) -> u8 {
    let mut byte = [0];
    memory.region().read(0, &mut byte);
    byte[0]
}

fn late_pair() -> (Network, Pair, FaultyWire) {
    let network = Network::with_late_rdma(7, u64::MAX);
    let (pair, wire) = pair_on(&network, limits(), limits());
    (network, pair, wire)
}

#[test]
fn a_read_lands_until_its_queue_pair_is_destroyed() {
    let (network, mut p, wire) = late_pair();
    assert!(p.a.poller.caps().touches_until_destroyed);
    let (sink, source) = (p.a.memory(4096, Access::LOCAL_WRITE), p.b.memory(4096, Access::REMOTE));
    set(&sink);
    wire.stall(End::B, true);
    p.a.post(&[wr(1, SendOp::Read(source.remote(0)), sink.sge(0, 512).unwrap(), true)]);
    p.settle();
    p.a.poller.fail(p.a.qp);
    let dead = p.a.poller.detach(p.a.qp).unwrap();
    assert_eq!(p.a.poll(), 0, "a flush is no word of what lands");
    network.advance(TICKS);
    assert_ne!(first(&sink), OLD, "it lands after the end");
    set(&sink);
    network.advance(TICKS);
    assert_eq!(first(&sink), OLD, "once");
    drop(dead);
    assert_ne!(first(&sink), OLD, "and at the last moment");
    set(&sink);
    network.advance(10 * TICKS);
    assert_eq!(first(&sink), OLD, "what is destroyed touches nothing");
}

#[test]
fn a_write_of_the_peer_lands_until_the_queue_pair_is_destroyed() {
    let (network, mut p, wire) = late_pair();
    let (buffer, source) = (p.a.memory(4096, Access::REMOTE), p.b.memory(4096, Access::REMOTE));
    set(&buffer);
    source.region().write(0, &[0x22; 4096]);
    wire.stall(End::B, true);
    p.b.post(&[wr(1, SendOp::Write(buffer.remote(0)), source.sge(0, 512).unwrap(), true)]);
    p.settle();
    p.a.poller.fail(p.a.qp);
    let dead = p.a.poller.detach(p.a.qp).unwrap();
    network.advance(TICKS);
    assert_eq!(first(&buffer), 0x22);
    set(&buffer);
    drop(dead);
    assert_eq!(first(&buffer), 0x22);
}

#[test]
fn flushes_come_some_polls_after_the_end() {
    let (_network, mut p, wire) = late_pair();
    let memory = p.a.memory(4096, Access::LOCAL_WRITE);
    for id in 0..8 {
        p.a.recv(id, memory.sge(0, 64).unwrap());
    }
    wire.cut();
    let mut polls = 0;
    while p.a.seen.len() < 8 {
        p.a.poll();
        polls += 1;
        assert!(polls < 100, "all of them, in the end: {:?}", p.a.outcome());
    }
    assert!(polls > 3, "in {polls} polls, of which one was the first");
    assert!(p.a.seen.iter().all(|c| c.status != WcStatus::Success));
}

#[test]
fn the_ordinary_network_lets_go_at_once() {
    let network = Network::new(7);
    let (mut p, wire) = pair_on(&network, limits(), limits());
    assert!(!p.a.poller.caps().touches_until_destroyed);
    let (sink, source) = (p.a.memory(4096, Access::LOCAL_WRITE), p.b.memory(4096, Access::REMOTE));
    set(&sink);
    wire.stall(End::B, true);
    p.a.post(&[wr(1, SendOp::Read(source.remote(0)), sink.sge(0, 512).unwrap(), true)]);
    p.settle();
    p.a.poller.fail(p.a.qp);
    drop(p.a.poller.detach(p.a.qp));
    network.advance(TICKS);
    assert_eq!(first(&sink), OLD);
}
