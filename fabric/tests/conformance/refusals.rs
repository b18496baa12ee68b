//! Cases of what is refused, by the peer or by one's own end: with which status, and that no byte
//! of it lands.

use rblk_fabric::{Access, QpIndex, RecvWr, RemoteBuffer, SendOp, Sge, WcStatus, WrId};

use super::{Expect, FLUSHED, OK, Pair, bytes_of, fill, wr};

/// The requester's first WR fails with its cause, the rest flush, and the responder dies where it
/// does.
fn refused(p: &mut Pair, expect: &Expect, first: u64, cause: WcStatus, last: u64) {
    p.until("the refusal", |p| p.a.status_of(last).is_some());
    let cause = expect.told(cause, p.a.status_of(first));
    let expected: Vec<_> =
        (first..=last).map(|id| (id, if id == first { cause } else { FLUSHED })).collect();
    assert_eq!(p.a.outcome(), expected);
    if expect.responder_dies {
        p.until("the responder's flush", |p| p.b.status_of(900).is_some());
        assert_eq!(p.b.status_of(900), Some(FLUSHED));
    }
}

pub(super) fn no_recv_is_rnr(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let sge = from.sge(0, 64).unwrap();
    p.a.recv(3, sge);
    p.a.post(&[wr(1, SendOp::Send, sge, false), wr(2, SendOp::Send, sge, false)]);
    p.until_a(3);
    assert_eq!(p.a.outcome(), [(1, expect.rnr), (2, FLUSHED), (3, FLUSHED)]);
    assert!(p.b.seen.is_empty());
}

pub(super) fn immediate_without_recv_is_rnr(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    let op = SendOp::WriteWithImm(window.remote(0), 1);
    p.a.post(&[wr(1, op, from.sge(0, 64).unwrap(), true)]);
    p.until_a(1);
    assert_eq!(p.a.outcome(), [(1, expect.told(expect.rnr, p.a.status_of(1)))]);
}

pub(super) fn recv_too_short(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let to = p.b.memory(4096, Access::REMOTE);
    p.b.recv(900, to.sge(0, 63).unwrap());
    p.b.recv(901, to.sge(0, 64).unwrap());
    p.a.post(&[wr(1, SendOp::Send, from.sge(0, 64).unwrap(), true)]);
    p.until_a(1);
    p.until_b(2);
    assert_eq!(p.a.outcome(), [(1, WcStatus::RemoteInvalidRequest)]);
    assert_eq!(p.b.outcome(), [(900, WcStatus::LocalLength), (901, FLUSHED)]);
    assert_eq!(bytes_of(&to, 0, 64), [0; 64]);
}

pub(super) fn recv_memory_bad(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let to = p.b.memory(4096, Access::LOCAL_READ);
    p.b.recv(900, to.sge(0, 64).unwrap());
    p.a.post(&[wr(1, SendOp::Send, from.sge(0, 64).unwrap(), true)]);
    p.until_a(1);
    p.until_b(1);
    assert_eq!(p.a.outcome(), [(1, WcStatus::RemoteOperation)]);
    assert_eq!(p.b.outcome(), [(900, WcStatus::LocalProtection)]);
}

pub(super) fn guarded(p: &mut Pair) {
    let spare = p.b.memory(4096, Access::REMOTE);
    p.b.recv(900, spare.sge(0, 64).unwrap());
}

pub(super) fn bad_rkey(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    guarded(p);
    let good = window.remote(0);
    let bad = RemoteBuffer { rkey: rblk_fabric::Rkey(good.rkey.0 ^ 0x5500_0000), ..good };
    let sge = from.sge(0, 64).unwrap();
    p.a.post(&[
        wr(1, SendOp::Write(bad), sge, false),
        wr(2, SendOp::Write(good), sge, true),
        wr(3, SendOp::Read(good), sge, false),
    ]);
    refused(p, expect, 1, WcStatus::RemoteAccess, 3);
    assert_eq!(bytes_of(&window, 0, 4096), [0; 4096]);
}

pub(super) fn wrong_access(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    fill(&from, 1);
    let read_only = p.b.memory(4096, Access { remote_read: true, ..Access::LOCAL_WRITE });
    guarded(p);
    let sge = from.sge(0, 64).unwrap();
    // The READ is allowed, and is answered before the refusal.
    p.a.post(&[
        wr(1, SendOp::Read(read_only.remote(0)), sge, true),
        wr(2, SendOp::Write(read_only.remote(0)), sge, true),
    ]);
    p.until_a(2);
    let told = expect.told(WcStatus::RemoteAccess, p.a.status_of(2));
    assert_eq!(p.a.outcome(), [(1, OK), (2, told)]);
    if expect.responder_dies {
        p.until_b(1);
        assert_eq!(p.b.outcome(), [(900, FLUSHED)]);
    }
    assert_eq!(bytes_of(&read_only, 0, 64), [0; 64]);
}

pub(super) fn remote_bounds(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(8192, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    guarded(p);
    // Up to the last byte is fine, one past it is not.
    let tail = window.remote(4096 - 64);
    p.a.post(&[wr(1, SendOp::Write(tail), from.sge(0, 64).unwrap(), true)]);
    p.until_a(1);
    assert_eq!(p.a.outcome(), [(1, OK)]);
    p.a.seen.clear();
    p.a.post(&[
        wr(2, SendOp::Write(tail), from.sge(0, 65).unwrap(), true),
        wr(3, SendOp::Write(tail), from.sge(0, 64).unwrap(), true),
    ]);
    refused(p, expect, 2, WcStatus::RemoteAccess, 3);
}

/// An address at the top of the address space, whose end wraps around.
pub fn remote_wrap_around(p: &mut Pair, expect: &Expect) {
    let from = p.a.memory(8192, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    guarded(p);
    let wrap = RemoteBuffer { addr: u64::MAX - 10, ..window.remote(0) };
    p.a.post(&[wr(1, SendOp::Read(wrap), from.sge(0, 64).unwrap(), true)]);
    refused(p, expect, 1, WcStatus::RemoteAccess, 1);
}

pub(super) fn local_protection_after_good_ones(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    let good = from.sge(0, 64).unwrap();
    let past = Sge { addr: good.addr + 4096 - 63, ..good };
    p.a.recv(9, good);
    p.a.post(&[
        wr(1, SendOp::Write(window.remote(0)), good, true),
        wr(2, SendOp::Write(window.remote(0)), good, false),
        wr(3, SendOp::Write(window.remote(0)), past, false),
        wr(4, SendOp::Write(window.remote(0)), good, false),
    ]);
    p.until_a(4);
    assert_eq!(
        p.a.outcome(),
        [(1, OK), (3, WcStatus::LocalProtection), (4, FLUSHED), (9, FLUSHED)]
    );
}

pub(super) fn read_sink_needs_local_write(p: &mut Pair, _: &Expect) {
    let sink = p.a.memory(4096, Access::LOCAL_READ);
    let window = p.b.memory(4096, Access::REMOTE);
    fill(&window, 4);
    p.a.post(&[wr(1, SendOp::Read(window.remote(0)), sink.sge(0, 64).unwrap(), true)]);
    p.until_a(1);
    assert_eq!(p.a.outcome(), [(1, WcStatus::LocalProtection)]);
    assert_eq!(bytes_of(&sink, 0, 64), [0; 64]);
}

pub(super) fn empty_messages_are_refused(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    p.a.post(&[wr(1, SendOp::Send, from.sge(0, 0).unwrap(), true)]);
    p.until_a(1);
    assert_eq!(p.a.outcome(), [(1, WcStatus::LocalLength)]);
}

pub(super) fn read_depth(p: &mut Pair, expect: &Expect) {
    let sink = p.a.memory(4096, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    guarded(p);
    let read = |id| wr(id, SendOp::Read(window.remote(0)), sink.sge(0, 64).unwrap(), true);
    p.a.post(&[read(1), read(2), read(3), read(4)]);
    p.until_a(4);
    assert_eq!(p.a.outcome(), [(1, OK), (2, OK), (3, OK), (4, OK)]);
    p.a.seen.clear();
    p.a.post(&[read(1), read(2), read(3), read(4), read(5)]);
    p.until_a(5);
    let last = if expect.read_depth_refused { WcStatus::RemoteInvalidRequest } else { OK };
    assert_eq!(p.a.outcome(), [(1, OK), (2, OK), (3, OK), (4, OK), (5, last)]);
}

pub(super) fn queue_fills_and_empties(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let window = p.b.memory(4096, Access::REMOTE);
    let write =
        |id, signaled| wr(id, SendOp::Write(window.remote(0)), from.sge(0, 64).unwrap(), signaled);
    for round in 0..5usize {
        let batch: Vec<_> = (0..10).map(|id| write(id, id == 7)).collect();
        let refused = p.a.poller.post_send(p.a.qp, &batch).unwrap_err();
        assert_eq!(refused.posted, 8);
        assert_eq!(refused.source.raw_os_error(), Some(12), "ENOMEM");
        p.until_a(round + 1);
        assert_eq!(p.a.seen[round].id.0, 7);
    }
    p.settle();
    assert_eq!(p.a.seen.len(), 5);
    let counters = p.a.poller.counters();
    assert_eq!((counters.writes, counters.signaled, counters.send_doorbells), (40, 5, 5));
}

pub(super) fn recv_queue_fills(p: &mut Pair, _: &Expect) {
    let to = p.b.memory(4096, Access::REMOTE);
    let batch: Vec<_> = (0..10).map(|id| RecvWr::one(WrId(id), to.sge(0, 64).unwrap())).collect();
    let refused = p.b.poller.post_recv(p.b.qp, &batch).unwrap_err();
    assert_eq!((refused.posted, refused.source.raw_os_error()), (8, Some(12)));
}

pub(super) fn unknown_qp(p: &mut Pair, _: &Expect) {
    let from = p.a.memory(4096, Access::REMOTE);
    let sge = from.sge(0, 64).unwrap();
    let error = p.a.poller.post_send(QpIndex(77), &[wr(1, SendOp::Send, sge, true)]).unwrap_err();
    assert_eq!((error.posted, error.source.raw_os_error()), (0, Some(22)));
    assert!(p.a.poller.post_recv(QpIndex(77), &[RecvWr::one(WrId(0), sge)]).is_err());
    assert!(p.a.poller.detach(QpIndex(77)).is_none());
    p.a.poller.fail(QpIndex(77));
    assert!(p.a.poller.detach(p.a.qp).is_some());
    assert!(p.a.poller.post_send(p.a.qp, &[wr(1, SendOp::Send, sge, true)]).is_err());
}
