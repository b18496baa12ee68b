//! [`Rig`]: one target and any number of initiator queues in one thread over the in-memory fabric.
//!
//! The parts are the product's: [`PollGroup`](rblk_target::data::poll_group::PollGroup) and
//! [`Engine`](rblk_initiator::engine::Engine), with QPs, regions and keys as control makes them.
//! Control itself is missing. Either the caller brings it, and assigns each connection its session
//! and epoch ([`Join`]). Or the caller begins sessions, opens volumes and raises epochs by hand;
//! then the rig adds a connection only after the connections of older epochs have ended.
//!
//! Both ends may die and come back: the target with [`Rig::kill_target`] and [`Rig::start_target`],
//! a queue with [`Rig::drop_queue`]; and a queue may be stopped for a while ([`Rig::freeze`]).
//!
//! There are no sockets, no sleeps and no clock but the rig's own: [`Rig::step`] lets one tick pass
//! and gives each end one turn. One seed decides everything that happens, so a run can be repeated
//! from its seed. [`Rig::fingerprint`] shows whether two runs are equal.

mod changing;
mod destroying;
mod options;
mod poller;
mod queue;
mod target;
mod timing;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;
use rblk_fabric::soft::network::{FaultyWire, Network};
use rblk_fabric::{Device, Poller, ProtectionDomain, QpIndex, Region, RemoteBuffer};
use rblk_operate::target::traffic::IoStats;
use rblk_protocol::auth::{Hellos, SessionSecret};
use rblk_protocol::{CommandCapsule, ConnectionKind, Epoch, Tag};
use rblk_runtime::Moment;
use rblk_target::data::connection::SpareMemory;
use rblk_target::data::poll_group::{FromGroup, SettleTicket};
use rblk_target::store::Store;
use rblk_target::volume::Volume;
use rblk_target::volume::ids::{AdmissionId, ConnectionId, SessionIndex, VolumeIndex};

use changing::Changing;
use destroying::Destroys;
pub use options::{QueueOptions, RigOptions, VolumeKind, VolumeSpec};
pub use poller::{CqBreaker, CqFault, breakable, soft_domain, soft_handle};
use queue::Queue;
pub use queue::QueueId;
pub use target::CqNews;
use target::{Group, SessionState};
pub use timing::{EngineTime, Times, time_turns};

use crate::allocations;
use crate::seed::Random;

/// How often a poll group looks for silent peers, as its thread does.
const LISTEN: Duration = Duration::from_secs(1);

/// Allocations in the turns of each end, if this program [counts](crate::allocations::are_counted)
/// them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Allocations {
    /// By queues, in [`Rig::submit`] too.
    pub initiator: u64,
    /// By poll groups.
    pub target: u64,
}

/// The end of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Its queue.
    pub queue: QueueId,
    /// Its tag.
    pub tag: Tag,
    /// Bytes moved, or a negative errno.
    pub result: i32,
}

/// A connection that the target reported gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gone {
    /// Its name for control.
    pub admission: AdmissionId,
    /// Its session.
    pub session: SessionIndex,
    /// Its kind.
    pub kind: ConnectionKind,
    /// Its epoch.
    pub epoch: Epoch,
}

/// The place of a connection in the target's control.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Join {
    /// Its name for control.
    pub admission: AdmissionId,
    /// Its session; [`SessionIndex::NONE`] before LOGIN.
    pub session: SessionIndex,
    /// Its epoch.
    pub epoch: Epoch,
    /// Its kind.
    pub kind: ConnectionKind,
}

/// An admin command that waits for [`Rig::reply`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AdminCommand {
    /// The connection it came by.
    pub connection: ConnectionId,
    /// The connection's name for control.
    pub admission: AdmissionId,
    /// The command.
    pub command: CommandCapsule,
    /// Its in-capsule data.
    pub body: Vec<u8>,
    /// The poll group to answer.
    pub group: usize,
}

/// The initiator's end of a connection without an [`rblk_initiator::engine::Engine`], to be driven
/// by hand.
#[derive(Debug)]
pub struct RawEnd {
    /// Domain for memory of its own.
    pub pd: ProtectionDomain,
    /// Its CQ.
    pub poller: Box<dyn Poller>,
    /// Its QP.
    pub qp: QpIndex,
    /// The link, to break it.
    pub wire: FaultyWire,
    /// The hellos of the connection.
    pub hellos: Hellos,
}

/// A condition that did not come true.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("nothing came of it in {steps} steps")]
pub struct Stuck {
    /// The number of steps.
    pub steps: u64,
}

/// A target and its initiators in one thread.
pub struct Rig<S> {
    options: RigOptions,
    network: Network,
    began: Instant,
    now: Instant,
    // None while the target is dead.
    groups: Vec<Group<S>>,
    next_group: usize,
    skips: Random,
    target_pd: ProtectionDomain,
    // Memory of admin connections in that domain.
    spares: SpareMemory,
    initiator_pd: ProtectionDomain,
    volumes: Vec<Arc<Volume>>,
    sessions: Vec<SessionState>,
    queues: Vec<Option<Queue>>,
    // The links of all connections to this run of the target.
    wires: Vec<FaultyWire>,
    outcomes: Vec<Outcome>,
    gone: Vec<Gone>,
    admin: Vec<AdminCommand>,
    lost_writes: bool,
    losses_known: Vec<(usize, VolumeIndex)>,
    settled: Vec<(SettleTicket, Result<(), String>)>,
    changing: Changing,
    fingerprint: u64,
    allocations: Allocations,
    times: Times,
    steps: u64,
    listened: Instant,
    destroys: Destroys,
    // The landing buffer of the newest connection with bounce memory.
    last_landing: Option<RemoteBuffer>,
    // The secret that new I/O connections have to prove.
    secret: Option<SessionSecret>,
    // I/O connections that have proven it.
    proven: usize,
    // The counters of the target's connections.
    ios: Vec<Arc<IoStats>>,
}

impl<S: Store> std::fmt::Debug for Rig<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let queues =
            self.queues.iter().flatten().map(|q| (q.engine.is_connected(), q.engine.outstanding()));
        f.debug_struct("Rig")
            .field("steps", &self.steps)
            .field("shards", &self.groups.iter().map(|g| g.engine.shard()).collect::<Vec<_>>())
            .field("sessions", &self.sessions)
            .field("queues (connected, outstanding)", &queues.collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

impl<S: Store> Rig<S> {
    /// A target with its volumes and without connections. `store` gets the region of the arena,
    /// once per poll group; with several groups the stores must have the same bytes.
    ///
    /// # Errors
    /// Memory is short, or the sizes do not fit.
    pub fn new(options: &RigOptions, store: impl FnMut(&Arc<Region>) -> S) -> Result<Self> {
        let make =
            if options.late_rdma { Network::with_late_rdma } else { Network::with_region_max };
        let network = match options.iwarp {
            true => Network::with_iwarp_rules(options.seed),
            false => make(options.seed, options.region_max_bytes),
        };
        network.set_conditions(options.conditions);
        let device = Device::Soft(network.device());
        let now = Instant::now();
        let mut rig = Self {
            options: options.clone(),
            network,
            began: now,
            now,
            groups: Vec::new(),
            next_group: 0,
            skips: Random::new(options.seed ^ 0x736b_6970),
            target_pd: device.alloc_pd()?,
            spares: SpareMemory::default(),
            initiator_pd: device.alloc_pd()?,
            volumes: Vec::new(),
            sessions: Vec::new(),
            queues: Vec::new(),
            wires: Vec::new(),
            outcomes: Vec::new(),
            gone: Vec::new(),
            admin: Vec::new(),
            lost_writes: false,
            losses_known: Vec::new(),
            settled: Vec::new(),
            changing: Changing::default(),
            fingerprint: options.seed,
            allocations: Allocations::default(),
            times: Times::default(),
            steps: 0,
            listened: now,
            destroys: Destroys::new(options.seed, options.destroy_steps),
            last_landing: None,
            secret: None,
            proven: 0,
            ios: Vec::new(),
        };
        rig.start_target(store)?;
        Ok(rig)
    }

    /// The network, to change its conditions.
    #[must_use]
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// The rig's clock.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Time of the rig's clock since it was made.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.now - self.began
    }

    /// Steps so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// A hash of all events and their times: equal for equal runs.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Adds an event to the fingerprint.
    pub fn note(&mut self, what: &[u64]) {
        let mut hash = self.fingerprint;
        for number in [self.steps].iter().chain(what) {
            for byte in number.to_le_bytes() {
                hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
        }
        self.fingerprint = hash;
    }

    /// Lets time pass without turns, as when all threads sleep. A pause beyond the network's next
    /// arrival or a deadline of the parts makes them late.
    pub fn skip(&mut self, ticks: u32) {
        self.steps += u64::from(ticks);
        self.now += self.options.tick * ticks;
        self.network.advance(ticks.into());
    }

    /// One tick, and one turn of each end. Returns whether anything happened.
    pub fn step(&mut self) -> bool {
        self.steps += 1;
        self.now += self.options.tick;
        self.network.advance(1);
        self.destroy_due();
        let mut busy = false;
        let mut messages: Vec<FromGroup> = Vec::new();
        let listens = self.now - self.listened > LISTEN;
        if listens {
            self.listened = self.now;
        }
        for group in &mut self.groups {
            if listens {
                group.engine.check_silence(self.now);
            }
            if self.skips.chance(self.options.skipped_turns_per_mille) {
                busy = true;
                continue;
            }
            let allocated = allocations::of_this_thread();
            let now = Moment::from(self.now);
            busy |= timing::turn(&mut self.times.target, || group.turn(now))
                || group.engine.has_outbox();
            self.allocations.target += allocations::of_this_thread() - allocated;
            messages.extend(group.engine.take_outbox());
        }
        for message in messages {
            self.on_message(message);
        }
        for at in 0..self.queues.len() {
            busy |= self.turn_queue(at);
        }
        busy
    }

    /// Steps until the condition is true. Returns the number of steps.
    ///
    /// # Errors
    /// The condition is false after `most` steps.
    pub fn run(
        &mut self,
        most: u64,
        mut until: impl FnMut(&mut Self) -> bool,
    ) -> Result<u64, Stuck> {
        for steps in 0..=most {
            if until(self) {
                return Ok(steps);
            }
            if steps < most {
                self.step();
            }
        }
        Err(Stuck { steps: most })
    }

    /// Steps until every queue has its path and no request is outstanding.
    ///
    /// # Errors
    /// A path is missing, or a request is outstanding, after `most` steps.
    pub fn settle(&mut self, most: u64) -> Result<u64, Stuck> {
        self.run(most, |rig| {
            rig.queues
                .iter()
                .flatten()
                .all(|q| q.engine.is_connected() && q.engine.outstanding() == 0)
        })
    }

    /// The outcomes since the last call, in order.
    pub fn take_outcomes(&mut self) -> Vec<Outcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// The allocations of the ends' turns so far.
    #[must_use]
    pub fn allocations(&self) -> Allocations {
        self.allocations
    }

    /// The time of the turns so far in which this thread was [timed](time_turns).
    #[must_use]
    pub fn times(&self) -> Times {
        self.times
    }

    /// Connections the target reported gone since the last call.
    pub fn take_gone(&mut self) -> Vec<Gone> {
        std::mem::take(&mut self.gone)
    }

    /// Admin commands that came in since the last call.
    pub fn take_admin(&mut self) -> Vec<AdminCommand> {
        std::mem::take(&mut self.admin)
    }
}
