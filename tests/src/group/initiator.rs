//! [`Initiator`]: a host with at most one mount of the volume: the product's [`Course`] over the
//! addresses of all members, and the requests of the device.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rblk_initiator::volume::course::{
    Act, Attempt, Course, CourseState, Facts, Failure, LossKind, OpenVerdict, Rules,
};
use rblk_protocol::{
    AccessMode, ConnectionKind, Epoch, Features, Generation, HelloRequest, HostId, LoginReply,
    LoginRequest, Name, Opcode, OpenReply, OpenRequest, QueueDepth, SessionId, Status, Version,
};

use super::air::{Air, Event, Healing, Io, ToHost, ToMember, Whose, login_of};
use super::member::OPEN;
use super::register::MountId;
use super::{BLOCK_BYTES, BLOCKS, volume_name};

/// Milliseconds of silence after which a path is lost.
const DETECT: u64 = 2_000;
/// Milliseconds for the answer to a LOGIN or an OPEN.
const ANSWER: u64 = 35_000;
/// Most requests of a device at a time.
const OUTSTANDING: usize = 3;
/// Milliseconds for which a host that uses no force tries to mount.
const PATIENCE: u64 = 40_000;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Hello,
    Login,
    Open,
    // Retained writes are made again.
    Replay,
}

#[derive(Debug)]
struct Trying {
    connection: u64,
    attempt: Attempt,
    phase: Phase,
    deadline: u64,
    login: Option<LoginReply>,
    replay: BTreeSet<u64>,
}

/// A request of the device.
#[derive(Clone, Copy, Debug)]
struct Request {
    number: u64,
    io: Io,
    issued: u64,
    read: u64,
}

#[derive(Debug)]
struct Mount {
    id: MountId,
    take_over: bool,
    course: Option<Course>,
    // The facts for the next process, while there is none.
    down: Option<Facts>,
    trying: Option<Trying>,
    connection: Option<u64>,
    address: usize,
    retry_at: u64,
    begun: u64,
    is_fenced: bool,
    requests: Vec<Request>,
    // By block: the value, and when it was acknowledged.
    unflushed: BTreeMap<usize, (u64, u64)>,
}

/// See the module.
#[derive(Debug)]
pub struct Initiator {
    host: usize,
    members: usize,
    write_back: bool,
    retain: bool,
    mount: Option<Mount>,
    /// Requests that ended well.
    pub done: u64,
    /// Mounts that lost the volume.
    pub fenced: u64,
    /// Takes of the volume back, at whichever member.
    pub resumed: u64,
    /// The longest time that a request took.
    pub longest: u64,
}

impl Initiator {
    /// A host without a mount.
    #[must_use]
    pub fn new(host: usize, members: usize, write_back: bool, retain: bool) -> Self {
        let (done, fenced, resumed, longest) = (0, 0, 0, 0);
        let mount = None;
        Self { host, members, write_back, retain, mount, done, fenced, resumed, longest }
    }

    fn rules(&self) -> Rules {
        Rules {
            addresses: self.members,
            detect: Duration::from_millis(DETECT),
            connect_timeout: Duration::from_secs(5),
            reconnect_delay: Duration::from_millis(100),
            fail_after: None,
            failback: Duration::ZERO,
        }
    }

    /// Whether its mount has the volume, as far as it knows.
    #[must_use]
    pub fn has_volume(&self) -> bool {
        self.mount.as_ref().is_some_and(|mount| {
            !mount.is_fenced && (mount.course.is_some() || mount.down.is_some())
        })
    }

    /// Whether it has a mount that has the volume, or is to get it by force.
    #[must_use]
    pub fn is_mounting(&self) -> bool {
        self.mount.as_ref().is_some_and(|mount| {
            !mount.is_fenced && (mount.take_over || mount.course.is_some() || mount.down.is_some())
        })
    }

    /// The member that it uses or asks.
    #[must_use]
    pub fn member(&self) -> Option<usize> {
        let mount = self.mount.as_ref()?;
        let asked = mount.trying.as_ref().map(|trying| trying.attempt.address);
        asked.or_else(|| mount.connection.map(|_| mount.address))
    }

    /// The requests that have not ended.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        let living = self.mount.as_ref().filter(|mount| !mount.is_fenced);
        living.map_or(0, |mount| mount.requests.len())
    }

    /// Mounts the volume, if the host has no living mount.
    pub fn mount(&mut self, air: &mut Air, take_over: bool) {
        if let Some(mount) = self.mount.as_mut().filter(|mount| !mount.is_fenced) {
            mount.take_over |= take_over && mount.course.is_none() && mount.down.is_none();
            return;
        }
        self.unmount(air);
        let id = MountId(air.number());
        air.log.add("mounts", [self.host as u64, id.0, u64::from(take_over)]);
        let address = air.random.index(self.members);
        self.mount = Some(Mount {
            id,
            take_over,
            course: None,
            down: None,
            trying: None,
            connection: None,
            address,
            retry_at: air.now,
            begun: air.now,
            is_fenced: false,
            requests: Vec::new(),
            unflushed: BTreeMap::new(),
        });
    }

    fn unmount(&mut self, air: &mut Air) {
        self.hang_up(air);
        let Some(mount) = self.mount.take() else { return };
        mount.requests.iter().for_each(|request| air.register.dropped(request.read));
    }

    /// Ends the connections.
    fn hang_up(&mut self, air: &mut Air) {
        let Some(mount) = &mut self.mount else { return };
        let trying = mount.trying.take().map(|it| (it.connection, it.attempt.address));
        let used = mount.connection.take().map(|connection| (connection, mount.address));
        for (connection, address) in trying.into_iter().chain(used) {
            close(air, (self.host, address), connection);
        }
    }

    /// The process of the mount dies. The device stays.
    pub fn crash(&mut self, air: &mut Air, time: u64) {
        self.hang_up(air);
        let Some(mount) = &mut self.mount else { return };
        let Some(course) = mount.course.take() else { return };
        air.log.add("initiator dies", [self.host as u64, 0, 0]);
        mount.down = Some(course.facts().clone());
        mount.unflushed.clear();
        air.after(time, Event::Heals(Healing::Host(self.host)));
    }

    /// The next process of the mount.
    pub fn recover(&mut self, air: &Air) {
        let rules = self.rules();
        let Some(mount) = &mut self.mount else { return };
        if let Some(facts) = mount.down.take() {
            mount.course = Some(Course::lost(rules, facts, air.instant()));
        }
    }

    // Tries.

    fn begin_try(&mut self, air: &mut Air, attempt: Attempt) {
        let connection = air.number();
        let Some(mount) = &mut self.mount else { return };
        let limit = u64::try_from(attempt.limit.as_millis()).unwrap_or(DETECT);
        mount.trying = Some(Trying {
            connection,
            attempt,
            phase: Phase::Hello,
            deadline: air.now + limit,
            login: None,
            replay: BTreeSet::new(),
        });
        let (session, epoch) = attempt.resume.unwrap_or((SessionId::default(), Epoch(0)));
        let hello = HelloRequest {
            kind: ConnectionKind::Admin,
            newest: Version::NEWEST,
            oldest: Version::OLDEST,
            depth: QueueDepth::new(16).expect("a depth"),
            features: Features::default(),
            in_capsule_bytes: 4096,
            io_max_bytes: 1 << 16,
            epoch,
            reads_in: 0,
            session,
        };
        let Some(life) = air.lives[attempt.address] else {
            return self.fail(air, Failure::Transient);
        };
        let whose = Whose { member: attempt.address, life };
        air.to_member(whose, self.host, connection, ToMember::Hello(hello, mount.id));
    }

    fn fail(&mut self, air: &mut Air, why: Failure) {
        let random = air.random.bits();
        let delay = air.random.within(100, 1_500);
        let (now, members) = (air.instant(), self.members);
        let Some(mount) = &mut self.mount else { return };
        let Some(trying) = mount.trying.take() else { return };
        close(air, (self.host, trying.attempt.address), trying.connection);
        match &mut mount.course {
            Some(course) => course.failed(why, now, random),
            None => {
                mount.address = (trying.attempt.address + 1) % members;
                mount.retry_at = air.now + delay;
            }
        }
    }

    fn admin(&self, air: &mut Air, opcode: Opcode, body: Vec<u8>) {
        let Some(trying) = self.mount.as_ref().and_then(|mount| mount.trying.as_ref()) else {
            return;
        };
        let Some(life) = air.lives[trying.attempt.address] else { return };
        let whose = Whose { member: trying.attempt.address, life };
        air.to_member(whose, self.host, trying.connection, ToMember::Admin(opcode, body));
    }

    fn phase(&mut self, air: &Air, phase: Phase) {
        if let Some(trying) = self.mount.as_mut().and_then(|mount| mount.trying.as_mut()) {
            (trying.phase, trying.deadline) = (phase, air.now + ANSWER);
        }
    }

    /// A message of a member.
    pub fn hears(&mut self, air: &mut Air, connection: u64, message: ToHost) {
        let Some(mount) = &self.mount else { return };
        let phase =
            mount.trying.as_ref().filter(|it| it.connection == connection).map(|it| it.phase);
        match (phase, message) {
            (Some(Phase::Hello), ToHost::Accepted) => {
                let number = u8::try_from(self.host + 1).unwrap_or(u8::MAX);
                let host_name = Name::new(&format!("host{}", self.host)).expect("a name");
                let host = HostId([number; 16]);
                let login = LoginRequest { host, host_name, keep_alive_ms: 1000, join: None };
                self.phase(air, Phase::Login);
                self.admin(air, Opcode::Login, login.to_wire().to_vec());
            }
            (Some(_), ToHost::Refused(true)) => self.fail(air, Failure::SessionGone),
            (Some(_), ToHost::Refused(false) | ToHost::Closed) => {
                self.fail(air, Failure::Transient)
            }
            (Some(Phase::Login), ToHost::Admin(status, payload)) => {
                self.logged_in(air, status, &payload);
            }
            (Some(Phase::Open), ToHost::Admin(status, payload)) => {
                self.opened(air, status, &payload);
            }
            (Some(Phase::Replay), ToHost::Io(op, _)) => self.replayed(air, op),
            (None, ToHost::Io(op, value)) if mount.connection == Some(connection) => {
                self.ended(air, op, value);
            }
            (None, ToHost::Closed) if mount.connection == Some(connection) => self.lose(air),
            _ => {}
        }
    }

    fn logged_in(&mut self, air: &mut Air, status: Status, payload: &[u8]) {
        let login = login_of(payload).filter(|_| status == Status::Ok);
        let Some(login) = login else {
            let why = match status {
                Status::NoSuchSession => Failure::SessionGone,
                _ => Failure::Transient,
            };
            return self.fail(air, why);
        };
        let Some(mount) = &mut self.mount else { return };
        let Some(trying) = &mut mount.trying else { return };
        trying.login = Some(login);
        let generation = trying.attempt.generation;
        if let Some(course) = &mut mount.course {
            course.logged_in(&login).expect("the members have one name");
        }
        let take_over = mount.take_over && generation.is_fresh();
        let mode = AccessMode::Exclusive;
        let open = OpenRequest { name: volume_name(), mode, take_over, generation };
        self.phase(air, Phase::Open);
        self.admin(air, OPEN, open.to_wire().to_vec());
    }

    fn opened(&mut self, air: &mut Air, status: Status, payload: &[u8]) {
        let reply = payload.get(..OpenReply::BYTES).and_then(|it| OpenReply::from_wire(it).ok());
        let Some(reply) = reply.filter(|_| status == Status::Ok) else {
            return self.refused(air, status, payload);
        };
        let rules = self.rules();
        let Some(mount) = &mut self.mount else { return };
        let Some(trying) = &mut mount.trying else { return };
        let Some(login) = trying.login else { return };
        air.register.heard(mount.id, reply.verifier);
        let Some(course) = &mut mount.course else {
            let facts = Facts {
                resume: Some((login.session, login.epoch)),
                volume: reply,
                instance: login.instance,
                target_name: login.target_name,
                fenced: None,
            };
            let (address, connection) = (trying.attempt.address, trying.connection);
            mount.course = Some(Course::connected(rules, facts, address, air.instant()));
            (mount.address, mount.connection, mount.trying) = (address, Some(connection), None);
            air.log.add("has the volume", [self.host as u64, address as u64, reply.generation.0]);
            return;
        };
        match course.opened(&reply) {
            OpenVerdict::Go => self.arrive(air),
            OpenVerdict::Changed(how) => air.wrong(&format!("the volume {how}")),
            OpenVerdict::ResolveUnflushed if !self.retain || mount.unflushed.is_empty() => {
                mount.unflushed.clear();
                self.arrive(air);
            }
            OpenVerdict::ResolveUnflushed => {
                let (id, address, connection) =
                    (mount.id, trying.attempt.address, trying.connection);
                let Some(life) = air.lives[address] else { return };
                let whose = Whose { member: address, life };
                let mut replay = BTreeSet::new();
                for (block, (value, _)) in &mount.unflushed {
                    let op = air.number();
                    replay.insert(op);
                    air.register.writes(id, *block, *value);
                    let io = Io::Write(*block, *value);
                    air.to_member(whose, self.host, connection, ToMember::Io(op, io));
                }
                trying.replay = replay;
                self.phase(air, Phase::Replay);
            }
        }
    }

    fn refused(&mut self, air: &mut Air, status: Status, payload: &[u8]) {
        match status {
            Status::Fenced if !payload.is_empty() => {
                self.fenced += 1;
                air.log.add("is fenced", [self.host as u64, 0, 0]);
                let Some(mount) = &mut self.mount else { return };
                mount.is_fenced = true;
                if let Some(course) = &mut mount.course {
                    course.fenced("another host");
                }
                for request in mount.requests.drain(..) {
                    air.register.dropped(request.read);
                }
                self.hang_up(air);
            }
            Status::NoSuchVolume => air.wrong("a host hears that the volume of the group is gone"),
            _ => self.fail(air, Failure::Transient),
        }
    }

    fn replayed(&mut self, air: &mut Air, op: u64) {
        let Some(mount) = &mut self.mount else { return };
        let Some(trying) = &mut mount.trying else { return };
        if trying.replay.remove(&op) && trying.replay.is_empty() {
            let now = air.now;
            for (block, (value, at)) in &mut mount.unflushed {
                air.register.written(mount.id, *block, *value, now);
                *at = now;
            }
            self.arrive(air);
        }
    }

    /// The paths of a try serve requests: all that have no answer are sent again.
    fn arrive(&mut self, air: &mut Air) {
        let Some(mount) = &mut self.mount else { return };
        let (Some(trying), Some(course)) = (mount.trying.take(), &mut mount.course) else { return };
        if course.arrived(air.instant()).is_none() {
            air.wrong("a try that opened the volume does not arrive");
        }
        self.resumed += 1;
        (mount.address, mount.connection) = (trying.attempt.address, Some(trying.connection));
        air.log.add("is back", [self.host as u64, trying.attempt.address as u64, 0]);
        let (id, requests) = (mount.id, mount.requests.clone());
        for request in &requests {
            if let Io::Write(block, value) = request.io {
                // It comes after the retained writes to its block.
                air.register.writes(id, block, value);
            }
            self.send(air, request);
        }
    }

    fn lose(&mut self, air: &mut Air) {
        let random = air.random.bits();
        let Some(mount) = &mut self.mount else { return };
        let Some(connection) = mount.connection.take() else { return };
        close(air, (self.host, mount.address), connection);
        if let Some(course) = &mut mount.course {
            course.lose(LossKind::Path, air.instant(), random);
        }
    }

    // Requests.

    fn send(&self, air: &mut Air, request: &Request) {
        let Some(mount) = &self.mount else { return };
        let (Some(connection), Some(life)) = (mount.connection, air.lives[mount.address]) else {
            return;
        };
        let whose = Whose { member: mount.address, life };
        let message = ToMember::Io(request.number, request.io);
        air.to_member(whose, self.host, connection, message);
    }

    fn ended(&mut self, air: &mut Air, op: u64, value: u64) {
        let Some(mount) = &mut self.mount else { return };
        let Some(at) = mount.requests.iter().position(|it| it.number == op) else { return };
        let Request { io, issued, read, .. } = mount.requests.remove(at);
        let (id, now) = (mount.id, air.now);
        if let Some((holder, since)) = air.register.holder
            && holder != id
            && issued > since
        {
            let host = self.host;
            air.wrong(&format!(
                "{io:?} of host {host} is answered after another one got the volume"
            ));
        }
        match io {
            Io::Read(_) => {
                if let Err(what) = air.register.has_read(id, read, value) {
                    air.wrong(&format!("host {}: {what}", self.host));
                }
            }
            Io::Write(block, value) => {
                air.register.written(id, block, value, now);
                if self.write_back {
                    mount.unflushed.insert(block, (value, now));
                }
            }
            Io::Flush => {
                air.register.flushed(id, issued);
                mount.unflushed.retain(|_, (_, at)| *at >= issued);
            }
        }
        self.done += 1;
        self.longest = self.longest.max(now - issued);
    }

    /// Begins a request.
    fn begin(&mut self, air: &mut Air, io: Io) {
        let number = air.number();
        let Some(mount) = &mut self.mount else { return };
        let read = match io {
            Io::Read(block) => air.register.reads(block),
            Io::Write(block, value) => {
                air.register.writes(mount.id, block, value);
                0
            }
            Io::Flush => 0,
        };
        let request = Request { number, io, issued: air.now, read };
        mount.requests.push(request);
        self.send(air, &request);
    }

    /// Reads every block, once nothing else is under way.
    pub fn read_all(&mut self, air: &mut Air) {
        (0..BLOCKS).for_each(|block| self.begin(air, Io::Read(block)));
    }

    fn begin_any(&mut self, air: &mut Air) {
        let Some(mount) = &self.mount else { return };
        if mount.requests.len() >= OUTSTANDING || mount.course.is_none() {
            return;
        }
        let block = air.random.index(BLOCKS);
        let is_block = |request: &Request| match request.io {
            Io::Read(at) | Io::Write(at, _) => at == block,
            Io::Flush => false,
        };
        if mount.requests.iter().any(is_block) {
            return;
        }
        let flushes = mount.requests.iter().any(|request| request.io == Io::Flush);
        let io = match air.random.below(10) {
            // FLUSHes that wait leave places for requests that a cache answers.
            0 if !flushes => Io::Flush,
            0..=5 => Io::Read(block),
            _ => Io::Write(block, air.register.value()),
        };
        self.begin(air, io);
    }

    /// Time passes.
    pub fn tick(&mut self, air: &mut Air, begins: bool) {
        let Some(mount) = &self.mount else { return };
        if mount.is_fenced || mount.down.is_some() {
            return;
        }
        if let Some(connection) = mount.connection
            && is_lost(air, self.host, mount.address)
        {
            air.log.add("loses its target", [self.host as u64, connection, 0]);
            self.lose(air);
        }
        let Some(mount) = &self.mount else { return };
        if let Some(trying) = &mount.trying
            && (trying.deadline <= air.now || is_lost(air, self.host, trying.attempt.address))
        {
            self.fail(air, Failure::Transient);
        }
        self.go_on(air);
        if begins && air.random.chance(600) {
            self.begin_any(air);
        }
    }

    fn go_on(&mut self, air: &mut Air) {
        let rules = self.rules();
        let Some(mount) = &mut self.mount else { return };
        let Some(course) = &mut mount.course else {
            if !mount.take_over && air.now > mount.begun + PATIENCE {
                return self.unmount(air);
            }
            if mount.trying.is_none() && mount.retry_at <= air.now {
                let (address, limit) = (mount.address, rules.try_limit());
                let generation = Generation::FRESH;
                self.begin_try(air, Attempt { address, resume: None, generation, limit });
            }
            return;
        };
        debug_assert!(course.state() != CourseState::Fenced || mount.is_fenced);
        let random = air.random.bits();
        match course.due(air.instant(), random) {
            Some(Act::Try(attempt)) => self.begin_try(air, attempt),
            Some(act) => air.wrong(&format!("{act:?} is not expected")),
            None => {}
        }
    }
}

fn is_lost(air: &Air, host: usize, member: usize) -> bool {
    let silent = |since: Option<u64>| since.is_some_and(|since| air.now >= since + DETECT);
    let is_dead = air.lives[member].is_none() && air.links[host][member].is_none();
    is_dead || silent(air.links[host][member]) || silent(air.paused_since[member])
}

fn close(air: &mut Air, (host, member): (usize, usize), connection: u64) {
    if let Some(life) = air.lives[member] {
        air.to_member(Whose { member, life }, host, connection, ToMember::Close);
    }
}

/// A block of the volume in bytes, for people who read a plan.
pub const BYTES: u32 = BLOCK_BYTES;
