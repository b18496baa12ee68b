//! Sessions, epochs, the drain.

use super::*;

#[test]
fn of_two_epochs_in_a_row_the_newer_is_answered() {
    let mut w = World::new();
    let first = w.session(1);
    let queue = w.queue(first, 0);
    let second = w.connect(ConnectionKind::Admin, first.id, Epoch(2)).unwrap();
    assert!(!w.is_dying(first) && !w.is_dying(queue));
    assert_eq!(w.log_in(second, 1, 1), None, "connections of epoch 1 are there");
    assert!(w.is_dying(first) && w.is_dying(queue));
    let third = w.connect(ConnectionKind::Admin, first.id, Epoch(3)).unwrap();
    assert!(!w.is_dying(second));
    assert_eq!(w.log_in(third, 2, 1), None);
    assert!(w.is_dying(second));
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
    assert_eq!(w.open(stranger, 2, exclusive(0)).unwrap().status, Status::NotReady);
    w.send(stranger, 3, Opcode::Login, 0, b"short");
    assert_eq!(w.answer(stranger, 3).unwrap().status, Status::InvalidField);
    assert_eq!(w.log_in(stranger, 1, 1), None);
    assert_eq!(w.open(first, 2, exclusive(0)).unwrap().status, Status::Fenced, "of an old epoch");
    assert_eq!(
        w.connect(ConnectionKind::Admin, first.id, Epoch(u32::MAX)),
        Err(RejectReason::NoSuchSession),
        "no epoch could follow"
    );
}

#[test]
fn a_session_is_not_superseded_without_proof() {
    let mut w = World::new();
    let first = w.session(1);
    let queue = w.queue(first, 0);
    assert_eq!(w.open(first, 1, exclusive(0)).unwrap().status, Status::Ok);
    let told = w.notices.len();
    // One that has learned the id, and says whatever it likes.
    let thief = w.connect(ConnectionKind::Admin, first.id, Epoch(9)).unwrap();
    for (tag, opcode) in
        [Opcode::OpenVolume, Opcode::Logout, Opcode::ListVolumes, Opcode::AsyncEvent]
            .into_iter()
            .enumerate()
    {
        let tag = u16::try_from(tag).unwrap();
        w.send(thief, tag, opcode, 0, &exclusive(0).to_wire());
        assert_eq!(w.answer(thief, tag).unwrap().status, Status::NotReady, "{opcode:?}");
    }
    assert_eq!(w.log_in(thief, 9, 2).unwrap().status, Status::NoSuchSession, "of another host");
    w.bury(thief);
    assert!(!w.is_dying(first) && !w.is_dying(queue));
    assert_eq!(w.notices.len(), told);
    assert_eq!(w.core.sessions().get(first.session).unwrap().epoch, Epoch(1));
    assert_eq!(w.writable(first.session), [0]);
    // Of two that name one epoch, the first LOGIN has it.
    let (a, b) = (
        w.connect(ConnectionKind::Admin, first.id, Epoch(2)).unwrap(),
        w.connect(ConnectionKind::Admin, first.id, Epoch(2)).unwrap(),
    );
    assert_eq!(w.log_in(b, 1, 1), None, "the older connections are there");
    assert_eq!(w.log_in(a, 1, 1).unwrap().status, Status::NoSuchSession);
    w.bury(a);
    w.bury(queue);
    w.bury(first);
    assert_eq!(w.answer(b, 1).unwrap().status, Status::Ok, "and the other changed nothing");
}

#[test]
fn strangers_fill_only_their_own_places() {
    let mut w = World::new();
    let resident = w.session(1);
    let asked = |w: &World| HelloRequest {
        kind: ConnectionKind::Admin,
        session: SessionId::default(),
        epoch: Epoch(0),
        ..w.hello()
    };
    let from = |w: &mut World, peer: &str| {
        let asked = asked(w);
        w.made += 1;
        w.knock(&asked, peer, SessionId([0xdd; 16]))
    };
    let mut strangers = Vec::new();
    for address in 0..4 {
        for port in 0..16 {
            strangers.push(from(&mut w, &format!("tcp://10.0.0.{address}:{port}")).unwrap());
        }
        if address < 3 {
            let refused = from(&mut w, &format!("tcp://10.0.0.{address}:99")).unwrap_err();
            assert_eq!(refused.reason, RejectReason::Crowded);
            assert!(refused.text.contains("16 connections of your address"), "{}", refused.text);
        }
    }
    let refused = from(&mut w, "tcp://10.0.1.1:1").unwrap_err();
    assert!(refused.text.starts_with("64 connections"), "{}", refused.text);
    assert!(refused.text.len() <= rblk_protocol::limits::REJECT_TEXT_BYTES, "it would be cut");
    // They have no session, and keep nobody from theirs.
    assert_eq!(w.core.sessions().iter().count(), 1);
    w.queue(resident, 0);
    assert_eq!(w.open(resident, 1, exclusive(0)).unwrap().status, Status::Ok);
    // Their time ends whatever they say.
    w.pass(STRANGER_TIME);
    strangers.iter().for_each(|stranger| w.send(*stranger, 1, Opcode::ListVolumes, 0, &[]));
    w.pass(Duration::from_millis(1));
    assert!(strangers.iter().all(|stranger| w.is_dying(*stranger)));
    w.bury_the_dying();
    assert_eq!(w.core.strangers(), 0);
    w.session(2);
}

#[test]
fn a_full_table_of_sessions_is_told_at_login_too() {
    let mut w = World::new();
    let links: Vec<_> = (0..9)
        .map(|_| w.connect(ConnectionKind::Admin, SessionId::default(), Epoch(0)).unwrap())
        .collect();
    for link in &links[..8] {
        assert_eq!(w.log_in(*link, 1, 1).unwrap().status, Status::Ok);
    }
    let said = w.log_in(links[8], 1, 1).unwrap();
    assert_eq!(said.status, Status::LimitReached);
    assert!(said.text().contains("sessions_max"), "{}", said.text());
    assert_eq!(
        w.connect(ConnectionKind::Admin, SessionId::default(), Epoch(0)),
        Err(RejectReason::LimitReached)
    );
}

#[test]
fn a_session_keeps_to_its_budget() {
    let mut w = World::new();
    let a = w.session(1);
    let b = w.session(2);
    let refused = |w: &mut World, link: Link, queue| {
        let kind = ConnectionKind::Io { queue };
        let asked = HelloRequest { kind, session: link.id, epoch: link.epoch, ..w.hello() };
        w.knock(&asked, "peer", SessionId::default()).unwrap_err()
    };
    // Connections: every queue, and the admin connection.
    let queues: Vec<_> = (0..64).map(|queue| w.queue(a, queue)).collect();
    let text = refused(&mut w, a, 64).text;
    assert!(text.starts_with("65 connections") && text.ends_with("(connections_max)"), "{text}");
    w.bury(queues[7]);
    w.queue(a, 7);
    // Memory.
    w.memory_bytes = 200 << 20;
    let first = w.queue(b, 0);
    w.queue(b, 1);
    let text = refused(&mut w, b, 2).text;
    assert!(text.starts_with("512 MiB") && text.contains("(memory_max)"), "{text}");
    w.bury(first);
    w.queue(b, 2);
}

#[test]
fn a_promise_of_heart_beats_has_an_end() {
    let mut w = World::new();
    let link = w.connect(ConnectionKind::Admin, SessionId::default(), Epoch(0)).unwrap();
    let login =
        LoginRequest { host: HostId([1; 16]), host_name: host_name(1), keep_alive_ms: u32::MAX };
    w.send(link, 1, Opcode::Login, 0, &login.to_wire());
    assert_eq!(w.silences, [Duration::from_secs(4 * 300 + 2)]);
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
