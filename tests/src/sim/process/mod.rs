//! [`Process`]: the server of one mount: the product's [`Course`], engines and accounts, on a
//! simulated path.
//!
//! This module does the work of the product's `Mount` and `Try` in the same order: connect, LOGIN,
//! OPEN, settle, connect every queue. Every step takes time, in which any fault may occur.

mod phase;
mod settling;
mod trying;
mod ways;

use std::sync::Arc;
use std::time::Duration;

use rblk_fabric::soft::network::FaultyWire;
use rblk_initiator::engine::PathEnd;
use rblk_initiator::engine::durability::retain::RetainRing;
use rblk_initiator::engine::durability::{Durability, Ledger};
use rblk_initiator::engine::pulse::Pulse;
use rblk_initiator::engine::ways::WayIndex;
use rblk_initiator::volume::course::{Act, Attempt, Course, CourseState, Facts, LossKind, Rules};
use rblk_protocol::{Epoch, Generation, HostId, OpenReply, QueueDepth, VolumeFlags};
use rblk_rig::inprocess::{QueueId, QueueOptions};
use rblk_rig::seed::Random;

use self::phase::{Phase, Trying};
use self::ways::{Ways, way_of};
use crate::oracle::{Host, Oracle};
use crate::sim::admin::{self, AdminEnd, Heard};
use crate::sim::log::Log;
use crate::sim::plan::{Break, Moment, Plan};
use crate::sim::site::Site;
use crate::storm::VOLUME;

/// The errno of every request of a fenced mount.
pub const EBADE: i32 = 52;
/// The errno of requests when the target is gone for too long.
pub const EIO: i32 = 5;

/// A host's link to one address.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Link {
    /// The kind of break, if the link is broken.
    pub broken: Option<Break>,
}

/// Everything outside the process.
#[derive(Debug)]
pub struct Ground<'a> {
    /// The target.
    pub site: &'a mut Site,
    /// Checks the results.
    pub oracle: &'a mut Oracle,
    /// The events.
    pub log: &'a mut Log,
    /// The moments of this turn.
    pub moments: &'a mut Vec<Moment>,
    /// The host's links, by address.
    pub links: &'a [Link],
    /// The target's machine has no power: a connect request is not even refused.
    pub dark: bool,
}

/// The note of a process for the next one of its mount.
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

/// The state of a process that mounts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Without a device.
    Mounting,
    /// With a device.
    Serving,
    /// The mount failed, and the process is over.
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
    // The number of losses at the last settlement with a target.
    settled_losses: u64,
    queues: Vec<QueueId>,
    // One for each living way. A process that uses one way at a time has one at most.
    sessions: Vec<Session>,
    // Of a process that uses several ways, once it has its device.
    ways: Option<Ways>,
    trying: Option<Trying>,
    // The note for the next process of this mount.
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
            durability: Durability::new(plan.on_loss),
            settled_losses: 0,
            queues: Vec::new(),
            sessions: Vec::new(),
            ways: None,
            trying: None,
            note: None,
            gave_up: false,
            frozen: false,
        }
    }

    /// A process that mounts the volume.
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

    /// A process that takes over the device of a dead one, by its note.
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
            true => Durability::inheriting_loss(plan.on_loss, true),
            false => Durability::inheriting(plan.on_loss),
        };
        process.settled_losses = process.durability.losses();
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
            failback: Duration::from_millis(if self.plan.ways { 0 } else { 500 }),
        }
    }

    fn pulse(&self) -> Pulse {
        Pulse::of(self.plan.detect)
    }

    /// Its state.
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

    /// Whether its next message is due within a few steps.
    #[must_use]
    pub fn is_hasty(&self) -> bool {
        let hasty = |t: &Trying| matches!(t.phase, Phase::Knock { .. } | Phase::Queue { .. });
        let joins = self.ways.as_ref().is_some_and(Ways::is_hasty);
        joins || self.trying.as_ref().is_some_and(hasty)
    }

    /// Whether every way lives, if it uses several.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.ways.as_ref().is_none_or(|ways| ways.living() == self.plan.addresses)
    }

    /// The way that had paths in an epoch which the target is about to end.
    #[must_use]
    pub fn way_of(&self, epoch: Epoch) -> Option<WayIndex> {
        self.ways.as_ref()?.place(epoch)
    }

    /// Stops it, or continues it.
    pub fn freeze(&mut self, frozen: bool, site: &mut Site) {
        self.frozen = frozen;
        for queue in &self.queues {
            site.rig.freeze(*queue, frozen);
        }
    }

    /// All its links to an address.
    pub fn wires<'p>(&'p self, address: usize, site: &'p Site) -> Vec<FaultyWire> {
        let mut wires = Vec::new();
        if let Some(session) = self.sessions.iter().find(|s| s.address == address) {
            wires.push(session.admin.wire().clone());
        }
        let of_queues = match &self.ways {
            Some(_) => Some(way_of(address)),
            None => (self.address() == Some(address)).then_some(WayIndex::FIRST),
        };
        if let Some(way) = of_queues {
            let of_way = |queue: &QueueId| site.rig.wires_of(*queue, way).to_vec();
            wires.extend(self.queues.iter().flat_map(of_way));
        }
        wires.extend(self.ways.iter().flat_map(|ways| ways.wires(address)));
        if let Some(trying) = self.trying.as_ref().filter(|t| t.attempt.address == address) {
            wires.extend(trying.admin.iter().map(|admin| admin.wire().clone()));
            match &trying.phase {
                Phase::Queue { paths, .. } => {
                    wires.extend(paths.iter().flat_map(|(_, wires)| wires.clone()));
                }
                Phase::Settle(settling) => wires.extend(settling.wires.iter().cloned()),
                _ => {}
            }
        }
        wires
    }

    /// The address in use.
    #[must_use]
    pub fn address(&self) -> Option<usize> {
        self.sessions.first().map(|session| session.address)
    }

    /// Kills the process, or with `silent` its machine. Leaves its device to the next process.
    pub fn die(mut self, silent: bool, site: &mut Site) -> Option<Note> {
        if silent {
            for address in 0..self.plan.addresses {
                self.wires(address, site).iter().for_each(FaultyWire::silence);
            }
        }
        for queue in &self.queues {
            site.rig.drop_queue(*queue, silent);
        }
        self.note.take()
    }

    /// Whether every flush of its mount fails until a remount.
    #[must_use]
    pub fn fails_every_flush(&self) -> bool {
        self.durability.fails_every_flush()
    }

    /// Notes a loss that every flush reports at once, as the product does.
    fn note_loss(&mut self) {
        let noted = self.note.as_ref().is_none_or(|note| note.loss_untold);
        if !noted && self.durability.fails_every_flush() {
            self.write_note();
        }
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
            if self.plan.ways {
                let number = u16::try_from(self.queues.len()).unwrap_or(u16::MAX);
                rig.engine_mut(queue).allow_ways(number, self.plan.policy);
            }
            self.queues.push(queue);
        }
    }

    fn queue_options(&self) -> QueueOptions {
        self.plan.queue_options()
    }

    fn fail_all(&self, errno: Option<i32>, ground: &mut Ground<'_>) {
        for queue in &self.queues {
            ground.site.rig.fail_requests(*queue, errno);
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
    /// A result is wrong.
    pub fn turn(&mut self, ground: &mut Ground<'_>) {
        if self.frozen || self.gave_up {
            return;
        }
        let now = ground.site.rig.now();
        for queue in self.queues.clone() {
            for (way, end) in ground.site.rig.take_way_ends(queue) {
                let is_breach = matches!(end, PathEnd::Protocol(_));
                assert!(!is_breach, "{way:?} of {:?}: {end:?}", self.mount);
                if end != PathEnd::Dropped {
                    self.way_dies(way, ground);
                }
            }
        }
        for address in 0..self.plan.addresses {
            self.turn_session(address, ground);
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
        self.turn_ways(ground);
        self.note_loss();
    }

    fn turn_session(&mut self, address: usize, ground: &mut Ground<'_>) {
        let (now, pulse) = (ground.site.rig.now(), self.pulse());
        let its = |session: &&mut Session| session.address == address;
        let Some(session) = self.sessions.iter_mut().find(its) else { return };
        match session.admin.turn(now, pulse, true) {
            Ok(None) => {}
            Ok(Some(Heard::Draining)) => {
                ground.log.add("hears of the drain", [self.mount.0.into(), 0, 0]);
                if let Some(course) = &mut self.course {
                    course.draining(now);
                }
            }
            Ok(Some(Heard::Answer { status, .. })) => self.drop_answered(address, status, ground),
            Err(admin::Lost) => self.way_dies(way_of(address), ground),
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
        let is_connected = |course: &Course| course.state() == CourseState::Connected;
        if !self.course.as_ref().is_some_and(is_connected) {
            return;
        }
        ground.log.add("lost", [self.mount.0.into(), 0, 0]);
        let now = ground.site.rig.now();
        let random = self.random.bits();
        self.drop_session(ground);
        if let Some(course) = &mut self.course {
            course.lose(LossKind::Path, now, random);
        }
    }

    fn drop_session(&mut self, ground: &mut Ground<'_>) {
        self.sessions.clear();
        self.ways.iter_mut().for_each(Ways::leave);
        for queue in &self.queues {
            ground.site.rig.engine_mut(*queue).disconnect();
        }
    }
}
