//! Access to volumes: generations, take-over, restarts.

use super::*;

const FIRST: Generation = Generation(1);
const SECOND: Generation = Generation(2);

/// Host 1 has volume 0, with a queue that has commands.
fn held() -> (World, Link, Link) {
    let mut w = World::new();
    let a = w.session(1);
    let queue = w.queue(a, 0);
    assert_eq!(w.open(a, 1, exclusive(0)).unwrap().generation(), FIRST);
    (w, a, queue)
}

#[test]
fn a_holder_that_comes_back_too_late_is_fenced() {
    let (mut w, a, queue) = held();
    w.bury(a);
    w.bury(queue);
    w.pass(LEASE + Duration::from_secs(1));
    assert_eq!(
        w.connect(ConnectionKind::Admin, a.id, Epoch(2)),
        Err(RejectReason::NoSuchSession),
        "the lease ended"
    );
    let b = w.session(2);
    assert_eq!(w.open(b, 1, exclusive(0)).unwrap().generation(), SECOND);
    // While the other host is there, after it was cut off, after it left, and after a restart.
    let a = w.session(1);
    let late = w.open(a, 1, returning(0, FIRST)).unwrap();
    let peer = &w.core.sessions().get(b.session).unwrap().peer;
    assert_eq!((late.status, late.text()), (Status::Fenced, format!("held by host2 ({peer})")));
    assert_eq!(w.core.decisions().refused_returns, 1);
    w.log_out(b);
    w.bury(b);
    let late = w.open(a, 1, returning(0, FIRST)).unwrap();
    assert_eq!((late.status, late.text().as_str()), (Status::Fenced, "was held by host2 since"));
    let mut w = w.restart();
    let a = w.session(1);
    for generation in [FIRST, Generation(3), Generation(u64::MAX)] {
        assert_eq!(w.open(a, 1, returning(0, generation)).unwrap().status, Status::Fenced);
    }
    assert_eq!(
        w.open(a, 1, returning(0, SECOND)).unwrap().status,
        Status::Fenced,
        "that is another host's"
    );
    let again = w.open(a, 1, exclusive(0)).unwrap();
    assert_eq!(again.generation(), Generation(3), "a fresh start has nothing queued");
}

#[test]
fn a_holder_that_comes_back_in_time_goes_on() {
    let (mut w, a, queue) = held();
    w.bury(a);
    w.bury(queue);
    w.pass(LEASE + Duration::from_secs(1));
    let a = w.session(1);
    let back = w.open(a, 1, returning(0, FIRST)).unwrap();
    assert_eq!(back.generation(), FIRST, "nobody came between");
    assert_eq!(w.writable(a.session), [0]);
    let resumed = w.connect(ConnectionKind::Admin, a.id, Epoch(2)).unwrap();
    w.bury(a);
    assert_eq!(w.log_in(resumed, 1, 1).unwrap().status, Status::Ok);
    assert_eq!(w.open(resumed, 2, returning(0, FIRST)).unwrap().generation(), FIRST);
}

#[test]
fn a_take_over_waits_for_the_disk_and_the_victims_connections() {
    let (mut w, a, queue) = held();
    w.slow_disk = true;
    let b = w.session(2);
    let refused = w.open(b, 1, exclusive(0)).unwrap();
    assert_eq!(refused.status, Status::InUse);
    assert_eq!(refused.text(), "held by host1 (peer1)");
    assert_eq!(w.open(b, 2, taking_over(0)), None);
    // The next run would not know of the take-over, so nothing happens before.
    assert_untouched(&w, a, queue);
    w.write_all();
    assert_eq!(w.core.decisions().take_overs, 1);
    assert!(w.is_dying(a) && w.is_dying(queue));
    let close =
        Notice::Close { session: a.session, volume: VolumeIndex(0), refusal: Status::Fenced };
    assert!(w.notices.contains(&close));
    // The fenced host stays out for good, by any OPEN.
    assert_eq!(w.open(a, 3, exclusive(0)).unwrap().status, Status::Fenced);
    assert_eq!(w.open(a, 3, taking_over(0)).unwrap().status, Status::Fenced);
    for kind in [ConnectionKind::Admin, ConnectionKind::Io { queue: 1 }] {
        let epoch = if kind == ConnectionKind::Admin { Epoch(2) } else { Epoch(1) };
        assert_eq!(w.connect(kind, a.id, epoch), Err(RejectReason::NoSuchSession));
    }
    w.bury(a);
    assert_eq!(w.answer(b, 2), None);
    assert_eq!(w.writable(b.session), [0_u16; 0]);
    w.bury(queue);
    assert_eq!(w.answer(b, 2).unwrap().generation(), SECOND);
    assert_eq!(w.writable(b.session), [0]);
    assert!(w.notices.contains(&Notice::ForgetSession { session: a.session }));
    let a = w.session(1);
    assert_eq!(w.open(a, 1, returning(0, FIRST)).unwrap().status, Status::Fenced);
    let mut w = w.restart();
    let a = w.session(1);
    assert_eq!(w.open(a, 1, returning(0, FIRST)).unwrap().status, Status::Fenced);
}

/// Host 1 still has volume 0, as if no other host had asked for it.
fn assert_untouched(w: &World, a: Link, queue: Link) {
    assert!(!w.is_dying(a) && !w.is_dying(queue));
    assert_eq!(w.writable(a.session), [0]);
    assert_eq!(w.core.decisions().take_overs, 0);
    assert_eq!(w.core.generation(VolumeIndex(0)), FIRST);
}

/// The disk fails the oldest change.
fn fail_one(w: &mut World) -> HolderRecord {
    let (ticket, record) = w.on_their_way.remove(0);
    w.core.persisted(ticket, Err("No space left".to_owned()));
    w.carry_out();
    record
}

#[test]
fn an_unwritten_take_over_did_not_happen() {
    let (mut w, a, queue) = held();
    w.slow_disk = true;
    let b = w.session(2);
    assert_eq!(w.open(b, 1, taking_over(0)), None);
    w.bury(a);
    w.bury(queue);
    // The target died before the change got to the disk.
    let mut w = w.restart();
    let a = w.session(1);
    assert_eq!(w.open(a, 1, returning(0, FIRST)).unwrap().generation(), FIRST);
}

#[test]
fn a_take_over_that_cannot_be_remembered_leaves_the_holder_as_it_is() {
    for (may_have_it, heals) in [(false, true), (true, true), (false, false)] {
        let (mut w, a, queue) = held();
        w.slow_disk = true;
        let b = w.session(2);
        assert_eq!(w.open(b, 1, taking_over(0)), None);
        let record = fail_one(&mut w);
        assert_eq!(record.generation, SECOND);
        if may_have_it {
            w.durable.insert(record.volume, record);
        }
        let failed = w.answer(b, 1).unwrap();
        assert_eq!(failed.status, Status::StoreError);
        assert!(failed.text().ends_with("No space left"), "{}", failed.text());
        assert_eq!(w.writable(b.session), [0_u16; 0]);
        assert_untouched(&w, a, queue);
        // The disk may have either record now: the holder's is written again.
        if heals {
            w.write_all();
        } else {
            assert_eq!(fail_one(&mut w).generation, FIRST);
            assert_eq!(w.on_their_way, []);
        }
        assert_eq!(w.durable[&[1; 16]].generation, FIRST);
        // The holder comes back for its volume, which needs no disk.
        let again = w.connect(ConnectionKind::Admin, a.id, Epoch(2)).unwrap();
        assert_eq!(w.log_in(again, 1, 1), None);
        w.bury_the_dying();
        assert_eq!(w.answer(again, 1).unwrap().status, Status::Ok);
        assert_eq!(w.open(again, 2, returning(0, FIRST)).unwrap().generation(), FIRST);
        // Another host can take the volume over once the disk works.
        w.slow_disk = false;
        assert_eq!(w.open(b, 2, taking_over(0)), None);
        w.bury_the_dying();
        assert_eq!(w.answer(b, 2).unwrap().generation(), SECOND);
    }
}

#[test]
fn opens_while_a_take_over_is_being_written() {
    for succeeds in [true, false] {
        let (mut w, a, queue) = held();
        let (b, c) = (w.session(2), w.session(3));
        w.slow_disk = true;
        assert_eq!(w.open(b, 1, taking_over(0)), None);
        assert_eq!(w.open(c, 1, exclusive(0)), None, "who has it is not known yet");
        // The holder lost its path, comes back to its volume, and leaves.
        let again = w.connect(ConnectionKind::Admin, a.id, Epoch(2)).unwrap();
        w.bury(a);
        w.bury(queue);
        assert_eq!(w.log_in(again, 1, 1).unwrap().status, Status::Ok);
        assert_eq!(w.open(again, 2, returning(0, FIRST)), None);
        if !succeeds {
            assert_eq!(fail_one(&mut w).host, HostId([2; 16]));
            assert_eq!(w.answer(b, 1).unwrap().status, Status::StoreError);
            assert_eq!(w.answer(c, 1).unwrap().status, Status::InUse);
            assert_eq!(w.answer(again, 2).unwrap().generation(), FIRST);
            continue;
        }
        w.send(again, 3, Opcode::CloseVolume, 1, &[]);
        assert_eq!(w.answer(again, 2).unwrap().status, Status::NoSuchVolume);
        assert_eq!(w.answer(again, 3).unwrap().status, Status::Ok);
        assert_eq!(w.on_their_way.len(), 1, "the generation must not fall on the disk");
        w.write_all();
        assert_eq!(w.answer(b, 1), None, "it may have sent commands");
        w.bury_the_dying();
        assert_eq!(w.answer(b, 1).unwrap().generation(), SECOND);
        assert_eq!(w.answer(c, 1).unwrap().status, Status::InUse);
        assert_eq!(w.durable[&[1; 16]].generation, SECOND);
        assert_eq!(w.replies, []);
    }
}

#[test]
fn a_claim_without_a_waiting_open() {
    let give_up: [fn(&mut World, Link); 4] = [
        |w, b| w.bury(b),
        |w, b| {
            w.send(b, 2, Opcode::CloseVolume, 1, &[]);
            assert_eq!(w.answer(b, 1).unwrap().status, Status::NoSuchVolume);
            assert_eq!(w.answer(b, 2).unwrap().status, Status::Ok);
        },
        |w, b| {
            w.log_out(b);
            assert_eq!(w.answer(b, 1).unwrap().status, Status::NotReady);
        },
        |w, b| {
            w.pass(Duration::from_secs(31));
            let late = w.answer(b, 1).unwrap();
            assert_eq!(late.status, Status::TimedOut);
            assert!(late.text().contains("state directory"), "{}", late.text());
        },
    ];
    for give_up in give_up {
        let (mut w, a, queue) = held();
        let b = w.session(2);
        w.slow_disk = true;
        assert_eq!(w.open(b, 1, taking_over(0)), None);
        give_up(&mut w, b);
        let c = w.session(3);
        assert_eq!(w.open(c, 1, exclusive(0)), None);
        // The disk has the claim, and then has the holder's record again.
        let (ticket, record) = w.on_their_way.remove(0);
        w.durable.insert(record.volume, record);
        w.core.persisted(ticket, Ok(()));
        w.carry_out();
        assert_untouched(&w, a, queue);
        assert_eq!(w.answer(c, 1).unwrap().status, Status::InUse);
        w.write_all();
        assert_eq!(w.durable[&[1; 16]].generation, FIRST);
        assert_eq!(w.replies, []);
    }
}

#[test]
fn a_disk_that_hangs_is_not_given_more_and_more() {
    let mut w = World::new();
    let a = w.session(1);
    w.slow_disk = true;
    // Many OPENs: each ends the one before, which is being written.
    assert_eq!((1..2000).find_map(|tag| w.open(a, tag, exclusive(0))), None);
    assert_eq!(w.on_their_way.len(), 1);
    while !w.on_their_way.is_empty() {
        w.write_all();
    }
    w.replies.clear();
    // Many CLOSEs and OPENs.
    let refused = (1..2000).find_map(|tag| {
        w.send(a, tag, Opcode::CloseVolume, 1, &[]);
        w.replies.clear();
        w.open(a, tag, returning(0, FIRST))
    });
    assert_eq!(refused.unwrap().status, Status::LimitReached);
    assert!(w.on_their_way.len() <= 1025, "{}", w.on_their_way.len());
    w.write_all();
    w.replies.clear();
    w.slow_disk = false;
    assert_eq!(w.open(a, 2, exclusive(0)).unwrap().status, Status::Ok);
}

#[test]
fn a_change_that_could_not_be_written_is_written_again() {
    let (mut w, a, queue) = held();
    w.log_out(a);
    w.bury(a);
    w.bury(queue);
    assert!(!w.durable[&[1; 16]].present);
    // The holder comes back, and the record does not get to the disk.
    let a = w.session(1);
    w.slow_disk = true;
    assert_eq!(w.open(a, 1, returning(0, FIRST)), None);
    fail_one(&mut w);
    assert_eq!(w.answer(a, 1).unwrap().status, Status::StoreError);
    w.write_all();
    let (a, again) = (w.session(1), returning(0, FIRST));
    // The holder in its generation, but the record on the disk has it as gone.
    assert_eq!(w.open(a, 1, again), None);
    assert_eq!(w.on_their_way.len(), 1);
    w.write_all();
    assert_eq!(w.answer(a, 1).unwrap().generation(), FIRST);
    assert!(w.durable[&[1; 16]].present);

    // A host that shares it may not be let in before either.
    let shared = open_as(1, AccessMode::Shared);
    assert_eq!(w.open(a, 2, shared), None);
    let b = w.session(2);
    assert_eq!(w.open(b, 1, shared), None);
    fail_one(&mut w);
    assert_eq!(w.answer(a, 2).unwrap().status, Status::StoreError);
    assert_eq!(w.answer(b, 1), None, "it claims the volume itself");
    w.write_all();
    assert_eq!(w.answer(b, 1).unwrap().generation(), FIRST);
    assert_eq!(w.durable[&[2; 16]].generation, FIRST);
}

#[test]
fn a_take_over_of_one_that_waits_to_take_over() {
    let (mut w, a, queue) = held();
    let (b, c) = (w.session(2), w.session(3));
    assert_eq!(w.open(b, 1, taking_over(0)), None);
    assert_eq!(w.open(c, 1, exclusive(0)).unwrap().status, Status::InUse, "b waits for it");
    assert_eq!(w.open(c, 2, taking_over(0)), None);
    let fenced = w.answer(b, 1).unwrap();
    assert_eq!(fenced.status, Status::Fenced);
    assert!(fenced.text().starts_with("held by host3 ("), "{}", fenced.text());
    w.bury(b);
    w.bury(a);
    assert_eq!(w.answer(c, 2), None, "the first victim still has a queue");
    w.bury(queue);
    assert_eq!(w.answer(c, 2).unwrap().generation(), Generation(3));
    assert_eq!(w.replies, []);
}

#[test]
fn the_new_holder_dies_during_the_take_over() {
    let (mut w, a, queue) = held();
    let b = w.session(2);
    assert_eq!(w.open(b, 1, taking_over(0)), None);
    w.bury(b);
    assert!(!w.core.sessions().is_open(VolumeIndex(0)), "it was never let in");
    let c = w.session(3);
    assert_eq!(w.open(c, 1, exclusive(0)), None, "commands of the victim are still under way");
    w.bury(a);
    w.bury(queue);
    assert_eq!(w.answer(c, 1).unwrap().generation(), Generation(3));
    // The opener comes back without a volume, and in a new session: it was never let in.
    assert_eq!(w.connect(ConnectionKind::Admin, b.id, Epoch(2)), Err(RejectReason::NoSuchSession));
    let b = w.session(2);
    assert_eq!(w.open(b, 2, exclusive(0)).unwrap().status, Status::InUse);
    assert_eq!(w.replies, []);
}

#[test]
fn the_victim_logs_out_during_the_take_over() {
    // Before the take-over: its commands are still under way.
    let (mut w, a, queue) = held();
    w.log_out(a);
    assert_eq!(w.open(a, 2, exclusive(0)).unwrap().status, Status::NotReady, "it said goodbye");
    let b = w.session(2);
    assert_eq!(w.open(b, 1, exclusive(0)), None);
    assert!(w.is_dying(queue) && w.is_dying(a), "whether it closes them or not");
    w.bury(queue);
    w.bury(a);
    assert_eq!(w.answer(b, 1).unwrap().generation(), SECOND);

    // After the take-over.
    let (mut w, a, queue) = held();
    let b = w.session(2);
    assert_eq!(w.open(b, 1, taking_over(0)), None);
    w.send(a, 2, Opcode::Logout, 0, &[]);
    assert_eq!(w.answer(a, 2).unwrap().status, Status::Fenced);
    w.bury(a);
    w.bury(queue);
    assert_eq!(w.answer(b, 1).unwrap().generation(), SECOND);
    assert_eq!(w.core.sessions().writer(VolumeIndex(0)).unwrap().index, b.session);
}

#[test]
fn a_volume_closed_with_commands_under_way() {
    let (mut w, a, queue) = held();
    w.send(a, 2, Opcode::CloseVolume, 1, &[]);
    assert_eq!(w.answer(a, 2).unwrap().status, Status::Ok);
    w.send(a, 2, Opcode::CloseVolume, 1, &[]);
    assert_eq!(w.answer(a, 2).unwrap().status, Status::NoSuchVolume);
    assert!(!w.is_dying(queue), "nobody minds");
    let b = w.session(2);
    let reader = w.open(b, 1, open_as(0, AccessMode::ReadOnly)).unwrap();
    assert_eq!(reader.generation(), FIRST, "readers wait for nobody");
    assert_eq!(w.open(b, 2, exclusive(0)), None);
    w.bury(queue);
    // The host held nothing else: its session ends with its connections, and it comes back in a new
    // one.
    let late = w.connect(ConnectionKind::Admin, a.id, Epoch(2)).unwrap();
    w.bury_the_dying();
    assert_eq!(w.answer(b, 2).unwrap().generation(), SECOND);
    assert_eq!(w.log_in(late, 1, 1).unwrap().status, Status::NoSuchSession);
    let a = w.session(1);
    assert_eq!(w.open(a, 2, exclusive(1)).unwrap().generation(), FIRST);
}

#[test]
fn opening_in_another_mode_closes_first() {
    let (mut w, a, queue) = held();
    assert_eq!(w.open(a, 2, open_as(0, AccessMode::ReadOnly)).unwrap().generation(), FIRST);
    assert_eq!(w.writable(a.session), [0_u16; 0]);
    let b = w.session(2);
    assert_eq!(w.open(b, 1, exclusive(0)), None, "it may have written before");
    w.bury(a);
    w.bury(queue);
    assert_eq!(w.answer(b, 1).unwrap().generation(), SECOND);
}

#[test]
fn the_victims_other_volumes_are_kept_for_it() {
    let (mut w, a, queue) = held();
    assert_eq!(w.open(a, 2, exclusive(1)).unwrap().generation(), FIRST);
    let b = w.session(2);
    assert_eq!(w.open(b, 1, taking_over(0)), None);
    let kept = w.open(b, 2, exclusive(1)).unwrap();
    assert_eq!(kept.status, Status::InUse);
    assert_eq!(kept.text(), "held by host1, which may come back for another 30 s");
    w.bury(a);
    w.bury(queue);
    assert_eq!(w.answer(b, 1).unwrap().generation(), SECOND);
    let a = w.session(1);
    assert_eq!(w.open(a, 1, returning(0, FIRST)).unwrap().status, Status::Fenced);
    assert_eq!(w.open(a, 2, returning(1, FIRST)).unwrap().generation(), FIRST);
    // Unless the host stays away.
    w.bury(a);
    w.pass(LEASE + Duration::from_secs(1));
    assert_eq!(w.open(b, 3, exclusive(1)).unwrap().generation(), SECOND);
}

#[test]
fn a_take_over_of_one_that_is_cut_off_is_at_once() {
    let (mut w, a, queue) = held();
    w.bury(a);
    w.bury(queue);
    let b = w.session(2);
    assert_eq!(w.open(b, 1, exclusive(0)).unwrap().status, Status::InUse, "its lease runs");
    assert_eq!(w.open(b, 2, taking_over(0)).unwrap().generation(), SECOND);
    assert_eq!(w.connect(ConnectionKind::Admin, a.id, Epoch(2)), Err(RejectReason::NoSuchSession));
    assert_eq!(w.open(b, 3, taking_over(0)).unwrap().generation(), Generation(3), "from itself");
    assert_eq!(w.core.decisions().take_overs, 1);
}

#[test]
fn a_take_over_times_out_and_the_victim_stays_out() {
    let (mut w, a, queue) = held();
    let b = w.session(2);
    assert_eq!(w.open(b, 1, taking_over(0)), None);
    w.bury(a);
    w.pass(Duration::from_secs(30));
    assert_eq!(w.replies, []);
    w.pass(Duration::from_secs(1));
    assert_eq!(w.answer(b, 1).unwrap().status, Status::TimedOut);
    assert_eq!(w.writable(b.session), [0_u16; 0]);
    let a = w.session(1);
    assert_eq!(w.open(a, 1, returning(0, FIRST)).unwrap().status, Status::Fenced);
    assert_eq!(w.open(b, 2, exclusive(0)), None, "it waits again");
    w.bury(queue);
    assert_eq!(w.answer(b, 2).unwrap().generation(), Generation(3));
}

#[test]
fn after_a_restart_holders_are_waited_for() {
    let (w, ..) = held();
    let mut w = w.restart();
    let b = w.session(2);
    w.pass(Duration::from_secs(10));
    let refused = w.open(b, 1, exclusive(0)).unwrap();
    assert_eq!(refused.status, Status::InUse);
    assert_eq!(refused.text(), "held by host1, which may come back for another 20 s");
    assert_eq!(w.open(b, 1, open_as(0, AccessMode::ReadOnly)).unwrap().generation(), FIRST);
    assert_eq!(w.open(b, 2, exclusive(1)).unwrap().generation(), FIRST, "nobody had that");
    let a = w.session(1);
    assert_eq!(w.open(a, 1, returning(0, FIRST)).unwrap().generation(), FIRST);
    assert_eq!(w.open(b, 3, exclusive(0)).unwrap().status, Status::InUse);

    // The host itself again; another one by force; and another one after the lease.
    let mut w = w.restart();
    let a = w.session(1);
    assert_eq!(w.open(a, 1, exclusive(0)).unwrap().generation(), SECOND);
    let mut w = w.restart();
    let b = w.session(2);
    assert_eq!(w.open(b, 1, taking_over(0)).unwrap().generation(), Generation(3));
    let mut w = w.restart();
    w.pass(LEASE);
    let c = w.session(3);
    assert_eq!(w.open(c, 1, exclusive(0)).unwrap().generation(), Generation(4));
    // Not for a host that logged out.
    w.log_out(c);
    let mut w = w.restart();
    let d = w.session(4);
    assert_eq!(w.open(d, 1, exclusive(0)).unwrap().generation(), Generation(5));
}

#[test]
fn hosts_that_share_a_volume() {
    let shared = open_as(0, AccessMode::Shared);
    let mut w = World::new();
    let (a, b, c) = (w.session(1), w.session(2), w.session(3));
    assert_eq!(w.open(a, 1, shared).unwrap().generation(), FIRST);
    assert_eq!(w.open(b, 1, shared).unwrap().generation(), FIRST);
    assert_eq!(w.open(c, 1, exclusive(0)).unwrap().status, Status::InUse);
    w.log_out(b);
    let mut w = w.restart();
    let (a, b, c) = (w.session(1), w.session(2), w.session(3));
    assert_eq!(w.open(b, 1, shared).unwrap().generation(), FIRST, "it would not be in its way");
    w.log_out(b);
    assert_eq!(w.open(c, 1, exclusive(0)).unwrap().status, Status::InUse, "a may come back");
    let back = OpenRequest { generation: FIRST, ..shared };
    assert_eq!(w.open(a, 1, back).unwrap().generation(), FIRST);
    assert_eq!(w.open(c, 2, taking_over(0)), None);
    w.bury(a);
    assert_eq!(w.answer(c, 2), None, "b left, but its connection did not");
    w.bury(b);
    assert_eq!(w.answer(c, 2).unwrap().generation(), SECOND);
    let a = w.session(1);
    assert_eq!(w.open(a, 1, back).unwrap().status, Status::Fenced);
    assert_eq!(w.open(a, 2, shared).unwrap().status, Status::InUse);
    let take = OpenRequest { take_over: true, ..shared };
    assert_eq!(w.open(a, 3, take), None);
    w.bury(c);
    assert_eq!(w.answer(a, 3).unwrap().generation(), Generation(3));
}

#[test]
fn the_first_sharer_does_not_get_the_volume_alone_after_a_restart() {
    let shared = open_as(0, AccessMode::Shared);
    let mut w = World::new();
    let (a, b) = (w.session(1), w.session(2));
    assert_eq!(w.open(a, 1, shared).unwrap().generation(), FIRST);
    assert_eq!(w.open(b, 1, shared).unwrap().generation(), FIRST);
    let mut w = w.restart();
    // The record names host 1.
    let a = w.session(1);
    let refused = w.open(a, 1, exclusive(0)).unwrap();
    assert_eq!(refused.status, Status::InUse);
    let text = "shared by host1 and perhaps others, which may come back for another 30 s";
    assert_eq!(refused.text(), text);
    let b = w.session(2);
    let back = OpenRequest { generation: FIRST, ..shared };
    assert_eq!(w.open(b, 1, back).unwrap().generation(), FIRST);
    w.log_out(b);
    w.bury(b);
    w.pass(LEASE + Duration::from_secs(1));
    assert_eq!(w.open(a, 2, exclusive(0)).unwrap().generation(), SECOND, "nobody else came");
}

#[test]
fn the_same_host_takes_its_own_place() {
    let (mut w, a, queue) = held();
    let again = w.session(1);
    assert_eq!(w.open(again, 1, exclusive(0)).unwrap().status, Status::InUse, "it is connected");
    assert_eq!(w.open(again, 1, returning(0, FIRST)).unwrap().status, Status::InUse);
    w.bury(a);
    w.bury(queue);
    assert_eq!(w.open(again, 2, exclusive(0)).unwrap().generation(), SECOND);
    // The old process wakes up.
    let old = w.session(1);
    assert_eq!(w.open(old, 1, returning(0, FIRST)).unwrap().status, Status::Fenced);
}

#[test]
fn a_target_that_remembers_nothing_believes_the_first() {
    let forgetful = || {
        let holders = Holders::forgetful(Generation(1000));
        World::with(holders, BTreeMap::new(), Instant::now())
    };
    let mut w = forgetful();
    let (a, b) = (w.session(1), w.session(2));
    assert_eq!(w.open(a, 1, returning(0, FIRST)).unwrap().generation(), FIRST);
    assert_eq!(w.open(b, 1, returning(0, FIRST)).unwrap().status, Status::Fenced);
    let mut w = forgetful();
    let (a, b) = (w.session(1), w.session(2));
    assert_eq!(w.open(b, 1, exclusive(0)).unwrap().generation(), Generation(1001));
    let late = w.open(a, 1, returning(0, FIRST)).unwrap();
    assert_eq!(late.status, Status::Fenced);
}

#[test]
fn opens_that_make_no_sense() {
    let mut w = World::new();
    let a = w.session(1);
    w.send(a, 1, Opcode::OpenVolume, 0, &[1; 80]);
    assert_eq!(w.answer(a, 1).unwrap().status, Status::InvalidField);
    assert_eq!(w.open(a, 1, exclusive(7)).unwrap().status, Status::NoSuchVolume);
    w.send(a, 1, Opcode::CloseVolume, 0, &[]);
    assert_eq!(w.answer(a, 1).unwrap().status, Status::NoSuchVolume);
    w.send(a, 1, Opcode::Read, 1, &[]);
    assert_eq!(w.answer(a, 1).unwrap().status, Status::InvalidOpcode);
    assert_eq!(
        w.open(a, 1, returning(0, FIRST)).unwrap().text(),
        "its holders are not known any more"
    );
}
