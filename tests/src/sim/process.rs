//! [`Process`]: the server of one mount: the real [`Course`], engines and accounts, on a path that is made here.
//!
//! What the product does in `Mount` and `Try` around them is done here in the same order: connect, LOGIN, OPEN, settle,
//! connect every queue. Every step takes time, in which anything may happen.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_bench::inprocess::{Join, QueueId, QueueOptions};
use rblk_bench::seed::Random;
use rblk_fabric::Region;
use rblk_fabric::soft::memory::Wire;
use rblk_initiator::admin::{AdminChannel, Pulse};
use rblk_initiator::durability::{Durability, Ledger};
use rblk_initiator::engine::PathEnd;
use rblk_initiator::error::SessionError;
use rblk_initiator::mount::course::{Act, Attempt, Course, Facts, Failure, Loss, Rules, Verdict};
use rblk_initiator::mount::settle::{self, Judgement};
use rblk_initiator::path::Path;
use rblk_initiator::replay::{self, Progress, ReplayError, Replayer};
use rblk_initiator::retain::{Piece, ReplayLog, RetainRing};
use rblk_initiator::session::QueueWish;
use rblk_protocol::limits;
use rblk_protocol::{
    AccessMode, ConnectionKind, Epoch, Features, Generation, HelloReject, HelloRequest, HostId,
    LoginReply, LoginRequest, Opcode, OpenReply, OpenRequest, QueueDepth, SessionId, Status,
    Version, VolumeFlags,
};

use super::admin::{self, AdminEnd, Heard};
use super::log::Log;
use super::plan::{Break, Moment, Plan};
use super::site::{self, Knock, Site};
use crate::oracle::{Host, Oracle};
use crate::storm::VOLUME;

/// What every request of a fenced mount fails with.
pub const EBADE: i32 = 52;
/// What requests fail with when the target is gone for too long.
pub const EIO: i32 = 5;
/// How long a LOGIN or OPEN may take that waits for the end of older connections.
const WAITING_LIMIT: Duration = Duration::from_secs(35);
/// The queue that writes again.
const REPLAY_QUEUE: u16 = limits::QUEUES_MAX - 1;

/// A host's link to one address.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Link {
    /// It is broken, and how.
    pub broken: Option<Break>,
}

/// Everything outside the process.
#[derive(Debug)]
pub struct Ground<'a> {
    /// The target.
    pub site: &'a mut Site,
    /// What may be.
    pub oracle: &'a mut Oracle,
    /// What happened.
    pub log: &'a mut Log,
    /// Moments that came.
    pub moments: &'a mut Vec<Moment>,
    /// The host's links, by address.
    pub links: &'a [Link],
    /// The target's machine has no power: nobody says no.
    pub dark: bool,
}

/// What a process writes down for the next one of its mount.
#[derive(Clone, Debug)]
pub struct Note {
    facts: Facts,
    loss_untold: bool,
}

#[derive(Debug)]
struct Session {
    admin: AdminEnd,
    address: usize,
}

#[derive(Debug)]
enum Phase {
    // The connect request is under way.
    Knock { due: u64 },
    // Nobody answers it.
    Unanswered,
    Login,
    Open,
    Settle(Box<Settling>),
    // The next queue's connect request is under way.
    Queue { due: u64, paths: Vec<(Path, Wire)> },
}

#[derive(Debug)]
struct Settling {
    replayer: Replayer<Arc<ReplayLog>>,
    judgement: Judgement,
    wire: Wire,
    begun: bool,
}

#[derive(Debug)]
struct Trying {
    attempt: Attempt,
    take_over: bool,
    since: Instant,
    phase: Phase,
    admin: Option<AdminEnd>,
    login: Option<LoginReply>,
    volume: Option<OpenReply>,
}

/// How a try is going.
#[derive(Debug)]
enum Going {
    On,
    Failed(Failure),
    Fenced(String),
    Changed(&'static str),
    Arrived(Vec<(Path, Wire)>),
}

/// What became of a process that mounts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It has no device yet.
    Mounting,
    /// It has one.
    Serving,
    /// It could not mount, and is over.
    GaveUp,
}

/// The server of one mount.
#[derive(Debug)]
pub struct Process {
    mount: Host,
    host_id: HostId,
    plan: Plan,
    random: Random,
    course: Option<Course>,
    durability: Arc<Durability>,
    queues: Vec<QueueId>,
    session: Option<Session>,
    trying: Option<Trying>,
    // What the next process of this mount will know.
    note: Option<Note>,
    gave_up: bool,
    frozen: bool,
}

impl Process {
    fn new(plan: &Plan, mount: Host, host: usize, seed: u64) -> Self {
        Self {
            mount,
            host_id: HostId([u8::try_from(host + 1).unwrap_or(u8::MAX); 16]),
            plan: plan.clone(),
            random: Random::new(seed),
            course: None,
            durability: Durability::new(),
            queues: Vec::new(),
            session: None,
            trying: None,
            note: None,
            gave_up: false,
            frozen: false,
        }
    }

    /// One that mounts the volume.
    #[must_use]
    pub fn mount(
        plan: &Plan,
        mount: Host,
        host: usize,
        take_over: bool,
        seed: u64,
        ground: &mut Ground<'_>,
    ) -> Self {
        let mut process = Self::new(plan, mount, host, seed);
        let address = process.random.index(plan.addresses);
        let attempt = Attempt {
            address,
            resume: None,
            generation: Generation::FRESH,
            limit: process.rules().try_limit(),
        };
        process.begin_try(attempt, take_over, ground);
        process
    }

    /// One that takes over the device of another that died, by its note.
    #[must_use]
    pub fn recover(
        plan: &Plan,
        mount: Host,
        host: usize,
        note: Note,
        seed: u64,
        ground: &mut Ground<'_>,
    ) -> Self {
        let mut process = Self::new(plan, mount, host, seed);
        process.durability = match note.loss_untold {
            true => Durability::inheriting_loss(true),
            false => Durability::inheriting(),
        };
        let facts = note.facts.clone();
        process.make_queues(&facts.volume, ground);
        if facts.fenced.is_some() {
            process.fail_all(Some(EBADE), ground);
        }
        let now = ground.site.rig.now();
        process.note = Some(note);
        process.course = Some(Course::lost(process.rules(), facts, now));
        process
    }

    fn rules(&self) -> Rules {
        Rules {
            addresses: self.plan.addresses,
            detect: self.plan.detect,
            connect_timeout: Duration::from_secs(5),
            reconnect_delay: Duration::from_millis(50),
            fail_after: self.plan.fail_after,
            failback: Duration::from_millis(500),
        }
    }

    fn pulse(&self) -> Pulse {
        Pulse::of(self.plan.detect)
    }

    /// Whether it has its device.
    #[must_use]
    pub fn state(&self) -> State {
        match (&self.course, self.gave_up) {
            (_, true) => State::GaveUp,
            (Some(_), _) => State::Serving,
            (None, _) => State::Mounting,
        }
    }

    /// Its course, when it has a device.
    #[must_use]
    pub fn course(&self) -> Option<&Course> {
        self.course.as_ref()
    }

    /// Its queues.
    #[must_use]
    pub fn queues(&self) -> &[QueueId] {
        &self.queues
    }

    /// Whether it is stopped.
    #[must_use]
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// Whether something of it is due within a few steps.
    #[must_use]
    pub fn is_hasty(&self) -> bool {
        let hasty = |t: &Trying| matches!(t.phase, Phase::Knock { .. } | Phase::Queue { .. });
        self.trying.as_ref().is_some_and(hasty)
    }

    /// Stops it, or lets it go on.
    pub fn freeze(&mut self, frozen: bool, site: &mut Site) {
        self.frozen = frozen;
        for queue in &self.queues {
            site.rig.freeze(*queue, frozen);
        }
    }

    /// All links of it to an address.
    pub fn wires<'p>(&'p self, address: usize, site: &'p Site) -> Vec<Wire> {
        let mut wires = Vec::new();
        if let Some(session) = self.session.as_ref().filter(|s| s.address == address) {
            wires.push(session.admin.wire().clone());
            wires.extend(self.queues.iter().filter_map(|queue| site.rig.wire(*queue)).cloned());
        }
        if let Some(trying) = self.trying.as_ref().filter(|t| t.attempt.address == address) {
            wires.extend(trying.admin.iter().map(|admin| admin.wire().clone()));
            match &trying.phase {
                Phase::Queue { paths, .. } => {
                    wires.extend(paths.iter().map(|(_, wire)| wire.clone()));
                }
                Phase::Settle(settling) => wires.push(settling.wire.clone()),
                _ => {}
            }
        }
        wires
    }

    /// The address in use.
    #[must_use]
    pub fn address(&self) -> Option<usize> {
        self.session.as_ref().map(|session| session.address)
    }

    /// It dies; with `silent` its machine does. Its device is left to the next one.
    pub fn die(mut self, silent: bool, site: &mut Site) -> Option<Note> {
        if silent {
            for address in 0..self.plan.addresses {
                self.wires(address, site).iter().for_each(Wire::silence);
            }
        }
        for queue in &self.queues {
            site.rig.drop_queue(*queue, silent);
        }
        self.note.take()
    }

    fn write_note(&mut self) {
        let loss_untold = self.durability.has_untold_loss();
        self.note = self.course.as_ref().map(|course| {
            let facts = course.facts().clone();
            Note { facts, loss_untold }
        });
    }

    fn make_queues(&mut self, volume: &OpenReply, ground: &mut Ground<'_>) {
        let options = self.queue_options();
        for _ in 0..self.plan.queues {
            let depth = QueueDepth::new(options.depth).expect("a depth");
            let ledger = volume.flags.has(VolumeFlags::VOLATILE_CACHE).then(|| {
                let ring = self.plan.retain_bytes.map(|bytes| RetainRing::for_queue(bytes, depth));
                Ledger::new(Arc::clone(&self.durability), depth, ring)
            });
            let rig = &mut ground.site.rig;
            let queue = rig.add_engine(VOLUME, options, ledger).expect("a queue");
            rig.engine_mut(queue).set_pulse(Some(self.pulse()));
            self.queues.push(queue);
        }
    }

    fn queue_options(&self) -> QueueOptions {
        QueueOptions {
            depth: self.plan.depth,
            io_max_bytes: self.plan.io_max_bytes,
            in_capsule_bytes: self.plan.in_capsule_bytes,
            features: self.plan.features,
            reads_out: self.plan.reads_out,
        }
    }

    fn fail_all(&self, errno: Option<i32>, ground: &mut Ground<'_>) {
        for queue in &self.queues {
            ground.site.rig.engine_mut(*queue).set_failed(errno);
        }
    }

    fn hold_all(&self, held: bool, ground: &mut Ground<'_>) {
        for queue in &self.queues {
            ground.site.rig.engine_mut(*queue).hold(held);
        }
    }

    /// One turn of its control.
    ///
    /// # Panics
    /// Something is not what it has to be.
    pub fn turn(&mut self, ground: &mut Ground<'_>) {
        if self.frozen || self.gave_up {
            return;
        }
        let now = ground.site.rig.now();
        for queue in self.queues.clone() {
            for end in ground.site.rig.take_path_ends(queue) {
                if end != PathEnd::Dropped {
                    self.lose(ground);
                }
            }
        }
        if let Some(session) = &mut self.session {
            match session.admin.turn(now, Pulse::of(self.plan.detect), true) {
                Ok(None) => {}
                Ok(Some(Heard::Draining)) => {
                    ground.log.add("hears of the drain", [self.mount.0.into(), 0, 0]);
                    if let Some(course) = &mut self.course {
                        course.draining(now);
                    }
                }
                Ok(Some(heard)) => panic!("an answer nobody waits for: {heard:?}"),
                Err(admin::Lost) => self.lose(ground),
            }
        }
        if let Some(course) = &mut self.course
            && course.is_holding()
            && self.queues.iter().all(|queue| ground.site.rig.engine_mut(*queue).is_quiet())
        {
            course.quiet();
        }
        self.go_on_trying(ground);
        loop {
            let random = self.random.bits();
            let Some(act) = self.course.as_mut().and_then(|course| course.due(now, random)) else {
                break;
            };
            self.act(act, ground);
        }
    }

    fn act(&mut self, act: Act, ground: &mut Ground<'_>) {
        let now = ground.site.rig.now();
        match act {
            Act::Try(attempt) => {
                self.write_note();
                self.begin_try(attempt, false, ground);
            }
            Act::Fail => self.fail_all(Some(EIO), ground),
            Act::Hold => self.hold_all(true, ground),
            Act::Leave(_) => {
                ground.log.add("leaves", [self.mount.0.into(), 0, 0]);
                self.drop_session(ground);
            }
            Act::Probe(address) => {
                let answers = ground.links[address].broken.is_none()
                    && ground.site.is_up()
                    && !ground.site.is_draining();
                if let Some(course) = &mut self.course {
                    course.probed(address, answers, now);
                }
            }
        }
    }

    /// The target is lost.
    fn lose(&mut self, ground: &mut Ground<'_>) {
        if self.session.is_none() {
            return;
        }
        ground.log.add("lost", [self.mount.0.into(), 0, 0]);
        let now = ground.site.rig.now();
        let random = self.random.bits();
        self.drop_session(ground);
        if let Some(course) = &mut self.course {
            course.lose(Loss::Path, now, random);
        }
    }

    fn drop_session(&mut self, ground: &mut Ground<'_>) {
        self.session = None;
        for queue in &self.queues {
            ground.site.rig.engine_mut(*queue).disconnect();
        }
    }

    fn begin_try(&mut self, attempt: Attempt, take_over: bool, ground: &mut Ground<'_>) {
        let (id, epoch) = attempt.resume.map_or((0, 0), |(id, epoch)| (id.0[1], epoch.0));
        ground.log.add("tries", [self.mount.0.into(), id.into(), epoch.into()]);
        let due = self.soon(ground);
        self.trying = Some(Trying {
            attempt,
            take_over,
            since: ground.site.rig.now(),
            phase: Phase::Knock { due },
            admin: None,
            login: None,
            volume: None,
        });
    }

    /// When a message over the network has come.
    fn soon(&mut self, ground: &Ground<'_>) -> u64 {
        ground.site.rig.steps() + 1 + self.random.below(6)
    }

    fn go_on_trying(&mut self, ground: &mut Ground<'_>) {
        let Some(mut trying) = self.trying.take() else { return };
        let going = self.step(&mut trying, ground);
        let now = ground.site.rig.now();
        let random = self.random.bits();
        match going {
            Going::On => self.trying = Some(trying),
            Going::Failed(why) => {
                ground.log.add("try failed", [self.mount.0.into(), why as u64, 0]);
                match &mut self.course {
                    Some(course) => course.failed(why, now, random),
                    None => self.gave_up = true,
                }
            }
            Going::Fenced(by) => {
                ground.log.add("fenced", [self.mount.0.into(), 0, 0]);
                if let Some(course) = &mut self.course {
                    course.fenced(by);
                    self.write_note();
                    self.fail_all(Some(EBADE), ground);
                } else {
                    self.gave_up = true;
                }
            }
            Going::Changed(how) => panic!("the volume {how}"),
            Going::Arrived(paths) => self.arrive(trying, paths, ground),
        }
    }

    fn arrive(&mut self, trying: Trying, paths: Vec<(Path, Wire)>, ground: &mut Ground<'_>) {
        let now = ground.site.rig.now();
        let address = trying.attempt.address;
        let (Some(login), Some(volume)) = (trying.login, trying.volume) else {
            panic!("arrived without a volume")
        };
        let was_failing = match &mut self.course {
            Some(course) => {
                let arrival = course.arrived(now).expect("a try is under way");
                assert_eq!(arrival.address, address);
                arrival.was_failing
            }
            None => {
                let facts = Facts {
                    resume: Some((login.session, login.epoch)),
                    volume,
                    instance: login.instance,
                    target_name: login.target_name,
                    fenced: None,
                };
                self.course = Some(Course::connected(self.rules(), facts, address, now));
                false
            }
        };
        ground.log.add("arrived", [self.mount.0.into(), address as u64, 0]);
        ground.moments.push(Moment::Arrived);
        self.durability.arrived();
        // Whatever was to be written again has been by now.
        let settled = ground.oracle.go_on(self.mount, None, true);
        assert_eq!(settled, Ok(()));
        self.session = trying.admin.map(|admin| Session { admin, address });
        self.hold_all(false, ground);
        for (queue, (path, wire)) in self.queues.clone().into_iter().zip(paths) {
            ground.site.rig.give_path(queue, path, wire);
        }
        if was_failing {
            self.fail_all(None, ground);
        }
        self.write_note();
    }

    fn step(&mut self, trying: &mut Trying, ground: &mut Ground<'_>) -> Going {
        let now = ground.site.rig.now();
        if let Some(admin) = &mut trying.admin {
            let parks = matches!(trying.phase, Phase::Settle(_));
            match admin.turn(now, self.pulse(), parks) {
                Ok(None) => {}
                Ok(Some(Heard::Draining)) | Err(admin::Lost) => {
                    return Going::Failed(Failure::Transient);
                }
                Ok(Some(Heard::Answer { status, value, payload })) => {
                    return self.answered(trying, status, value, &payload, ground);
                }
            }
        }
        let waited = now.saturating_duration_since(trying.since);
        let limit = match &trying.phase {
            Phase::Login if trying.attempt.resume.is_some() => WAITING_LIMIT,
            Phase::Open => WAITING_LIMIT,
            Phase::Settle(_) => Duration::MAX,
            _ => trying.attempt.limit,
        };
        if waited >= limit {
            return Going::Failed(Failure::Transient);
        }
        match &mut trying.phase {
            Phase::Knock { due } if *due <= ground.site.rig.steps() => self.knock(trying, ground),
            Phase::Queue { due, .. } if *due <= ground.site.rig.steps() => {
                self.connect_queue(trying, ground)
            }
            Phase::Settle(_) => self.rewrite(trying, ground),
            _ => Going::On,
        }
    }

    fn hello(&self, kind: ConnectionKind, session: SessionId, epoch: Epoch) -> HelloRequest {
        let options = match kind {
            ConnectionKind::Admin => admin::options(),
            ConnectionKind::Io { .. } => self.queue_options(),
        };
        HelloRequest {
            kind,
            newest: Version::NEWEST,
            oldest: Version::OLDEST,
            depth: QueueDepth::new(options.depth).expect("a depth"),
            features: options.features,
            in_capsule_bytes: options.in_capsule_bytes,
            io_max_bytes: options.io_max_bytes,
            epoch,
            session,
        }
    }

    /// A connect request arrives at the target, if it does.
    fn ask_in(
        &self,
        address: usize,
        hello: &HelloRequest,
        ground: &mut Ground<'_>,
    ) -> Result<Option<Join>, Failure> {
        match ground.links[address].broken {
            None => {}
            Some(Break::Cut) => return Err(Failure::Transient),
            Some(Break::Silence | Break::Stall) => return Ok(None),
        }
        if ground.dark {
            return Ok(None);
        }
        match ground.site.knock(hello, self.mount, ground.log) {
            Knock::Nobody => Err(Failure::Transient),
            Knock::Admitted(join) => Ok(Some(join)),
            Knock::Refused(refused) => {
                let reject = HelloReject {
                    reason: Some(refused.reason),
                    newest: Version::NEWEST,
                    oldest: Version::OLDEST,
                    text: refused.text,
                };
                let address = "site".to_owned();
                Err(failure(&SessionError::Refused { address, reject }))
            }
        }
    }

    fn knock(&self, trying: &mut Trying, ground: &mut Ground<'_>) -> Going {
        let (session, epoch) = trying.attempt.resume.unwrap_or((SessionId::default(), Epoch(0)));
        let hello = self.hello(ConnectionKind::Admin, session, epoch);
        let join = match self.ask_in(trying.attempt.address, &hello, ground) {
            Ok(Some(join)) => join,
            Ok(None) => {
                trying.phase = Phase::Unanswered;
                return Going::On;
            }
            Err(why) => return Going::Failed(why),
        };
        let sizes = AdminChannel::qp_limits();
        let end = ground.site.rig.raw_end(join, admin::options(), sizes).expect("a connection");
        let now = ground.site.rig.now();
        let mut admin = AdminEnd::new(end, join.epoch, now);
        let login = LoginRequest {
            host: self.host_id,
            host_name: rblk_protocol::Name::new("host").expect("a name"),
            keep_alive_ms: u32::try_from(self.plan.detect.as_millis()).unwrap_or(u32::MAX),
        };
        admin.call(Opcode::Login, &login.to_wire());
        trying.admin = Some(admin);
        trying.phase = Phase::Login;
        trying.since = now;
        Going::On
    }

    fn answered(
        &mut self,
        trying: &mut Trying,
        status: Status,
        value: u32,
        payload: &[u8],
        ground: &mut Ground<'_>,
    ) -> Going {
        let now = ground.site.rig.now();
        let len = usize::try_from(value).unwrap_or(0).min(payload.len()).min(256);
        let text = String::from_utf8_lossy(&payload[..len]).into_owned();
        match trying.phase {
            Phase::Login => {
                if status != Status::Ok {
                    let what = "login".to_owned();
                    return Going::Failed(failure(&SessionError::Status { what, status, text }));
                }
                let login =
                    LoginReply::from_wire(&payload[..LoginReply::BYTES]).expect("a LOGIN reply");
                if let Some(course) = &mut self.course {
                    course.logged_in(&login).expect("the same target");
                    self.write_note();
                }
                trying.login = Some(login);
                let open = OpenRequest {
                    name: site::volume_name(),
                    mode: AccessMode::Exclusive,
                    take_over: trying.take_over,
                    generation: trying.attempt.generation,
                };
                if let Some(admin) = &mut trying.admin {
                    admin.call(Opcode::OpenVolume, &open.to_wire());
                }
                trying.phase = Phase::Open;
                trying.since = now;
                Going::On
            }
            Phase::Open => {
                match status {
                    Status::Ok => {}
                    // Without a word it is the session that has gone, not the volume that was taken.
                    Status::Fenced if !text.is_empty() => return Going::Fenced(text),
                    _ => {
                        let what = "open".to_owned();
                        return Going::Failed(failure(&SessionError::Status {
                            what,
                            status,
                            text,
                        }));
                    }
                }
                let volume =
                    OpenReply::from_wire(&payload[..OpenReply::BYTES]).expect("an OPEN reply");
                trying.volume = Some(volume);
                trying.since = now;
                let verdict = match &mut self.course {
                    Some(course) => course.opened(&volume),
                    None => Verdict::Go,
                };
                match verdict {
                    Verdict::Go => self.begin_queues(trying, ground),
                    Verdict::Settle => self.settle(trying, &volume, ground),
                    Verdict::Changed(how) => Going::Changed(how),
                }
            }
            _ => panic!("an answer nobody waits for: {status:?}"),
        }
    }

    fn begin_queues(&mut self, trying: &mut Trying, ground: &mut Ground<'_>) -> Going {
        let due = self.soon(ground);
        trying.since = ground.site.rig.now();
        trying.phase = Phase::Queue { due, paths: Vec::new() };
        Going::On
    }

    fn settle(
        &mut self,
        trying: &mut Trying,
        volume: &OpenReply,
        ground: &mut Ground<'_>,
    ) -> Going {
        let mut stock = Some(Vec::new());
        for queue in &self.queues {
            let entries = ground.site.rig.engine_mut(*queue).take_stock();
            match (&mut stock, entries) {
                (Some(all), Some(entries)) => all.extend(entries),
                _ => stock = None,
            }
        }
        let judgement = settle::judge(&self.durability, stock, volume.block_size);
        let log = match &judgement {
            Judgement::Rewrite { log, .. } => {
                let numbers = [self.mount.0.into(), log.writes(), log.pieces().len() as u64];
                ground.log.add("rewrites", numbers);
                Arc::new(log.clone())
            }
            Judgement::Nothing | Judgement::Lost { .. } => {
                self.settled(&judgement, true, ground);
                return self.begin_queues(trying, ground);
            }
        };
        ground.moments.push(Moment::Settle);
        if log.pieces().is_empty() {
            self.settled(&judgement, true, ground);
            return self.begin_queues(trying, ground);
        }
        let depth = QueueDepth::new(replay::DEPTH.min(self.plan.depth)).expect("a depth");
        let options = QueueOptions {
            depth: depth.get(),
            features: Features::default(),
            ..self.queue_options()
        };
        let wish = QueueWish {
            depth,
            io_max_bytes: options.io_max_bytes,
            in_capsule_bytes: options.in_capsule_bytes,
            features: options.features,
        };
        let buffers = replay::buffers(wish).expect("memory");
        let (path, wire) = match self.path(trying, REPLAY_QUEUE, options, &buffers, ground) {
            Ok(Some(made)) => made,
            Ok(None) => {
                trying.phase = Phase::Unanswered;
                return Going::On;
            }
            Err(why) => return Going::Failed(why),
        };
        let now = ground.site.rig.now();
        let pulse = self.pulse();
        let replayer = Replayer::new(log, path, buffers, wish, now).with_pulse(pulse);
        trying.phase =
            Phase::Settle(Box::new(Settling { replayer, judgement, wire, begun: false }));
        Going::On
    }

    /// The account is settled: the product's, and the oracle's.
    fn settled(&self, judgement: &Judgement, rewritten: bool, ground: &mut Ground<'_>) {
        judgement.settle(&self.durability, rewritten);
        let settled = match judgement {
            Judgement::Rewrite { log, .. } if rewritten => {
                let again = |block: usize| {
                    let block = block as u64;
                    let has = |p: &Piece| (p.lba.0..p.lba.0 + p.count.0).contains(&block);
                    log.pieces().iter().any(has)
                };
                ground.log.add("rewritten", [self.mount.0.into(), log.writes(), 0]);
                let owes = self.durability.has_untold_loss();
                ground.oracle.go_on(self.mount, Some(&again), owes)
            }
            _ => {
                let losses = self.durability.losses();
                ground.log.add("settled", [self.mount.0.into(), losses, 0]);
                ground.oracle.go_on(self.mount, None, true)
            }
        };
        assert_eq!(settled, Ok(()), "mount {}", self.mount.0);
    }

    fn rewrite(&mut self, trying: &mut Trying, ground: &mut Ground<'_>) -> Going {
        let now = ground.site.rig.now();
        let Phase::Settle(settling) = &mut trying.phase else { return Going::On };
        let rewritten = match settling.replayer.turn(now) {
            Ok(Progress::Done) => true,
            Err(ReplayError::Refused(_)) => false,
            Ok(Progress::Busy) => {
                if !std::mem::replace(&mut settling.begun, true) {
                    ground.moments.push(Moment::Rewrite);
                }
                return Going::On;
            }
            Ok(Progress::Idle) => return Going::On,
            Err(_) => return Going::Failed(Failure::Transient),
        };
        let Phase::Settle(settling) = std::mem::replace(&mut trying.phase, Phase::Unanswered)
        else {
            return Going::On;
        };
        self.settled(&settling.judgement, rewritten, ground);
        self.begin_queues(trying, ground)
    }

    fn path(
        &self,
        trying: &Trying,
        queue: u16,
        options: QueueOptions,
        buffers: &Arc<Region>,
        ground: &mut Ground<'_>,
    ) -> Result<Option<(Path, Wire)>, Failure> {
        let (Some(login), Some(volume)) = (trying.login, trying.volume) else {
            return Err(Failure::Transient);
        };
        let hello = self.hello(ConnectionKind::Io { queue }, login.session, login.epoch);
        let Some(join) = self.ask_in(trying.attempt.address, &hello, ground)? else {
            return Ok(None);
        };
        let rig = &mut ground.site.rig;
        Ok(Some(rig.path(join, volume.handle, options, buffers).expect("a path")))
    }

    fn connect_queue(&mut self, trying: &mut Trying, ground: &mut Ground<'_>) -> Going {
        let Phase::Queue { paths, .. } = &mut trying.phase else { return Going::On };
        let mut paths = std::mem::take(paths);
        let Some(volume) = trying.volume else { return Going::Failed(Failure::Transient) };
        if self.queues.is_empty() {
            self.make_queues(&volume, ground);
        }
        let queue = paths.len();
        let buffers = Arc::clone(ground.site.rig.buffers(self.queues[queue]));
        let number = u16::try_from(queue).unwrap_or(u16::MAX);
        match self.path(trying, number, self.queue_options(), &buffers, ground) {
            Ok(Some(made)) => paths.push(made),
            Ok(None) => {
                trying.phase = Phase::Unanswered;
                return Going::On;
            }
            Err(why) => return Going::Failed(why),
        }
        if paths.len() == self.queues.len() {
            return Going::Arrived(paths);
        }
        ground.moments.push(Moment::Queue);
        let due = self.soon(ground);
        trying.phase = Phase::Queue { due, paths };
        Going::On
    }
}

fn failure(error: &SessionError) -> Failure {
    if error.is_session_gone() { Failure::SessionGone } else { Failure::Transient }
}
