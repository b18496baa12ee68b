//! [`World`]: hosts, their mounts, the target and the oracle, and everything that goes wrong between them.

use std::fmt;
use std::ops::Range;

use rblk_bench::crash_store::CrashStore;
use rblk_bench::ram_store::StoreConditions;
use rblk_bench::seed::Random;
use rblk_fabric::soft::memory::{End, Wire};
use rblk_initiator::io::{Io, IoOp};
use rblk_initiator::mount::course;
use rblk_target::store::Store;

use super::kernel::{Expect, Kernel, Request};
use super::log::Log;
use super::plan::{Break, Death, Fault, Moment, Plan, When};
use super::process::{EBADE, EIO, Ground, Link, Note, Process, State};
use super::site::{Decided, Left, Site};
use crate::oracle::{ChangeId, Host, Oracle, Survives};
use crate::storm::VOLUME;

/// What reads find in their buffer's place before they are answered.
const UNREAD: u8 = 0xee;
/// Steps that everything may take to end after the last fault.
const PATIENCE: u64 = 120_000;
/// Steps in which nothing happens before some are skipped.
const IDLE: u64 = 4;
/// Steps that are skipped at most when nothing happens.
const SKIP: u64 = 25;
/// Steps after which a fault comes although its moment did not.
const IMPATIENCE: u64 = 1200;
/// Steps that are waited for something in the store to be held.
const HOLD: u64 = 100;
/// How often a mount is tried that does not come about.
const TRIES: u32 = 12;
/// Requests of a mount that was fenced: they have to fail.
const LATE_REQUESTS: u32 = 6;

#[derive(Debug)]
struct Mount {
    number: Host,
    host: usize,
    kernel: Kernel,
    process: Option<Process>,
    note: Option<Note>,
    // The next process begins then.
    revives: Option<u64>,
    served: bool,
    // Another mount wanted the volume, or has it.
    threatened: bool,
    fenced: bool,
    late: u32,
    // A flush may have to tell of a loss.
    doubtful: bool,
}

/// A mount that is wanted.
#[derive(Clone, Copy, Debug)]
struct Wish {
    at: u64,
    take_over: bool,
    tries: u32,
}

/// What was done in a run.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Report {
    /// Requests that ended.
    pub requests: u64,
    /// Of them, with an error.
    pub errors: u64,
    /// Steps.
    pub steps: u64,
    /// Mounts.
    pub mounts: u64,
    /// Those that lost the volume to another.
    pub fenced: u64,
    /// Ends of the target.
    pub restarts: u64,
    /// Servers that died and were followed by another.
    pub recoveries: u64,
    /// A number over everything that happened.
    pub fingerprint: u64,
}

impl Report {
    /// Adds what was done in another run.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.steps += other.steps;
        self.mounts += other.mounts;
        self.fenced += other.fenced;
        self.restarts += other.restarts;
        self.recoveries += other.recoveries;
        self.fingerprint ^= other.fingerprint;
    }
}

/// See the module.
pub struct World {
    plan: Plan,
    site: Site,
    oracle: Oracle,
    log: Log,
    moments: Vec<Moment>,
    random: Random,
    mounts: Vec<Mount>,
    numbers: u8,
    wishes: Vec<Option<Wish>>,
    // By host and address.
    links: Vec<Vec<Link>>,
    // Links that heal, with what was stalled on them.
    heals: Vec<(u64, usize, usize, Vec<Wire>)>,
    thaws: Vec<(u64, Host)>,
    // The store behaves again, the QPs flush again.
    store_heals: Option<u64>,
    // What the store has is held as soon as it has something, or never then; and for how long.
    holds: Option<(u64, u64)>,
    releases: Option<u64>,
    jam_heals: Option<u64>,
    // The target is down: when it is back, on what.
    down: Option<(u64, Left, Option<CrashStore>)>,
    dark: bool,
    drain_down: u64,
    // The next fault, and since when it is waited for.
    fault: usize,
    fault_since: u64,
    // Ops of the store have failed.
    store_failed: bool,
    calm: bool,
    ending: bool,
    by_hand: bool,
    pause: u64,
    // Steps in which nothing happened.
    idle: u64,
    begun: u64,
    report: Report,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("report", &self.report).finish_non_exhaustive()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "seed {}: RBLK_SEED={} runs it again\n{:?}\nlast events (step, what, of whom, numbers):\n{}",
                self.plan.seed, self.plan.seed, self.plan, self.log
            );
        }
    }
}

impl World {
    /// A world in which the first host is about to mount.
    #[must_use]
    pub fn new(plan: Plan) -> Self {
        let mut random = Random::new(plan.seed ^ 0x0077_6f72_6c64);
        let mut image = vec![0; plan.volume_bytes];
        random.fill(&mut image);
        let oracle = Oracle::new(image.clone(), plan.block_bytes as usize);
        let mut world = Self {
            site: Site::new(&plan, image),
            oracle,
            log: Log::new(),
            moments: Vec::new(),
            random,
            mounts: Vec::new(),
            numbers: 0,
            wishes: vec![None; plan.hosts],
            links: vec![vec![Link::default(); plan.addresses]; plan.hosts],
            heals: Vec::new(),
            thaws: Vec::new(),
            store_heals: None,
            holds: None,
            releases: None,
            jam_heals: None,
            down: None,
            dark: false,
            drain_down: 0,
            fault: 0,
            fault_since: 0,
            store_failed: false,
            calm: false,
            ending: false,
            by_hand: false,
            pause: 0,
            idle: 0,
            begun: 0,
            report: Report::default(),
            plan,
        };
        world.wishes[0] = Some(Wish { at: 0, take_over: false, tries: 0 });
        world
    }

    /// Runs a plan to its end.
    ///
    /// # Panics
    /// Something is not what it has to be.
    #[must_use]
    pub fn run(plan: Plan) -> Report {
        let mut world = Self::new(plan);
        while world.fault < world.plan.faults.len() || world.begun < world.plan.requests {
            world.step();
            assert!(world.step_number() < 40 * PATIENCE, "it does not come to an end");
        }
        world.finish()
    }

    /// What was done so far.
    #[must_use]
    pub fn report(&self) -> Report {
        Report {
            steps: self.step_number(),
            fingerprint: self.site.rig.fingerprint() ^ self.log.hash(),
            ..self.report
        }
    }

    fn step_number(&self) -> u64 {
        self.site.rig.steps()
    }

    /// One step of everybody.
    ///
    /// # Panics
    /// Something is not what it has to be.
    pub fn step(&mut self) {
        let mut busy = self.site.rig.step();
        self.log.at(self.step_number());
        busy |= self.reap();
        self.pump();
        self.turn_processes();
        self.pump();
        if !self.calm && !self.by_hand {
            busy |= self.begin_requests();
        }
        busy |= self.dispatch();
        self.look_after_target();
        self.heal();
        self.revive();
        self.mount_wished();
        self.next_fault();
        self.idle = if busy { 0 } else { self.idle + 1 };
        if self.idle > IDLE {
            self.skip();
        }
    }

    fn pump(&mut self) {
        for decided in self.site.pump(&mut self.log, &mut self.moments) {
            match decided {
                Decided::LoggedIn(host) => self.oracle.new_attempt(host),
                Decided::Threatened(host) => {
                    for mount in self.mounts.iter_mut().filter(|m| m.number != host) {
                        mount.threatened = true;
                    }
                }
                Decided::Opened { host, fresh } => self.opened(host, fresh),
            }
        }
    }

    fn opened(&mut self, host: Host, fresh: bool) {
        if !fresh {
            assert!(!self.oracle.is_fenced(host), "{host:?} came back although it was fenced");
            return;
        }
        // Whoever had the volume has it no more; also mounts that are gone by now.
        for number in (0..self.numbers).map(Host).filter(|number| *number != host) {
            self.oracle.fence(number);
        }
        for mount in self.mounts.iter_mut().filter(|m| m.number != host) {
            self.report.fenced += u64::from(!mount.fenced);
            mount.fenced = true;
        }
    }

    fn turn_processes(&mut self) {
        for at in 0..self.mounts.len() {
            let mount = &mut self.mounts[at];
            let Some(process) = &mut mount.process else { continue };
            let mut ground = Ground {
                site: &mut self.site,
                oracle: &mut self.oracle,
                log: &mut self.log,
                moments: &mut self.moments,
                links: &self.links[mount.host],
                dark: self.dark,
            };
            process.turn(&mut ground);
            mount.served |= process.state() == State::Serving;
        }
        let gave_up =
            |mount: &Mount| mount.process.as_ref().is_some_and(|p| p.state() == State::GaveUp);
        while let Some(at) = self.mounts.iter().position(gave_up) {
            let host = self.mounts[at].host;
            self.unmount(at, false);
            if let Some(wish) = &mut self.wishes[host] {
                wish.at = self.site.rig.steps() + self.random.within(20, 400);
                wish.tries += 1;
                if wish.tries > TRIES {
                    self.wishes[host] = None;
                }
            }
        }
    }

    /// Takes what ended and holds it against the oracle.
    fn reap(&mut self) -> bool {
        let outcomes = self.site.rig.take_outcomes();
        let busy = !outcomes.is_empty();
        for outcome in outcomes {
            let found = self.mounts.iter().enumerate().find_map(|(at, mount)| {
                let queues = mount.process.as_ref()?.queues();
                Some((at, queues.iter().position(|queue| *queue == outcome.queue)?))
            });
            let Some((at, queue)) = found else { panic!("nobody has {outcome:?}") };
            let mount = &mut self.mounts[at];
            let request = mount.kernel.end(queue, outcome.tag);
            let length = self.plan.io_max_bytes as usize;
            let bytes = self.site.rig.buffer(outcome.queue, outcome.tag, length);
            self.report.requests += 1;
            self.check(at, &request, outcome.result, &bytes);
            let _ = self.mounts[at].kernel.guard(queue, outcome.tag, Some(bytes));
        }
        busy
    }

    fn check(&mut self, at: usize, request: &Request, result: i32, bytes: &[u8]) {
        let mount = &self.mounts[at];
        let number = mount.number;
        let Request { op, range, fua, expect, given, .. } = request;
        let ok = result >= 0;
        if ok {
            let moves = matches!(op, IoOp::Read | IoOp::Write);
            let moved = if moves { range.len() } else { 0 };
            assert_eq!(usize::try_from(result), Ok(moved), "{request:?}");
        } else {
            let allowed = match -result {
                EBADE => mount.threatened,
                EIO => {
                    self.store_failed
                        || self.plan.fail_after.is_some()
                        || *op == IoOp::Flush && mount.doubtful
                }
                _ => false,
            };
            self.report.errors += 1;
            self.log.add("failed", [number.0.into(), u64::from(result.unsigned_abs()), *op as u64]);
            assert!(allowed, "{request:?} of {number:?} failed: errno {}", -result);
        }
        let held = match *expect {
            Expect::Read(begin) if ok => {
                self.oracle.end_read(begin, range.start, &bytes[..range.len()])
            }
            Expect::Read(begin) => {
                self.oracle.drop_read(begin);
                Ok(())
            }
            Expect::Change(id) => {
                if *op == IoOp::Write {
                    let mut data = vec![0; range.len()];
                    Oracle::fill(id, range.start, &mut data);
                    assert!(data == bytes[..range.len()], "the data of {request:?} was changed");
                }
                self.oracle.end_change(id, ok, *fua)
            }
            Expect::Flush(begin) => self.oracle.end_flush_given(begin, given.unwrap_or(begin), ok),
        };
        if let Err(wrong) = held {
            panic!("{request:?} of {number:?}: {wrong}");
        }
    }

    fn begin_requests(&mut self) -> bool {
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        let most = self.plan.mix.begins;
        let limit = 4 * self.plan.requests;
        let mut busy = false;
        for at in 0..self.mounts.len() {
            for _ in 0..self.random.within(0, most) {
                let mount = &mut self.mounts[at];
                let full = mount.kernel.requests().len() >= self.plan.outstanding;
                if !mount.served || full || self.begun >= limit {
                    continue;
                }
                if mount.fenced {
                    if mount.late == LATE_REQUESTS {
                        continue;
                    }
                    mount.late += 1;
                }
                self.begin_any(at);
                busy = true;
            }
        }
        if self.random.chance(20) {
            self.pause = self.random.within(0, self.plan.mix.pause);
        }
        busy
    }

    fn begin_any(&mut self, at: usize) {
        let kind = u32::try_from(self.random.below(1000)).unwrap_or(0);
        let (flush, erase) = (self.plan.mix.flush, self.plan.mix.erase);
        let op = if kind < flush {
            IoOp::Flush
        } else if kind < flush + erase {
            IoOp::Discard
        } else if kind < flush + 2 * erase {
            IoOp::WriteZeroes
        } else if self.random.chance(400) {
            IoOp::Read
        } else {
            IoOp::Write
        };
        let range = if op == IoOp::Flush { 0..0 } else { self.random_range() };
        let fua = op == IoOp::Write && self.random.chance(self.plan.mix.fua);
        self.begin(at, op, range, fua);
    }

    fn random_range(&mut self) -> Range<usize> {
        let block = self.oracle.block_bytes();
        let longest = self.plan.io_max_bytes as usize / block;
        let longest = [1, 2, longest][self.random.index(3)].min(longest);
        let blocks = 1 + self.random.index(longest);
        let all = self.oracle.len() / block;
        // Half of the requests meet in a few blocks.
        let room = if self.random.chance(500) { blocks + 3 } else { all };
        let blocks = blocks.min(all);
        let first = self.random.index(room.min(all) - blocks + 1);
        first * block..(first + blocks) * block
    }

    fn begin(&mut self, at: usize, op: IoOp, range: Range<usize>, fua: bool) -> Expect {
        let mount = &mut self.mounts[at];
        let host = mount.number;
        let expect = match op {
            IoOp::Read => Expect::Read(self.oracle.begin_read_by(host)),
            IoOp::Write => Expect::Change(self.oracle.begin_change_by(host, &range, false)),
            IoOp::Discard | IoOp::WriteZeroes => {
                Expect::Change(self.oracle.begin_change_by(host, &range, true))
            }
            IoOp::Flush => Expect::Flush(self.oracle.begin_flush_by(host)),
        };
        self.begun += 1;
        mount.kernel.begin(Request { op, range, fua, expect, given: None, place: None });
        expect
    }

    /// Gives the servers what the driver has for them.
    fn dispatch(&mut self) -> bool {
        let mut busy = false;
        for mount in &mut self.mounts {
            let Some(process) = mount.process.as_ref().filter(|p| !p.is_frozen()) else { continue };
            if !mount.served {
                continue;
            }
            while let Some(request) = mount.kernel.next(&mut self.random) {
                let Some((queue, tag)) = request.place else { continue };
                if let Expect::Flush(_) = request.expect {
                    request.given.get_or_insert_with(|| self.oracle.begin_flush_by(mount.number));
                }
                let request = request.clone();
                let id = process.queues()[queue];
                if let Some(guarded) = mount.kernel.guard(queue, tag, None) {
                    let is = self.site.rig.buffer(id, tag, guarded.len());
                    assert!(is == guarded, "an idle buffer of {:?} was written to", mount.number);
                }
                let len = request.range.len();
                match request.expect {
                    Expect::Read(_) => self.site.rig.fill_buffer(id, tag, &vec![UNREAD; len]),
                    Expect::Change(change) if request.op == IoOp::Write => {
                        let mut data = vec![0; len];
                        Oracle::fill(change, request.range.start, &mut data);
                        self.site.rig.fill_buffer(id, tag, &data);
                    }
                    _ => {}
                }
                let offset = request.range.start as u64;
                let io = self.site.rig.request(id, request.op, offset, len as u64);
                let io = Io { fua: request.fua, ..io };
                self.site.rig.submit(id, tag, io).expect("an idle tag");
                busy = true;
            }
        }
        busy
    }

    /// Nothing happens: on to when something may.
    fn skip(&mut self) {
        let steps = self.step_number();
        let mut ticks = SKIP;
        if self.holds.is_some() || self.site.has_due() || self.mounts.iter().any(Mount::is_hasty) {
            return;
        }
        if self.site.rig.has_target() {
            let store = self.site.rig.store_mut();
            if store.disk_busy() > 0 && !store.conditions().stalled {
                return;
            }
            for group in self.site.rig.groups_mut() {
                if let Some(left) = group.next_deadline() {
                    ticks = ticks.min(u64::try_from(left.as_millis()).unwrap_or(0));
                }
            }
        }
        let network = self.site.rig.network();
        if let Some(at) = network.next_arrival() {
            ticks = ticks.min(at.saturating_sub(network.now()));
        }
        let dues = self.heals.iter().map(|heal| heal.0);
        let dues = dues.chain(self.thaws.iter().map(|thaw| thaw.0));
        let dues = dues.chain(self.store_heals).chain(self.releases).chain(self.jam_heals);
        let dues = dues.chain(self.down.iter().map(|down| down.0));
        let dues = dues.chain(self.mounts.iter().filter_map(|mount| mount.revives));
        let dues = dues.chain(self.wishes.iter().flatten().map(|wish| wish.at));
        let fault = self.plan.faults.get(self.fault).map(|(when, _)| match when {
            When::Steps(steps) => self.fault_since + steps,
            When::At(_) => self.fault_since + IMPATIENCE,
        });
        for due in dues.chain(fault).filter(|due| *due > steps) {
            ticks = ticks.min(due - steps);
        }
        if self.pause > 0 {
            ticks = ticks.min(self.pause);
        }
        let ticks = ticks.saturating_sub(1);
        self.pause = self.pause.saturating_sub(ticks);
        self.site.rig.skip(u32::try_from(ticks).unwrap_or(0));
    }

    fn next_fault(&mut self) {
        let steps = self.step_number();
        let moments = std::mem::take(&mut self.moments);
        let Some((when, fault)) = self.plan.faults.get(self.fault).copied() else { return };
        if self.calm || !self.mounts.iter().any(|mount| mount.served) && self.fault == 0 {
            self.fault_since = steps;
            return;
        }
        let waited = steps.saturating_sub(self.fault_since);
        let due = match when {
            When::Steps(after) => waited >= after,
            When::At(moment) => moments.contains(&moment) || waited >= IMPATIENCE,
        };
        if due {
            self.fault += 1;
            self.fault_since = steps;
            self.strike(fault);
        }
    }

    /// The newest mount of a host.
    fn mount_of(&self, host: usize) -> Option<usize> {
        self.mounts.iter().rposition(|mount| mount.host == host)
    }

    /// The host if it has a mount, else the one that has the volume.
    fn aim(&self, host: usize) -> usize {
        let other = || self.holder().map(|at| self.mounts[at].host);
        if self.mount_of(host).is_some() { host } else { other().unwrap_or(host) }
    }

    fn strike(&mut self, fault: Fault) {
        let steps = self.step_number();
        match fault {
            Fault::Link { host, address, how, steps: lasts } => {
                let host = self.aim(host);
                let all = 0..self.plan.addresses;
                for address in all.filter(|at| address.is_none_or(|only| only == *at)) {
                    self.break_link(host, address, how, steps + lasts);
                }
            }
            Fault::Wire { host, queue, near, bytes } => {
                let host = self.aim(host);
                let Some(at) = self.mount_of(host) else { return };
                let Some(process) = &self.mounts[at].process else { return };
                let Some(queue) = process.queues().get(queue) else { return };
                let end = if near { End::A } else { End::B };
                if let Some(wire) = self.site.rig.wire(*queue) {
                    wire.cut_after(end, bytes);
                    self.log.add("a wire is cut soon", [host as u64, bytes as u64, 0]);
                }
            }
            Fault::Target { death, steps: lasts } => {
                if self.site.is_up() {
                    self.end_target(Some(death), steps + lasts);
                }
            }
            Fault::Drain { steps: lasts } => {
                if self.site.is_up() {
                    self.drain_down = lasts;
                    self.site.drain(&mut self.log);
                }
            }
            Fault::Server { host, steps: lasts } => {
                let host = self.aim(host);
                if let Some(at) = self.mount_of(host) {
                    self.kill_server(at, steps + lasts);
                }
            }
            Fault::Host { host, steps: lasts } => {
                while let Some(at) = self.mount_of(host) {
                    self.log.add("host dies", [host as u64, self.mounts[at].number.0.into(), 0]);
                    self.unmount(at, true);
                }
                self.wishes[host] = Some(Wish { at: steps + lasts, take_over: false, tries: 0 });
            }
            Fault::Freeze { host, steps: lasts } => {
                let host = self.aim(host);
                let Some(at) = self.mount_of(host) else { return };
                let mount = &mut self.mounts[at];
                if let Some(process) = &mut mount.process {
                    self.log.add("freezes", [mount.number.0.into(), 0, 0]);
                    process.freeze(true, &mut self.site);
                    self.thaws.push((steps + lasts, mount.number));
                }
            }
            Fault::Mount { host, take_over } => {
                let holds = |at: usize| {
                    let mount = &self.mounts[at];
                    mount.served && !mount.is_out()
                };
                // The holder itself has it already.
                let holds_it = self.mount_of(host).is_some_and(holds);
                let host = if holds_it { (host + 1) % self.plan.hosts } else { host };
                if self.mount_of(host).is_some_and(holds) || self.wishes[host].is_some() {
                    return;
                }
                self.wishes[host] = Some(Wish { at: steps, take_over, tries: 0 });
            }
            Fault::Slow { steps: lasts, stalled } => {
                let mut conditions = self.plan.store;
                conditions.stalled = stalled;
                conditions.delay_max = 20 * (conditions.delay_max + 2);
                self.set_store(conditions);
                self.store_heals = Some(steps + lasts);
            }
            Fault::Hold { steps: lasts } => {
                let conditions = StoreConditions { stalled: true, ..self.plan.store };
                self.set_store(conditions);
                self.holds = Some((steps + HOLD, lasts));
            }
            Fault::Errors { steps: lasts, per_mille } => {
                let mut conditions = self.plan.store;
                conditions.errors_per_mille = per_mille;
                self.store_failed = true;
                self.set_store(conditions);
                self.store_heals = Some(steps + lasts);
            }
            Fault::Jam { steps: lasts } => {
                self.log.add("QPs jam", [0; 3]);
                self.site.rig.jam_failed_qps(true);
                self.jam_heals = Some(steps + lasts);
            }
        }
    }

    fn set_store(&mut self, conditions: StoreConditions) {
        self.log.add(
            "store",
            [
                u64::from(conditions.stalled),
                conditions.delay_max,
                conditions.errors_per_mille.into(),
            ],
        );
        if self.site.rig.has_target() {
            self.site.rig.store_mut().set_conditions(conditions);
        }
    }

    fn break_link(&mut self, host: usize, address: usize, how: Break, until: u64) {
        self.log.add("link breaks", [host as u64, address as u64, how as u64]);
        let mut stalled = Vec::new();
        for mount in self.mounts.iter().filter(|mount| mount.host == host) {
            let Some(process) = &mount.process else { continue };
            for wire in process.wires(address, &self.site) {
                match how {
                    Break::Cut => wire.cut(),
                    Break::Silence => wire.silence(),
                    Break::Stall => {
                        wire.stall(End::A, true);
                        wire.stall(End::B, true);
                        stalled.push(wire);
                    }
                }
            }
        }
        self.links[host][address].broken = Some(how);
        self.heals.push((until, host, address, stalled));
    }

    fn heal(&mut self) {
        let now = if self.calm { u64::MAX } else { self.step_number() };
        while let Some(at) = self.heals.iter().position(|heal| heal.0 <= now) {
            let (_, host, address, stalled) = self.heals.swap_remove(at);
            let again = self.heals.iter().any(|heal| (heal.1, heal.2) == (host, address));
            if !again {
                self.links[host][address].broken = None;
            }
            for wire in stalled {
                wire.stall(End::A, false);
                wire.stall(End::B, false);
            }
            self.log.add("link heals", [host as u64, address as u64, 0]);
        }
        while let Some(at) = self.thaws.iter().position(|thaw| thaw.0 <= now) {
            let (_, number) = self.thaws.swap_remove(at);
            let again = self.thaws.iter().any(|thaw| thaw.1 == number);
            if let Some(mount) = self.mounts.iter_mut().find(|mount| mount.number == number)
                && let Some(process) = mount.process.as_mut().filter(|_| !again)
            {
                self.log.add("thaws", [number.0.into(), 0, 0]);
                process.freeze(false, &mut self.site);
            }
        }
        if self.store_heals.is_some_and(|at| at <= now) {
            self.store_heals = None;
            self.set_store(self.plan.store);
        }
        self.hold(now);
        if self.releases.is_some_and(|at| at <= now) {
            self.releases = None;
            self.log.add("store releases", [0; 3]);
            if self.site.rig.has_target() {
                self.site.rig.store_mut().release();
            }
        }
        if self.jam_heals.is_some_and(|at| at <= now) {
            self.jam_heals = None;
            self.site.rig.jam_failed_qps(false);
            self.site.rig.destroy_jammed();
            self.log.add("QPs flush again", [0; 3]);
        }
    }

    fn hold(&mut self, now: u64) {
        let Some((until, lasts)) = self.holds else { return };
        if !self.site.rig.has_target() {
            self.holds = None;
            return;
        }
        let store = self.site.rig.store_mut();
        let has = store.changes_in_flight();
        if has > 0 {
            store.hold();
            self.releases = Some(self.site.rig.steps() + lasts);
            self.moments.push(Moment::Held);
            self.log.add("store holds", [has as u64, 0, 0]);
        }
        if has > 0 || until <= now {
            self.holds = None;
            if self.store_heals.is_none() {
                self.set_store(self.plan.store);
            }
        }
    }

    fn look_after_target(&mut self) {
        let now = if self.calm { u64::MAX } else { self.step_number() };
        if self.site.drained().is_some() {
            let until = self.step_number() + self.drain_down;
            self.end_target(None, until);
        }
        if self.down.as_ref().is_some_and(|down| down.0 <= now)
            && let Some((_, left, disk)) = self.down.take()
        {
            self.site.start(&left, disk.as_ref(), &mut self.log);
            self.dark = false;
            if self.store_heals.is_none() {
                self.set_store(self.plan.store);
            }
        }
    }

    fn end_target(&mut self, death: Option<Death>, until: u64) {
        // What it has decided and not said is nobody's business any more; what it has said is.
        self.pump();
        self.report.restarts += 1;
        let clean = self.site.drained() == Some(true) && death.is_none();
        let disk = self.site.disk();
        let left = self.site.end(death, &mut self.log);
        let silent = death == Some(Death::Machine);
        self.site.vanish(silent);
        self.dark = silent;
        match &left {
            Left::Everything => {
                for number in (0..self.numbers).map(Host) {
                    self.oracle.new_attempt(number);
                }
            }
            Left::Image(image) => {
                let survives = if clean { Survives::Acknowledged } else { Survives::Durable };
                let retains = self.plan.retain_bytes.is_some();
                let lives = |host: Host| {
                    self.mounts.iter().any(|m| m.number == host && m.process.is_some())
                };
                let counted =
                    self.oracle.restart(image.clone(), survives, |host| retains && lives(host));
                if let Err(wrong) = counted {
                    panic!("after the end of the target: {wrong}");
                }
                for mount in &mut self.mounts {
                    mount.doubtful |= !clean;
                }
            }
        }
        self.down = Some((until, left, Some(disk)));
    }

    fn kill_server(&mut self, at: usize, until: u64) {
        let mount = &mut self.mounts[at];
        let Some(process) = mount.process.take() else { return };
        self.log.add("server dies", [mount.number.0.into(), 0, 0]);
        let number = mount.number;
        let served = mount.served;
        mount.note = process.die(false, &mut self.site);
        mount.kernel.crash(&mut self.random);
        mount.revives = Some(until);
        mount.doubtful = true;
        self.thaws.retain(|thaw| thaw.1 != number);
        self.oracle.host_died(number);
        if !served {
            self.mounts.remove(at);
        }
    }

    fn revive(&mut self) {
        let now = if self.calm { u64::MAX } else { self.step_number() };
        for at in 0..self.mounts.len() {
            let mount = &mut self.mounts[at];
            if mount.process.is_some() || mount.revives.is_none_or(|at| at > now) {
                continue;
            }
            let Some(note) = mount.note.take() else { continue };
            mount.revives = None;
            self.report.recoveries += 1;
            self.log.add("server recovers", [mount.number.0.into(), 0, 0]);
            let mut ground = Ground {
                site: &mut self.site,
                oracle: &mut self.oracle,
                log: &mut self.log,
                moments: &mut self.moments,
                links: &self.links[mount.host],
                dark: self.dark,
            };
            let seed = self.random.bits();
            let (number, host) = (mount.number, mount.host);
            mount.process =
                Some(Process::recover(&self.plan, number, host, note, seed, &mut ground));
        }
    }

    fn mount_wished(&mut self) {
        let nobody = self.mounts.iter().all(Mount::is_out);
        if nobody && !self.ending && self.wishes.iter().all(Option::is_none) {
            // Somebody comes in the end.
            let (host, delay) = (self.random.index(self.plan.hosts), self.random.within(50, 500));
            let at = self.step_number() + delay;
            self.wishes[host] = Some(Wish { at, take_over: false, tries: 0 });
        }
        for host in 0..self.plan.hosts {
            let steps = self.step_number();
            let Some(wish) = self.wishes[host].filter(|wish| wish.at <= steps) else { continue };
            match self.mount_of(host) {
                // It came about.
                Some(at) if self.mounts[at].served && !self.mounts[at].is_out() => {
                    self.wishes[host] = None;
                    continue;
                }
                Some(at) if self.mounts[at].is_out() => {
                    // By force: the device's users are told that it is gone.
                    self.unmount(at, false);
                }
                Some(_) => continue,
                None => {}
            }
            let number = Host(self.numbers);
            self.numbers += 1;
            self.report.mounts += 1;
            self.log.add("mounts", [number.0.into(), host as u64, u64::from(wish.take_over)]);
            let mut ground = Ground {
                site: &mut self.site,
                oracle: &mut self.oracle,
                log: &mut self.log,
                moments: &mut self.moments,
                links: &self.links[host],
                dark: self.dark,
            };
            let seed = self.random.bits();
            let (plan, take_over) = (&self.plan, wish.take_over);
            let process = Process::mount(plan, number, host, take_over, seed, &mut ground);
            self.mounts.push(Mount {
                number,
                host,
                kernel: Kernel::new(self.plan.queues, self.plan.depth),
                process: Some(process),
                note: None,
                revives: None,
                served: false,
                threatened: false,
                fenced: false,
                late: 0,
                doubtful: false,
            });
        }
    }

    /// A mount ends, with all its requests.
    fn unmount(&mut self, at: usize, silent: bool) {
        let mount = self.mounts.remove(at);
        for request in mount.kernel.requests() {
            if let Expect::Read(begin) = request.expect {
                self.oracle.drop_read(begin);
            }
        }
        self.thaws.retain(|thaw| thaw.1 != mount.number);
        self.oracle.host_died(mount.number);
        if let Some(process) = mount.process {
            self.log.add("unmounted", [mount.number.0.into(), u64::from(silent), 0]);
            process.die(silent, &mut self.site);
        }
    }

    /// Heals everything, waits for what is outstanding, and looks at what is left.
    ///
    /// # Panics
    /// Something is not what it has to be, or does not end.
    #[must_use]
    pub fn finish(mut self) -> Report {
        self.calm = true;
        self.log.add("calm", [0; 3]);
        // Whoever still wants the volume may have to wait for a lease.
        self.settle();
        let Some(at) = self.holder() else { panic!("nobody has the volume") };
        self.read_all(at);
        for _ in 0..4 {
            let errors = self.report.errors;
            self.io(at, IoOp::Flush, 0..0);
            if self.report.errors == errors || self.store_failed {
                break;
            }
        }
        if !self.store_failed {
            let store = self.site.rig.store_mut();
            let (now, durable) = (store.bytes(VOLUME), store.durable(VOLUME));
            assert!(now == durable, "a FLUSH left something volatile in the store");
            let begin = self.oracle.begin_read_by(self.mounts[at].number);
            if let Err(wrong) = self.oracle.end_read(begin, 0, &now) {
                panic!("the store after a FLUSH: {wrong}");
            }
        }
        self.check_guards();
        let report = self.report();
        self.end_mounts();
        let breaches = self.site.breaches();
        assert!(breaches.is_empty(), "{breaches:?}");
        report
    }

    /// The place of the mount that has the volume.
    fn holder(&self) -> Option<usize> {
        self.mounts.iter().position(|mount| mount.served && !mount.is_out())
    }

    fn is_settled(&self) -> bool {
        let settled = |mount: &Mount| {
            let state = mount.process.as_ref().and_then(|p| p.course()).map(|c| c.state());
            let right = match state {
                Some(course::State::Connected) => !mount.fenced,
                // The other may have gone before it had the volume.
                Some(course::State::Fenced) => mount.threatened,
                _ => false,
            };
            right && mount.kernel.requests().is_empty()
        };
        let nobody_comes = self.wishes.iter().all(Option::is_none);
        self.mounts.iter().all(settled) && self.holder().is_some() && nobody_comes
    }

    fn settle(&mut self) {
        let until = self.step_number() + PATIENCE;
        while !self.is_settled() {
            self.step();
            let stuck = self.step_number() >= until;
            assert!(!stuck, "it does not end: {:#?}", self.describe());
        }
    }

    fn describe(&self) -> Vec<String> {
        let describe = |mount: &Mount| {
            let course = mount.process.as_ref().and_then(|p| p.course());
            format!(
                "{:?} served {} fenced {} requests {:?} course {course:?}",
                mount.number,
                mount.served,
                mount.fenced,
                mount.kernel.requests()
            )
        };
        self.mounts.iter().map(describe).collect()
    }

    fn io(&mut self, at: usize, op: IoOp, range: Range<usize>) {
        self.begin(at, op, range, false);
        self.settle();
    }

    fn read_all(&mut self, at: usize) {
        let longest = self.plan.io_max_bytes as usize;
        for start in (0..self.oracle.len()).step_by(longest) {
            self.begin(at, IoOp::Read, start..(start + longest).min(self.oracle.len()), false);
        }
        self.settle();
    }

    fn check_guards(&mut self) {
        for mount in &self.mounts {
            let Some(process) = &mount.process else { continue };
            for (queue, tag, bytes) in mount.kernel.guards() {
                let is = self.site.rig.buffer(process.queues()[queue], tag, bytes.len());
                assert!(is == bytes, "an idle buffer of {:?} was written to", mount.number);
            }
        }
    }

    fn end_mounts(&mut self) {
        self.ending = true;
        while !self.mounts.is_empty() {
            self.unmount(0, false);
        }
        self.wishes.fill(None);
        let until = self.step_number() + PATIENCE;
        while self.site.sessions() > 0 {
            self.step();
            assert!(self.step_number() < until, "connections are left without a peer");
        }
        // What one poll group has of another's is given back by messages.
        let held = |world: &mut Self| -> Vec<String> {
            let groups = world.site.rig.groups_mut();
            groups
                .flat_map(|g| {
                    g.shard().slots().held().map(|h| format!("{h:?}")).collect::<Vec<_>>()
                })
                .collect()
        };
        while !held(self).is_empty() {
            self.step();
            assert!(self.step_number() < until, "slots are held: {:?}", held(self));
        }
        assert_eq!(self.site.rig.store_mut().in_flight(), 0, "the store has something to do");
    }
}

impl Mount {
    /// It has lost the volume for good.
    fn is_out(&self) -> bool {
        let course = self.process.as_ref().and_then(|process| process.course());
        self.fenced || course.is_some_and(|course| course.state() == course::State::Fenced)
    }

    fn is_hasty(&self) -> bool {
        self.process.as_ref().is_some_and(|process| !process.is_frozen() && process.is_hasty())
    }
}

/// For tests of single scenarios: one mount, driven by hand.
impl World {
    /// Makes no requests of its own.
    pub fn by_hand(&mut self) {
        self.by_hand = true;
    }

    /// Steps until something is so.
    ///
    /// # Panics
    /// It does not come to that.
    pub fn until(&mut self, what: &str, mut so: impl FnMut(&mut Self) -> bool) {
        let until = self.step_number() + PATIENCE;
        while !so(self) {
            self.step();
            assert!(self.step_number() < until, "{what}: {:#?}", self.describe());
        }
    }

    /// Whether a mount serves its requests.
    #[must_use]
    pub fn is_mounted(&self) -> bool {
        self.holder().is_some()
    }

    /// The oldest mount that has the volume gets a request. Returns the change, if it is one.
    ///
    /// # Panics
    /// There is none.
    pub fn submit(&mut self, op: IoOp, range: Range<usize>, fua: bool) -> Option<ChangeId> {
        let at = self.holder().expect("a mount");
        match self.begin(at, op, range, fua) {
            Expect::Change(id) => Some(id),
            Expect::Read(_) | Expect::Flush(_) => None,
        }
    }

    /// The address in use by the mount that has the volume.
    #[must_use]
    pub fn address(&self) -> Option<usize> {
        self.mounts[self.holder()?].process.as_ref()?.address()
    }

    /// What the store has.
    pub fn stored(&mut self) -> Vec<u8> {
        self.site.rig.store_mut().bytes(VOLUME)
    }

    /// Requests that are not answered.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.mounts.iter().map(|mount| mount.kernel.requests().len()).sum()
    }

    /// Something goes wrong now.
    pub fn fault(&mut self, fault: Fault) {
        self.strike(fault);
    }

    /// Whether the store holds something.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        self.releases.is_some()
    }

    /// What it is made of.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}
