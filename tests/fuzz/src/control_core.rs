//! The decisions of control. Peers may send anything at any time: connections, admin commands with
//! any body, ends. Time passes, and the disk is slow or fails.
//!
//! Rules: no two sessions may write to an exclusive volume. A LOGIN and a DROP are answered after
//! the last connection of the epochs that they end is gone, and such an epoch never lives again. A
//! holder that the target has announced is durable. Each command of a live connection is answered
//! once, and at the end none waits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_protocol::{
    AccessMode, BlockCount, BlockSize, CommandCapsule, ConnectionKind, DropRequest, Epoch,
    Features, Generation, HelloRequest, HostId, InstanceId, Join, Lba, LoginRequest, Name, Opcode,
    OpenReply, OpenRequest, QueueDepth, Sequence, SessionId, Status, Tag, Version, VolumeHandle,
};
use rblk_target::control::core::{Capacity, ConnectionRef, Core, CoreParts, Effect, Knock, Ticket};
use rblk_target::data::poll_group::{Notice, SettleTicket};
use rblk_target::record::holders::{HolderRecord, Holders};
use rblk_target::volume::ids::{AdmissionId, ConnectionId, SessionIndex, VolumeIndex};
use rblk_target::volume::{CacheMode, Placement, Volume};

use crate::Input;

const VOLUMES: u16 = 2;
const LINKS: usize = 24;

/// The bytes are the acts of the peers, the clock and the disk.
pub fn run(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let mut world = World::new();
    while !input.is_empty() {
        world.act(&mut input);
        world.look();
    }
    world.end();
    world.opened > 0
}

#[derive(Clone, Copy)]
struct Link {
    admission: AdmissionId,
    // NONE until its LOGIN is accepted.
    session: SessionIndex,
    id: SessionId,
    epoch: Epoch,
    kind: ConnectionKind,
    at: ConnectionRef,
    is_dying: bool,
}

/// A command without an answer so far.
#[derive(Clone, Copy)]
struct Asked {
    link: Link,
    opcode: Opcode,
    open: Option<OpenRequest>,
    ends: Ends,
}

/// The epochs of its session that a command ends.
#[derive(Clone, Copy)]
enum Ends {
    None,
    One(Epoch),
    Below(Epoch),
    Of(DropRequest),
}

impl Ends {
    /// As the body of a command says.
    fn of(link: Link, opcode: Opcode, body: &[u8]) -> Self {
        match opcode {
            Opcode::Login => match LoginRequest::from_wire(body).map(|login| login.join) {
                Ok(None) => Self::Below(link.epoch),
                Ok(Some(Join { ends: Some(ends), .. })) => Self::One(ends),
                Ok(Some(_)) | Err(_) => Self::None,
            },
            Opcode::Drop => DropRequest::from_wire(body).map_or(Self::None, Self::Of),
            _ => Self::None,
        }
    }

    fn has(&self, epoch: Epoch) -> bool {
        match self {
            Self::None => false,
            Self::One(one) => *one == epoch,
            Self::Below(first) => epoch < *first,
            Self::Of(request) => request.epochs().contains(&epoch),
        }
    }
}

struct World {
    core: Core,
    now: Instant,
    links: Vec<Link>,
    asked: BTreeMap<(u32, u16), Asked>,
    // Epochs that the target said to be over.
    over: Vec<(SessionId, Ends)>,
    // By session and volume, as in the poll groups.
    open: BTreeMap<(SessionIndex, u16), AccessMode>,
    durable: BTreeMap<[u8; 16], HolderRecord>,
    on_their_way: Vec<(Ticket, HolderRecord)>,
    settles: Vec<SettleTicket>,
    made: u32,
    tag: u16,
    stops: bool,
    opened: u32,
}

impl World {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            core: Core::new(parts(Holders::durable([])), now),
            now,
            links: Vec::new(),
            asked: BTreeMap::new(),
            over: Vec::new(),
            open: BTreeMap::new(),
            durable: BTreeMap::new(),
            on_their_way: Vec::new(),
            settles: Vec::new(),
            made: 0,
            tag: 0,
            stops: false,
            opened: 0,
        }
    }

    fn act(&mut self, input: &mut Input<'_>) {
        match input.below(12) {
            0 => self.connect(input, true),
            1 => self.connect(input, false),
            2 => self.login(input),
            3 | 4 => self.open(input),
            5 => self.anything(input),
            6 => {
                let dying: Vec<Link> = self.links.iter().filter(|l| l.is_dying).copied().collect();
                if let Some(link) = input.pick(&dying) {
                    self.bury(link);
                }
            }
            7 => {
                if let Some(link) = input.pick(&self.links) {
                    self.bury(link);
                }
            }
            8 => self.pass(Duration::from_millis(u64::from(input.u16()))),
            9 => self.write_one(input.below(4) == 3),
            10 => self.simple(input),
            _ => match input.u8() {
                0xff => self.restart(),
                0xfe => {
                    self.core.volume_changed(VolumeIndex(u16::from(input.below(4))));
                    self.carry_out();
                }
                fails @ 0xf8..=0xfd => self.settle_one(fails == 0xf8),
                _ => self.pass(Duration::from_millis(500)),
            },
        }
    }

    fn connect(&mut self, input: &mut Input<'_>, fresh: bool) {
        if self.links.len() >= LINKS {
            return;
        }
        self.made += 1;
        let named = input.pick(&self.links).filter(|_| !fresh);
        let shift = u32::from(input.below(3));
        let queue = u16::from(input.below(4));
        let (session, epoch, kind) = match named {
            None if fresh => (SessionId::default(), Epoch(0), ConnectionKind::Admin),
            // A connection of a session that does not exist.
            None => (SessionId(input.array()), Epoch(shift), ConnectionKind::Io { queue }),
            Some(link) if queue == 3 => {
                (link.id, Epoch(link.epoch.0 + shift), ConnectionKind::Admin)
            }
            Some(link) => (link.id, Epoch(link.epoch.0 + shift / 2), ConnectionKind::Io { queue }),
        };
        let asked = HelloRequest {
            kind,
            newest: Version::NEWEST,
            oldest: Version::OLDEST,
            depth: QueueDepth::new(16).expect("a depth"),
            features: Features::default(),
            in_capsule_bytes: 4096,
            io_max_bytes: 1 << 20,
            epoch,
            reads_in: 0,
            session,
        };
        let mut id = [0xee; 16];
        id[..4].copy_from_slice(&self.made.to_le_bytes());
        let admitted = {
            let peer = format!("tcp://192.0.2.{}:1", 1 + self.made % 8);
            let (asked, peer, fresh) = (&asked, peer.as_str(), SessionId(id));
            let (memory_bytes, is_encrypted) = (1 << 10, false);
            let knock = Knock {
                asked,
                introduction: None,
                peer,
                memory_bytes,
                fresh,
                is_encrypted,
                has_ways: true,
            };
            self.core.connect(&knock, self.now)
        };
        if let Ok(admitted) = admitted {
            self.links.push(Link {
                admission: admitted.id,
                session: admitted.session,
                id: if session.is_none() { SessionId(id) } else { session },
                epoch: admitted.epoch,
                kind,
                at: ConnectionRef {
                    group: 0,
                    connection: ConnectionId { index: 0, generation: self.made },
                },
                is_dying: false,
            });
        }
        self.carry_out();
    }

    fn admin(&self, input: &mut Input<'_>) -> Option<Link> {
        let admins: Vec<Link> =
            self.links.iter().filter(|l| l.kind == ConnectionKind::Admin).copied().collect();
        input.pick(&admins)
    }

    fn login(&mut self, input: &mut Input<'_>) {
        let Some(link) = self.admin(input) else { return };
        let host = 1 + input.below(3);
        let keep_alive_ms = input.u32();
        // Its high bits say how it joins.
        let bits = keep_alive_ms >> 24;
        let before = |back: u32| Epoch(link.epoch.0.saturating_sub(back));
        let ends = Some(before(1 + (bits >> 2 & 3))).filter(|_| bits & 0x40 != 0);
        let join = Join { beside: before(1 + (bits & 3)), ends };
        let login = LoginRequest {
            host: HostId([host; 16]),
            host_name: Name::new(&format!("host{host}")).expect("a name"),
            keep_alive_ms,
            join: Some(join).filter(|_| bits & 0x80 != 0),
        };
        self.send(link, Opcode::Login, 0, &login.to_wire(), None);
    }

    fn open(&mut self, input: &mut Input<'_>) {
        let Some(link) = self.admin(input) else { return };
        let modes = [AccessMode::Exclusive, AccessMode::ReadOnly, AccessMode::Shared];
        let bits = input.u8();
        let request = OpenRequest {
            name: Name::new(&format!("v{}", bits & 3)).expect("a name"),
            mode: modes[usize::from(bits >> 2 & 3).min(2)],
            take_over: bits & 0x30 == 0x10,
            generation: Generation(u64::from(bits >> 6)),
        };
        self.send(link, Opcode::OpenVolume, 0, &request.to_wire(), Some(request));
    }

    /// A command without a body, or a DROP, as an initiator sends it.
    fn simple(&mut self, input: &mut Input<'_>) {
        let Some(link) = self.admin(input) else { return };
        let opcodes = [
            Opcode::ListVolumes,
            Opcode::CloseVolume,
            Opcode::AsyncEvent,
            Opcode::Logout,
            Opcode::Drop,
        ];
        let opcode = opcodes[usize::from(input.below(5))];
        let volume = u32::from(input.below(4));
        let dropped = DropRequest::new(&[Epoch(1 + volume)]).expect("an epoch");
        let body = if opcode == Opcode::Drop { &dropped.to_wire()[..] } else { &[] };
        self.send(link, opcode, volume, body, None);
    }

    /// Any command with any body.
    fn anything(&mut self, input: &mut Input<'_>) {
        let Some(link) = self.admin(input) else { return };
        let opcode = input.pick(&Opcode::ALL).unwrap_or(Opcode::Login);
        let (volume, length) = (input.u32(), usize::from(input.below(128)));
        let body = input.bytes(length);
        let open = OpenRequest::from_wire(body).ok().filter(|_| opcode == Opcode::OpenVolume);
        self.send(link, opcode, volume, body, open);
    }

    fn send(
        &mut self,
        link: Link,
        opcode: Opcode,
        volume: u32,
        body: &[u8],
        open: Option<OpenRequest>,
    ) {
        self.tag = self.tag.wrapping_add(1);
        let ends = Ends::of(link, opcode, body);
        let asked = Asked { link, opcode, open, ends };
        self.asked.insert((link.at.connection.generation, self.tag), asked);
        let command = CommandCapsule {
            volume: VolumeHandle(volume),
            lba: Lba(u64::from(volume)),
            ..CommandCapsule::new(opcode, Tag(self.tag), link.epoch, Sequence(1))
        };
        self.core.command(link.at, link.admission, &command, body, self.now);
        self.carry_out();
    }

    fn bury(&mut self, link: Link) {
        self.links.retain(|other| other.at != link.at);
        self.asked.retain(|(connection, _), _| *connection != link.at.connection.generation);
        self.core.gone(link.admission, self.now);
        self.carry_out();
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        if self.core.needs_ticks() {
            self.core.tick(self.now);
        }
        self.carry_out();
    }

    /// The disk writes the oldest change, or reports an error.
    fn write_one(&mut self, fails: bool) {
        if self.on_their_way.is_empty() {
            return;
        }
        let (ticket, record) = self.on_their_way.remove(0);
        if !fails {
            self.durable.insert(record.volume, record);
        }
        self.core.persisted(ticket, if fails { Err("disk".to_owned()) } else { Ok(()) });
        self.carry_out();
    }

    /// A store has flushed, or reports an error.
    fn settle_one(&mut self, fails: bool) {
        if self.settles.is_empty() {
            return;
        }
        let ticket = self.settles.remove(0);
        self.core.settled(ticket, if fails { Err("store".to_owned()) } else { Ok(()) });
        self.carry_out();
    }

    /// The target dies. The next run has the durable records.
    fn restart(&mut self) {
        let holders = Holders::durable(self.durable.values().cloned());
        self.core = Core::new(parts(holders), self.now);
        self.links.clear();
        self.asked.clear();
        self.over.clear();
        self.open.clear();
        self.on_their_way.clear();
        self.settles.clear();
        self.stops = false;
    }

    fn carry_out(&mut self) {
        while let Some(effect) = self.core.next_effect() {
            match effect {
                Effect::Reply { to, tag, status, payload, .. } => {
                    self.replied(to, tag, status, &payload);
                }
                Effect::Adopt { connection, session, epoch, .. } => {
                    let mut links = self.links.iter_mut();
                    let link = links.find(|link| link.at == connection).expect("somebody");
                    assert_eq!((link.session, link.epoch), (SessionIndex::NONE, epoch), "adopted");
                    link.session = session;
                }
                Effect::Expel { connection } => {
                    let links = self.links.iter_mut().filter(|link| link.at == connection);
                    links.for_each(|link| link.is_dying = true);
                }
                Effect::Evict { admission } => {
                    let links = self.links.iter_mut().filter(|link| link.admission == admission);
                    links.for_each(|link| link.is_dying = true);
                }
                Effect::LimitHost { .. } => {}
                Effect::All(notice) => self.note(notice),
                Effect::Persist { ticket, record } => self.on_their_way.push((ticket, record)),
                Effect::Settle { ticket, .. } => self.settles.push(ticket),
                Effect::Claim { .. } | Effect::Prove { .. } => {
                    unreachable!("no volume is of a group here")
                }
                Effect::Step(_) | Effect::GiveUpStep | Effect::GivenUp(_) | Effect::Altered(_) => {
                    unreachable!("no volume is changed here")
                }
                Effect::StopGroups => {
                    assert!(!self.stops, "it stops twice");
                    self.stops = true;
                }
            }
        }
    }

    fn note(&mut self, notice: Notice) {
        match notice {
            Notice::Open { session, volume, mode } => {
                self.open.insert((session, volume.0), mode);
            }
            Notice::Close { session, volume, .. } => {
                self.open.remove(&(session, volume.0));
            }
            Notice::EndConnections { session, before } => {
                let ends = |l: &&mut Link| l.session == session && l.epoch < before;
                self.links.iter_mut().filter(ends).for_each(|link| link.is_dying = true);
            }
            Notice::EndEpoch { session, epoch } => {
                let ends = |l: &&mut Link| (l.session, l.epoch) == (session, epoch);
                self.links.iter_mut().filter(ends).for_each(|link| link.is_dying = true);
            }
            Notice::Host { .. } => {}
            Notice::ForgetSession { session } => {
                self.open.retain(|(of, _), _| *of != session);
                let lives = self.links.iter().any(|link| link.session == session);
                assert!(!lives, "a session was forgotten that has connections");
            }
        }
    }

    fn replied(&mut self, to: ConnectionRef, tag: Tag, status: Status, payload: &[u8]) {
        // The target may answer a connection that is gone.
        if !self.links.iter().any(|link| link.at == to) {
            return;
        }
        let asked = self.asked.remove(&(to.connection.generation, tag.0));
        let Asked { link, opcode, open, ends } = asked.expect("answered twice, or unasked");
        if status != Status::Ok {
            return;
        }
        match opcode {
            Opcode::Login | Opcode::Drop => self.over.push((link.id, ends)),
            Opcode::OpenVolume => {
                self.opened += 1;
                let reply = OpenReply::from_wire(payload).expect("a reply to OPEN");
                let request = open.expect("an OPEN that can be read");
                let record = self.durable.get(&reply.uuid).map(|record| record.generation);
                let is_durable = record >= Some(reply.generation);
                assert!(
                    request.mode == AccessMode::ReadOnly || is_durable,
                    "told of {}, on the disk {record:?}",
                    reply.generation
                );
            }
            _ => {}
        }
    }

    fn look(&self) {
        for volume in 0..VOLUMES {
            let modes: Vec<AccessMode> = self
                .open
                .iter()
                .filter(|((session, of), mode)| {
                    let lives = self.links.iter().any(|link| link.session == *session);
                    *of == volume && lives && **mode != AccessMode::ReadOnly
                })
                .map(|(_, mode)| *mode)
                .collect();
            let shared = modes.iter().all(|mode| *mode == AccessMode::Shared);
            assert!(modes.len() < 2 || shared, "two writers: {modes:?}");
        }
        // A stranger may name a session without belonging to it.
        for link in self.links.iter().filter(|link| link.session != SessionIndex::NONE) {
            let mut over = self.over.iter().filter(|(id, _)| *id == link.id);
            assert!(!over.any(|(_, ends)| ends.has(link.epoch)), "of an epoch that is over");
        }
        let sessions: Vec<_> = self.core.sessions().iter().collect();
        for session in sessions {
            let links = self.links.iter().filter(|link| link.id == session.id).count();
            assert!(links >= usize::from(session.connections() > 0), "connections of nobody");
        }
    }

    /// No command waits after every end is buried, the disk has caught up and the time is over.
    fn end(&mut self) {
        while !self.on_their_way.is_empty() {
            self.write_one(false);
        }
        while let Some(link) = self.links.iter().find(|link| link.is_dying).copied() {
            self.bury(link);
        }
        for _ in 0..3 {
            self.pass(Duration::from_secs(31));
            while !self.on_their_way.is_empty() {
                self.write_one(false);
            }
        }
        let waits = |asked: &&Asked| asked.opcode != Opcode::AsyncEvent;
        let waiting = self.asked.values().filter(waits).map(|asked| asked.opcode);
        assert_eq!(waiting.collect::<Vec<_>>(), [], "never answered");
    }
}

fn parts(holders: Holders) -> CoreParts {
    let volume = |index: u16| {
        Arc::new(Volume {
            index: VolumeIndex(index),
            name: Name::new(&format!("v{index}")).expect("a name"),
            uuid: [u8::try_from(index).expect("few volumes") + 1; 16],
            block_size: BlockSize::new(512).expect("a size"),
            blocks: BlockCount(100),
            read_only: false,
            placement: Placement::Null,
            cache: CacheMode::None,
            cache_min_bytes: 0,
            cache_max_bytes: None,
            read_ahead_bytes: 0,
            discard: true,
            discard_granularity_bytes: 512,
            is_durable_at_once: false,
            limits: None,
        })
    };
    CoreParts {
        name: Name::new("t").expect("a name"),
        instance: InstanceId([9; 16]),
        volumes: (0..VOLUMES).map(volume).collect(),
        capacity: Capacity::new(8, None, 64 << 30),
        lease: Duration::from_secs(30),
        drain_timeout: Duration::from_secs(10),
        holders,
        auth: None,
    }
}

/// Two hosts that take a volume from each other, and one that comes back.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let session = |host: u8| [0, 0, 0, 0, 2, host, host, 100, 0, 0, 0];
    let mut two = [session(0), session(1)].concat();
    two.extend([3, 0, 0, 9, 0, 1, 0, 0, 0, 3, 1, 0x10, 9, 0, 6, 0, 9, 0]);
    let mut back = session(0).to_vec();
    back.extend([3, 0, 8, 9, 0, 1, 0, 1, 3, 2, 1, 0, 100, 0, 0, 0, 6, 0, 6, 0, 3, 0, 0x40, 9, 0]);
    let mut ways = session(0).to_vec();
    ways.extend([3, 0, 0, 9, 0]);
    // The host joins its session by another way, and drops that way.
    ways.extend([1, 0, 1, 3, 2, 1, 0, 0, 0, 0, 0x80, 10, 0, 4, 1, 6, 0]);
    vec![two, back, ways]
}
