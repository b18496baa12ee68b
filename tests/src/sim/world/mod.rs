//! [`World`]: hosts, their mounts, the target and the oracle, and everything that goes wrong
//! between them.
//!
//! A step gives each part one turn, always in the same order. The plan and its seed make every
//! choice. Anything wrong panics, with the plan and the last events.

mod faults;
mod finish;
mod mount;
mod requests;

use std::fmt;
use std::ops::Range;

use rblk_config::OnLoss;
use rblk_fabric::soft::network::FaultyWire;
use rblk_initiator::engine::io::IoOp;
use rblk_protocol::Epoch;
use rblk_rig::crash_store::CrashStore;
use rblk_rig::seed::Random;

use self::faults::IMPATIENCE;
use self::mount::{Mount, Wish};
use crate::oracle::{ChangeId, Host, Oracle};
use crate::sim::kernel::Expect;
use crate::sim::log::Log;
use crate::sim::neighbour::Neighbour;
use crate::sim::plan::{Fault, Moment, Plan, When};
use crate::sim::process::Link;
use crate::sim::site::{Decided, Left, Site};
use crate::storm::VOLUME;

/// Steps that everything may take to end after the last fault.
const PATIENCE: u64 = 120_000;

/// Steps in which nothing happens before some are skipped.
const IDLE: u64 = 4;

/// Steps that are skipped at most when nothing happens.
const SKIP: u64 = 25;

/// Counts of a run.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Report {
    /// Requests that ended.
    pub requests: u64,
    /// Requests that ended with an error.
    pub errors: u64,
    /// Steps.
    pub steps: u64,
    /// Mounts.
    pub mounts: u64,
    /// Mounts that lost the volume to another.
    pub fenced: u64,
    /// Ends of the target.
    pub restarts: u64,
    /// Servers that died and were followed by another.
    pub recoveries: u64,
    /// Flushes that failed after a loss that every flush reports.
    pub lasting: u64,
    /// Mounts made again after a lasting loss, with working flushes.
    pub remounts: u64,
    /// LOGINs beside other ways, and DROPs, that the target answered.
    pub way_changes: u64,
    /// Faults that struck after their moment, and not for want of it.
    pub after_moments: u64,
    /// A hash of all events.
    pub fingerprint: u64,
}

impl Report {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.steps += other.steps;
        self.mounts += other.mounts;
        self.fenced += other.fenced;
        self.restarts += other.restarts;
        self.recoveries += other.recoveries;
        self.lasting += other.lasting;
        self.remounts += other.remounts;
        self.way_changes += other.way_changes;
        self.after_moments += other.after_moments;
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
    neighbour: Option<Neighbour>,
    numbers: u8,
    wishes: Vec<Option<Wish>>,
    // By host and address.
    links: Vec<Vec<Link>>,
    // Links to heal, with the wires that were stalled.
    heals: Vec<(u64, usize, usize, Vec<FaultyWire>)>,
    thaws: Vec<(u64, Host)>,
    // The step at which the store recovers.
    store_heals: Option<u64>,
    // The step until which ops to hold are awaited, and the duration of the hold.
    holds: Option<(u64, u64)>,
    releases: Option<u64>,
    jam_heals: Option<u64>,
    // While the target is down: the step of its return, and its disk.
    down: Option<(u64, Left, Option<CrashStore>)>,
    dark: bool,
    drain_down: u64,
    // The next fault, and the step since which it is due.
    fault: usize,
    fault_since: u64,
    // The step at which the moment came that the next fault strikes after.
    moment_came: Option<u64>,
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
        let oracle = Oracle::new(image.clone(), plan.block_bytes as usize)
            .with_lasting_losses(plan.on_loss == OnLoss::UntilRemount);
        let mut world = Self {
            site: Site::new(&plan, image),
            oracle,
            log: Log::new(),
            moments: Vec::new(),
            random,
            mounts: Vec::new(),
            neighbour: Neighbour::of(&plan),
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
            moment_came: None,
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
    /// A result is wrong.
    #[must_use]
    pub fn run(plan: Plan) -> Report {
        let mut world = Self::new(plan);
        while world.fault < world.plan.faults.len() || world.begun < world.plan.requests {
            world.step();
            assert!(world.step_number() < 40 * PATIENCE, "it does not come to an end");
        }
        world.finish()
    }

    /// The counts so far.
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

    /// Gives every part one step.
    ///
    /// # Panics
    /// A result is wrong.
    pub fn step(&mut self) {
        let mut busy = self.site.rig.step();
        self.log.at(self.step_number());
        busy |= self.reap();
        self.pump();
        self.turn_processes();
        self.pump();
        if let Some(neighbour) = &mut self.neighbour {
            neighbour.turn(&mut self.site);
            busy |= neighbour.is_busy();
        }
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
                Decided::LoggedIn(host) => self.oracle.new_attempt(host, |_| true),
                Decided::Ended { host, epochs } => {
                    self.report.way_changes += 1;
                    self.epochs_ended(host, &epochs);
                }
                Decided::Threatened(host) => {
                    for mount in self.mounts.iter_mut().filter(|m| m.number != host) {
                        mount.threatened = true;
                    }
                }
                Decided::Opened { host, fresh } => self.opened(host, fresh),
            }
        }
    }

    /// The target has ended epochs of a mount that lives by others. Changes that were under way in
    /// these are made again.
    fn epochs_ended(&mut self, host: Host, epochs: &[Epoch]) {
        let Some(mount) = self.mounts.iter().find(|mount| mount.number == host) else { return };
        let Some(process) = &mount.process else { return };
        let mut ended = Vec::new();
        for request in mount.kernel.requests() {
            let (Expect::Change(id), Some((queue, tag))) = (request.expect, request.place) else {
                continue;
            };
            let old = self.site.rig.engine_mut(process.queues()[queue]).old_way(tag);
            let of_way = |epoch: &Epoch| old.is_some() && process.way_of(*epoch) == old;
            if epochs.iter().any(of_way) {
                ended.push(id);
            }
        }
        self.oracle.new_attempt(host, |id| ended.contains(&id));
    }

    /// Skips to a step at which an event may occur, when nothing happens.
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
            When::After(_, more) => {
                self.moment_came.map_or(self.fault_since + IMPATIENCE, |at| at + more)
            }
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
}

/// For tests of single scenarios: one mount, driven by hand.
impl World {
    /// Makes no requests of its own.
    pub fn by_hand(&mut self) {
        self.by_hand = true;
    }

    /// Steps until the condition is true.
    ///
    /// # Panics
    /// The condition stays false.
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

    /// Gives the oldest mount that has the volume a request. Returns the change, if it is one.
    ///
    /// # Panics
    /// No mount has the volume.
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

    /// The bytes in the store.
    pub fn stored(&mut self) -> Vec<u8> {
        self.site.rig.store_mut().bytes(VOLUME)
    }

    /// Requests that are not answered.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.mounts.iter().map(|mount| mount.kernel.requests().len()).sum()
    }

    /// Strikes with a fault now.
    pub fn fault(&mut self, fault: Fault) {
        self.strike(fault);
    }

    /// Whether the store holds ops.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        self.releases.is_some()
    }

    /// The plan.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}
