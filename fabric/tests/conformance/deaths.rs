//! Cases of QPs, regions and keys that die: what was outstanding is flushed in order, and the
//! memory of the dead is not touched any more.

use rblk_fabric::{Access, MemoryRegion, RemoteBuffer, SendOp, WcStatus};

use super::refusals::guarded;
use super::{Expect, FLUSHED, OK, Pair, bytes_of, fill, pattern, wr};

pub(super) fn fail_flushes_in_order(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let spare = p.b.memory(4096, Access::REMOTE);
    p.b.recv(900, spare.sge(0, 64).unwrap());
    for id in 0..4 {
        p.a.recv(id, from.sge(0, 64).unwrap());
    }
    p.a.poller.fail(p.a.qp);
    p.a.poller.fail(p.a.qp);
    p.until_a(4);
    assert_eq!(p.a.outcome(), [(0, FLUSHED), (1, FLUSHED), (2, FLUSHED), (3, FLUSHED)]);
    // The peer sees it too.
    p.until_b(1);
    assert_eq!(p.b.outcome(), [(900, FLUSHED)]);
}

pub(super) fn posting_after_error(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let sge = from.sge(0, 64).unwrap();
    p.a.poller.fail(p.a.qp);
    for round in 0..5 {
        p.a.recv(1, sge);
        p.a.post(&[wr(2, SendOp::Send, sge, false), wr(3, SendOp::Send, sge, true)]);
        p.until_a(3 * (round + 1));
    }
    assert!(p.a.seen.iter().all(|c| c.status == FLUSHED));
    let mut sends: Vec<_> = p.a.seen.iter().map(|c| c.id.0).filter(|id| *id != 1).collect();
    sends.dedup();
    assert_eq!(sends, [2, 3, 2, 3, 2, 3, 2, 3, 2, 3]);
}

pub(super) fn peer_death(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(1 << 20, Access::REMOTE);
    let window = p.b.memory(1 << 20, Access::REMOTE);
    let sge = from.sge(0, 64).unwrap();
    p.a.recv(9, sge);
    p.b.poller.fail(p.b.qp);
    let write = |id| wr(id, SendOp::Write(window.remote(0)), from.sge(0, 1 << 20).unwrap(), true);
    p.a.post(&[write(1), write(2)]);
    p.until_a(3);
    let outcome = p.a.outcome();
    assert!(expect.peer_death.contains(&outcome[0].1), "{outcome:?}");
    assert_eq!((outcome[0].0, &outcome[1..]), (1, &[(2, FLUSHED), (9, FLUSHED)][..]));
    assert!(bytes_of(&window, 0, 64) == [0; 64]);
}

pub(super) fn dead_region_is_not_written(p: &mut Pair, expect: &Expect) {
    if !expect.dead_region {
        return;
    }
    let from = p.a.memory(1 << 20, Access::REMOTE);
    fill(&from, 200);
    let window = p.b.memory(1 << 20, Access::REMOTE);
    guarded(p);
    let region = std::sync::Arc::clone(window.region());
    let write = wr(1, SendOp::Write(window.remote(0)), from.sge(0, 1 << 20).unwrap(), true);
    p.a.post(&[write]);
    // Somewhere in the middle, or before: then the region dies.
    for _ in 0..3 {
        p.a.poll();
        p.b.poll();
    }
    if !p.a.seen.is_empty() {
        return;
    }
    drop(window);
    region.zero(0, 1 << 20);
    p.until_a(1);
    let mut bytes = vec![0; 1 << 20];
    region.read(0, &mut bytes);
    assert!(bytes.iter().all(|b| *b == 0), "bytes landed in a dead region");
    // All of it may have been there already when the region died.
    let seen = p.a.seen[0].status;
    assert!(seen == OK || seen == expect.told(WcStatus::RemoteAccess, Some(seen)), "{seen:?}");
}

/// RDMA of a requester that does not know yet that the responder gave its QP up, as a flush has
/// told the responder itself: the memory is registered still.
pub(super) fn dead_qp_guards_memory(p: &mut Pair, expect: &Expect) {
    const LEN: u32 = 16 << 10;
    let from = p.a.memory(1 << 16, Access::REMOTE);
    let window = p.b.memory(1 << 16, Access::REMOTE);
    fill(&from, 1);
    fill(&window, 2);
    guarded(p);
    p.b.poller.fail(p.b.qp);
    p.until("the responder's flush", |p| p.b.status_of(900).is_some());
    let write = |id| wr(id, SendOp::Write(window.remote(0)), from.sge(0, LEN).unwrap(), true);
    let sink = from.sge(1 << 15, LEN).unwrap();
    let mut last = wr(2, SendOp::Write(window.remote(0)), from.sge(0, LEN).unwrap(), true);
    if expect.immediates {
        last.op = SendOp::WriteWithImm(window.remote(0), 7);
    }
    // One may be refused at once: the end may have come already.
    let _ = p
        .a
        .poller
        .post_send(p.a.qp, &[write(1), last, wr(3, SendOp::Read(window.remote(0)), sink, true)]);
    if expect.refusal_is_told {
        p.until_a(3);
        assert!(p.a.seen.iter().all(|c| c.status != OK), "{:?}", p.a.outcome());
    }
    p.settle();
    assert_eq!(p.b.status_of(900), Some(FLUSHED));
    assert_unharmed(&window, 2);
    // Nor was anything read out of it.
    assert_unharmed(&from, 1);
}

/// Writes are landing when the responder gives its QP up: from its flush on its memory is its own.
pub(super) fn death_amid_writes_guards_memory(p: &mut Pair, _: &Expect) {
    const LEN: u32 = 1 << 18;
    let from = p.a.memory(LEN as usize, Access::REMOTE);
    let window = p.b.memory(LEN as usize, Access::REMOTE);
    fill(&from, 1);
    guarded(p);
    let write = |id| wr(id, SendOp::Write(window.remote(0)), from.sge(0, LEN).unwrap(), true);
    p.a.post(&[write(1), write(2), write(3), write(4)]);
    let last = pattern(1, LEN as usize - 1);
    p.until("the first write", |_| bytes_of(&window, LEN as usize - 1, 1) == [last]);
    p.b.poller.fail(p.b.qp);
    // Soft-RoCE ends the packet at which its responder is, and sees the error state before the
    // next: it says nothing of that but by flushing the RECVs, which the same task of the kernel
    // does.
    p.until("the responder's flush", |p| p.b.status_of(900).is_some());
    assert_eq!(p.b.status_of(900), Some(FLUSHED));
    fill(&window, 2);
    p.settle();
    assert_unharmed(&window, 2);
}

fn assert_unharmed(mr: &MemoryRegion, seed: u8) {
    let len = mr.region().len();
    let fresh: Vec<u8> = (0..len).map(|at| pattern(seed, at)).collect();
    assert!(bytes_of(mr, 0, len) == fresh, "the guard pattern of seed {seed} is spoilt");
}

/// The QP lives and the memory is registered, but not under the key that the requester has.
fn dead_key(p: &mut Pair, expect: &Expect, op: impl Fn(RemoteBuffer) -> SendOp) {
    const LEN: u32 = 16 << 10;
    let from = p.a.memory(1 << 16, Access::REMOTE);
    let old = p.b.memory(1 << 16, Access::REMOTE);
    fill(&from, 1);
    guarded(p);
    let sge = from.sge(0, LEN).unwrap();
    // While it lives, the key opens.
    p.a.post(&[wr(1, SendOp::Write(old.remote(0)), sge, true)]);
    p.until_a(1);
    assert_eq!(p.a.status_of(1), Some(OK));
    let region = std::sync::Arc::clone(old.region());
    let dead = old.remote(0).rkey;
    let new = p.b.pd.register(&region, Access::REMOTE).unwrap();
    drop(old);
    assert_ne!(new.rkey(), dead);
    // The address is one where memory is: the key alone is wrong.
    let remote = RemoteBuffer { addr: new.remote(0).addr, rkey: dead };
    fill(&new, 2);
    let op = op(remote);
    let is_read = matches!(op, SendOp::Read(_));
    p.a.post(&[wr(2, op, sge, true)]);
    if expect.refusal_is_told {
        p.until_a(2);
        let told = expect.told(WcStatus::RemoteAccess, p.a.status_of(2));
        assert_eq!(p.a.status_of(2), Some(told));
    } else if is_read {
        p.until_a(2);
        assert_ne!(p.a.status_of(2), Some(OK));
    }
    p.settle();
    assert_unharmed(&new, 2);
    assert_unharmed(&from, 1);
}

pub(super) fn dead_key_is_not_written(p: &mut Pair, expect: &Expect) {
    dead_key(p, expect, SendOp::Write);
}

pub(super) fn dead_key_is_not_written_with_immediate(p: &mut Pair, expect: &Expect) {
    if expect.immediates {
        dead_key(p, expect, |remote| SendOp::WriteWithImm(remote, 7));
        assert!(p.b.seen.iter().all(|c| c.status != OK), "no immediate of a refused write");
    }
}

pub(super) fn dead_key_is_not_read(p: &mut Pair, expect: &Expect) {
    dead_key(p, expect, SendOp::Read);
}
