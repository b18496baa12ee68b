//! Several ways of one host to the real target, driven by hand: LOGINs that join, DROP, and the
//! writes of a way that is gone.
//!
//! The control, the poll groups and the engines are the real ones; the network and the store are in
//! memory. A scene has a way die while the store holds its write, and writes the same blocks again
//! by the other way as soon as the target says that the first epoch is over. [`drive()`] does all
//! that at random: one queue of the real engine has a path of each way.

mod drive;
mod halves;
mod others;

use std::sync::Arc;
use std::time::Duration;

use rblk_fabric::soft::network::FaultyWire;
use rblk_initiator::engine::io::IoOp;
use rblk_initiator::engine::path::Path;
use rblk_initiator::engine::pulse::Pulse;
use rblk_initiator::engine::ways::WayIndex;
use rblk_initiator::volume::admin::AdminChannel;
use rblk_protocol::{
    AccessMode, ConnectionKind, DropRequest, Epoch, Features, Generation, HostId, Join, LoginReply,
    LoginRequest, Name, Opcode, OpenReply, OpenRequest, RejectReason, SessionId, Status, Tag,
    VolumeHandle,
};
use rblk_rig::inprocess::{QueueId, QueueOptions};
use rblk_rig::seed::Random;
use rblk_target::volume::CacheMode;

use crate::bed::pattern;
use crate::oracle::Host;
use crate::sim::admin::{self, AdminEnd, Heard};
use crate::sim::log::Log;
use crate::sim::plan::Plan;
use crate::sim::site::{self, Knock, Site};
use crate::storm::VOLUME;
pub use drive::drive;
pub use halves::equal_halves;
pub use others::others_go_on;

/// Steps within which anything happens that is due.
const PATIENCE: u64 = 20_000;
const HOST: Host = Host(0);

/// The ways of the host.
const FIRST: usize = 0;
const SECOND: usize = 1;

/// One life of one way.
struct Way {
    epoch: Epoch,
    admin: AdminEnd,
    queue: QueueId,
    wires: Vec<FaultyWire>,
    // The answer to the command that is under way.
    answer: Option<(Status, Vec<u8>)>,
    // The target is silent on its admin connection, or that is dead.
    lost: bool,
}

impl Way {
    /// Nothing comes through any more, and one end or none learns of that.
    fn break_link(&self, silent: bool) {
        let end = if silent { FaultyWire::silence } else { FaultyWire::cut };
        self.wires.iter().for_each(end);
    }
}

struct Bench {
    plan: Plan,
    site: Site,
    log: Log,
    session: SessionId,
    handle: VolumeHandle,
    ways: Vec<Option<Way>>,
    // The queue that has a path of every way. Without it each way has a queue of its own.
    shared: Option<QueueId>,
    tag: u16,
}

impl Bench {
    /// The plan of a seed, for several ways.
    fn plan(seed: u64) -> Plan {
        let mut plan = Plan::random(seed);
        // The store must have the write while its way dies.
        let cached = [CacheMode::None, CacheMode::WriteThrough];
        plan.cache = cached[usize::try_from(seed % 2).unwrap()];
        (plan.lanes, plan.neighbour) = (1, false);
        // In the smallest arena the host's share of memory has room for one request, which may be
        // the one that the store holds.
        plan.arena_bytes += plan.groups * (1 << 20);
        plan.depth = plan.depth.max(4);
        plan.detect = Duration::from_millis(400);
        // The session is never lost.
        plan.lease = Duration::from_secs(600);
        (plan.store.delay_min, plan.store.delay_max, plan.store.capacity) = (3, 8, 4096);
        plan
    }

    /// A target, and a host with so many ways that are not in use.
    fn of(seed: u64, ways: usize) -> Self {
        Self::by(Self::plan(seed), ways)
    }

    /// As [`Self::of`], by another plan.
    fn by(plan: Plan, ways: usize) -> Self {
        let site = Site::new(&plan, vec![0; plan.volume_bytes]);
        let (session, handle) = (SessionId::default(), VolumeHandle(0));
        let ways = (0..ways).map(|_| None).collect();
        Self { plan, site, log: Log::new(), session, handle, ways, shared: None, tag: 0 }
    }

    /// A step in which no way is lost.
    fn step(&mut self) {
        self.turn();
        let lost = self.ways.iter().flatten().any(|way| way.lost);
        assert!(!lost, "a way died that was not broken: {:?}", self.log);
    }

    fn turn(&mut self) {
        self.site.rig.step();
        self.log.at(self.site.rig.steps());
        self.site.pump(&mut self.log, &mut Vec::new());
        let (now, pulse) = (self.site.rig.now(), Pulse::of(self.plan.detect));
        for way in self.ways.iter_mut().flatten() {
            match way.admin.turn(now, pulse, false) {
                Ok(Some(Heard::Answer { status, payload, .. })) => {
                    way.answer = Some((status, payload));
                }
                Ok(_) => {}
                Err(admin::Lost) => way.lost = true,
            }
        }
    }

    fn wait<T>(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> Option<T>) -> T {
        for _ in 0..PATIENCE {
            if let Some(value) = done(self) {
                return value;
            }
            self.step();
        }
        panic!("{what} takes too long: {:?} {:?}", self.plan, self.log)
    }

    fn answer(&mut self, at: usize) -> Option<(Status, Vec<u8>)> {
        self.ways[at].as_mut().expect("a way").answer.take()
    }

    fn call(&mut self, at: usize, opcode: Opcode, body: &[u8]) {
        self.ways[at].as_mut().expect("a way").admin.call(opcode, body);
    }

    fn queue_options(&self) -> QueueOptions {
        QueueOptions { lanes: 1, ..self.plan.queue_options() }
    }

    fn knock(&mut self, kind: ConnectionKind, epoch: Epoch) -> Knock {
        let options = match kind {
            ConnectionKind::Admin => QueueOptions { features: Features::WAYS, ..admin::options() },
            ConnectionKind::Io { .. } => self.queue_options(),
        };
        let hello = admin::hello(kind, &options, self.session, epoch);
        let knock = self.site.knock(&hello, HOST, &mut self.log);
        self.site.pump(&mut self.log, &mut Vec::new());
        knock
    }

    /// Sends the LOGIN of a way. Its epoch is 0 for a new session.
    fn ask_in(&mut self, at: usize, epoch: u32, join: Option<Join>) {
        self.connect(at, epoch);
        self.log_in(at, join);
    }

    /// Makes the admin connection of a way.
    fn connect(&mut self, at: usize, epoch: u32) {
        let Knock::Admitted(admitted) = self.knock(ConnectionKind::Admin, Epoch(epoch)) else {
            panic!("refused")
        };
        let options = self.queue_options();
        let rig = &mut self.site.rig;
        let sizes = AdminChannel::qp_limits();
        let end = rig.raw_end(admitted, admin::options(), sizes).expect("a connection");
        let admin = AdminEnd::new(end, admitted.epoch, rig.now());
        let queue = self.shared.unwrap_or_else(|| {
            let queue = rig.add_engine(VOLUME, options, None).expect("a queue");
            rig.engine_mut(queue).set_pulse(Some(Pulse::of(self.plan.detect)));
            queue
        });
        let wires = vec![admin.wire().clone()];
        let (epoch, answer, lost) = (admitted.epoch, None, false);
        let way = Way { epoch, admin, queue, wires, answer, lost };
        assert!(self.ways[at].replace(way).is_none(), "it lives");
    }

    fn log_in(&mut self, at: usize, join: Option<Join>) {
        let login = LoginRequest {
            host: HostId([7; 16]),
            host_name: Name::new("host").expect("a name"),
            keep_alive_ms: 1000,
            join,
        };
        self.call(at, Opcode::Login, &login.to_wire());
    }

    /// The answer to the LOGIN of a way, and then its queue.
    fn come_in(&mut self, at: usize) {
        let (status, payload) = self.wait("LOGIN", |bench| bench.answer(at));
        assert_eq!(status, Status::Ok);
        let reply = LoginReply::from_wire(&payload[..LoginReply::BYTES]).expect("a LOGIN reply");
        self.session = reply.session;
        if self.handle == VolumeHandle(0) {
            self.open(at);
        }
        self.give_queue(at, reply.epoch, false);
        let queue = self.way(at).queue;
        self.wait("a self-test", |bench| bench.site.rig.is_connected(queue).then_some(()));
    }

    /// Connects the queue of a way that logged in. With `beside` the paths of other ways stay.
    fn give_queue(&mut self, at: usize, epoch: Epoch, beside: bool) {
        let (queue, handle) = (self.way(at).queue, self.handle);
        let Knock::Admitted(join) = self.knock(ConnectionKind::Io { queue: 0 }, epoch) else {
            panic!("refused")
        };
        let options = self.queue_options();
        let rig = &mut self.site.rig;
        let buffers = Arc::clone(rig.buffers(queue));
        let (path, wires) = rig.path(&[join], handle, options, &buffers).expect("a path");
        self.ways[at].as_mut().expect("a way").wires.extend(wires.iter().cloned());
        let way = if self.shared.is_some() { at } else { 0 };
        let path = Path { way: WayIndex::new(way).expect("a place"), ..path };
        match beside {
            true => rig.join_path(queue, path, wires),
            false => rig.give_path(queue, path, wires),
        }
    }

    fn open(&mut self, at: usize) {
        let (name, mode) = (site::volume_name(), AccessMode::Exclusive);
        let open = OpenRequest { name, mode, take_over: false, generation: Generation::FRESH };
        self.call(at, Opcode::OpenVolume, &open.to_wire());
        let (status, payload) = self.wait("OPEN", |bench| bench.answer(at));
        assert_eq!(status, Status::Ok);
        self.handle = OpenReply::from_wire(&payload[..OpenReply::BYTES]).expect("a reply").handle;
    }

    fn way(&self, at: usize) -> &Way {
        self.ways[at].as_ref().expect("a way")
    }

    /// Both ways, in epochs 1 and 2.
    fn both(seed: u64) -> Self {
        let mut bench = Self::of(seed, 2);
        bench.ask_in(FIRST, 0, None);
        bench.come_in(FIRST);
        bench.ask_in(SECOND, 2, Some(Join { beside: Epoch(1), ends: None }));
        bench.come_in(SECOND);
        bench
    }

    /// Begins a request by a way. Returns its tag.
    fn begin(&mut self, at: usize, op: IoOp, (offset, len): (u64, usize), seed: u64) -> Tag {
        let queue = self.way(at).queue;
        self.tag = (self.tag + 1) % self.plan.depth;
        let tag = Tag(self.tag);
        if op == IoOp::Write {
            self.site.rig.fill_buffer(queue, tag, &pattern(seed, len));
        }
        let io = self.site.rig.request(queue, op, offset, len as u64);
        self.site.rig.submit(queue, tag, io).expect("a free tag");
        tag
    }

    fn end(&mut self, at: usize, tag: Tag) {
        let queue = self.way(at).queue;
        let result = self.wait("a request", |bench| {
            let outcomes = bench.site.rig.take_outcomes();
            outcomes.into_iter().find(|o| (o.queue, o.tag) == (queue, tag)).map(|o| o.result)
        });
        assert!(result >= 0, "errno {}", -result);
    }

    fn write(&mut self, at: usize, place: (u64, usize), seed: u64) {
        let tag = self.begin(at, IoOp::Write, place, seed);
        self.end(at, tag);
    }

    fn reads(&mut self, at: usize, place: (u64, usize), seed: u64) {
        let tag = self.begin(at, IoOp::Read, place, 0);
        self.end(at, tag);
        let bytes = self.site.rig.buffer(self.way(at).queue, tag, place.1);
        assert!(bytes == pattern(seed, place.1), "stale data: {:?}", self.log);
    }

    /// A way dies: its host hears nothing of it any more, and the target may not know.
    fn kill(&mut self, at: usize, silent: bool) -> Epoch {
        let way = self.ways[at].take().expect("a way");
        way.break_link(silent);
        self.site.rig.drop_queue(way.queue, silent);
        way.epoch
    }

    fn drop_epoch(&mut self, at: usize, epoch: Epoch) {
        let request = DropRequest::new(&[epoch]).expect("an epoch");
        self.call(at, Opcode::Drop, &request.to_wire());
    }
}

/// Two places of a volume that do not overlap.
fn places(bench: &Bench, random: &mut Random) -> [(u64, usize); 2] {
    let block = bench.plan.block_bytes as usize;
    let half = bench.plan.volume_bytes / 2;
    let most = (bench.plan.io_max_bytes as usize).min(half) / block;
    [0, half].map(|from| {
        let len = block * (1 + random.index(most));
        let room = (half - len) / block;
        ((from + block * random.index(room + 1)) as u64, len)
    })
}

/// A way dies while the store holds its write. DROP is answered when nothing of that write can
/// follow, and the other way goes on meanwhile.
///
/// # Panics
/// A rule is broken.
pub fn held_write(seed: u64) {
    let mut random = Random::new(seed ^ 0x7761_7973);
    let mut bench = Bench::both(seed);
    let [place, other] = places(&bench, &mut random);
    bench.write(FIRST, place, 1);
    bench.reads(SECOND, place, 1);
    // The store gets the write of the second way, and keeps it.
    bench.begin(SECOND, IoOp::Write, place, 2);
    bench.wait("a write", |bench| {
        (bench.site.rig.store_mut().changes_in_flight() > 0).then_some(())
    });
    bench.site.rig.store_mut().hold();
    let jams = random.chance(300);
    bench.site.rig.hold_destroys(jams);
    let dead = bench.kill(SECOND, random.chance(500));
    (0..random.below(40)).for_each(|_| bench.step());
    bench.drop_epoch(FIRST, dead);
    // The first way goes on, whatever became of the second.
    for round in 0..1 + random.below(4) {
        bench.write(FIRST, other, 10 + round);
        bench.reads(FIRST, other, 10 + round);
        (0..random.below(100)).for_each(|_| bench.step());
    }
    assert!(bench.answer(FIRST).is_none(), "DROP was answered while the store held a write");
    let refused = bench.knock(ConnectionKind::Io { queue: 1 }, dead);
    let Knock::Refused(refused) = refused else { panic!("an epoch that ended lives again") };
    assert_eq!(refused.reason, RejectReason::StaleEpoch);
    bench.site.rig.store_mut().release();
    if jams {
        (0..random.below(200)).for_each(|_| bench.step());
        assert!(bench.answer(FIRST).is_none(), "DROP was answered before the QPs were destroyed");
        bench.site.rig.hold_destroys(false);
    }
    let (status, _) = bench.wait("DROP", |bench| bench.answer(FIRST));
    assert_eq!(status, Status::Ok);
    // Nothing of the old copy can follow.
    bench.write(FIRST, place, 3);
    bench.reads(FIRST, place, 3);
    let (join, epoch) = (Join { beside: Epoch(1), ends: Some(dead) }, dead.0 + 1);
    bench.ask_in(SECOND, epoch, Some(join));
    bench.come_in(SECOND);
    bench.reads(SECOND, place, 3);
    bench.write(SECOND, place, 4);
    (0..500).for_each(|_| bench.step());
    bench.reads(FIRST, place, 4);
    let image = bench.site.rig.store_mut().bytes(VOLUME);
    let from = usize::try_from(place.0).unwrap();
    assert!(image[from..from + place.1] == pattern(4, place.1), "stale data in the store");
    assert_eq!(bench.site.breaches(), [] as [String; 0]);
}

/// Both ways die in turn. A LOGIN that joins waits for the last life of its way, and one that
/// resumes the session for all.
///
/// # Panics
/// A rule is broken.
pub fn joins_and_returns(seed: u64) {
    let mut bench = Bench::both(seed);
    let place = (0, bench.plan.block_bytes as usize);
    let hold = |bench: &mut Bench, at: usize, value: u64| {
        bench.begin(at, IoOp::Write, place, value);
        bench.wait("a write", |bench| {
            (bench.site.rig.store_mut().changes_in_flight() > 0).then_some(())
        });
        bench.site.rig.store_mut().hold();
        bench.kill(at, seed.is_multiple_of(3))
    };
    let dead = hold(&mut bench, SECOND, 1);
    bench.ask_in(SECOND, 3, Some(Join { beside: Epoch(1), ends: Some(dead) }));
    (0..300).for_each(|_| bench.step());
    assert!(bench.answer(SECOND).is_none(), "the write of epoch 2 is in the store");
    bench.site.rig.store_mut().release();
    bench.come_in(SECOND);
    bench.write(SECOND, place, 2);
    // Both die, the first with a write in the store.
    hold(&mut bench, FIRST, 3);
    bench.kill(SECOND, seed.is_multiple_of(2));
    bench.ask_in(FIRST, 4, None);
    (0..300).for_each(|_| bench.step());
    assert!(bench.answer(FIRST).is_none(), "the write of epoch 1 is in the store");
    bench.site.rig.store_mut().release();
    bench.come_in(FIRST);
    bench.write(FIRST, place, 4);
    (0..300).for_each(|_| bench.step());
    bench.reads(FIRST, place, 4);
    assert_eq!(bench.site.breaches(), [] as [String; 0]);
}

/// A LOGIN that its host has given up and dropped comes late: it joins nothing and ends nothing.
///
/// # Panics
/// A rule is broken.
pub fn late_login(seed: u64) {
    let mut bench = Bench::both(seed);
    let place = (0, bench.plan.block_bytes as usize);
    let dead = bench.kill(SECOND, true);
    let joins = seed.is_multiple_of(2);
    bench.connect(SECOND, 3);
    let request = DropRequest::new(&[dead, Epoch(3)]).expect("epochs");
    bench.call(FIRST, Opcode::Drop, &request.to_wire());
    let (status, _) = bench.wait("DROP", |bench| bench.answer(FIRST));
    assert_eq!(status, Status::Ok);
    bench.log_in(SECOND, joins.then_some(Join { beside: Epoch(1), ends: None }));
    let (status, _) = bench.wait("LOGIN", |bench| bench.answer(SECOND));
    assert_eq!(status, Status::NoSuchSession);
    for round in 0..20 {
        bench.write(FIRST, place, round);
        bench.reads(FIRST, place, round);
    }
}

/// All scenes of a seed.
///
/// # Panics
/// A rule is broken.
pub fn run(seed: u64) {
    held_write(seed);
    joins_and_returns(seed);
    late_login(seed);
    others_go_on(seed);
    equal_halves(seed);
    drive(seed);
}
