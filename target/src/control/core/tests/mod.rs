//! Core with poll groups that act on notices only when the test lets them.

mod alter;
mod auth;
mod group;
mod holders;
mod news;
mod occurrences;
mod random;
mod sessions;
mod ways;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_protocol::auth::{Carrier, Hellos};
use rblk_protocol::{
    AccessMode, BlockCount, BlockSize, CommandCapsule, ConnectionKind, Epoch, Features, Generation,
    HelloAccept, HelloRequest, HostId, InstanceId, LoginReply, LoginRequest, Name, Nonce, Opcode,
    OpenReply, OpenRequest, QueueDepth, RejectReason, Sequence, SessionId, Status, Tag, Version,
    VolumeHandle,
};

use super::{
    Admitted, AuthConfig, Capacity, ConnectRefusal, ConnectionRef, Core, CoreParts, Effect,
    Introduction, Knock, Ticket,
};
use crate::data::connection::STRANGER_TIME;
use crate::data::poll_group::{Notice, SettleTicket, VolumeStep};
use crate::record::holders::{HolderRecord, Holders, VolumeUuid};
use crate::store::rbd::image_claim::Wish;
use crate::volume::ids::{AdmissionId, ConnectionId, SessionIndex, VolumeIndex};
use crate::volume::limits::Limiter;
use crate::volume::{CacheMode, Placement, Volume};

const LEASE: Duration = Duration::from_secs(30);
const DRAIN: Duration = Duration::from_secs(10);
const VOLUMES: u16 = 2;

/// A connection as the poll groups have it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Link {
    admission: AdmissionId,
    since: Instant,
    // NONE until its LOGIN is accepted.
    session: SessionIndex,
    id: SessionId,
    epoch: Epoch,
    kind: ConnectionKind,
    at: ConnectionRef,
    // Control ordered its end.
    dying: bool,
}

/// The reply to an admin command.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Replied {
    to: ConnectionRef,
    tag: Tag,
    status: Status,
    value: u32,
    payload: Vec<u8>,
}

impl Replied {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.payload[..self.value as usize]).into_owned()
    }

    fn generation(&self) -> Generation {
        assert_eq!(self.status, Status::Ok, "{}", self.text());
        OpenReply::from_wire(&self.payload).unwrap().generation
    }
}

/// One run of a target.
struct World {
    core: Core,
    now: Instant,
    links: Vec<Link>,
    replies: Vec<Replied>,
    notices: Vec<Notice>,
    // The longest silence that the poll groups got at each LOGIN.
    silences: Vec<Duration>,
    // The limits of hosts that the poll groups got.
    limits: Vec<(SessionIndex, Option<Arc<Limiter>>)>,
    // The records after a restart.
    durable: BTreeMap<VolumeUuid, HolderRecord>,
    // Changes on their way to these records, while the disk is slow.
    slow_disk: bool,
    // Proofs that were asked for, while the cluster is silent.
    proofs: Vec<(VolumeIndex, Ticket)>,
    silent_cluster: bool,
    on_their_way: Vec<(Ticket, HolderRecord)>,
    // Volumes whose writes the store has to make durable, while it is slow.
    slow_store: bool,
    settles: Vec<(SettleTicket, VolumeIndex)>,
    stopped: bool,
    // Steps of changes of volumes that core ordered, and the outcomes of the changes.
    steps: Vec<VolumeStep>,
    altered: Vec<Result<(), String>>,
    given_up: Vec<String>,
    // Claims of volumes of the group that core ordered.
    claims: Vec<(Name, Wish)>,
    made: u32,
    // Of the next connections.
    memory_bytes: u64,
    // If hosts prove their keys: whether the hellos offer it, and the hellos.
    introduce: bool,
    // Whether the next hellos offer ways.
    has_ways: bool,
    introductions: BTreeMap<AdmissionId, Introduction>,
}

/// The grant of a connection, with a nonce of its own.
fn accept(made: u32) -> HelloAccept {
    let mut nonce = Nonce([3; 16]);
    nonce.0[..4].copy_from_slice(&made.to_le_bytes());
    HelloAccept {
        version: Version::NEWEST,
        depth: QueueDepth::new(16).unwrap(),
        features: Features::AUTH,
        in_capsule_bytes: 4096,
        io_max_bytes: 1 << 20,
        instance: InstanceId([9; 16]),
        nonce,
    }
}

fn volume(index: u16) -> Arc<Volume> {
    Arc::new(Volume {
        index: VolumeIndex(index),
        name: volume_name(index),
        uuid: [u8::try_from(index).unwrap() + 1; 16],
        block_size: BlockSize::new(512).unwrap(),
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
}

fn volume_name(index: u16) -> Name {
    Name::new(&format!("v{index}")).unwrap()
}

fn host_name(host: u8) -> Name {
    Name::new(&format!("host{host}")).unwrap()
}

fn login_of(host: u8) -> LoginRequest {
    let (host, host_name) = (HostId([host; 16]), host_name(host));
    LoginRequest { host, host_name, keep_alive_ms: 1000, join: None }
}

fn open_as(volume: u16, mode: AccessMode) -> OpenRequest {
    OpenRequest { name: volume_name(volume), mode, take_over: false, generation: Generation::FRESH }
}

fn exclusive(volume: u16) -> OpenRequest {
    open_as(volume, AccessMode::Exclusive)
}

fn taking_over(volume: u16) -> OpenRequest {
    OpenRequest { take_over: true, ..exclusive(volume) }
}

fn returning(volume: u16, generation: Generation) -> OpenRequest {
    OpenRequest { generation, ..exclusive(volume) }
}

impl World {
    fn new() -> Self {
        Self::with(Holders::durable([]), BTreeMap::new(), Instant::now())
    }

    fn with(holders: Holders, durable: BTreeMap<VolumeUuid, HolderRecord>, now: Instant) -> Self {
        Self::of(holders, durable, now, None)
    }

    fn of(
        holders: Holders,
        durable: BTreeMap<VolumeUuid, HolderRecord>,
        now: Instant,
        auth: Option<AuthConfig>,
    ) -> Self {
        Self::having(Capacity::new(8, None, 64 << 30), holders, durable, now, auth)
    }

    fn having(
        capacity: Capacity,
        holders: Holders,
        durable: BTreeMap<VolumeUuid, HolderRecord>,
        now: Instant,
        auth: Option<AuthConfig>,
    ) -> Self {
        let parts = CoreParts {
            name: Name::new("t").unwrap(),
            instance: InstanceId([9; 16]),
            volumes: (0..VOLUMES).map(volume).collect(),
            capacity,
            lease: LEASE,
            drain_timeout: DRAIN,
            holders,
            auth,
        };
        let mut core = Core::new(parts, now);
        core.ready(now);
        Self {
            core,
            now,
            links: Vec::new(),
            replies: Vec::new(),
            notices: Vec::new(),
            silences: Vec::new(),
            limits: Vec::new(),
            durable,
            slow_disk: false,
            proofs: Vec::new(),
            silent_cluster: false,
            on_their_way: Vec::new(),
            slow_store: false,
            settles: Vec::new(),
            stopped: false,
            steps: Vec::new(),
            altered: Vec::new(),
            given_up: Vec::new(),
            claims: Vec::new(),
            made: 0,
            memory_bytes: 1 << 10,
            introduce: true,
            has_ways: false,
            introductions: BTreeMap::new(),
        }
    }

    /// The target dies; the next run has the durable records.
    fn restart(self) -> Self {
        let holders = Holders::durable(self.durable.values().cloned());
        let (made, has_ways) = (self.made, self.has_ways);
        Self { made, has_ways, ..Self::with(holders, self.durable, self.now) }
    }

    fn carry_out(&mut self) {
        while let Some(effect) = self.core.next_effect() {
            match effect {
                Effect::Reply { to, tag, status, value, payload } => {
                    self.replies.push(Replied { to, tag, status, value, payload });
                }
                Effect::Adopt { connection, session, epoch, silence, .. } => {
                    self.silences.push(silence);
                    let mut links = self.links.iter_mut();
                    let link = links.find(|link| link.at == connection).expect("somebody");
                    assert_eq!((link.session, link.epoch), (SessionIndex::NONE, epoch));
                    link.session = session;
                }
                Effect::Expel { connection } => {
                    let links = self.links.iter_mut().filter(|link| link.at == connection);
                    links.for_each(|link| link.dying = true);
                }
                Effect::Evict { admission } => {
                    let links = self.links.iter_mut().filter(|link| link.admission == admission);
                    links.for_each(|link| link.dying = true);
                }
                Effect::LimitHost { session, limits } => self.limits.push((session, limits)),
                Effect::All(notice) => {
                    if let Notice::EndConnections { session, before } = notice {
                        let ends = |l: &&mut Link| l.session == session && l.epoch < before;
                        self.links.iter_mut().filter(ends).for_each(|link| link.dying = true);
                    }
                    if let Notice::EndEpoch { session, epoch } = notice {
                        let ends = |l: &&mut Link| (l.session, l.epoch) == (session, epoch);
                        self.links.iter_mut().filter(ends).for_each(|link| link.dying = true);
                    }
                    self.notices.push(notice);
                }
                Effect::Persist { ticket, record } => {
                    self.on_their_way.push((ticket, record));
                    if !self.slow_disk {
                        self.write_all();
                    }
                }
                Effect::Settle { ticket, volume } => {
                    self.settles.push((ticket, volume));
                    if !self.slow_store {
                        self.settle_all(&Ok(()));
                    }
                }
                Effect::Claim { name, wish } => self.claims.push((name, wish)),
                Effect::Prove { ticket, volume } => {
                    self.proofs.push((volume, ticket));
                    if !self.silent_cluster {
                        self.prove_all();
                    }
                }
                Effect::Step(step) => self.steps.push(step),
                Effect::GiveUpStep => {}
                Effect::GivenUp(why) => self.given_up.push(why),
                Effect::Altered(result) => self.altered.push(result),
                Effect::StopGroups => {
                    assert!(!self.stopped, "once");
                    self.stopped = true;
                }
            }
        }
    }

    /// The cluster says that the images are this member's.
    fn prove_all(&mut self) {
        for (volume, ticket) in std::mem::take(&mut self.proofs) {
            self.core.proven(volume, ticket);
        }
        self.carry_out();
    }

    /// Makes all records on their way to the disk durable.
    fn write_all(&mut self) {
        for (ticket, record) in std::mem::take(&mut self.on_their_way) {
            self.durable.insert(record.volume, record);
            self.core.persisted(ticket, Ok(()));
        }
        self.carry_out();
    }

    /// The stores have made the writes durable, or failed.
    fn settle_all(&mut self, result: &Result<(), String>) {
        for (ticket, _) in std::mem::take(&mut self.settles) {
            self.core.settled(ticket, result.clone());
        }
        self.carry_out();
    }

    fn hello(&self) -> HelloRequest {
        let features = if self.has_ways { Features::WAYS } else { Features::default() };
        HelloRequest {
            kind: ConnectionKind::Admin,
            newest: Version::NEWEST,
            oldest: Version::OLDEST,
            depth: QueueDepth::new(16).unwrap(),
            features,
            in_capsule_bytes: 4096,
            io_max_bytes: 1 << 20,
            epoch: Epoch(0),
            reads_in: 0,
            session: SessionId::default(),
        }
    }

    fn connect(
        &mut self,
        kind: ConnectionKind,
        session: SessionId,
        epoch: Epoch,
    ) -> Result<Link, RejectReason> {
        self.made += 1;
        let asked = HelloRequest { kind, epoch, session, ..self.hello() };
        let mut fresh = [0xee; 16];
        fresh[..4].copy_from_slice(&self.made.to_le_bytes());
        let peer = format!("peer{}", self.made);
        self.knock(&asked, &peer, SessionId(fresh)).map_err(|refused| refused.reason)
    }

    /// A connect request. Changes nothing of any session.
    fn knock(
        &mut self,
        asked: &HelloRequest,
        peer: &str,
        fresh: SessionId,
    ) -> Result<Link, ConnectRefusal> {
        let HelloRequest { kind, session, .. } = *asked;
        let memory_bytes = self.memory_bytes;
        let introduction = (self.core.requires_proof() && self.introduce).then(|| Introduction {
            hellos: Hellos::new(asked, &accept(self.made)),
            carrier: Carrier::Memory,
        });
        let is_encrypted = asked.features.has(Features::ENCRYPT);
        let has_ways = asked.features.has(Features::WAYS);
        let knock =
            Knock { asked, introduction, peer, memory_bytes, fresh, is_encrypted, has_ways };
        let admitted = self.core.connect(&knock, self.now);
        // Without a proof, only another unproven connection may have to go.
        while let Some(effect) = self.core.next_effect() {
            let Effect::Evict { admission } = effect else { panic!("{effect:?}") };
            let links = self.links.iter_mut().filter(|link| link.admission == admission);
            links.for_each(|link| link.dying = true);
        }
        let Admitted { id, session: slot, epoch, .. } = admitted?;
        let link = Link {
            admission: id,
            since: self.now,
            session: slot,
            id: if session.is_none() { fresh } else { session },
            epoch,
            kind,
            at: ConnectionRef {
                group: self.made as usize % 2,
                connection: ConnectionId { index: 0, generation: self.made },
            },
            dying: false,
        };
        self.links.push(link);
        if let Some(introduction) = introduction {
            self.introductions.insert(id, introduction);
        }
        Ok(link)
    }

    /// Removes a connection after the last use of its resources.
    fn bury(&mut self, link: Link) {
        let at = self.links.iter().position(|l| l.at == link.at).expect("buried once");
        self.links.remove(at);
        self.core.gone(link.admission, self.now);
        self.carry_out();
    }

    fn bury_the_dying(&mut self) {
        while let Some(link) = self.links.iter().find(|link| link.dying).copied() {
            self.bury(link);
        }
    }

    fn is_dying(&self, link: Link) -> bool {
        self.links.iter().any(|l| l.at == link.at && l.dying)
    }

    fn send(&mut self, link: Link, tag: u16, opcode: Opcode, volume: u32, body: &[u8]) {
        let command = CommandCapsule {
            volume: VolumeHandle(volume),
            ..CommandCapsule::new(opcode, Tag(tag), link.epoch, Sequence(1))
        };
        self.core.command(link.at, link.admission, &command, body, self.now);
        self.carry_out();
    }

    /// The reply to a command, if there is one.
    fn answer(&mut self, link: Link, tag: u16) -> Option<Replied> {
        let at = self.replies.iter().position(|said| said.to == link.at && said.tag == Tag(tag))?;
        Some(self.replies.remove(at))
    }

    fn log_in(&mut self, link: Link, tag: u16, host: u8) -> Option<Replied> {
        self.send(link, tag, Opcode::Login, 0, &login_of(host).to_wire());
        self.answer(link, tag)
    }

    /// A session of a host, logged in: its admin connection.
    fn session(&mut self, host: u8) -> Link {
        let link = self.connect(ConnectionKind::Admin, SessionId::default(), Epoch(0)).unwrap();
        let said = self.log_in(link, 0, host).expect("nothing to wait for");
        assert_eq!(LoginReply::from_wire(&said.payload).unwrap().session, link.id);
        self.as_it_is(link)
    }

    /// A connection as the poll groups have it now.
    fn as_it_is(&self, link: Link) -> Link {
        *self.links.iter().find(|l| l.at == link.at).expect("it is there")
    }

    /// An I/O connection of the session's epoch.
    fn queue(&mut self, admin: Link, queue: u16) -> Link {
        self.connect(ConnectionKind::Io { queue }, admin.id, admin.epoch).unwrap()
    }

    fn open(&mut self, link: Link, tag: u16, request: OpenRequest) -> Option<Replied> {
        self.send(link, tag, Opcode::OpenVolume, 0, &request.to_wire());
        self.answer(link, tag)
    }

    fn log_out(&mut self, link: Link) {
        self.send(link, 9, Opcode::Logout, 0, &[]);
        assert_eq!(self.answer(link, 9).unwrap().status, Status::Ok);
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        // Control ticks only on demand: without demand a tick would change nothing.
        if self.core.needs_ticks() {
            self.core.tick(self.now);
        }
        self.carry_out();
        // The poll groups end late strangers.
        let (now, none) = (self.now, SessionIndex::NONE);
        let late = |l: &&mut Link| l.session == none && now > l.since + STRANGER_TIME;
        self.links.iter_mut().filter(late).for_each(|link| link.dying = true);
    }

    /// Volumes that the poll groups let a session write to.
    fn writable(&self, session: SessionIndex) -> Vec<u16> {
        (0..VOLUMES)
            .filter(|volume| {
                let last = self.notices.iter().rev().find_map(|notice| match *notice {
                    Notice::Open { session: s, volume: v, mode }
                        if (s, v.0) == (session, *volume) =>
                    {
                        Some(mode != AccessMode::ReadOnly)
                    }
                    Notice::Close { session: s, volume: v, .. }
                        if (s, v.0) == (session, *volume) =>
                    {
                        Some(false)
                    }
                    Notice::ForgetSession { session: s } if s == session => Some(false),
                    _ => None,
                });
                last.unwrap_or(false)
            })
            .collect()
    }
}
