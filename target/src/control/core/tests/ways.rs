//! Several ways of one host in one session: LOGINs that join, DROPs, and the death of a way.

use rblk_protocol::{AsyncEvent, DropRequest, Join};

use super::*;

/// A world whose ends know ways, and a session with its first.
fn of_ways() -> (World, Link) {
    let mut w = World { has_ways: true, ..World::new() };
    let first = w.session(1);
    assert_eq!(w.open(first, 1, exclusive(0)).unwrap().status, Status::Ok);
    (w, first)
}

impl World {
    /// A connection for one more way, which has not logged in.
    fn newcomer(&mut self, of: Link, epoch: u32) -> Link {
        self.connect(ConnectionKind::Admin, of.id, Epoch(epoch)).unwrap()
    }

    /// The LOGIN of a newcomer.
    fn join(&mut self, link: Link, beside: u32, ends: Option<u32>) -> Option<Status> {
        let join = Some(Join { beside: Epoch(beside), ends: ends.map(Epoch) });
        let login = LoginRequest { join, ..login_of(1) };
        self.send(link, 0, Opcode::Login, 0, &login.to_wire());
        self.answer(link, 0).map(|said| said.status)
    }

    /// One more way, logged in.
    fn way(&mut self, of: Link, epoch: u32) -> Link {
        let link = self.newcomer(of, epoch);
        assert_eq!(self.join(link, of.epoch.0, None), Some(Status::Ok));
        self.as_it_is(link)
    }

    fn drop_epochs(&mut self, link: Link, tag: u16, epochs: &[u32]) -> Option<Status> {
        let epochs: Vec<Epoch> = epochs.iter().copied().map(Epoch).collect();
        let request = DropRequest::new(&epochs).unwrap();
        self.send(link, tag, Opcode::Drop, 0, &request.to_wire());
        self.answer(link, tag).map(|said| said.status)
    }
}

#[test]
fn a_way_that_joins_ends_no_other() {
    let (mut w, first) = of_ways();
    let queue = w.queue(first, 0);
    let second = w.way(first, 2);
    assert_eq!(second.session, first.session);
    w.queue(second, 0);
    w.queue(first, 1);
    assert!(!w.is_dying(first) && !w.is_dying(queue));
    assert_eq!(w.writable(first.session), [0], "the session has it, whatever the way");
    let commands = [Opcode::ListVolumes, Opcode::CloseVolume];
    for (tag, opcode) in (5..).zip(commands) {
        w.send(second, tag, opcode, 1, &[]);
        assert!(w.answer(second, tag).is_some_and(|said| said.status != Status::Fenced));
    }
}

#[test]
fn a_login_that_joins_waits_for_the_last_life_of_its_way() {
    let (mut w, first) = of_ways();
    let second = w.way(first, 2);
    let queue = w.queue(second, 0);
    let third = w.newcomer(first, 3);
    assert_eq!(w.join(third, 1, Some(2)), None);
    assert!(w.is_dying(second) && w.is_dying(queue) && !w.is_dying(first));
    assert_eq!(
        w.connect(ConnectionKind::Io { queue: 0 }, first.id, Epoch(3)),
        Err(RejectReason::NoSuchSession),
        "not yet"
    );
    assert_eq!(
        w.connect(ConnectionKind::Io { queue: 1 }, first.id, Epoch(2)),
        Err(RejectReason::StaleEpoch)
    );
    // Joins may overlap: each waits for its own.
    let fourth = w.way(first, 4);
    w.bury(second);
    assert_eq!(w.answer(third, 0), None);
    w.bury(queue);
    assert_eq!(w.answer(third, 0).unwrap().status, Status::Ok);
    w.queue(third, 0);
    assert!(!w.is_dying(fourth));
    // To end an epoch again changes nothing.
    let fifth = w.newcomer(first, 5);
    assert_eq!(w.join(fifth, 3, Some(2)), Some(Status::Ok));
}

#[test]
fn drop_is_answered_at_the_last_burial() {
    let (mut w, first) = of_ways();
    let (second, third) = (w.way(first, 2), w.way(first, 3));
    let queues = [w.queue(second, 0), w.queue(second, 1)];
    assert_eq!(w.drop_epochs(first, 5, &[2]), None);
    assert!(w.is_dying(second) && !w.is_dying(first) && !w.is_dying(third));
    // By another way, too: the first one may die before the answer.
    assert_eq!(w.drop_epochs(third, 6, &[2, 7]), None);
    assert_eq!(w.open(second, 9, exclusive(0)).unwrap().status, Status::Fenced);
    let joins = w.connect(ConnectionKind::Io { queue: 2 }, first.id, Epoch(2));
    assert_eq!(joins, Err(RejectReason::StaleEpoch));
    w.bury(queues[0]);
    w.bury(second);
    assert_eq!(w.replies, []);
    w.bury(queues[1]);
    assert_eq!(w.answer(first, 5).unwrap().status, Status::Ok);
    assert_eq!(w.answer(third, 6).unwrap().status, Status::Ok);
    assert_eq!(w.drop_epochs(first, 7, &[2]), Some(Status::Ok), "again");
    // A LOGIN beside it was on its way when it died.
    let fourth = w.newcomer(first, 8);
    assert_eq!(w.join(fourth, 2, None), Some(Status::Ok));
}

#[test]
fn a_login_that_was_given_up_comes_too_late() {
    let (mut w, first) = of_ways();
    let late = w.newcomer(first, 4);
    let killer = w.newcomer(first, 5);
    let other = w.newcomer(first, 6);
    assert_eq!(w.drop_epochs(first, 5, &[5]), Some(Status::Ok), "nobody came in it");
    assert_eq!(w.join(late, 1, None), Some(Status::NoSuchSession));
    assert_eq!(w.log_in(killer, 1, 1).unwrap().status, Status::NoSuchSession);
    assert!(!w.is_dying(first));
    assert_eq!(w.join(other, 1, None), Some(Status::Ok));
}

#[test]
fn rules_of_join_and_drop() {
    let (mut w, first) = of_ways();
    let second = w.way(first, 2);
    assert_eq!(w.drop_epochs(first, 5, &[1, 2]), Some(Status::InvalidField), "its own epoch");
    w.send(first, 6, Opcode::Drop, 0, &[0; 32]);
    assert_eq!(w.answer(first, 6).unwrap().status, Status::InvalidField);
    assert!(!w.is_dying(first) && !w.is_dying(second));
    let third = w.newcomer(first, 3);
    assert_eq!(w.join(third, 1, Some(3)), Some(Status::InvalidField), "it ends itself");
    assert_eq!(w.join(third, 3, None), Some(Status::NoSuchSession), "beside itself");
    assert_eq!(w.join(third, 9, None), Some(Status::NoSuchSession));
    // A first connection has nothing to join.
    let stranger = w.connect(ConnectionKind::Admin, SessionId::default(), Epoch(0)).unwrap();
    assert_eq!(w.join(stranger, 1, None), Some(Status::InvalidField));
    // Another host, which has heard of the session.
    let login = LoginRequest { join: Some(Join { beside: Epoch(1), ends: None }), ..login_of(2) };
    w.send(third, 7, Opcode::Login, 0, &login.to_wire());
    assert_eq!(w.answer(third, 7).unwrap().status, Status::NoSuchSession);
    // Ends that have not agreed on ways.
    w.has_ways = false;
    let old = w.newcomer(first, 4);
    assert_eq!(w.join(old, 1, None), Some(Status::InvalidField));
    assert_eq!(w.log_in(old, 1, 1), None, "it may come back as ever");
    w.bury_the_dying();
    assert_eq!(w.answer(old, 1).unwrap().status, Status::Ok);
    assert_eq!(w.drop_epochs(old, 2, &[1]), Some(Status::InvalidOpcode));
}

#[test]
fn a_host_that_lost_all_its_ways_ends_them_all() {
    let (mut w, first) = of_ways();
    let (second, third) = (w.way(first, 2), w.way(first, 3));
    let queue = w.queue(third, 0);
    assert_eq!(w.drop_epochs(first, 5, &[3]), None);
    let back = w.newcomer(first, 4);
    assert_eq!(w.log_in(back, 1, 1), None);
    assert!([first, second, third, queue].iter().all(|link| w.is_dying(*link)));
    // A process that was superseded stays out.
    let old = w.newcomer(first, 5);
    assert_eq!(w.join(old, 2, None), Some(Status::NoSuchSession));
    assert!(!w.is_dying(back));
    w.bury(queue);
    w.bury(third);
    w.bury(first);
    assert_eq!(w.replies, [], "the DROP came in an epoch that is over");
    w.bury(second);
    assert_eq!(w.answer(back, 1).unwrap().status, Status::Ok);
    assert_eq!(w.join(old, 4, None), Some(Status::Ok));
}

#[test]
fn the_lease_begins_when_the_last_way_is_lost() {
    let (mut w, first) = of_ways();
    let second = w.way(first, 2);
    let queues = [w.queue(first, 0), w.queue(second, 0)];
    w.bury(first);
    assert!(w.is_dying(queues[0]) && !w.is_dying(queues[1]) && !w.is_dying(second));
    w.bury(queues[0]);
    w.pass(LEASE * 2);
    assert_eq!(w.writable(first.session), [0]);
    // The first way comes back beside the second, or beside its own last life.
    let third = w.newcomer(first, 3);
    assert_eq!(w.join(third, 1, None), Some(Status::Ok));
    w.bury(third);
    w.bury(second);
    w.bury(queues[1]);
    w.pass(LEASE);
    assert_eq!(w.writable(first.session), [0]);
    w.pass(Duration::from_secs(1));
    assert_eq!(w.writable(first.session), [] as [u16; 0]);
}

#[test]
fn a_take_over_waits_for_every_way() {
    let (mut w, first) = of_ways();
    let second = w.way(first, 2);
    let queues = [w.queue(first, 0), w.queue(second, 0)];
    let other = w.session(2);
    assert_eq!(w.open(other, 1, taking_over(0)), None);
    assert!([first, second].iter().chain(&queues).all(|link| w.is_dying(*link)));
    for link in [first, queues[0], second] {
        w.bury(link);
        assert_eq!(w.answer(other, 1), None);
    }
    w.bury(queues[1]);
    assert_eq!(w.answer(other, 1).unwrap().status, Status::Ok);
    assert_eq!(
        w.connect(ConnectionKind::Admin, first.id, Epoch(3)),
        Err(RejectReason::NoSuchSession)
    );
}

#[test]
fn a_drop_that_waits_too_long_times_out() {
    let (mut w, first) = of_ways();
    let second = w.way(first, 2);
    assert_eq!(w.drop_epochs(first, 5, &[2]), None);
    assert!(w.core.needs_ticks());
    w.pass(Duration::from_secs(31));
    assert_eq!(w.answer(first, 5).unwrap().status, Status::TimedOut);
    assert_eq!(w.drop_epochs(first, 6, &[2]), None);
    w.bury(second);
    assert_eq!(w.answer(first, 6).unwrap().status, Status::Ok);
    assert!(!w.core.needs_ticks());
}

#[test]
fn a_session_has_a_bounded_number_of_ways() {
    let (mut w, first) = of_ways();
    (2..=8).for_each(|epoch| {
        w.way(first, epoch);
    });
    let ninth = w.newcomer(first, 9);
    assert_eq!(w.join(ninth, 1, None), Some(Status::LimitReached));
    assert_eq!(w.join(ninth, 1, Some(8)), None, "in the place of another");
    w.bury_the_dying();
    assert_eq!(w.answer(ninth, 0).unwrap().status, Status::Ok);
    // The memory of a session, too.
    w.drop_epochs(first, 5, &[7]);
    w.bury_the_dying();
    w.memory_bytes = 512 << 20;
    let large = w.newcomer(first, 10);
    assert_eq!(w.join(large, 1, None), Some(Status::LimitReached));
}

#[test]
fn every_way_hears_of_a_change() {
    let (mut w, first) = of_ways();
    let second = w.way(first, 2);
    let changed = AsyncEvent::VolumesChanged as u32;
    for link in [first, second] {
        // One that joined may have missed an event.
        w.send(link, 5, Opcode::AsyncEvent, 0, &[]);
        let said = w.answer(link, 5).map(|said| said.value);
        assert_eq!(said, (link == second).then_some(changed));
    }
    w.send(second, 6, Opcode::AsyncEvent, 0, &[]);
    assert_eq!(w.answer(second, 6), None);
    w.core.volume_changed(VolumeIndex(0));
    w.carry_out();
    assert_eq!(w.answer(first, 5).map(|said| said.value), Some(changed));
    assert_eq!(w.answer(second, 6).map(|said| said.value), Some(changed));
    w.core.drain(w.now);
    for link in [first, second] {
        w.send(link, 7, Opcode::AsyncEvent, 0, &[]);
        let said = w.answer(link, 7).map(|said| said.value);
        assert_eq!(said, Some(AsyncEvent::Draining as u32));
    }
}
