//! Histories that the oracle accepts, and histories that it rejects.

use super::*;

const ALL: Range<usize> = 0..1024;

fn oracle() -> Oracle {
    Oracle::new(vec![0; 1024], 1024)
}

fn data(id: ChangeId) -> Vec<u8> {
    let mut data = vec![0; 1024];
    Oracle::fill(id, 0, &mut data);
    data
}

fn written(oracle: &mut Oracle, fua: bool) -> ChangeId {
    let id = oracle.begin_change(&ALL, false);
    oracle.end_change(id, true, fua).unwrap();
    id
}

fn read(oracle: &mut Oracle, bytes: &[u8]) -> Result<(), String> {
    let begin = oracle.begin_read();
    oracle.end_read(begin, 0, bytes)
}

fn flush(oracle: &mut Oracle) {
    let begin = oracle.begin_flush();
    oracle.end_flush(begin, true).unwrap();
}

#[test]
fn a_read_sees_the_last_write() {
    let mut oracle = oracle();
    read(&mut oracle, &[0; 1024]).unwrap();
    let a = written(&mut oracle, false);
    read(&mut oracle, &data(a)).unwrap();
    assert!(read(&mut oracle, &[0; 1024]).is_err(), "older than what was acknowledged");
    let b = written(&mut oracle, false);
    assert!(read(&mut oracle, &data(a)).is_err());
    read(&mut oracle, &data(b)).unwrap();
    let mut torn = data(b);
    torn[512..].copy_from_slice(&data(a)[512..]);
    assert!(read(&mut oracle, &torn).is_err(), "torn");
    torn[512..].fill(0xdb);
    assert!(read(&mut oracle, &torn).is_err(), "foreign");
    let zeroes = oracle.begin_change(&ALL, true);
    oracle.end_change(zeroes, true, false).unwrap();
    assert!(read(&mut oracle, &data(b)).is_err());
    read(&mut oracle, &[0; 1024]).unwrap();
}

#[test]
fn a_concurrent_read_sees_either() {
    for new in [false, true] {
        let mut oracle = oracle();
        let a = written(&mut oracle, false);
        let begin = oracle.begin_read();
        let b = written(&mut oracle, false);
        oracle.end_read(begin, 0, &data(if new { b } else { a })).unwrap();
        assert!(read(&mut oracle, &data(a)).is_err());
    }
}

#[test]
fn reads_never_go_back_to_an_older_value() {
    let mut oracle = oracle();
    let a = oracle.begin_change(&ALL, false);
    let b = oracle.begin_change(&ALL, false);
    read(&mut oracle, &[0; 1024]).unwrap();
    read(&mut oracle, &data(a)).unwrap();
    assert!(read(&mut oracle, &[0; 1024]).is_err(), "back before an unanswered write");
    read(&mut oracle, &data(b)).unwrap();
    oracle.end_change(a, true, false).unwrap();
    oracle.end_change(b, true, false).unwrap();
    assert!(read(&mut oracle, &data(a)).is_err(), "back to a concurrent write");
    read(&mut oracle, &data(b)).unwrap();
}

#[test]
fn unordered_writes_are_settled_by_a_read() {
    for second in [false, true] {
        let mut oracle = oracle();
        let a = oracle.begin_change(&ALL, false);
        let b = oracle.begin_change(&ALL, false);
        oracle.end_change(b, true, false).unwrap();
        oracle.end_change(a, true, false).unwrap();
        let (winner, loser) = if second { (b, a) } else { (a, b) };
        read(&mut oracle, &data(winner)).unwrap();
        assert!(read(&mut oracle, &data(loser)).is_err());
        flush(&mut oracle);
        // The loser was overwritten at an unknown moment: a crash may show it.
        assert!(oracle.crash(data(winner), Survives::Durable).is_ok());
    }
}

#[test]
fn a_failed_change_may_have_happened() {
    for seen in [false, true] {
        let mut oracle = oracle();
        let a = written(&mut oracle, false);
        let b = oracle.begin_change(&ALL, false);
        oracle.end_change(b, false, false).unwrap();
        read(&mut oracle, &data(if seen { b } else { a })).unwrap();
        assert_eq!(read(&mut oracle, &data(a)).is_err(), seen);
        let c = written(&mut oracle, false);
        assert!(read(&mut oracle, &data(b)).is_err());
        read(&mut oracle, &data(c)).unwrap();
    }
}

#[test]
fn crashes_lose_only_volatile_changes() {
    let fresh = || {
        let mut oracle = oracle();
        let old = written(&mut oracle, false);
        let flushed = written(&mut oracle, false);
        flush(&mut oracle);
        let acknowledged = written(&mut oracle, false);
        let submitted = oracle.begin_change(&ALL, false);
        (oracle, [old, flushed, acknowledged, submitted])
    };
    for (which, durable, acknowledged) in
        [(0, false, false), (1, true, false), (2, true, true), (3, true, true)]
    {
        for (survives, right) in
            [(Survives::Durable, durable), (Survives::Acknowledged, acknowledged)]
        {
            let (mut oracle, ids) = fresh();
            let result = oracle.crash(data(ids[which]), survives);
            assert_eq!(result.is_ok(), right, "{which} {result:?}");
            if right {
                read(&mut oracle, &data(ids[which])).unwrap();
                assert!(read(&mut oracle, &[0; 1024]).is_err());
            }
        }
    }
    let (mut oracle, ids) = fresh();
    let mut torn = data(ids[1]);
    torn[..512].copy_from_slice(&data(ids[3])[..512]);
    assert_eq!(oracle.crash(torn.clone(), Survives::Durable), Ok(CrashCount { open: 2, older: 1 }));
    read(&mut oracle, &torn).unwrap();
    let (mut oracle, _) = fresh();
    assert!(oracle.crash(vec![0; 1024], Survives::Durable).is_err(), "older than durable");
}

#[test]
fn fua_is_durable_and_a_flush_covers_only_what_was_acknowledged() {
    let mut oracle = oracle();
    let a = oracle.begin_change(&ALL, false);
    let begin = oracle.begin_flush();
    oracle.end_change(a, true, false).unwrap();
    oracle.end_flush(begin, true).unwrap();
    assert!(oracle.crash(vec![0; 1024], Survives::Durable).is_ok());
    let b = written(&mut oracle, true);
    assert!(oracle.crash(vec![0; 1024], Survives::Durable).is_err());
    assert!(oracle.crash(data(b), Survives::Durable).is_ok());
}

const A: Host = Host(0);
const B: Host = Host(1);

#[test]
fn a_change_may_take_effect_once_in_each_attempt() {
    let mut oracle = oracle();
    let a = oracle.begin_change(&ALL, false);
    let b = written(&mut oracle, false);
    // The path is lost, and the first copy of `a` is done only now.
    read(&mut oracle, &data(a)).unwrap();
    oracle.new_attempt(A, |_| true);
    let c = written(&mut oracle, false);
    read(&mut oracle, &data(c)).unwrap();
    read(&mut oracle, &data(a)).unwrap();
    oracle.end_change(a, true, false).unwrap();
    let d = written(&mut oracle, false);
    assert!(read(&mut oracle, &data(a)).is_err(), "an attempt that was over");
    assert!(read(&mut oracle, &data(b)).is_err());
    read(&mut oracle, &data(d)).unwrap();
}

#[test]
fn an_attempt_ends_with_its_epoch() {
    let mut oracle = oracle();
    let a = oracle.begin_change(&ALL, false);
    oracle.new_attempt(A, |_| true);
    oracle.end_change(a, true, false).unwrap();
    let b = written(&mut oracle, false);
    assert!(read(&mut oracle, &data(a)).is_err(), "the copy of the old epoch");
    read(&mut oracle, &data(b)).unwrap();
    // The newest attempt is the one that was acknowledged.
    flush(&mut oracle);
    assert!(oracle.crash(data(a), Survives::Durable).is_err());
    // A change that another attempt repeats cannot come back after the value in between.
    let c = oracle.begin_change(&ALL, false);
    read(&mut oracle, &data(c)).unwrap();
    oracle.new_attempt(A, |_| true);
    let d = written(&mut oracle, false);
    read(&mut oracle, &data(d)).unwrap();
    oracle.end_change(c, false, false).unwrap();
    read(&mut oracle, &data(d)).unwrap();
}

#[test]
fn a_fenced_host_changes_nothing_any_more() {
    let read = |oracle: &mut Oracle, bytes: &[u8]| {
        let begin = oracle.begin_read_by(B);
        oracle.end_read(begin, 0, bytes)
    };
    for early in [true, false] {
        let mut oracle = oracle();
        let a = oracle.begin_change_by(A, &ALL, false);
        oracle.fence(A);
        if early {
            read(&mut oracle, &[0; 1024]).unwrap();
            assert!(read(&mut oracle, &data(a)).is_err(), "after the other host saw the volume");
        }
        oracle.new_attempt(A, |_| true);
        let b = oracle.begin_change_by(B, &ALL, false);
        oracle.end_change(b, true, false).unwrap();
        assert!(read(&mut oracle, &data(a)).is_err());
        read(&mut oracle, &data(b)).unwrap();
        // An answer from before the fence may still arrive; an answer to a later request may not.
        oracle.end_change(a, true, false).unwrap();
        read(&mut oracle, &data(b)).unwrap();
        let late = oracle.begin_change_by(A, &ALL, false);
        assert!(read(&mut oracle, &data(late)).is_err());
        assert!(oracle.end_change(late, true, false).is_err());
        let late = oracle.begin_change_by(A, &ALL, false);
        oracle.end_change(late, false, false).unwrap();
        let begin = oracle.begin_read_by(A);
        assert!(oracle.end_read(begin, 0, &data(b)).is_err());
        let begin = oracle.begin_flush_by(A);
        assert!(oracle.end_flush(begin, true).is_err());
        let begin = oracle.begin_flush_by(A);
        oracle.end_flush(begin, false).unwrap();
    }
}

#[test]
fn a_loss_at_a_restart_fails_every_flush_that_covers_it() {
    let mut oracle = oracle();
    let kept = written(&mut oracle, true);
    let lost = written(&mut oracle, false);
    let waits = oracle.begin_flush();
    let also = oracle.begin_flush();
    let under_way = oracle.begin_change(&ALL, false);
    oracle.restart(data(kept), Survives::Durable, |_| false).unwrap();
    read(&mut oracle, &data(kept)).unwrap();
    assert!(read(&mut oracle, &data(lost)).is_err());
    oracle.end_change(under_way, true, false).unwrap();
    read(&mut oracle, &data(under_way)).unwrap();
    assert!(oracle.end_flush(waits, true).is_err());
    oracle.end_flush(waits, false).unwrap();
    assert!(oracle.end_flush(also, true).is_err(), "it covered what is lost, too");
    flush(&mut oracle);
    assert!(oracle.crash(data(kept), Survives::Durable).is_err());
}

#[test]
fn a_flush_that_covers_no_loss_reports_none() {
    let mut oracle = oracle();
    let waits = oracle.begin_flush();
    let lost = written(&mut oracle, false);
    oracle.restart(vec![0; 1024], Survives::Durable, |_| false).unwrap();
    oracle.end_flush(waits, false).unwrap();
    let begin = oracle.begin_flush();
    assert!(oracle.end_flush(begin, true).is_err(), "{lost:?} is lost and untold");
    // A value that survived is not lost.
    let mut oracle = self::oracle();
    let there = written(&mut oracle, false);
    oracle.restart(data(there), Survives::Durable, |_| false).unwrap();
    flush(&mut oracle);
    assert!(oracle.restart(vec![0; 1024], Survives::Durable, |_| false).is_err());
}

#[test]
fn a_host_with_copies_repeats_lost_writes() {
    let fresh = || {
        let mut oracle = oracle();
        let old = written(&mut oracle, false);
        let new = written(&mut oracle, false);
        oracle.restart(vec![0; 1024], Survives::Durable, |_| true).unwrap();
        (oracle, old, new)
    };
    let (mut oracle, old, new) = fresh();
    assert!(oracle.go_on(A, Some(&|_| false), false).is_err(), "lost, and not written again");
    oracle.go_on(A, Some(&|_| true), false).unwrap();
    assert!(read(&mut oracle, &data(old)).is_err(), "older than the newest");
    assert!(read(&mut oracle, &[0; 1024]).is_err());
    read(&mut oracle, &data(new)).unwrap();
    flush(&mut oracle);
    assert!(oracle.crash(vec![0; 1024], Survives::Durable).is_err());
    // The target dies once more before all is written again.
    let (mut oracle, _, new) = fresh();
    oracle.restart(vec![0; 1024], Survives::Durable, |_| true).unwrap();
    assert!(oracle.go_on(A, Some(&|_| false), false).is_err());
    oracle.go_on(A, Some(&|_| true), false).unwrap();
    read(&mut oracle, &data(new)).unwrap();
    // The copies are lost, or unused.
    for dies in [true, false] {
        let (mut oracle, ..) = fresh();
        if dies {
            oracle.host_died(A);
        } else {
            oracle.go_on(A, None, false).unwrap();
        }
        read(&mut oracle, &[0; 1024]).unwrap();
        let begin = oracle.begin_flush();
        assert!(oracle.end_flush(begin, true).is_err());
        oracle.end_flush(begin, false).unwrap();
        flush(&mut oracle);
    }
    // A clean stop does not make the copies needless, either.
    let (mut oracle, _, new) = fresh();
    oracle.restart(vec![0; 1024], Survives::Acknowledged, |_| true).unwrap();
    assert!(oracle.go_on(A, Some(&|_| false), false).is_err());
    oracle.go_on(A, Some(&|_| true), false).unwrap();
    read(&mut oracle, &data(new)).unwrap();
    // Writes of an earlier life of the host do not count.
    let mut oracle = self::oracle();
    written(&mut oracle, false);
    oracle.host_died(A);
    oracle.restart(vec![0; 1024], Survives::Durable, |_| true).unwrap();
    oracle.go_on(A, Some(&|_| true), false).unwrap();
    let begin = oracle.begin_flush();
    assert!(oracle.end_flush(begin, true).is_err());
}

#[test]
fn concurrent_writes_are_written_again_in_either_order() {
    for second in [false, true] {
        let mut oracle = oracle();
        let a = oracle.begin_change(&ALL, false);
        let b = oracle.begin_change(&ALL, false);
        oracle.end_change(a, true, false).unwrap();
        oracle.end_change(b, true, false).unwrap();
        read(&mut oracle, &data(b)).unwrap();
        oracle.restart(vec![0; 1024], Survives::Durable, |_| true).unwrap();
        oracle.go_on(A, Some(&|_| true), false).unwrap();
        let (winner, loser) = if second { (b, a) } else { (a, b) };
        assert!(read(&mut oracle, &[0; 1024]).is_err());
        read(&mut oracle, &data(winner)).unwrap();
        assert!(read(&mut oracle, &data(loser)).is_err());
    }
}

#[test]
fn a_loss_that_a_flush_reported_is_not_reported_again() {
    for keeps in [true, false] {
        let mut oracle = oracle();
        let a = written(&mut oracle, false);
        let begin = oracle.begin_flush();
        oracle.end_flush(begin, false).unwrap();
        oracle.restart(vec![0; 1024], Survives::Durable, |_| keeps).unwrap();
        let again = |_| keeps;
        oracle.go_on(A, Some(&again), false).unwrap();
        read(&mut oracle, &if keeps { data(a) } else { vec![0; 1024] }).unwrap();
        flush(&mut oracle);
    }
}

#[test]
fn a_clean_stop_loses_nothing() {
    let mut oracle = oracle();
    let a = written(&mut oracle, false);
    assert!(oracle.restart(vec![0; 1024], Survives::Acknowledged, |_| true).is_err());
    oracle.restart(data(a), Survives::Acknowledged, |_| true).unwrap();
    read(&mut oracle, &data(a)).unwrap();
    flush(&mut oracle);
}
