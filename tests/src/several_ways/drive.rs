//! [`drive`]: a host with two to four ways: the engine of one queue has a path of each.
//!
//! The joins, DROPs and probes are those of [`Lives`]. The engine chooses the way of each request,
//! and decides when a request of a dead way may be sent again. The links of ways are cut and silent
//! at random, and the store holds writes.
//!
//! The volume has cells of one block, with one request of each at a time. So each read has one
//! right answer. Requests have any buffer of the queue. A card may still touch a buffer until a
//! dead QP is destroyed, and users look at what they read some time after the answer.

use std::collections::BTreeMap;
use std::time::Duration;

use rblk_initiator::engine::PathEnd;
use rblk_initiator::engine::io::IoOp;
use rblk_initiator::engine::pulse::Pulse;
use rblk_initiator::engine::ways::WayIndex;
use rblk_initiator::engine::ways::choice::ChoicePolicy;
use rblk_initiator::engine::ways::way_set::WaySet;
use rblk_initiator::volume::ways::{JoinFailure, Lives, WayAct, WayRules, WayTry};
use rblk_protocol::{DropRequest, Epoch, Opcode, Status, Tag};
use rblk_rig::inprocess::QueueId;
use rblk_rig::seed::Random;

use super::{Bench, PATIENCE};
use crate::bed::pattern;
use crate::storm::VOLUME;

const CELLS: usize = 4;
/// Requests of a run.
const REQUESTS: u64 = 400;
/// Steps after which a LOGIN or a connection is given up, beyond those in which QPs are destroyed.
const TRY: u64 = 2500;
/// Steps of a whole run.
const STEPS: u64 = 60 * PATIENCE;

/// A request.
struct Request {
    op: IoOp,
    value: u64,
    tag: Tag,
    since: u64,
    // It is answered; its user looks at the data at that step.
    looks_at: Option<u64>,
}

/// A block of the volume.
#[derive(Default)]
struct Cell {
    holds: u64,
    request: Option<Request>,
}

/// A LOGIN, and the path after it.
struct Coming {
    at: usize,
    epoch: Epoch,
    /// `None`: the mount had lost all ways.
    join: Option<WayTry>,
    since: u64,
    is_in: bool,
    has_path: bool,
}

struct Drive {
    bench: Bench,
    random: Random,
    queue: QueueId,
    lives: Lives,
    newest: Epoch,
    // The place of each epoch that a path was made in, until the target has ended it.
    places: BTreeMap<Epoch, usize>,
    coming: Option<Coming>,
    dropping: Option<(usize, DropRequest)>,
    free_tags: Vec<Tag>,
    // By way, the step at which its link heals.
    heals: Vec<u64>,
    releases: Option<u64>,
    cells: Vec<Cell>,
    value: u64,
    done: u64,
    is_calm: bool,
}

fn place(at: usize) -> WayIndex {
    WayIndex::new(at).expect("a few ways")
}

/// A queue that may have several ways, and the first of them.
fn bench(seed: u64, ways: usize, random: &mut Random) -> (Bench, QueueId) {
    let mut bench = Bench::of(seed, ways);
    let (options, pulse) = (bench.queue_options(), Pulse::of(bench.plan.detect));
    let rig = &mut bench.site.rig;
    let queue = rig.add_engine(VOLUME, options, None).expect("memory");
    let policy = [ChoicePolicy::Least, ChoicePolicy::RoundRobin][random.index(2)];
    let engine = rig.engine_mut(queue);
    engine.allow_ways(u16::try_from(random.index(4)).expect("few"), policy);
    engine.set_pulse(Some(pulse));
    bench.shared = Some(queue);
    bench.ask_in(0, 0, None);
    bench.come_in(0);
    (bench, queue)
}

impl Drive {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x6472_6976);
        let ways = 2 + random.index(3);
        let (bench, queue) = bench(seed, ways, &mut random);
        let rules = WayRules { ways, reconnect_delay: Duration::from_millis(20) };
        let (now, depth) = (bench.site.rig.now(), bench.plan.depth);
        Self {
            bench,
            random,
            queue,
            lives: Lives::new(rules, place(0), Epoch(1), now),
            newest: Epoch(1),
            places: BTreeMap::from([(Epoch(1), 0)]),
            coming: None,
            dropping: None,
            free_tags: (0..depth).map(Tag).collect(),
            heals: vec![0; ways],
            releases: None,
            cells: (0..CELLS).map(|_| Cell::default()).collect(),
            value: 0,
            done: 0,
            is_calm: false,
        }
    }

    fn steps(&self) -> u64 {
        self.bench.site.rig.steps()
    }

    fn is_broken(&self, at: usize) -> bool {
        self.heals[at] > self.steps()
    }

    fn step(&mut self) {
        if !self.is_calm {
            self.break_something();
        }
        self.bench.turn();
        let steps = self.steps();
        if self.releases.is_some_and(|at| at <= steps) {
            self.releases = None;
            self.bench.site.rig.store_mut().release();
        }
        self.take_outcomes();
        self.take_answers();
        self.take_deaths();
        self.look();
        self.come_in();
        self.take_acts();
        self.send();
    }

    fn break_something(&mut self) {
        let steps = self.steps();
        // Slower where QPs are destroyed slowly: a LOGIN that waits for them must have a chance.
        if self.random.below(400 + self.bench.plan.destroy_steps) == 0 {
            let at = self.random.index(self.heals.len());
            self.heals[at] = steps + self.random.within(20, 1500);
            let silent = self.random.chance(500);
            if let Some(way) = &self.bench.ways[at] {
                way.break_link(silent);
            }
        }
        let store = self.bench.site.rig.store_mut();
        if self.releases.is_none() && store.changes_in_flight() > 0 && self.random.below(60) == 0 {
            store.hold();
            self.releases = Some(steps + self.random.below(800));
        }
    }

    fn take_outcomes(&mut self) {
        for outcome in self.bench.site.rig.take_outcomes() {
            let is_it =
                |request: &&mut Request| request.looks_at.is_none() && request.tag == outcome.tag;
            let mut requests = self.cells.iter_mut().filter_map(|cell| cell.request.as_mut());
            let request = requests.find(is_it).expect("an outcome of a request");
            assert!(outcome.result >= 0, "errno {}", -outcome.result);
            request.looks_at = Some(self.bench.site.rig.steps() + self.random.below(30));
        }
    }

    /// The users of answered requests look at them.
    fn look(&mut self) {
        let (steps, len) = (self.steps(), self.bench.plan.block_bytes as usize);
        for (at, cell) in self.cells.iter_mut().enumerate() {
            let is_due = |request: &mut Request| request.looks_at.is_some_and(|due| due <= steps);
            let Some(request) = cell.request.take_if(is_due) else { continue };
            match request.op {
                IoOp::Write => cell.holds = request.value,
                IoOp::WriteZeroes => cell.holds = 0,
                IoOp::Read => {
                    let bytes = self.bench.site.rig.buffer(self.queue, request.tag, len);
                    let fine = bytes == block(cell.holds, len);
                    assert!(fine, "wrong data of cell {at}: {:?}", self.bench.log);
                }
                IoOp::Flush | IoOp::Discard => {}
            }
            self.free_tags.push(request.tag);
            self.done += 1;
        }
    }

    fn take_answers(&mut self) {
        for at in 0..self.heals.len() {
            let Some((status, _)) = self.bench.ways[at].as_mut().and_then(|way| way.answer.take())
            else {
                continue;
            };
            if let Some(coming) = self.coming.as_mut().filter(|c| c.at == at && !c.is_in) {
                assert_eq!(status, Status::Ok, "LOGIN of {:?}", coming.epoch);
                coming.is_in = true;
                match coming.join {
                    // The engine hears of that by its next path.
                    None => self.places.clear(),
                    Some(joining) => self.are_over(joining.join.ends),
                }
            } else if let Some((_, request)) = self.dropping.take_if(|(by, _)| *by == at) {
                assert_eq!(status, Status::Ok, "DROP");
                let over = self.lives.dropped(place(at), &request);
                self.are_over(over);
            } else {
                panic!("an answer to nothing");
            }
        }
    }

    /// The target has ended these epochs.
    fn are_over(&mut self, epochs: impl IntoIterator<Item = Epoch>) {
        for epoch in epochs {
            if let Some(at) = self.places.remove(&epoch) {
                self.bench.site.rig.engine_mut(self.queue).way_dropped(place(at));
            }
        }
    }

    fn take_deaths(&mut self) {
        let ends = self.bench.site.rig.take_way_ends(self.queue);
        let ended: WaySet = ends
            .into_iter()
            .inspect(|(way, end)| {
                assert!(!matches!(end, PathEnd::Protocol(_)), "{way:?}: {end:?}");
            })
            .filter(|(_, end)| *end != PathEnd::Dropped)
            .map(|(way, _)| way)
            .collect();
        // A LOGIN waits until the QPs of the last life of its way are destroyed at the target.
        let time = TRY + 2 * self.bench.plan.destroy_steps;
        for at in 0..self.heals.len() {
            let Some(way) = &self.bench.ways[at] else { continue };
            let late = |c: &Coming| c.at == at && c.since + time < self.steps();
            if way.lost || ended.has(place(at)) || self.coming.as_ref().is_some_and(late) {
                self.die(at);
            }
        }
    }

    fn die(&mut self, at: usize) {
        let silent = self.is_broken(at);
        let (now, random) = (self.bench.site.rig.now(), self.random.bits());
        self.dropping = self.dropping.filter(|(by, _)| *by != at);
        let way = self.bench.ways[at].take().expect("a way");
        way.break_link(silent);
        self.bench.site.rig.end_way(self.queue, place(at));
        match self.coming.take_if(|coming| coming.at == at) {
            Some(Coming { join: Some(_), .. }) => {
                self.lives.join_failed(place(at), JoinFailure::Transient, now, random);
            }
            Some(_) => {}
            None => self.lives.died(place(at), now, random),
        }
    }

    /// A way that logged in gets its path, and then lives.
    fn come_in(&mut self) {
        let Some(coming) = self.coming.as_mut().filter(|coming| coming.is_in) else { return };
        let (at, epoch) = (coming.at, coming.epoch);
        if !coming.has_path {
            if self.heals[at] > self.bench.site.rig.steps() {
                return;
            }
            coming.has_path = true;
            let beside = coming.join.is_some();
            self.places.insert(epoch, at);
            return self.bench.give_queue(at, epoch, beside);
        }
        if !self.bench.site.rig.engine_mut(self.queue).live_ways().has(place(at)) {
            return;
        }
        let Some(Coming { join, .. }) = self.coming.take() else { return };
        let now = self.bench.site.rig.now();
        match join {
            None => self.lives.restarted(place(at), epoch, now),
            Some(joining) => _ = self.lives.joined(&joining, now),
        }
    }

    fn take_acts(&mut self) {
        let now = self.bench.site.rig.now();
        if self.lives.are_lost() {
            if self.coming.is_none() {
                let at = self.random.index(self.heals.len());
                self.newest = self.newest.next().expect("few epochs");
                self.connect(at, None);
            }
            return;
        }
        while let Some(act) = self.lives.due(self.newest, now) {
            match act {
                WayAct::Join(joining) => {
                    assert!(self.coming.is_none(), "one at a time");
                    self.newest = joining.epoch;
                    self.connect(joining.way.get(), Some(joining));
                }
                WayAct::Drop { by, epochs } => {
                    self.dropping = Some((by.get(), epochs));
                    self.bench.call(by.get(), Opcode::Drop, &epochs.to_wire());
                }
                WayAct::Probe(way) => {
                    let (answers, random) = (!self.is_broken(way.get()), self.random.bits());
                    self.lives.probed(way, answers, now, random);
                }
            }
        }
    }

    fn connect(&mut self, at: usize, join: Option<WayTry>) {
        let now = self.bench.site.rig.now();
        if self.is_broken(at) {
            if join.is_some() {
                let random = self.random.bits();
                self.lives.join_failed(place(at), JoinFailure::Transient, now, random);
            }
            return;
        }
        let (epoch, since) = (self.newest, self.steps());
        self.bench.ask_in(at, epoch.0, join.map(|joining| joining.join));
        self.coming = Some(Coming { at, epoch, join, since, is_in: false, has_path: false });
    }

    /// Makes requests.
    fn send(&mut self) {
        let len = self.bench.plan.block_bytes as usize;
        for at in 0..CELLS {
            if self.cells[at].request.is_some() || self.is_calm || !self.random.chance(300) {
                continue;
            }
            self.value += 1;
            let op = match self.random.index(10) {
                0 => IoOp::Flush,
                1 => IoOp::WriteZeroes,
                2..=5 => IoOp::Read,
                _ => IoOp::Write,
            };
            // Any free buffer, so that each serves several cells in turn.
            let free = self.random.index(self.free_tags.len());
            let tag = self.free_tags.swap_remove(free);
            let (value, since, looks_at) = (self.value, self.steps(), None);
            self.cells[at].request = Some(Request { op, value, tag, since, looks_at });
            let rig = &mut self.bench.site.rig;
            // The user's data is there before the request, and only then.
            rig.fill_buffer(self.queue, tag, &pattern(self.value, len));
            let range = if op == IoOp::Flush { (0, 0) } else { ((at * len) as u64, len as u64) };
            let io = rig.request(self.queue, op, range.0, range.1);
            rig.submit(self.queue, tag, io).expect("a free tag");
        }
    }

    /// No request waits for ever.
    fn check_patience(&self) {
        let steps = self.steps();
        for request in self.cells.iter().filter_map(|cell| cell.request.as_ref()) {
            let waits = request.looks_at.is_none() && steps - request.since > PATIENCE;
            assert!(!waits, "{:?} waits: {:?}", request.tag, self.bench.log);
        }
    }
}

/// The content of a cell that holds that value; 0 is the first.
fn block(value: u64, len: usize) -> Vec<u8> {
    if value == 0 { vec![0; len] } else { pattern(value, len) }
}

/// A run of a seed. Returns how often a request was sent again.
///
/// # Panics
/// A rule is broken: data is stale, a LOGIN or a DROP in its time is refused, or nothing goes on.
pub fn drive(seed: u64) -> u64 {
    let mut drive = Drive::new(seed);
    for _ in 0..STEPS {
        drive.step();
        drive.check_patience();
        drive.is_calm |= drive.done >= REQUESTS;
        let is_idle = drive.cells.iter().all(|cell| cell.request.is_none());
        let all_live = drive.lives.living().count() == drive.heals.len();
        if drive.is_calm && is_idle && all_live && drive.dropping.is_none() {
            break;
        }
    }
    let living = drive.lives.living().count();
    assert_eq!(living, drive.heals.len(), "stuck: {:?} {:?}", drive.lives, drive.bench.log);
    assert!(drive.done >= REQUESTS, "stuck: {:?}", drive.bench.log);
    (0..1000).for_each(|_| drive.step());
    let len = drive.bench.plan.block_bytes as usize;
    let image = drive.bench.site.rig.store_mut().bytes(VOLUME);
    for (bytes, cell) in image.chunks(len).zip(&drive.cells) {
        assert!(bytes == block(cell.holds, len), "stale data in the store");
    }
    assert_eq!(drive.bench.site.breaches(), [] as [String; 0]);
    drive.bench.site.rig.queue_counts(drive.queue).replayed
}
