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
fn a_login_that_waits_too_long_times_out() {
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
fn ticks_are_needed_only_while_a_wait_may_end() {
    let mut w = World::new();
    assert!(!w.core.needs_ticks(), "nobody is there");
    let first = w.session(1);
    assert_eq!(w.open(first, 1, exclusive(0)).unwrap().status, Status::Ok);
    w.write_all();
    assert!(!w.core.needs_ticks(), "a session with nothing to do");
    // The LOGIN waits for the connections of the epoch before.
    let second = w.connect(ConnectionKind::Admin, first.id, Epoch(2)).unwrap();
    assert_eq!(w.log_in(second, 1, 1), None);
    assert!(w.core.needs_ticks());
    w.bury(first);
    assert!(!w.core.needs_ticks());
    // A lost session is kept for the lease.
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
    // A thief that has learned the id of the session.
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
    assert_eq!(w.core.sessions().get(first.session).unwrap().newest, Epoch(1));
    assert_eq!(w.writable(first.session), [0]);
    // Of two connections that name one epoch, the first LOGIN gets it.
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

impl World {
    /// A connect request of a stranger from that address.
    fn stranger_from(&mut self, peer: &str) -> Result<Link, ConnectRefusal> {
        let (kind, session, epoch) = (ConnectionKind::Admin, SessionId::default(), Epoch(0));
        let asked = HelloRequest { kind, session, epoch, ..self.hello() };
        self.made += 1;
        let mut fresh = [0xdd; 16];
        fresh[..4].copy_from_slice(&self.made.to_le_bytes());
        self.knock(&asked, peer, SessionId(fresh))
    }
}

#[test]
fn strangers_fill_only_their_own_places() {
    let mut w = World::new();
    let resident = w.session(1);
    let strangers: Vec<Link> =
        (0..64).map(|n| w.stranger_from(&format!("tcp://10.0.0.1:{n}")).unwrap()).collect();
    // The crowd fills only its own places, and one may come again in a moment.
    let refused = w.stranger_from("tcp://10.0.0.1:99").unwrap_err();
    assert_eq!(refused.reason, RejectReason::Crowded);
    assert!(refused.text.len() <= rblk_protocol::limits::REJECT_TEXT_BYTES, "it would be cut");
    // Strangers have no session, and take no place of a member.
    assert_eq!(w.core.sessions().iter().count(), 1);
    w.queue(resident, 0);
    assert_eq!(w.open(resident, 1, exclusive(0)).unwrap().status, Status::Ok);
    // Their time ends in spite of their commands.
    w.pass(STRANGER_TIME);
    strangers.iter().for_each(|stranger| w.send(*stranger, 1, Opcode::ListVolumes, 0, &[]));
    w.pass(Duration::from_millis(1));
    assert!(strangers.iter().all(|stranger| w.is_dying(*stranger)));
    w.bury_the_dying();
    assert_eq!(w.core.strangers(), 0);
    w.session(2);
}

#[test]
fn a_known_host_logs_in_while_strangers_fill_every_place() {
    let mut w = World::new();
    // From many addresses, and at once again when one has to go.
    let mut made = 0;
    let mut come = |w: &mut World| {
        made += 1;
        w.stranger_from(&format!("tcp://10.0.{}.1:{made}", made % 64))
    };
    for _ in 0..64 {
        come(&mut w).unwrap();
    }
    for round in 0..100 {
        let host = w.stranger_from("tcp://192.0.2.7:1").expect("a place");
        for _ in 0..20 {
            // With or without a place.
            let _ = come(&mut w);
            w.bury_the_dying();
        }
        w.now += Duration::from_millis(5);
        let said = w.log_in(host, 1, 7).expect("an answer");
        assert_eq!(said.status, Status::Ok, "{round}");
        assert!(w.core.strangers() <= 64);
        w.log_out(host);
        w.bury(host);
    }
}

#[test]
fn mounts_of_one_host_that_come_at_once_wait_for_each_other() {
    let mut w = World::with_sessions(1024);
    let (mut waiting, mut logged_in) = (200, 0);
    let mut logging_in: Vec<Link> = Vec::new();
    while logged_in < 200 {
        // A mount without a place comes again and again.
        for port in 0..waiting {
            match w.stranger_from(&format!("tcp://192.0.2.7:{port}")) {
                Ok(link) => logging_in.push(link),
                Err(refused) => assert_eq!(refused.reason, RejectReason::Crowded),
            }
        }
        waiting = 200 - logged_in - logging_in.len();
        // A way so long that the target is slower than that.
        w.now += Duration::from_millis(300);
        assert!(logging_in.iter().all(|link| !w.is_dying(*link)), "after {logged_in}");
        for link in logging_in.drain(..20.min(logging_in.len())) {
            assert_eq!(w.log_in(link, 1, 7).unwrap().status, Status::Ok);
            logged_in += 1;
        }
    }
}

#[test]
fn a_crowd_of_one_address_does_not_end_a_host_far_away() {
    let mut w = World::new();
    let crowd = |w: &mut World| {
        (0..100).filter_map(|n| w.stranger_from(&format!("tcp://10.0.0.1:{n}")).ok()).collect()
    };
    let mut young: Vec<Link> = crowd(&mut w);
    let host = w.stranger_from("tcp://192.0.2.7:1").expect("a place");
    w.bury_the_dying();
    // Its proof takes four ways there and back, and the crowd keeps its places young.
    for _ in 0..10 {
        w.now += Duration::from_millis(50);
        young.retain(|link| w.links.contains(link));
        young.drain(..).for_each(|link| w.bury(link));
        young = crowd(&mut w);
        assert!(young.len() >= 63);
    }
    assert_eq!(w.log_in(host, 1, 7).expect("it is there").status, Status::Ok);
}

#[test]
fn a_machine_with_a_network_is_one_stranger() {
    let mut w = World::new();
    let many: Vec<Link> =
        (0..60).map(|n| w.stranger_from(&format!("tcp://[2001:db8::{n:x}]:1")).unwrap()).collect();
    let few: Vec<Link> =
        (0..4).map(|n| w.stranger_from(&format!("tcp://[2001:db8:0:1::{n}]:1")).unwrap()).collect();
    w.now += Duration::from_millis(1);
    for n in 0..8 {
        w.stranger_from(&format!("tcp://192.0.2.{n}:1")).unwrap();
    }
    assert!(many[..8].iter().all(|link| w.is_dying(*link)), "the oldest of the many");
    assert!(!many[8..].iter().chain(&few).any(|link| w.is_dying(*link)));
}

#[test]
fn a_full_table_of_sessions_refuses_a_login_too() {
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

impl World {
    /// A target that allows this many sessions.
    fn with_sessions(sessions: u32) -> Self {
        let (holders, capacity) = (Holders::durable([]), Capacity::new(sessions, None, 64 << 30));
        Self::having(capacity, holders, BTreeMap::new(), Instant::now(), None)
    }

    /// A session of a host at that address, or the refusal.
    fn session_from(&mut self, address: &str) -> Result<Link, Replied> {
        let link = self.stranger_from(&format!("{address}:{}", self.made)).unwrap();
        let said = self.log_in(link, 1, 1).expect("an answer");
        if said.status == Status::Ok {
            return Ok(self.as_it_is(link));
        }
        self.bury(link);
        Err(said)
    }
}

#[test]
fn a_host_has_no_more_than_a_quarter_of_the_sessions() {
    let mut w = World::with_sessions(64);
    let held: Vec<Link> = (0..16).map(|_| w.session_from("10.0.0.1").unwrap()).collect();
    for _ in 0..100 {
        let said = w.session_from("10.0.0.1").unwrap_err();
        assert_eq!(said.status, Status::LimitReached);
        assert!(said.text().starts_with("16 sessions are your limit"), "{}", said.text());
        w.now += Duration::from_millis(100);
    }
    // Other hosts get all of theirs.
    for n in 2..5 {
        for _ in 0..16 {
            w.session_from(&format!("10.0.0.{n}")).unwrap();
        }
    }
    // A host comes back to a session of its own at any count.
    let back = w.connect(ConnectionKind::Admin, held[0].id, Epoch(2)).unwrap();
    assert_eq!(w.log_in(back, 1, 1), None, "the older connection is there");
    w.bury(held[0]);
    assert_eq!(w.answer(back, 1).unwrap().status, Status::Ok);
    w.log_out(held[1]);
    w.bury(held[1]);
    w.session_from("10.0.0.1").unwrap();
}

#[test]
fn two_hundred_mounts_of_one_host_fit_in_the_usual_budget() {
    // The defaults, on a machine of 8 GiB with 131072 files allowed by the unit.
    let capacity = Capacity::new(1024, Some(131_072), 8 << 30);
    let mut w =
        World::having(capacity, Holders::durable([]), BTreeMap::new(), Instant::now(), None);
    for _ in 0..200 {
        // Eight queues of depth 128, with 4 KiB of in-capsule data.
        w.memory_bytes = 160 << 10;
        let admin = w.session_from("10.0.0.1").unwrap();
        w.memory_bytes = 850 << 10;
        for queue in 0..8 {
            w.queue(admin, queue);
        }
    }
    // Another host gets as much.
    let admin = w.session_from("10.0.0.2").unwrap();
    for queue in 0..64 {
        w.queue(admin, queue);
    }
}

#[test]
fn sessions_that_hold_nothing_end_with_their_connections() {
    let mut w = World::with_sessions(64);
    for _ in 0..1000 {
        let link = w.session_from("10.0.0.1").unwrap();
        let queue = w.queue(link, 0);
        w.bury(link);
        assert_eq!(w.core.sessions().iter().count(), 1, "its queue is there");
        w.bury(queue);
        assert_eq!(w.core.sessions().iter().count(), 0);
        assert!(w.notices.contains(&Notice::ForgetSession { session: link.session }));
    }
    // A mount that loses its connection before OPEN logs in anew.
    let lost = w.session_from("10.0.0.1").unwrap();
    w.bury(lost);
    let again = w.connect(ConnectionKind::Admin, lost.id, Epoch(2));
    assert_eq!(again, Err(RejectReason::NoSuchSession));
    let mut mount = w.session_from("10.0.0.1").unwrap();
    assert_eq!(w.open(mount, 2, exclusive(0)).unwrap().status, Status::Ok);
    // A mount that holds a volume comes back, again and again, also at the limit of its host.
    for _ in 1..16 {
        w.session_from("10.0.0.1").unwrap();
    }
    for epoch in 2..5 {
        w.bury(mount);
        w.pass(LEASE - Duration::from_secs(1));
        let back = w.connect(ConnectionKind::Admin, mount.id, Epoch(epoch)).unwrap();
        assert_eq!(w.log_in(back, 1, 1).unwrap().status, Status::Ok);
        mount = w.as_it_is(back);
        assert_eq!(w.core.sessions().get(mount.session).unwrap().opened().count(), 1);
    }
    // After it has closed the volume, there is no session to come back to.
    w.send(mount, 3, Opcode::CloseVolume, 1, &[]);
    assert_eq!(w.answer(mount, 3).unwrap().status, Status::Ok);
    w.bury(mount);
    assert!(w.core.sessions().get(mount.session).is_none());
}

#[test]
fn a_promise_of_heart_beats_has_an_end() {
    let mut w = World::new();
    let link = w.connect(ConnectionKind::Admin, SessionId::default(), Epoch(0)).unwrap();
    let login = LoginRequest { keep_alive_ms: u32::MAX, ..login_of(1) };
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
fn a_drain_sends_the_event_and_waits() {
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
fn a_session_that_came_back_just_before_a_drain_gets_the_event() {
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
