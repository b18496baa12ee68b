//! [`drive`]: a host with two to four ways, as its engine will use them.
//!
//! The joins, DROPs and probes are those of [`Lives`], the way of a request is that of [`Choice`],
//! and [`Limbo`] says when a request of a dead way may be sent again. The links of ways are cut and
//! silent at random, and the store holds writes.
//!
//! The volume has cells of one block, with one request of each at a time. So each read has one
//! right answer. The ways share the buffers, as those of a queue do. A card may still touch a
//! buffer until a dead QP is destroyed, and users look at what they read some time after the
//! answer.

use std::collections::BTreeMap;
use std::time::Duration;

use rblk_initiator::engine::io::IoOp;
use rblk_initiator::engine::ways::WayIndex;
use rblk_initiator::engine::ways::choice::{Choice, ChoicePolicy, WayLoad, WayTerms};
use rblk_initiator::engine::ways::limbo::{Limbo, OldCopy};
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
/// Steps after which a LOGIN or a connection is given up.
const TRY: u64 = 2500;
/// Steps of a whole run.
const STEPS: u64 = 60 * PATIENCE;

/// A request.
struct Request {
    op: IoOp,
    value: u64,
    tag: Tag,
    by: Option<usize>,
    old: Option<OldCopy>,
    // It is answered; its user looks at the data at that step.
    looks_at: Option<u64>,
}

/// A path that ended and is not destroyed.
struct Dying {
    at: usize,
    queue: QueueId,
    has_ended: bool,
}

/// A block of the volume.
#[derive(Default)]
struct Cell {
    holds: u64,
    request: Option<Request>,
}

/// A LOGIN, and the queue after it.
struct Coming {
    at: usize,
    epoch: Epoch,
    /// `None`: the mount had lost all ways.
    join: Option<WayTry>,
    since: u64,
    is_in: bool,
    has_queue: bool,
}

struct Drive {
    bench: Bench,
    random: Random,
    lives: Lives,
    limbo: Limbo,
    choice: Choice,
    newest: Epoch,
    // The place of each epoch that lived.
    places: BTreeMap<Epoch, usize>,
    coming: Option<Coming>,
    dropping: Option<(usize, DropRequest)>,
    dying: Vec<Dying>,
    free_tags: Vec<Tag>,
    // By way, the step at which its link heals.
    heals: Vec<u64>,
    releases: Option<u64>,
    cells: Vec<Cell>,
    value: u64,
    done: u64,
    resent: u64,
    is_calm: bool,
}

fn place(at: usize) -> WayIndex {
    WayIndex::new(at).expect("a few ways")
}

impl Drive {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x6472_6976);
        let ways = 2 + random.index(3);
        let mut bench = Bench::of(seed, ways);
        let (options, depth) = (bench.queue_options(), bench.plan.depth);
        bench.shared = Some(bench.site.rig.add_engine(VOLUME, options, None).expect("memory"));
        bench.ask_in(0, 0, None);
        bench.come_in(0);
        let rules = WayRules { ways, reconnect_delay: Duration::from_millis(20) };
        let now = bench.site.rig.now();
        let policy = [ChoicePolicy::Least, ChoicePolicy::RoundRobin][random.index(2)];
        let mut choice = Choice::new(u16::try_from(random.index(4)).expect("few"), policy);
        choice.lives(place(0), WayTerms::default());
        Self {
            bench,
            random,
            lives: Lives::new(rules, place(0), Epoch(1), now),
            limbo: Limbo::default(),
            choice,
            newest: Epoch(1),
            places: BTreeMap::from([(Epoch(1), 0)]),
            coming: None,
            dropping: None,
            dying: Vec::new(),
            free_tags: (0..depth).map(Tag).collect(),
            heals: vec![0; ways],
            releases: None,
            cells: (0..CELLS).map(|_| Cell::default()).collect(),
            value: 0,
            done: 0,
            resent: 0,
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
        self.take_destroyed();
        self.look();
        self.come_in();
        self.take_acts();
        self.send();
    }

    fn break_something(&mut self) {
        let steps = self.steps();
        if self.random.below(400) == 0 {
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
            let by = self
                .bench
                .ways
                .iter()
                .position(|way| way.as_ref().is_some_and(|way| way.queue == outcome.queue));
            let is_it = |request: &&mut Request| request.by == by && request.tag == outcome.tag;
            let mut requests = self.cells.iter_mut().filter_map(|cell| cell.request.as_mut());
            let request = requests.find(is_it).expect("an outcome of a request");
            assert!(outcome.result >= 0, "errno {}", -outcome.result);
            request.by = None;
            request.looks_at = Some(self.bench.site.rig.steps() + self.random.below(30));
        }
    }

    /// The users of answered requests look at them.
    fn look(&mut self) {
        let (steps, len) = (self.steps(), self.bench.plan.block_bytes as usize);
        let memory = self.bench.shared.expect("memory");
        for (at, cell) in self.cells.iter_mut().enumerate() {
            let is_due = |request: &mut Request| request.looks_at.is_some_and(|due| due <= steps);
            let Some(request) = cell.request.take_if(is_due) else { continue };
            if request.op == IoOp::Write {
                cell.holds = request.value;
            } else {
                let bytes = self.bench.site.rig.buffer(memory, request.tag, len);
                let fine = bytes == block(cell.holds, len);
                assert!(fine, "wrong data of cell {at}: {:?}", self.bench.log);
            }
            self.free_tags.push(request.tag);
            self.done += 1;
        }
    }

    /// Paths that ended are destroyed, some time later.
    fn take_destroyed(&mut self) {
        let (rig, limbo) = (&mut self.bench.site.rig, &mut self.limbo);
        self.dying.retain_mut(|dying| {
            dying.has_ended |= !rig.take_path_ends(dying.queue).is_empty();
            let is_destroyed = dying.has_ended && rig.has_let_go(dying.queue);
            if is_destroyed {
                limbo.destroyed(place(dying.at));
                rig.drop_queue(dying.queue, true);
            }
            !is_destroyed
        });
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
                    None => self.limbo.all_dropped(),
                    Some(joining) => {
                        let ends = joining.join.ends.and_then(|ends| self.places.get(&ends));
                        ends.into_iter().for_each(|at| self.limbo.dropped(place(*at)));
                    }
                }
            } else if let Some((_, request)) = self.dropping.take_if(|(by, _)| *by == at) {
                assert_eq!(status, Status::Ok, "DROP");
                for epoch in self.lives.dropped(place(at), &request) {
                    if let Some(at) = self.places.remove(&epoch) {
                        self.limbo.dropped(place(at));
                    }
                }
            } else {
                panic!("an answer to nothing");
            }
        }
    }

    fn take_deaths(&mut self) {
        for at in 0..self.heals.len() {
            let Some(way) = &self.bench.ways[at] else { continue };
            let (queue, lost) = (way.queue, way.lost);
            let ended = !self.bench.site.rig.take_path_ends(queue).is_empty();
            let late = |c: &Coming| c.at == at && c.since + TRY < self.steps();
            if lost || ended || self.coming.as_ref().is_some_and(late) {
                self.die(at, ended);
            }
        }
    }

    fn die(&mut self, at: usize, has_ended: bool) {
        let silent = self.is_broken(at);
        let (now, random) = (self.bench.site.rig.now(), self.random.bits());
        self.dropping = self.dropping.filter(|(by, _)| *by != at);
        if let Some(coming) = self.coming.take_if(|coming| coming.at == at) {
            self.bench.kill(at, silent);
            if coming.join.is_some() {
                self.lives.join_failed(place(at), JoinFailure::Transient, now, random);
            }
            return;
        }
        let way = self.bench.ways[at].take().expect("a way");
        way.break_link(silent);
        self.bench.site.rig.disconnect(way.queue);
        self.dying.push(Dying { at, queue: way.queue, has_ended });
        self.lives.died(place(at), now, random);
        self.choice.died(place(at));
        self.limbo.died(place(at), true);
        let requests = self.cells.iter_mut().filter_map(|cell| cell.request.as_mut());
        for request in requests.filter(|request| request.by == Some(at)) {
            request.by = None;
            request.old = Some(OldCopy { way: place(at), op: request.op });
            self.resent += 1;
        }
    }

    /// A way that logged in gets its queue when its limbo is over, and then lives.
    fn come_in(&mut self) {
        let Some(coming) = self.coming.as_mut().filter(|coming| coming.is_in) else { return };
        let at = coming.at;
        if !coming.has_queue {
            if !self.limbo.is_over(place(at)) || self.heals[at] > self.bench.site.rig.steps() {
                return;
            }
            coming.has_queue = true;
            let epoch = coming.epoch;
            return self.bench.give_queue(at, epoch);
        }
        let queue = self.bench.way(at).queue;
        if !self.bench.site.rig.is_connected(queue) {
            return;
        }
        let Some(Coming { epoch, join, .. }) = self.coming.take() else { return };
        let now = self.bench.site.rig.now();
        self.places.insert(epoch, at);
        self.choice.lives(place(at), WayTerms::default());
        match join {
            None => self.lives.restarted(place(at), epoch, now),
            Some(joining) => {
                let over = self.lives.joined(&joining, now);
                over.map(|over| self.places.remove(&over));
            }
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
        self.coming = Some(Coming { at, epoch, join, since, is_in: false, has_queue: false });
    }

    /// Makes requests, and sends those that may be sent.
    fn send(&mut self) {
        let len = self.bench.plan.block_bytes as usize;
        for at in 0..CELLS {
            if self.cells[at].request.is_none() && !self.is_calm && self.random.chance(300) {
                self.value += 1;
                let op = [IoOp::Read, IoOp::Write][self.random.index(2)];
                // Any free buffer, so that each serves several cells in turn.
                let free = self.random.index(self.free_tags.len());
                let tag = self.free_tags.swap_remove(free);
                let (by, old, looks_at) = (None, None, None);
                let request = Request { op, value: self.value, tag, by, old, looks_at };
                self.cells[at].request = Some(request);
                let memory = self.bench.shared.expect("memory");
                // The user's data is there before the request, and only then.
                self.bench.site.rig.fill_buffer(memory, tag, &pattern(self.value, len));
            }
            let waits = |r: &&Request| r.by.is_none() && r.looks_at.is_none();
            let Some(request) = self.cells[at].request.as_ref().filter(waits) else { continue };
            if request.old.is_some_and(|old| !self.limbo.may_send(old)) {
                continue;
            }
            let (op, tag) = (request.op, request.tag);
            let cells = &self.cells;
            let load = |way: WayIndex| {
                let its = |cell: &&Cell| {
                    cell.request.as_ref().is_some_and(|request| request.by == Some(way.get()))
                };
                let unanswered = u32::try_from(cells.iter().filter(its).count()).expect("few");
                WayLoad { unanswered, awaited_bytes: u64::from(unanswered) << 17 }
            };
            let bytes = [4 << 10, 128 << 10][self.random.index(2)];
            let Some(way) = self.choice.choose(bytes, load) else { continue };
            let queue = self.bench.way(way.get()).queue;
            let rig = &mut self.bench.site.rig;
            let io = rig.request(queue, op, (at * len) as u64, len as u64);
            rig.submit(queue, tag, io).expect("a free tag");
            if let Some(request) = &mut self.cells[at].request {
                (request.by, request.old) = (Some(way.get()), None);
            }
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
    drive.resent
}
