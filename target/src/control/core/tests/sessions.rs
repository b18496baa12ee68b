//! Sessions, epochs, the drain.

use super::*;

#[test]
fn of_two_epochs_in_a_row_the_newer_is_answered() {
    let mut w = World::new();
    let first = w.session(1);
    let queue = w.queue(first, 0);
    let second = w.connect(ConnectionKind::Admin, first.id, Epoch(2)).unwrap();
    assert!(w.is_dying(first) && w.is_dying(queue));
    assert_eq!(w.log_in(second, 1, 1), None, "connections of epoch 1 are there");
    let third = w.connect(ConnectionKind::Admin, first.id, Epoch(3)).unwrap();
    assert!(w.is_dying(second));
    assert_eq!(w.log_in(third, 2, 1), None);
    w.bury(first);
    w.bury(second);
    assert_eq!(w.replies, []);
    w.bury(queue);
    let said = w.answer(third, 2).expect("nothing older is left");
    assert_eq!(LoginReply::from_wire(&said.payload).unwrap().epoch, Epoch(3));
    assert_eq!(w.replies, [], "epoch 2 is told nothing");
    assert_eq!(
        w.connect(ConnectionKind::Io { queue: 0 }, first.id, Epoch(2)),
        Err(RejectReason::StaleEpoch)
    );
    w.queue(third, 0);
}

#[test]
fn a_login_whose_connection_died_opens_nothing() {
    let mut w = World::new();
    let first = w.session(1);
    let queue = w.queue(first, 0);
    let second = w.connect(ConnectionKind::Admin, first.id, Epoch(2)).unwrap();
    assert_eq!(w.log_in(second, 1, 1), None);
    w.bury(second);
    w.bury(first);
    w.bury(queue);
    assert_eq!(w.replies, []);
    assert_eq!(
        w.connect(ConnectionKind::Io { queue: 0 }, first.id, Epoch(2)),
        Err(RejectReason::NoSuchSession),
        "nobody logged in in that epoch"
    );
}

#[test]
fn a_login_that_waits_too_long_is_told() {
    let mut w = World::new();
    let first = w.session(1);
    let second = w.connect(ConnectionKind::Admin, first.id, Epoch(2)).unwrap();
    assert_eq!(w.log_in(second, 1, 1), None);
    assert_eq!(w.log_in(second, 2, 1).unwrap().status, Status::NotReady, "one at a time");
    w.pass(Duration::from_secs(30));
    assert_eq!(w.replies, []);
    w.pass(Duration::from_secs(1));
    assert_eq!(w.answer(second, 1).unwrap().status, Status::TimedOut);
    assert_eq!(w.log_in(second, 3, 1), None, "it may ask again");
    w.bury(first);
    assert_eq!(w.answer(second, 3).unwrap().status, Status::Ok);
}

#[test]
fn time_matters_only_where_something_may_be_over() {
    let mut w = World::new();
    assert!(!w.core.needs_ticks(), "nobody is there");
    let first = w.session(1);
    assert_eq!(w.open(first, 1, exclusive(0)).unwrap().status, Status::Ok);
    w.write_all();
    assert!(!w.core.needs_ticks(), "a session with nothing to do");
    // It waits for the connections of the epoch before.
    let second = w.connect(ConnectionKind::Admin, first.id, Epoch(2)).unwrap();
    assert_eq!(w.log_in(second, 1, 1), None);
    assert!(w.core.needs_ticks());
    w.bury(first);
    assert!(!w.core.needs_ticks());
    // Lost: it is kept for the lease.
    w.bury(second);
    assert!(w.core.needs_ticks());
    w.pass(LEASE + Duration::from_secs(1));
    w.write_all();
    assert!(!w.core.needs_ticks());
    let third = w.session(1);
    w.core.drain(w.now);
    assert!(w.core.needs_ticks());
    w.log_out(third);
    w.bury(third);
    assert!(!w.core.needs_ticks(), "it stopped");
}

#[test]
fn who_may_log_in() {
    let mut w = World::new();
    let first = w.session(1);
    assert_eq!(w.log_in(first, 1, 1).unwrap().status, Status::NotReady, "it has");
    let stranger = w.connect(ConnectionKind::Admin, first.id, Epoch(2)).unwrap();
    assert_eq!(w.log_in(stranger, 1, 2).unwrap().status, Status::NoSuchSession);
    assert_eq!(w.open(stranger, 2, exclusive(0)).unwrap().status, Status::NotReady);
    assert_eq!(w.open(first, 2, exclusive(0)).unwrap().status, Status::Fenced, "of an old epoch");
    w.send(stranger, 3, Opcode::Login, 0, b"short");
    assert_eq!(w.answer(stranger, 3).unwrap().status, Status::InvalidField);
    assert_eq!(
        w.connect(ConnectionKind::Admin, first.id, Epoch(u32::MAX)),
        Err(RejectReason::NoSuchSession),
        "no epoch could follow"
    );
}

#[test]
fn a_connection_that_could_not_be_made_leaves_nothing() {
    let mut w = World::new();
    let link = w.connect(ConnectionKind::Admin, SessionId::default(), Epoch(0)).unwrap();
    w.bury(link);
    assert_eq!(w.core.sessions().iter().count(), 0);
    let admin = w.session(1);
    let queue = w.queue(admin, 3);
    assert_eq!(
        w.connect(ConnectionKind::Io { queue: 3 }, admin.id, admin.epoch),
        Err(RejectReason::DuplicateQueue)
    );
    w.bury(queue);
    w.queue(admin, 3);
}

#[test]
fn queues_do_not_outlive_their_admin_connection() {
    let mut w = World::new();
    let admin = w.session(1);
    let queue = w.queue(admin, 0);
    w.bury(admin);
    assert!(w.is_dying(queue));
}

#[test]
fn a_drain_tells_and_waits() {
    let mut w = World::new();
    let (a, b) = (w.session(1), w.session(2));
    for tag in 1..=4 {
        w.send(a, tag, Opcode::AsyncEvent, 0, &[]);
    }
    w.send(a, 5, Opcode::AsyncEvent, 0, &[]);
    assert_eq!(w.answer(a, 5).unwrap().status, Status::LimitReached);
    assert_eq!(w.core.drain_state(w.now), None);
    w.core.drain(w.now);
    w.carry_out();
    let told: Vec<_> = w.replies.drain(..).map(|s| (s.to, s.tag, s.status, s.value)).collect();
    let expected: Vec<_> = (1..=4).map(|tag| (a.at, Tag(tag), Status::Ok, 1)).collect();
    assert_eq!(told, expected);
    w.send(b, 1, Opcode::AsyncEvent, 0, &[]);
    assert_eq!(w.answer(b, 1).unwrap().value, 1, "at once");
    for (link, tag) in [(a, 6), (b, 2)] {
        w.send(link, tag, Opcode::AsyncEvent, 0, &[]);
        assert_eq!(w.answer(link, tag), None, "it was told, and would ask for ever");
    }
    assert_eq!(
        w.connect(ConnectionKind::Admin, SessionId::default(), Epoch(0)),
        Err(RejectReason::ShuttingDown)
    );
    w.pass(Duration::from_secs(4));
    let state = w.core.drain_state(w.now).unwrap();
    assert_eq!((state.lasted.as_secs(), state.left.as_secs(), state.sessions), (4, 6, 2));
    w.bury(a);
    assert!(!w.stopped);
    w.core.drain(w.now);
    w.bury(b);
    assert!(w.stopped);
    w.pass(DRAIN);
}

#[test]
fn a_session_that_came_back_just_before_a_drain_is_told_too() {
    let mut w = World::new();
    let old = w.session(1);
    w.send(old, 1, Opcode::AsyncEvent, 0, &[]);
    let new = w.connect(ConnectionKind::Admin, old.id, Epoch(2)).unwrap();
    assert_eq!(w.log_in(new, 1, 1), None);
    w.core.drain(w.now);
    w.carry_out();
    assert_eq!(w.answer(old, 1).unwrap().value, 1);
    w.bury(old);
    assert_eq!(w.answer(new, 1).unwrap().status, Status::Ok);
    w.send(new, 2, Opcode::AsyncEvent, 0, &[]);
    assert_eq!(w.answer(new, 2).unwrap().value, 1);
}

#[test]
fn a_drain_does_not_wait_for_ever() {
    let mut w = World::new();
    w.session(1);
    w.core.drain(w.now);
    w.pass(DRAIN);
    assert!(!w.stopped);
    w.pass(Duration::from_millis(500));
    assert!(w.stopped);
    assert_eq!(w.core.drain_state(w.now).unwrap().left, Duration::ZERO);
}
