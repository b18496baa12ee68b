//! Hosts that prove their keys, and hosts that do not.

use rblk_config::{HostConfig, Limits};
use rblk_protocol::auth::{
    InitiatorHandshake, InitiatorSeal, PublicKey, QueueKey, SealedReply, SecretKey, SessionSecret,
};
use rblk_protocol::{DropRequest, Join, KeyedDescriptor, VolumeEntry, VolumeListHeader};

use super::*;
use crate::control::core::{AuthConfig, Hosts};

const TARGET: u8 = 100;
const NEXT_TARGET: u8 = 101;

fn secret_key(byte: u8) -> SecretKey {
    SecretKey::from_bytes(&mut [byte; 32])
}

fn key(byte: u8) -> PublicKey {
    secret_key(byte).public()
}

/// A host with the key of that number.
fn entry(number: u8, volumes: &[&str]) -> HostConfig {
    let rights = volumes.iter().map(|right| right.parse().unwrap()).collect();
    HostConfig::new(format!("db{number}"), vec![key(number)], rights)
}

fn hosts(entries: &[HostConfig]) -> Hosts {
    Hosts::new(entries).unwrap()
}

fn world(entries: &[HostConfig]) -> World {
    let auth = AuthConfig { keys: vec![secret_key(TARGET)], hosts: hosts(entries) };
    World::of(Holders::durable([]), BTreeMap::new(), Instant::now(), Some(auth))
}

/// Two hosts with all rights.
fn two() -> World {
    world(&[entry(1, &["*:rw"]), HostConfig { take_over: true, ..entry(2, &["*:rw"]) }])
}

/// The initiator's end of an admin connection that has proven its key.
struct Proven {
    link: Link,
    seal: InitiatorSeal,
    sequence: Sequence,
    secret: Option<SessionSecret>,
}

fn capsule(opcode: Opcode, tag: u16, epoch: Epoch, sequence: Sequence) -> CommandCapsule {
    let buffer = KeyedDescriptor { address: 1 << 20, length: 4096, rkey: 7 };
    let buffer = Some(buffer);
    CommandCapsule { buffer, ..CommandCapsule::new(opcode, Tag(tag), epoch, sequence) }
}

impl World {
    fn say(&mut self, link: Link, command: &CommandCapsule, body: &[u8]) {
        self.core.command(link.at, link.admission, command, body, self.now);
        self.carry_out();
    }

    fn stranger(&mut self, resume: Option<(SessionId, Epoch)>) -> Link {
        let (session, epoch) = resume.unwrap_or_default();
        self.connect(ConnectionKind::Admin, session, epoch).unwrap()
    }

    /// AUTHENTICATE by a host that knows the target by that key. Returns the answer and the
    /// handshake.
    fn authenticate(&mut self, link: Link, host: u8, target: u8) -> (Replied, InitiatorHandshake) {
        let introduction = self.introductions[&link.admission];
        let (own, target) = (secret_key(host), key(target));
        let Introduction { hellos, carrier } = introduction;
        let (handshake, first) =
            InitiatorHandshake::begin(&own, &target, &hellos, carrier).unwrap();
        let command = capsule(Opcode::Authenticate, 1, link.epoch, Sequence(1));
        self.say(link, &command, &first);
        (self.answer(link, 1).expect("an answer"), handshake)
    }

    /// LOGIN after that. The answer comes later.
    fn ask_in(&mut self, link: Link, host: u8) -> Proven {
        self.ask_in_beside(link, host, None)
    }

    fn ask_in_beside(&mut self, link: Link, host: u8, beside: Option<Epoch>) -> Proven {
        let (said, handshake) = self.authenticate(link, host, TARGET);
        assert_eq!(said.status, Status::Ok);
        let login = LoginRequest {
            // A false identity, which the target ignores.
            host: HostId([9; 16]),
            host_name: host_name(9),
            keep_alive_ms: 1000,
            join: beside.map(|beside| Join { beside, ends: None }),
        };
        let sequence = Sequence(2);
        let (third, seal) =
            handshake.finish(&said.payload, &login.to_wire(), sequence).expect("the target");
        self.say(link, &capsule(Opcode::Login, 2, link.epoch, sequence), &third);
        Proven { link, seal, sequence, secret: None }
    }

    /// The target's reply to a command, unchanged on its way.
    fn hear(&mut self, proven: &Proven, tag: u16) -> Option<SealedReply> {
        let said = self.answer(proven.link, tag)?;
        Some(proven.seal.open_reply(proven.sequence, &said.payload).expect("sealed"))
    }

    fn logged_in(&mut self, proven: &mut Proven) -> LoginReply {
        let said = self.hear(proven, 2).expect("an answer");
        assert_eq!(said.status, Status::Ok);
        let (reply, secret) = SessionSecret::from_login_payload(&said.payload).unwrap();
        proven.secret = Some(secret);
        proven.link = self.as_it_is(proven.link);
        reply
    }

    /// A session of a host that has proven its key.
    fn proven(&mut self, host: u8) -> Proven {
        let link = self.stranger(None);
        let mut proven = self.ask_in(link, host);
        let reply = self.logged_in(&mut proven);
        assert_eq!((reply.session, reply.epoch), (proven.link.id, Epoch(1)));
        proven
    }

    /// A sealed command.
    fn tell(&mut self, proven: &mut Proven, opcode: Opcode, body: &[u8]) -> Option<SealedReply> {
        proven.sequence = proven.sequence.next();
        let command = capsule(opcode, 3, proven.link.epoch, proven.sequence);
        let bytes = command.to_wire();
        let sealed = proven.seal.seal_command(proven.sequence, &bytes, body).unwrap();
        self.say(proven.link, &command, &sealed);
        self.hear(proven, 3)
    }

    fn opens(&mut self, proven: &mut Proven, request: OpenRequest) -> (Status, String) {
        let said = self.tell(proven, Opcode::OpenVolume, &request.to_wire()).expect("an answer");
        let len = usize::try_from(said.value).unwrap();
        let text = said.payload.get(..len).unwrap_or_default();
        (said.status, String::from_utf8_lossy(text).into_owned())
    }

    fn lists(&mut self, proven: &mut Proven) -> Vec<Name> {
        let said = self.tell(proven, Opcode::ListVolumes, &[]).expect("an answer");
        let (head, rest) = said.payload.split_at(VolumeListHeader::BYTES);
        let header = VolumeListHeader::from_wire(head).unwrap();
        let entries = rest.chunks_exact(VolumeEntry::BYTES);
        let names: Vec<_> = entries.map(|e| VolumeEntry::from_wire(e).unwrap().name).collect();
        assert_eq!(names.len(), header.total as usize, "the total is what it may see");
        names
    }
}

#[test]
fn the_key_decides_the_host() {
    let mut w = two();
    let mut a = w.proven(1);
    let session = w.core.sessions().get(a.link.session).unwrap();
    assert_eq!(session.host_name.as_str(), "db1", "not what LOGIN claims");
    assert_eq!(w.opens(&mut a, exclusive(0)).0, Status::Ok);
    // The next epoch has another secret.
    let again = w.stranger(Some((a.link.id, Epoch(2))));
    let mut again = w.ask_in(again, 1);
    assert_eq!(w.hear(&again, 2), None, "the older connection is there");
    w.bury(a.link);
    assert_eq!(w.logged_in(&mut again).epoch, Epoch(2));
    let key = |p: &Proven| QueueKey::new(p.secret.as_ref().unwrap(), Epoch(2), 0);
    let introduction = w.introductions[&again.link.admission];
    let (proof, _) = key(&a).prove(&introduction.hellos, Nonce([1; 16]));
    assert!(key(&again).check(&introduction.hellos, proof.as_bytes()).is_err());
}

#[test]
fn each_way_has_its_secret_and_its_key() {
    let keys = |keys: &[u8]| {
        let keys = keys.iter().map(|number| key(*number)).collect();
        HostConfig::new("db1".to_owned(), keys, vec!["*:rw".parse().unwrap()])
    };
    let mut w = World { has_ways: true, ..world(&[keys(&[1, 11])]) };
    let mut a = w.proven(1);
    let second = w.stranger(Some((a.link.id, Epoch(2))));
    let mut second = w.ask_in_beside(second, 11, Some(Epoch(1)));
    w.logged_in(&mut second);
    assert!(!w.is_dying(a.link));
    let [one, two] = [&a, &second].map(|way| {
        let admitted = w.queue(way.link, 0);
        let introduction = w.introductions[&admitted.admission];
        let queue = QueueKey::new(way.secret.as_ref().unwrap(), way.link.epoch, 0);
        let (proof, _) = queue.prove(&introduction.hellos, Nonce([1; 16]));
        (way.link.epoch, introduction.hellos, proof)
    });
    for (epoch, hellos, proof) in [one, two] {
        let secret = w.core.sessions.proofs().secret_of(a.link.session, epoch).unwrap().unwrap();
        assert!(QueueKey::new(&secret, epoch, 0).check(&hellos, proof.as_bytes()).is_ok());
    }
    // DROP is sealed like every command, and the secret of its epoch ends with it.
    let dropped = DropRequest::new(&[Epoch(2)]).unwrap();
    assert!(
        w.tell(&mut a, Opcode::Drop, &dropped.to_wire()).is_none(),
        "its connections are there"
    );
    assert!(w.core.sessions.proofs().secret_of(a.link.session, Epoch(2)).is_err());
    w.bury_the_dying();
    assert_eq!(w.hear(&a, 3).unwrap().status, Status::Ok);
    // A key that is withdrawn ends the session that it let in, by whichever way.
    let third = w.stranger(Some((a.link.id, Epoch(3))));
    let mut third = w.ask_in_beside(third, 11, Some(Epoch(1)));
    w.logged_in(&mut third);
    assert_eq!(w.core.set_hosts(hosts(&[keys(&[11])]), w.now).len(), 1);
    w.carry_out();
    assert!(w.is_dying(a.link) && w.is_dying(third.link));
}

#[test]
fn only_the_host_of_a_session_resumes_it() {
    let mut w = two();
    let mut a = w.proven(1);
    assert_eq!(w.opens(&mut a, exclusive(0)).0, Status::Ok);
    let told = w.notices.len();
    let thief = w.stranger(Some((a.link.id, Epoch(7))));
    let thief = w.ask_in(thief, 2);
    assert_eq!(w.hear(&thief, 2).unwrap().status, Status::NoSuchSession);
    assert!(!w.is_dying(a.link));
    assert_eq!((w.notices.len(), w.writable(a.link.session)), (told, vec![0]));
}

#[test]
fn the_loss_of_a_session_is_reported_under_seal() {
    let mut w = two();
    let mut a = w.proven(1);
    assert_eq!(w.opens(&mut a, exclusive(0)).0, Status::Ok);
    let told = w.notices.len();
    // Unknown, and an epoch that is not higher. At CONNECT, without a proof, the target says
    // nothing of it.
    for resume in [(SessionId([0x77; 16]), Epoch(5)), (a.link.id, Epoch(1)), (a.link.id, Epoch(0))]
    {
        let back = w.stranger(Some(resume));
        let back = w.ask_in(back, 1);
        assert_eq!(w.hear(&back, 2).unwrap().status, Status::NoSuchSession, "{resume:?}");
    }
    assert!(!w.is_dying(a.link));
    assert_eq!((w.notices.len(), w.writable(a.link.session)), (told, vec![0]));
}

#[test]
fn no_connection_passes_without_proof() {
    let mut w = two();
    // A hello without keys.
    w.introduce = false;
    for kind in [ConnectionKind::Admin, ConnectionKind::Io { queue: 0 }] {
        let refused = w.connect(kind, SessionId::default(), Epoch(0)).unwrap_err();
        assert!(matches!(refused, RejectReason::NotAllowed | RejectReason::NoSuchSession));
    }
    w.introduce = true;
    // A LOGIN in the clear, and one out of order.
    let plain = w.stranger(None);
    assert_eq!(w.log_in(plain, 1, 1).unwrap().status, Status::NotAllowed);
    assert!(w.is_dying(plain));
    assert_eq!(w.log_in(plain, 1, 1).unwrap().status, Status::NotAllowed);
    assert_eq!(w.core.decisions().unproven, 1, "it is told of once");
    assert_eq!(w.core.sessions().iter().count(), 0);
    // Commands in the clear, or sealed and changed, in a proven session.
    for change in [false, true] {
        let mut a = w.proven(1);
        a.sequence = a.sequence.next();
        let command = capsule(Opcode::Logout, 3, Epoch(1), a.sequence);
        let mut body = a.seal.seal_command(a.sequence, &command.to_wire(), &[]).unwrap();
        if change {
            body[3] ^= 1
        } else {
            body.clear()
        }
        w.say(a.link, &command, &body);
        assert_eq!(w.answer(a.link, 3), None);
        assert!(w.is_dying(a.link), "changed: {change}");
        assert_eq!(w.core.sessions().get(a.link.session).unwrap().leave(), None);
    }
    // A command twice.
    let mut a = w.proven(1);
    a.sequence = a.sequence.next();
    let command = capsule(Opcode::ListVolumes, 3, Epoch(1), a.sequence);
    let body = a.seal.seal_command(a.sequence, &command.to_wire(), &[]).unwrap();
    w.say(a.link, &command, &body);
    assert!(w.answer(a.link, 3).is_some() && !w.is_dying(a.link));
    w.say(a.link, &command, &body);
    assert!(w.answer(a.link, 3).is_none() && w.is_dying(a.link));
}

#[test]
fn an_event_is_a_hint_in_the_clear() {
    let mut w = two();
    let a = w.proven(1);
    let command = capsule(Opcode::AsyncEvent, 5, Epoch(1), Sequence(99));
    w.say(a.link, &command, &[]);
    assert!(w.answer(a.link, 5).is_none() && !w.is_dying(a.link), "it is parked");
    w.core.drain(w.now);
    w.carry_out();
    let said = w.answer(a.link, 5).unwrap();
    assert_eq!((said.status, said.payload.len()), (Status::Ok, 0));
}

#[test]
fn a_wrong_revoked_or_rotated_out_key() {
    let mut w = two();
    // The key belongs to no host: it is refused, in the clear, and the connection ends.
    let link = w.stranger(None);
    let unknown = w.ask_in(link, 3);
    let said = w.answer(unknown.link, 2).unwrap();
    assert_eq!((said.status, said.payload.len()), (Status::NotAllowed, 0));
    assert!(w.is_dying(link));
    assert_eq!((w.core.sessions().iter().count(), w.core.decisions().unproven), (0, 1));
    // A revoked host loses its sessions and volumes at once.
    let (mut a, mut b) = (w.proven(1), w.proven(2));
    let queue = w.queue(a.link, 0);
    assert!(w.prove(queue));
    assert_eq!(w.opens(&mut a, exclusive(0)).0, Status::Ok);
    assert_eq!(w.opens(&mut b, exclusive(0)).0, Status::InUse);
    let only_two = [HostConfig { take_over: true, ..entry(2, &["*:rw"]) }];
    assert_eq!(w.core.set_hosts(hosts(&only_two), w.now), [Name::new("db1").unwrap()]);
    w.carry_out();
    assert!(w.is_dying(a.link) && w.is_dying(queue) && !w.is_dying(b.link));
    assert_eq!(w.writable(a.link.session), [0_u16; 0]);
    assert_eq!(w.tell(&mut a, Opcode::ListVolumes, &[]).unwrap().status, Status::NotAllowed);
    for resume in [Some((a.link.id, Epoch(2))), None] {
        let again = w.stranger(resume);
        let again = w.ask_in(again, 1);
        assert_eq!(w.answer(again.link, 2).unwrap().status, Status::NotAllowed);
    }
    // The next holder waits for commands under way.
    let open = exclusive(0).to_wire();
    assert_eq!(w.tell(&mut b, Opcode::OpenVolume, &open), None);
    w.bury_the_dying();
    assert_eq!(w.hear(&b, 3).unwrap().status, Status::Ok);
    assert!(w.core.sessions().get(a.link.session).is_none());
    // Two keys during a rotation; then the old one is out, with the sessions that proved it.
    let both = HostConfig { keys: vec![key(2), key(4)], ..entry(2, &["*:rw"]) };
    assert_eq!(w.core.set_hosts(hosts(&[both]), w.now), []);
    let mut c = w.proven(4);
    let host = |w: &World, p: &Proven| w.core.sessions().get(p.link.session).unwrap().host;
    assert_eq!(host(&w, &b), host(&w, &c), "one host");
    let new = HostConfig { keys: vec![key(4)], ..entry(2, &["*:rw"]) };
    assert_eq!(w.core.set_hosts(hosts(&[new]), w.now), [Name::new("db2").unwrap()]);
    w.carry_out();
    assert!(w.is_dying(b.link) && !w.is_dying(c.link));
    assert_eq!(w.opens(&mut c, exclusive(1)).0, Status::Ok);
    // The key in another entry is another host.
    let other = HostConfig { name: "other".to_owned(), keys: vec![key(4)], ..entry(2, &["*:rw"]) };
    assert_eq!(w.core.set_hosts(hosts(&[other]), w.now), [Name::new("db2").unwrap()]);
}

#[test]
fn the_poll_groups_hear_of_the_limits_of_hosts() {
    let limited =
        |iops| HostConfig { limits: Limits { iops, ..Limits::default() }, ..entry(1, &["*:rw"]) };
    let mut w = world(&[limited(Some(1000)), entry(2, &["*:rw"])]);
    let (a, b, _) = (w.proven(1), w.proven(1), w.proven(2));
    let told = std::mem::take(&mut w.limits);
    let sessions: Vec<_> = told.iter().map(|(session, _)| *session).collect();
    assert_eq!(sessions, [a.link.session, b.link.session], "nothing of a host without a limit");
    let (first, second) = (told[0].1.as_ref().unwrap(), told[1].1.as_ref().unwrap());
    assert!(Arc::ptr_eq(first, second), "they share one limit");
    // Unchanged limits keep their use; other limits begin anew.
    for (iops, is_same) in [(Some(1000), Some(true)), (Some(20), Some(false)), (None, None)] {
        assert_eq!(w.core.set_hosts(hosts(&[limited(iops), entry(2, &["*:rw"])]), w.now), []);
        w.carry_out();
        let told = std::mem::take(&mut w.limits);
        assert_eq!(told.len(), 2);
        for (_, limits) in told {
            assert_eq!(limits.map(|limits| Arc::ptr_eq(first, &limits)), is_same);
        }
    }
}

#[test]
fn an_acl_bounds_open_list_and_take_over() {
    let mut w = world(&[entry(1, &["v0:rw", "v1:ro"]), entry(2, &["v1:rw"]), entry(3, &["*:rw"])]);
    let (mut a, mut b, mut c) = (w.proven(1), w.proven(2), w.proven(3));
    let names = |w: &mut World, p: &mut Proven| {
        w.lists(p).iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(names(&mut w, &mut a), "v0 v1");
    assert_eq!(names(&mut w, &mut b), "v1");
    assert_eq!(names(&mut w, &mut c), "v0 v1");
    // A hidden volume does not exist for a host, even while another host has it.
    assert_eq!(w.opens(&mut c, exclusive(0)).0, Status::Ok);
    let hidden = w.opens(&mut b, exclusive(0));
    let nothing = OpenRequest { name: Name::new("nothing").unwrap(), ..exclusive(0) };
    assert_eq!(hidden, w.opens(&mut b, nothing));
    assert_eq!(hidden, (Status::NoSuchVolume, String::new()));
    // A volume that the host may only read.
    for mode in [AccessMode::Exclusive, AccessMode::Shared] {
        let (status, text) = w.opens(&mut a, open_as(1, mode));
        assert!(status == Status::NotAllowed && text.contains("v1:ro"), "{status:?} {text}");
    }
    assert_eq!(w.opens(&mut a, open_as(1, AccessMode::ReadOnly)).0, Status::Ok);
    // A host without the right to take over. A host that may open the volume learns the name of its
    // holder.
    let (status, text) = w.opens(&mut a, taking_over(0));
    assert!(status == Status::NotAllowed && text.contains("take_over"), "{status:?} {text}");
    let (status, text) = w.opens(&mut a, exclusive(0));
    assert!(status == Status::InUse && text.contains("db3"), "{status:?} {text}");
    assert_eq!(w.core.decisions().take_overs, 0);
    assert_eq!(w.writable(c.link.session), [0]);
    // Withdrawn rights close the volumes that they had opened, and no others.
    assert_eq!(w.opens(&mut c, exclusive(1)).0, Status::Ok);
    let less = [entry(1, &["v0:rw"]), entry(2, &["v1:rw"]), entry(3, &["v0:rw", "v1:ro"])];
    assert_eq!(w.core.set_hosts(hosts(&less), w.now), []);
    w.carry_out();
    assert_eq!(w.writable(c.link.session), [0]);
    let closed = Notice::Close {
        session: a.link.session,
        volume: VolumeIndex(1),
        refusal: Status::NotAllowed,
    };
    assert!(w.notices.contains(&closed));
    assert!(!w.is_dying(a.link));
    assert_eq!(names(&mut w, &mut a), "v0");
}

#[test]
fn a_right_that_is_withdrawn_meanwhile_opens_nothing() {
    let mut w = two();
    let mut a = w.proven(1);
    w.slow_disk = true;
    let open = exclusive(0).to_wire();
    assert_eq!(w.tell(&mut a, Opcode::OpenVolume, &open), None);
    w.core.set_hosts(hosts(&[entry(1, &["v1:rw"])]), w.now);
    w.carry_out();
    assert_eq!(w.hear(&a, 3).unwrap().status, Status::NotAllowed);
    w.write_all();
    assert_eq!(w.writable(a.link.session), [0_u16; 0]);
    assert!(w.core.sessions().writer(VolumeIndex(0)).is_none());
}

#[test]
fn a_target_with_another_key_fences_no_host() {
    let mut w = two();
    let mut a = w.proven(1);
    assert_eq!(w.opens(&mut a, exclusive(0)).0, Status::Ok);
    let told = w.notices.len();
    // The host comes back to a target that it knows by another key.
    let back = w.stranger(Some((a.link.id, Epoch(2))));
    let (said, _) = w.authenticate(back, 1, NEXT_TARGET);
    assert_eq!((said.status, said.payload.len()), (Status::NotAllowed, 0));
    assert!(w.is_dying(back) && !w.is_dying(a.link));
    assert_eq!((w.notices.len(), w.writable(a.link.session)), (told, vec![0]));
    // During a rotation the target is known by both keys.
    let keys = vec![secret_key(NEXT_TARGET), secret_key(TARGET)];
    let auth = AuthConfig { keys, hosts: hosts(&[entry(1, &["*:rw"])]) };
    let mut w = World::of(Holders::durable([]), BTreeMap::new(), Instant::now(), Some(auth));
    for target in [TARGET, NEXT_TARGET] {
        let link = w.stranger(None);
        assert_eq!(w.authenticate(link, 1, target).0.status, Status::Ok);
    }
}

#[test]
fn a_queue_that_has_proven_nothing_keeps_nothing() {
    let mut w = two();
    let a = w.proven(1);
    let from = |w: &mut World, peer: &str, queue| {
        w.made += 1;
        let kind = ConnectionKind::Io { queue };
        let asked = HelloRequest { kind, session: a.link.id, epoch: Epoch(1), ..w.hello() };
        w.knock(&asked, peer, SessionId::default())
    };
    // Any peer may name the session. From other addresses they take the places of strangers.
    let foreign: Vec<Link> =
        (0..64).map(|n| from(&mut w, &format!("tcp://10.0.0.9:{n}"), 0).unwrap()).collect();
    let refused = from(&mut w, "tcp://10.0.0.9:99", 0).unwrap_err();
    assert_eq!(refused.reason, RejectReason::Crowded);
    assert_eq!(w.core.sessions().get(a.link.session).unwrap().connections(), 1);
    // The connection with the proof gets the number.
    let peer = w.core.sessions().get(a.link.session).unwrap().peer.clone();
    let own = from(&mut w, &peer, 0).unwrap();
    w.core.proved(own.at, own.admission, w.now);
    w.carry_out();
    assert_eq!(from(&mut w, &peer, 0).unwrap_err().reason, RejectReason::DuplicateQueue);
    // A second connection with the secret is one too many.
    let late = foreign[0];
    w.core.proved(late.at, late.admission, w.now);
    w.carry_out();
    assert!(w.is_dying(late) && !w.is_dying(own));
    // The next epoch waits for all of them: a proof may be on its way.
    let next = w.stranger(Some((a.link.id, Epoch(2))));
    let mut next = w.ask_in(next, 1);
    assert!(foreign.iter().all(|link| w.is_dying(*link)));
    w.bury(a.link);
    w.bury(own);
    assert_eq!(w.hear(&next, 2), None);
    w.bury_the_dying();
    w.logged_in(&mut next);
    // A session without its admin connection takes no queues.
    w.bury(next.link);
    let asked = HelloRequest {
        kind: ConnectionKind::Io { queue: 1 },
        session: a.link.id,
        epoch: Epoch(2),
        ..w.hello()
    };
    assert!(w.knock(&asked, &peer, SessionId::default()).is_err());
}

impl World {
    /// A connect request of a queue of a session.
    fn join_from(&mut self, peer: &str, admin: Link, queue: u16) -> Result<Link, ConnectRefusal> {
        self.made += 1;
        let (kind, session, epoch) = (ConnectionKind::Io { queue }, admin.id, admin.epoch);
        let asked = HelloRequest { kind, session, epoch, ..self.hello() };
        self.knock(&asked, peer, SessionId::default())
    }

    /// A queue has proven that it is of its session.
    fn prove(&mut self, queue: Link) -> bool {
        let booked = self.core.proved(queue.at, queue.admission, self.now).is_some();
        self.carry_out();
        booked
    }
}

#[test]
fn a_host_keeps_to_its_budget_over_all_its_sessions() {
    let small = HostConfig { connections_max: Some(4), ..entry(1, &["*:rw"]) };
    let mut w = world(&[small, entry(2, &["*:rw"])]);
    let (a, again, b) = (w.proven(1), w.proven(1), w.proven(2));
    // An unproven connection does not count as its own.
    let queues: Vec<Link> = (0..4).map(|queue| w.queue(a.link, queue)).collect();
    let other = w.queue(again.link, 0);
    assert!(w.prove(queues[0]) && w.prove(other));
    let refused = w.join_from("peer", a.link, 9).unwrap_err();
    assert!(refused.text.starts_with("4 connections are your limit"), "{}", refused.text);
    assert!(!w.prove(queues[1]) && w.is_dying(queues[1]) && !w.is_dying(queues[0]));
    // The log has it once in a second.
    assert!(!w.core.lines().owes());
    assert!(!w.prove(queues[3]) && w.core.lines().owes());
    w.bury(other);
    assert!(w.prove(queues[2]), "there is room again");
    for queue in 0..8 {
        let queue = w.queue(b.link, queue);
        assert!(w.prove(queue));
    }
}

#[test]
fn a_host_has_no_more_sessions_than_connections() {
    let small = HostConfig { connections_max: Some(2), ..entry(1, &["*:rw"]) };
    let mut w = world(&[small, entry(2, &["*:rw"])]);
    let (a, _) = (w.proven(1), w.proven(1));
    let refused = |w: &mut World| {
        let link = w.stranger(None);
        let asked = w.ask_in(link, 1);
        let said = w.hear(&asked, 2).expect("an answer");
        w.bury(link);
        (said.status, String::from_utf8_lossy(&said.payload[..said.value as usize]).into_owned())
    };
    for _ in 0..100 {
        let (status, text) = refused(&mut w);
        assert_eq!(status, Status::LimitReached);
        assert!(text.starts_with("2 connections are your limit"), "{text}");
    }
    w.proven(2);
    // A session that lost its connection and holds a volume still counts.
    let mut a = a;
    assert_eq!(w.opens(&mut a, exclusive(0)).0, Status::Ok);
    w.bury(a.link);
    assert_eq!(refused(&mut w).0, Status::LimitReached);
    // Without a limit in its entry, a host has its part of the sessions.
    let mut w = world(&[entry(1, &["*:rw"])]);
    let all: Vec<Proven> = (0..8).map(|_| w.proven(1)).collect();
    w.bury(all[0].link);
    w.proven(1);
}

#[test]
fn a_crashed_host_finds_room_beside_its_kept_sessions() {
    let auth = AuthConfig { keys: vec![secret_key(TARGET)], hosts: hosts(&[entry(1, &["*:ro"])]) };
    let capacity = Capacity::new(32, None, 64 << 30);
    let now = Instant::now();
    let mut w = World::having(capacity, Holders::durable([]), BTreeMap::new(), now, Some(auth));
    let reader = open_as(0, AccessMode::ReadOnly);
    let log_in = |w: &mut World| {
        let link = w.stranger(None);
        let mut proven = w.ask_in(link, 1);
        let said = w.hear(&proven, 2).expect("an answer");
        if said.status != Status::Ok {
            let text = String::from_utf8_lossy(&said.payload[..said.value as usize]).into_owned();
            assert_eq!(said.status, Status::LimitReached);
            assert!(text.len() <= rblk_protocol::limits::REJECT_TEXT_BYTES, "{text}");
            w.bury(link);
            return Err(text);
        }
        proven.link = w.as_it_is(link);
        assert_eq!(w.opens(&mut proven, reader).0, Status::Ok);
        Ok(proven.link)
    };
    // A quarter of the sessions, and all of them lose their connections.
    for _ in 0..2 {
        let links: Vec<Link> = (0..8).map(|_| log_in(&mut w).expect("a quarter")).collect();
        assert_eq!(w.core.sessions().iter().filter(|s| s.connections() > 0).count(), 8);
        let text = log_in(&mut w).unwrap_err();
        assert!(text.contains("your limit"), "{text}");
        links.into_iter().for_each(|link| w.bury(link));
    }
    // Kept sessions are bounded, too, and the lease ends.
    let text = log_in(&mut w).unwrap_err();
    assert!(text.starts_with("16 sessions are your limit"), "{text}");
    w.pass(LEASE + Duration::from_secs(1));
    log_in(&mut w).unwrap();
}

#[test]
fn unproven_joiners_keep_no_queue_of_the_host_out() {
    let small = HostConfig { connections_max: Some(9), ..entry(1, &["*:rw"]) };
    let mut w = world(&[small, entry(2, &["*:rw"])]);
    let a = w.proven(1);
    let own = w.core.sessions().get(a.link.session).unwrap().peer.clone();
    w.memory_bytes = 3 << 20;
    // As many joiners as fit, from its own address and from others, and at once again.
    let mut joined = 0;
    let mut join = |w: &mut World| {
        joined += 1;
        let from =
            if joined % 2 == 0 { own.clone() } else { format!("tcp://10.0.0.{}:1", joined % 64) };
        let _ = w.join_from(&from, a.link, 0);
        w.bury_the_dying();
    };
    (0..400).for_each(|_| join(&mut w));
    let state = |w: &World| {
        let session = w.core.sessions().get(a.link.session).unwrap();
        (session.connections(), session.memory_bytes())
    };
    assert_eq!(state(&w), (1, 1 << 10), "nothing is booked on the host");
    for queue in 0..8 {
        let mine = w.join_from(&own, a.link, queue).expect("a place");
        (0..20).for_each(|_| join(&mut w));
        assert!(w.prove(mine), "{queue}");
    }
    assert_eq!(state(&w), (9, (1 << 10) + 8 * (3 << 20)));
    assert_eq!(w.join_from(&own, a.link, 8).unwrap_err().reason, RejectReason::LimitReached);
    // The joiners are bounded, by memory here, and their memory is free again.
    assert!(w.core.strangers() <= 64 && w.links.len() <= 9 + 170 + 64, "{}", w.links.len());
    let b = w.proven(2);
    w.bury(b.link);
    for link in w.links.clone() {
        w.bury(link);
    }
    assert_eq!(w.core.strangers(), 0);
}
