//! The account by itself: the effect of each mode after a loss. No write is forgotten or stuck.

use proptest::prelude::*;
use rblk_protocol::{BlockSize, QueueDepth, Status, Tag};

use super::retain::{self, RetainRing};
use super::*;
use crate::engine::io::{Io, IoOp};

fn io(op: IoOp, block: u64, blocks: u64) -> Io {
    Io::new(op, block * 512, blocks * 512, BlockSize::new(512).unwrap()).unwrap()
}

fn flush() -> Io {
    io(IoOp::Flush, 0, 0)
}

fn ledger(shared: &Arc<Durability>, ring: Option<RetainRing>) -> Ledger {
    Ledger::new(Arc::clone(shared), QueueDepth::new(8).unwrap(), ring)
}

fn send(ledger: &mut Ledger, tag: u16, io: &Io) -> SendPlan {
    ledger.submitted(Tag(tag));
    ledger.plan(Tag(tag), io)
}

fn answer(ledger: &mut Ledger, tag: u16, io: &Io, fine: bool) -> Answered {
    let status = if fine { Status::Ok } else { Status::StoreError };
    ledger.answered(Tag(tag), io, status, |_, piece| piece.fill(7))
}

const AS_IT_IS: SendPlan = SendPlan::Send { fua: false };

/// The path of every command under way died.
fn path_lost(ledger: &mut Ledger) {
    (0..8).for_each(|tag| _ = ledger.command_lost(Tag(tag)));
}

#[test]
fn a_flush_covers_earlier_acknowledged_writes_of_every_queue() {
    let shared = Durability::new(OnLoss::Once);
    let (mut a, mut b) = (ledger(&shared, None), ledger(&shared, None));
    let write = io(IoOp::Write, 0, 1);
    assert_eq!(send(&mut a, 0, &write), AS_IT_IS);
    assert_eq!(send(&mut a, 1, &write), AS_IT_IS);
    assert_eq!(shared.unflushed(), 0, "nothing is acknowledged");
    answer(&mut a, 0, &write, true);
    assert_eq!(send(&mut b, 0, &flush()), AS_IT_IS);
    answer(&mut a, 1, &write, true);
    assert_eq!(shared.unflushed(), 2);
    answer(&mut b, 0, &flush(), true);
    assert_eq!(shared.unflushed(), 1, "the one answered after the FLUSH was sent");
    for (op, fine) in [(IoOp::Discard, true), (IoOp::WriteZeroes, true), (IoOp::Write, false)] {
        let io = io(op, 0, 1);
        send(&mut a, 0, &io);
        answer(&mut a, 0, &io, fine);
    }
    let fua = Io { fua: true, ..write };
    assert_eq!(send(&mut a, 0, &fua), SendPlan::Send { fua: true });
    answer(&mut a, 0, &fua, true);
    assert_eq!(shared.unflushed(), 3);
    send(&mut b, 0, &flush());
    answer(&mut b, 0, &flush(), false);
    assert_eq!(shared.unflushed(), 3, "a FLUSH that failed");
}

#[test]
fn an_unasked_flush_reports_no_loss() {
    for (mode, before) in [(OnLoss::Once, 1), (OnLoss::UntilRemount, 1), (OnLoss::Once, 0)] {
        let shared = Durability::new(mode);
        let mut a = ledger(&shared, None);
        let write = io(IoOp::Write, 0, 1);
        send(&mut a, 0, &write);
        answer(&mut a, 0, &write, true);
        if before > 0 {
            shared.lose(shared.horizon());
            send(&mut a, 0, &write);
            answer(&mut a, 0, &write, true);
        }
        // The FLUSH is sent after a loss, too, and makes later writes durable. If it fails, that is
        // a loss.
        for (fine, losses) in [(true, before), (false, before + 1)] {
            send(&mut a, 1, &write);
            answer(&mut a, 1, &write, true);
            assert_eq!(send(&mut a, 0, &flush()), AS_IT_IS);
            a.unasked(Tag(0));
            assert!(!a.must_fail(Tag(0), &flush()));
            assert_eq!(answer(&mut a, 0, &flush(), fine), Answered::Done);
            assert_eq!(
                (shared.unflushed() == 0, shared.losses()),
                (fine || mode == OnLoss::Once, losses)
            );
            assert_eq!(shared.has_untold_loss(), losses > 0, "{mode:?} {fine}");
        }
        // The next FLUSH of a user reports the loss.
        send(&mut a, 0, &flush());
        let told = match mode {
            OnLoss::Once => a.must_fail(Tag(0), &flush()),
            OnLoss::UntilRemount => answer(&mut a, 0, &flush(), true) == Answered::Lost,
        };
        assert!(told, "{mode:?}");
    }
    // The end of the mount is no loss.
    let shared = Durability::new(OnLoss::UntilRemount);
    let mut a = ledger(&shared, None);
    send(&mut a, 0, &flush());
    a.unasked(Tag(0));
    a.answered(Tag(0), &flush(), Status::Fenced, |_, _| {});
    assert_eq!(shared.losses(), 0);
}

#[test]
fn a_flush_is_planned_anew_on_a_new_path() {
    let shared = Durability::new(OnLoss::Once);
    let mut a = ledger(&shared, None);
    let write = io(IoOp::Write, 0, 1);
    send(&mut a, 0, &flush());
    send(&mut a, 1, &write);
    answer(&mut a, 1, &write, true);
    path_lost(&mut a);
    a.plan(Tag(0), &flush());
    answer(&mut a, 0, &flush(), true);
    assert_eq!(shared.unflushed(), 0);
}

#[test]
fn a_loss_is_reported_once_and_to_every_waiting_flush() {
    let shared = Durability::new(OnLoss::Once);
    let (mut a, mut b) = (ledger(&shared, None), ledger(&shared, None));
    for tag in 0..2 {
        a.submitted(Tag(tag));
    }
    assert!(!a.must_fail(Tag(0), &flush()));
    shared.lose(shared.horizon());
    assert!(shared.has_untold_loss());
    assert!(!a.must_fail(Tag(0), &io(IoOp::Write, 0, 1)));
    assert!(a.must_fail(Tag(0), &flush()));
    assert!(!shared.has_untold_loss());
    assert!(a.must_fail(Tag(1), &flush()), "it covered what is lost, too");
    b.submitted(Tag(0));
    assert!(!b.must_fail(Tag(0), &flush()), "it came after the loss was told");
    // Without a waiting FLUSH, the next one reports the loss.
    shared.lose(shared.horizon());
    b.submitted(Tag(0));
    assert!(b.must_fail(Tag(0), &flush()));
    b.submitted(Tag(0));
    assert!(!b.must_fail(Tag(0), &flush()));
    assert_eq!(shared.losses(), 2);
}

#[test]
fn writes_of_a_predecessor_are_in_doubt_until_a_flush() {
    assert!(!Durability::new(OnLoss::Once).inherits_doubt());
    let shared = Durability::inheriting(OnLoss::Once);
    let mut a = ledger(&shared, Some(RetainRing::new(4096, 64)));
    assert!(shared.inherits_doubt());
    assert_eq!((shared.unflushed(), shared.losses()), (1, 0), "nothing is lost yet");
    // Our own write is retained; the write in doubt is not.
    let write = io(IoOp::Write, 0, 1);
    send(&mut a, 0, &write);
    answer(&mut a, 0, &write, true);
    assert_eq!((shared.unflushed(), a.unflushed().unwrap().len()), (2, 1));
    assert!(shared.inherits_doubt());
    // A failed FLUSH covers nothing.
    send(&mut a, 1, &flush());
    answer(&mut a, 1, &flush(), false);
    assert!(shared.inherits_doubt());
    send(&mut a, 1, &flush());
    answer(&mut a, 1, &flush(), true);
    assert!(!shared.inherits_doubt());
    assert_eq!((shared.unflushed(), shared.losses()), (0, 0));
}

#[test]
fn a_doubt_that_became_a_loss_is_reported_once() {
    let shared = Durability::inheriting(OnLoss::Once);
    let mut a = ledger(&shared, None);
    shared.lose(shared.horizon());
    assert!(!shared.inherits_doubt(), "it is settled");
    shared.arrived();
    a.submitted(Tag(0));
    assert!(a.must_fail(Tag(0), &flush()));
    a.submitted(Tag(0));
    assert!(!a.must_fail(Tag(0), &flush()));
}

#[test]
fn a_flush_from_before_the_lost_write_does_not_tell_it_to_the_next() {
    let shared = Durability::new(OnLoss::Once);
    let mut a = ledger(&shared, None);
    let write = io(IoOp::Write, 0, 1);
    a.submitted(Tag(0));
    send(&mut a, 1, &write);
    answer(&mut a, 1, &write, true);
    a.submitted(Tag(2));
    shared.lose(shared.horizon());
    assert!(a.must_fail(Tag(0), &flush()), "it waited");
    assert!(shared.has_untold_loss(), "whoever wrote may not know of that FLUSH");
    assert!(a.must_fail(Tag(2), &flush()));
    assert!(!shared.has_untold_loss());
    a.submitted(Tag(0));
    assert!(!a.must_fail(Tag(0), &flush()));
    // Requests that a successor gets again are from before, too.
    let shared = Durability::inheriting(OnLoss::Once);
    let mut a = ledger(&shared, None);
    a.submitted(Tag(0));
    shared.lose(shared.horizon());
    assert!(a.must_fail(Tag(0), &flush()));
    shared.arrived();
    a.submitted(Tag(0));
    assert!(a.must_fail(Tag(0), &flush()));
    a.submitted(Tag(0));
    assert!(!a.must_fail(Tag(0), &flush()));
}

#[test]
fn an_inherited_loss_is_reported_to_flushes_after_the_dead_process() {
    for doubt in [false, true] {
        let shared = Durability::inheriting_loss(OnLoss::Once, doubt);
        assert!(shared.has_untold_loss());
        assert_eq!((shared.inherits_doubt(), shared.unflushed()), (doubt, u64::from(doubt)));
        let mut a = ledger(&shared, None);
        // The driver sends these again: the user of the lost write may have sent neither.
        a.submitted(Tag(0));
        a.submitted(Tag(1));
        shared.arrived();
        assert!(a.must_fail(Tag(0), &flush()) && a.must_fail(Tag(1), &flush()));
        assert!(shared.has_untold_loss());
        a.submitted(Tag(0));
        assert!(a.must_fail(Tag(0), &flush()));
        assert!(!shared.has_untold_loss());
        // The loss is reported: the next FLUSH is sent, and settles the doubt.
        assert_eq!(send(&mut a, 0, &flush()), AS_IT_IS);
        assert!(!a.must_fail(Tag(0), &flush()));
        answer(&mut a, 0, &flush(), true);
        assert_eq!((shared.unflushed(), shared.inherits_doubt()), (0, false));
    }
    // Without a waiting FLUSH, the loss is reported at once and once.
    let shared = Durability::inheriting_loss(OnLoss::Once, true);
    let mut a = ledger(&shared, None);
    shared.arrived();
    a.submitted(Tag(0));
    assert!(a.must_fail(Tag(0), &flush()));
    a.submitted(Tag(0));
    assert!(!a.must_fail(Tag(0), &flush()));
}

#[test]
fn a_full_ring_is_flushed() {
    let shared = Durability::new(OnLoss::Once);
    let mut a = ledger(&shared, Some(RetainRing::new(2048, 64)));
    let write = io(IoOp::Write, 0, 1);
    for tag in 0..3 {
        assert_eq!(send(&mut a, tag, &write), AS_IT_IS);
    }
    // More than half is used, but a FLUSH would cover nothing.
    assert_eq!(send(&mut a, 3, &write), AS_IT_IS);
    assert_eq!(send(&mut a, 4, &write), SendPlan::Wait, "no room");
    assert!(a.has_waiting());
    answer(&mut a, 0, &write, true);
    assert_eq!(send(&mut a, 5, &write), SendPlan::Wait, "behind the one that waits");
    assert_eq!(a.plan(Tag(4), &write), SendPlan::FlushAhead);
    assert_eq!(a.plan(Tag(5), &write), SendPlan::Wait);
    // Reads and FLUSHes do not wait.
    assert_eq!(send(&mut a, 6, &io(IoOp::Read, 0, 1)), AS_IT_IS);
    assert_eq!(answer(&mut a, 4, &write, true), Answered::Again);
    assert_eq!(shared.unflushed(), 0);
    assert_eq!(a.plan(Tag(4), &write), AS_IT_IS);
    assert!(!a.has_waiting());
    assert_eq!(answer(&mut a, 4, &write, true), Answered::Done);
    let kept = a.unflushed().unwrap();
    assert_eq!((kept.len(), kept[0].number, kept[0].data.len()), (1, 1, 512));
    // An unanswered request fails instead: its place comes back.
    a.cancelled(Tag(5));
    path_lost(&mut a);
    assert_eq!(a.plan(Tag(1), &write), AS_IT_IS, "its place was kept");
}

#[test]
fn half_a_ring_is_flushed_ahead_without_making_others_wait() {
    let shared = Durability::new(OnLoss::Once);
    let mut a = ledger(&shared, Some(RetainRing::new(2048, 64)));
    let write = io(IoOp::Write, 0, 1);
    for tag in 0..3 {
        assert_eq!(send(&mut a, tag, &write), AS_IT_IS);
        answer(&mut a, tag, &write, true);
    }
    assert_eq!(send(&mut a, 0, &write), SendPlan::FlushAhead);
    assert_eq!(send(&mut a, 1, &write), AS_IT_IS, "half a ring is left");
    // The path dies: the FLUSH goes out again.
    path_lost(&mut a);
    assert_eq!(a.plan(Tag(0), &write), SendPlan::FlushAhead);
    assert_eq!(answer(&mut a, 0, &write, false), Answered::Again);
    assert!(shared.has_untold_loss(), "nobody else would say that it failed");
    assert_eq!(a.plan(Tag(0), &write), AS_IT_IS);
}

#[test]
fn a_write_longer_than_the_ring_is_durable_at_once() {
    let shared = Durability::new(OnLoss::Once);
    let mut a = ledger(&shared, Some(RetainRing::new(1024, 64)));
    let long = io(IoOp::Write, 0, 3);
    assert_eq!(send(&mut a, 0, &long), SendPlan::Send { fua: true });
    answer(&mut a, 0, &long, true);
    let kept = a.unflushed().unwrap();
    assert_eq!(kept[0].what, retain::RangeContent::Durable);
    assert!(kept[0].data.is_empty());
}

/// Runs a FLUSH from its submission to its end; the target answers it with that status. Returns
/// whether it succeeded.
fn flushed(ledger: &mut Ledger, tag: u16, status: Status) -> bool {
    ledger.submitted(Tag(tag));
    if ledger.must_fail(Tag(tag), &flush()) {
        return false;
    }
    assert_eq!(ledger.plan(Tag(tag), &flush()), AS_IT_IS);
    let answered = ledger.answered(Tag(tag), &flush(), status, |_, _| {});
    assert_ne!(answered, Answered::Again);
    answered == Answered::Done && status == Status::Ok
}

fn written(ledger: &mut Ledger, tag: u16) {
    let write = io(IoOp::Write, 0, 1);
    assert_eq!(send(ledger, tag, &write), AS_IT_IS);
    assert_eq!(answer(ledger, tag, &write, true), Answered::Done);
}

#[test]
fn two_file_systems_on_one_disk_both_hear_of_a_loss() {
    for mode in [OnLoss::Once, OnLoss::UntilRemount] {
        let shared = Durability::new(mode);
        // Each has a queue, and they flush by turns.
        let (mut a, mut b) = (ledger(&shared, None), ledger(&shared, None));
        written(&mut a, 0);
        written(&mut b, 0);
        assert!(flushed(&mut a, 1, Status::Ok) && flushed(&mut b, 1, Status::Ok));
        written(&mut a, 0);
        written(&mut b, 0);
        shared.lose(shared.horizon());
        assert!(!flushed(&mut a, 1, Status::Ok));
        let lasts = mode == OnLoss::UntilRemount;
        for _ in 0..3 {
            assert_eq!(flushed(&mut b, 1, Status::Ok), !lasts, "{mode}");
            assert_eq!(flushed(&mut a, 1, Status::Ok), !lasts, "{mode}");
        }
        assert_eq!(shared.has_untold_loss(), lasts);
        // All other requests go on: writes, reads, and a write with FUA.
        written(&mut a, 0);
        let fua = Io { fua: true, ..io(IoOp::Write, 0, 1) };
        assert_eq!(send(&mut b, 2, &fua), SendPlan::Send { fua: true });
        assert_eq!(answer(&mut b, 2, &fua, true), Answered::Done);
        let read = io(IoOp::Read, 0, 1);
        assert_eq!(send(&mut b, 2, &read), AS_IT_IS);
        assert_eq!(answer(&mut b, 2, &read, true), Answered::Done);
        assert_eq!(shared.losses(), 1);
    }
}

#[test]
fn a_flush_that_was_sent_before_the_loss_and_answered_after_it_fails() {
    let shared = Durability::new(OnLoss::UntilRemount);
    let (mut a, mut b) = (ledger(&shared, None), ledger(&shared, None));
    written(&mut a, 0);
    send(&mut b, 1, &flush());
    assert!(!flushed(&mut a, 1, Status::StoreError));
    assert_eq!(answer(&mut b, 1, &flush(), true), Answered::Lost);
    assert_eq!(shared.unflushed(), 0, "the target has made it durable, whatever the user is told");
}

#[test]
fn a_flush_that_the_target_fails_is_a_loss_until_the_remount() {
    for status in [Status::StoreError, Status::NoSpace, Status::Internal, Status::TimedOut] {
        let shared = Durability::new(OnLoss::UntilRemount);
        let (mut a, mut b) = (ledger(&shared, None), ledger(&shared, None));
        written(&mut a, 0);
        assert!(!flushed(&mut a, 1, status));
        assert!(shared.has_untold_loss(), "{status:?}");
        assert!(!flushed(&mut b, 1, Status::Ok), "the target started again: {status:?}");
        // A repeated failure adds no loss, unless there are new writes to lose.
        assert!(!flushed(&mut b, 1, status));
        assert_eq!(shared.losses(), 1);
        written(&mut a, 0);
        assert!(!flushed(&mut b, 1, status));
        assert_eq!(shared.losses(), 2);
        // With `Once`, only the waiting user gets the error.
        let shared = Durability::new(OnLoss::Once);
        let mut a = ledger(&shared, None);
        written(&mut a, 0);
        assert!(!flushed(&mut a, 1, status));
        assert_eq!((shared.losses(), shared.unflushed()), (0, 1));
        assert!(flushed(&mut a, 1, Status::Ok));
    }
    // A takeover by another host proves nothing about the store.
    let shared = Durability::new(OnLoss::UntilRemount);
    let mut a = ledger(&shared, None);
    assert!(!flushed(&mut a, 1, Status::Fenced));
    assert_eq!(shared.losses(), 0);
}

#[test]
fn a_failed_flush_keeps_the_copies_until_a_write_needs_their_room() {
    let shared = Durability::new(OnLoss::UntilRemount);
    let mut a = ledger(&shared, Some(RetainRing::new(2048, 64)));
    let write = io(IoOp::Write, 0, 1);
    for tag in 0..3 {
        written(&mut a, tag);
    }
    assert!(!flushed(&mut a, 3, Status::StoreError));
    assert_eq!((shared.losses(), a.unflushed().unwrap().len()), (1, 3), "a restart may save them");
    // More than half is used: a FLUSH goes ahead, and fails. There is room, so the copies stay.
    assert_eq!(send(&mut a, 0, &write), SendPlan::FlushAhead);
    assert_eq!(answer(&mut a, 0, &write, false), Answered::Again);
    assert_eq!(a.plan(Tag(0), &write), AS_IT_IS);
    assert_eq!(answer(&mut a, 0, &write, true), Answered::Done);
    assert_eq!((shared.losses(), a.unflushed().unwrap().len()), (1, 4));
    // No room: the write must not wait for ever.
    assert_eq!(send(&mut a, 0, &write), SendPlan::FlushAhead);
    assert_eq!(answer(&mut a, 0, &write, false), Answered::Again);
    assert_eq!(a.plan(Tag(0), &write), SendPlan::FlushAhead);
    assert_eq!(answer(&mut a, 0, &write, false), Answered::Again);
    assert_eq!((a.unflushed().unwrap().len(), shared.unflushed()), (0, 0));
    assert_eq!(a.plan(Tag(0), &write), AS_IT_IS);
    assert_eq!(answer(&mut a, 0, &write, true), Answered::Done);
    assert!(!flushed(&mut a, 1, Status::Ok), "a loss it is");
    assert_eq!(a.unflushed().unwrap().len(), 0, "what the target made durable needs no copy");
}

#[test]
fn copies_that_bring_the_writes_back_do_not_end_a_loss() {
    let shared = Durability::new(OnLoss::UntilRemount);
    let mut a = ledger(&shared, Some(RetainRing::new(4096, 64)));
    written(&mut a, 0);
    assert!(!flushed(&mut a, 1, Status::StoreError));
    // The target starts again, and the copies are written again.
    path_lost(&mut a);
    assert_eq!(a.unflushed().unwrap().len(), 1);
    shared.rewritten(shared.horizon(), 1);
    assert_eq!((shared.unflushed(), shared.losses()), (0, 1));
    assert!(!flushed(&mut a, 1, Status::Ok), "some user was told that the writes are lost");
}

proptest! {
    /// For any steps on either queue, in one process or its successors: until the remount no FLUSH
    /// that ends after the first loss succeeds.
    #[test]
    fn no_flush_succeeds_after_a_loss(
        steps in prop::collection::vec((0usize..2, 0u8..9), 1..200),
        retains in any::<bool>(),
    ) {
        let mode = OnLoss::UntilRemount;
        let ring = || retains.then(|| RetainRing::new(4096, 16));
        let mut shared = Durability::new(mode);
        let mut queues = [ledger(&shared, ring()), ledger(&shared, ring())];
        let mut lost = false;
        // By queue: a FLUSH under tag 7 is under way.
        let mut waits = [false; 2];
        for (at, what) in steps {
            let queue = &mut queues[at];
            match what {
                0..=2 => {
                    let write = io(IoOp::Write, 0, 1);
                    queue.submitted(Tag(0));
                    while queue.plan(Tag(0), &write) == SendPlan::FlushAhead {
                        let fine = what > 0;
                        prop_assert_eq!(answer(queue, 0, &write, fine), Answered::Again);
                        lost |= !fine;
                    }
                    prop_assert_eq!(answer(queue, 0, &write, true), Answered::Done);
                }
                3 => prop_assert_eq!(flushed(queue, 1, Status::Ok), !lost),
                4 => {
                    prop_assert!(!flushed(queue, 1, Status::StoreError));
                    lost = true;
                }
                5 if !waits[at] => {
                    queue.submitted(Tag(7));
                    prop_assert!(!queue.must_fail(Tag(7), &flush()), "it is sent nevertheless");
                    waits[at] = queue.plan(Tag(7), &flush()) == AS_IT_IS;
                }
                5 => {
                    let answered = answer(queue, 7, &flush(), true);
                    let expected = if lost { Answered::Lost } else { Answered::Done };
                    prop_assert_eq!(answered, expected);
                    waits[at] = false;
                }
                6 => {
                    shared.lose(shared.horizon());
                    lost = true;
                }
                7 => {
                    let horizon = shared.horizon();
                    shared.rewritten(horizon, shared.unflushed());
                }
                _ => {
                    // The process dies, and another takes over with the note.
                    prop_assert_eq!(shared.has_untold_loss(), lost);
                    shared = match lost {
                        true => Durability::inheriting_loss(mode, what % 2 == 0),
                        false => Durability::inheriting(mode),
                    };
                    queues = [ledger(&shared, ring()), ledger(&shared, ring())];
                    waits = [false; 2];
                    if at == 0 {
                        shared.arrived();
                    }
                }
            }
            prop_assert_eq!(shared.has_untold_loss(), lost);
            prop_assert_eq!(shared.fails_every_flush(), lost);
        }
        for queue in &mut queues {
            prop_assert_eq!(flushed(queue, 1, Status::Ok), !lost);
        }
    }

    /// For all sizes: while answers come, every write is sent and answered in the end, and each
    /// acknowledged one is durable, retained or reported lost at every moment; also when FLUSHes
    /// fail.
    #[test]
    fn no_write_is_forgotten_or_stuck(
        steps in prop::collection::vec((0u16..8, 0u8..12, 1u64..7), 1..300),
        blocks in 1usize..16,
        entries in 1usize..12,
        mode in prop::sample::select(vec![OnLoss::Once, OnLoss::UntilRemount]),
        flushes_fail in any::<bool>(),
    ) {
        #[derive(Clone, Copy, PartialEq, Debug)]
        enum State { Idle, Queued(Io), Sent(Io, SendPlan) }
        let shared = Durability::new(mode);
        let mut a = ledger(&shared, Some(RetainRing::new(blocks * 512, entries)));
        let mut states = [State::Idle; 8];
        let mut acknowledged = 0;
        let mut turn = |a: &mut Ledger, states: &mut [State; 8], tag: u16, answered: bool| {
            let at = usize::from(tag);
            if let (State::Sent(io, plan), true) = (states[at], answered) {
                let flushes = plan == SendPlan::FlushAhead || io.op == IoOp::Flush;
                states[at] = match answer(a, tag, &io, !(flushes && flushes_fail)) {
                    Answered::Again => State::Queued(io),
                    Answered::Done | Answered::Lost => {
                        acknowledged += u64::from(!matches!(io.op, IoOp::Read | IoOp::Flush));
                        State::Idle
                    }
                };
            }
            for at in 0..8u16 {
                if let State::Queued(io) = states[usize::from(at)] {
                    match a.plan(Tag(at), &io) {
                        SendPlan::Wait => {}
                        plan => states[usize::from(at)] = State::Sent(io, plan),
                    }
                }
            }
            let kept = a.unflushed().unwrap().len() as u64;
            prop_assert_eq!(shared.horizon(), acknowledged);
            prop_assert_eq!(shared.unflushed(), kept, "durable or retained");
            Ok(())
        };
        for (tag, kind, blocks) in steps {
            if states[usize::from(tag)] == State::Idle {
                let op = match kind {
                    0 => IoOp::Flush,
                    1 => IoOp::Discard,
                    2 => IoOp::WriteZeroes,
                    3 => IoOp::Read,
                    _ => IoOp::Write,
                };
                let mut io = if op == IoOp::Flush { flush() } else { io(op, 0, blocks) };
                io.fua = kind == 4;
                a.submitted(Tag(tag));
                states[usize::from(tag)] = State::Queued(io);
            } else if kind == 11 {
                path_lost(&mut a);
                for state in &mut states {
                    if let State::Sent(io, _) = *state {
                        *state = State::Queued(io);
                    }
                }
            }
            turn(&mut a, &mut states, tag, kind % 2 == 0)?;
        }
        for _ in 0..100 {
            for tag in 0..8 {
                turn(&mut a, &mut states, tag, true)?;
            }
        }
        prop_assert_eq!(states, [State::Idle; 8]);
    }
}
