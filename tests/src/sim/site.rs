//! [`Site`]: the target of a simulation: the real [`Core`] over the real poll groups, its durable
//! state, and its deaths and restarts.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use rblk_fabric::Region;
use rblk_protocol::{
    ConnectionKind, DropRequest, Epoch, Features, HelloRequest, InstanceId, LoginRequest, Name,
    Opcode, OpenRequest, SessionId, Status, Tag, WriteVerifier,
};
use rblk_rig::crash_store::CrashStore;
use rblk_rig::inprocess::{AdminCommand, Join, Rig, RigOptions, VolumeKind, VolumeSpec};
use rblk_rig::seed::Random;
use rblk_target::control::core::{
    Admitted, Capacity, ConnectRefusal, ConnectionRef, Core, CoreParts, Effect, Knock as CoreKnock,
    Ticket,
};
use rblk_target::data::poll_group::{SettleTicket, ToGroup};
use rblk_target::record::holders::{HolderRecord, Holders};
use rblk_target::record::{AtRisk, BootId, VolumeRecord};
use rblk_target::volume::CacheMode;
use rblk_target::volume::ids::AdmissionId;

use super::log::Log;
use super::neighbour::volume as neighbour;
use super::plan::{Death, Moment, Plan};
use crate::oracle::Host;
use crate::storm::{VOLUME, volume_limits};

/// The name of the target at every address.
#[must_use]
pub fn name() -> Name {
    Name::new("site").expect("a name")
}

/// The volume's name, as [`Rig`] calls its first.
#[must_use]
pub fn volume_name() -> Name {
    Name::new("v0").expect("a name")
}

/// How often control looks for deadlines that have passed.
const TICK: Duration = Duration::from_millis(100);
/// How long a drain may take.
const DRAIN: Duration = Duration::from_secs(2);

/// A decision of the target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Decided {
    /// LOGIN of a mount was answered: no connection of its older epochs is left.
    LoggedIn(Host),
    /// A DROP or a LOGIN that joins was answered: no connection of these epochs is left.
    Ended {
        /// The mount.
        host: Host,
        /// The epochs.
        epochs: Vec<Epoch>,
    },
    /// A mount claims the volume by force.
    Threatened(Host),
    /// OPEN of a mount was answered: the mount has the volume now.
    Opened {
        /// The mount.
        host: Host,
        /// The mount did not hold the volume before.
        fresh: bool,
    },
}

/// An admin command without an answer so far.
#[derive(Clone, Debug)]
struct Asked {
    to: ConnectionRef,
    tag: Tag,
    opcode: Opcode,
    host: Host,
    fresh: bool,
    // The epochs that a DROP or a LOGIN beside others ends.
    ends: Option<Vec<Epoch>>,
}

/// How a connect request ended.
#[derive(Debug)]
pub enum Knock {
    /// The target does not run.
    Nobody,
    /// The target refuses.
    Refused(ConnectRefusal),
    /// The connection may be made.
    Admitted(Join),
}

/// The contents of the store after the target's end.
#[derive(Debug)]
pub enum Left {
    /// All ops that took effect, on the same disk.
    Everything,
    /// These bytes.
    Image(Vec<u8>),
}

/// A disk with the plan's conditions. Its volume holds `image`. `seed` decides which writes survive
/// a crash.
fn disk(plan: &Plan, image: &[u8], region: &Arc<Region>, seed: u64) -> CrashStore {
    let mut store = CrashStore::new(region, seed);
    store.set_volume(VOLUME, image.to_vec());
    store.set_conditions(plan.store);
    if plan.neighbour {
        store.set_volume(neighbour::VOLUME, neighbour::image(plan.seed));
    }
    if plan.cache != CacheMode::None {
        store.set_exclusive();
    }
    store
}

/// The target.
#[derive(Debug)]
pub struct Site {
    /// Its groups and its peers' queues.
    pub rig: Rig<CrashStore>,
    plan: Plan,
    core: Option<Core>,
    random: Random,
    // The knowledge of the next run.
    holders: BTreeMap<[u8; 16], HolderRecord>,
    record: VolumeRecord,
    boot: BootId,
    renounced: bool,
    // Flushes that an OPEN waits for: poll groups that have not answered, and the first failure.
    settles: BTreeMap<SettleTicket, (usize, Result<(), String>)>,
    // Records on their way to the disk, and the steps at which they arrive.
    persists: VecDeque<(u64, Ticket, HolderRecord)>,
    asked: Vec<Asked>,
    owners: BTreeMap<AdmissionId, Host>,
    ticked: Duration,
    stopping: bool,
    breaches: Vec<String>,
}

impl Site {
    /// A running target with a volume that holds `image`.
    ///
    /// # Panics
    /// The target cannot be made.
    #[must_use]
    pub fn new(plan: &Plan, image: Vec<u8>) -> Self {
        let volume = VolumeSpec {
            block_size: plan.block_bytes,
            blocks: (plan.volume_bytes / plan.block_bytes as usize) as u64,
            cache: plan.cache,
            limits: volume_limits(plan.seed, 1000),
            ..VolumeSpec::new(VolumeKind::Store, plan.volume_bytes as u64)
        };
        let mut volumes = vec![volume];
        if plan.neighbour {
            volumes.push(VolumeSpec {
                block_size: plan.block_bytes,
                blocks: (neighbour::BYTES / plan.block_bytes as usize) as u64,
                cache: plan.cache,
                read_only: true,
                ..VolumeSpec::new(VolumeKind::Store, neighbour::BYTES as u64)
            });
        }
        let options = RigOptions {
            seed: plan.seed,
            conditions: plan.network,
            tick: Duration::from_millis(1),
            groups: plan.groups,
            skipped_turns_per_mille: plan.skipped_turns_per_mille,
            arena_bytes: plan.arena_bytes,
            dirty_max_bytes: plan.dirty_max_bytes,
            write_back_delay: plan.write_back_delay,
            io_max_bytes: plan.io_max_bytes,
            cq_entries: 1 << 12,
            late_rdma: true,
            destroy_steps: plan.destroy_steps,
            volumes,
            ..RigOptions::default()
        };
        let stores = CrashStore::shared(|region| disk(plan, &image, region, plan.seed));
        let rig = Rig::new(&options, stores).expect("a rig");
        let mut random = Random::new(plan.seed ^ 0x7461_7267);
        let boot = BootId::new(&format!("{:x}", random.bits()));
        let record = VolumeRecord::new(rig.volumes()[0].uuid);
        let mut site = Self {
            rig,
            plan: plan.clone(),
            core: None,
            random,
            holders: BTreeMap::new(),
            record,
            boot,
            renounced: false,
            settles: BTreeMap::new(),
            persists: VecDeque::new(),
            asked: Vec::new(),
            owners: BTreeMap::new(),
            ticked: Duration::ZERO,
            stopping: false,
            breaches: Vec::new(),
        };
        site.begin();
        site
    }

    fn begin(&mut self) {
        let parts = CoreParts {
            name: name(),
            instance: InstanceId(id(&mut self.random)),
            volumes: self.rig.volumes().to_vec(),
            capacity: Capacity::new(64, None, 64 << 30),
            lease: self.plan.lease,
            drain_timeout: DRAIN,
            holders: Holders::durable(self.holders.values().cloned()),
            auth: None,
        };
        let mut core = Core::new(parts, self.rig.now());
        let volume = &self.rig.volumes()[0];
        let _ = self.record.begin(&self.boot, WriteVerifier(id(&mut self.random)));
        let risk = AtRisk::by_writes_to(volume).expect("a store");
        self.record.put_at_risk(risk, &self.boot);
        core.vouch(volume.uuid, self.record.verifier().expect("it begins with one"));
        self.core = Some(core);
        self.stopping = false;
        self.ticked = self.rig.elapsed();
    }

    /// Whether it runs.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.core.is_some()
    }

    /// Whether it drains.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.stopping
    }

    /// Its sessions that have connections.
    #[must_use]
    pub fn sessions(&self) -> usize {
        let sessions = |core: &Core| core.sessions().iter().filter(|s| s.connections() > 0).count();
        self.core.as_ref().map_or(0, sessions)
    }

    /// Breaches of the store's contract so far.
    pub fn breaches(&mut self) -> Vec<String> {
        if self.rig.has_target() {
            self.breaches.extend(self.rig.store_mut().breaches());
        }
        std::mem::take(&mut self.breaches)
    }

    /// Receives a connect request of a mount.
    pub fn knock(&mut self, asked: &HelloRequest, host: Host, log: &mut Log) -> Knock {
        let now = self.rig.now();
        let Some(core) = &mut self.core else { return Knock::Nobody };
        if self.stopping {
            return Knock::Nobody;
        }
        let fresh = SessionId(id(&mut self.random));
        // Uses only the bytes that cross the wire.
        let asked = HelloRequest::from_wire(&asked.to_wire()).expect("a good hello");
        let knock = CoreKnock {
            asked: &asked,
            introduction: None,
            peer: &format!("host{}", host.0),
            memory_bytes: 1 << 20,
            fresh,
            is_encrypted: false,
            has_ways: asked.features.has(Features::WAYS),
        };
        match core.connect(&knock, now) {
            Ok(admitted) => {
                let Admitted { id: admission, session, epoch, .. } = admitted;
                let join = Join { admission, session, epoch, kind: asked.kind };
                if asked.kind == ConnectionKind::Admin {
                    self.owners.insert(admission, host);
                }
                log.add(
                    "admitted",
                    [host.0.into(), admitted.session.index.into(), admitted.epoch.0.into()],
                );
                Knock::Admitted(join)
            }
            Err(refused) => {
                log.add("refused", [host.0.into(), asked.epoch.0.into(), 0]);
                Knock::Refused(refused)
            }
        }
    }

    /// Hands messages of the poll groups to control, and carries out its decisions. Call it after
    /// each step and after each [`Self::knock`].
    pub fn pump(&mut self, log: &mut Log, moments: &mut Vec<Moment>) -> Vec<Decided> {
        let mut decided = Vec::new();
        let (now, elapsed) = (self.rig.now(), self.rig.elapsed());
        if self.core.is_none() {
            return decided;
        }
        self.renounced |= self.rig.take_lost_writes();
        self.carry_out(log, moments, &mut decided);
        for gone in self.rig.take_gone() {
            if gone.session == neighbour::SESSION {
                continue;
            }
            log.add("gone", [gone.session.index.into(), gone.epoch.0.into(), 0]);
            self.owners.remove(&gone.admission);
            moments.push(Moment::Buried);
            if let Some(core) = &mut self.core {
                core.gone(gone.admission, now);
            }
            self.carry_out(log, moments, &mut decided);
        }
        for command in self.rig.take_admin() {
            self.command(&command, log, moments, &mut decided);
        }
        let step = self.rig.steps();
        while self.persists.front().is_some_and(|(due, ..)| *due <= step) {
            let Some((_, ticket, record)) = self.persists.pop_front() else { break };
            self.holders.insert(record.volume, record);
            if let Some(core) = &mut self.core {
                core.persisted(ticket, Ok(()));
            }
            self.carry_out(log, moments, &mut decided);
        }
        self.take_settled();
        self.carry_out(log, moments, &mut decided);
        if elapsed - self.ticked >= TICK {
            self.ticked = elapsed;
            // As control does: without that need, a tick must change nothing.
            if let Some(core) = self.core.as_mut().filter(|core| core.needs_ticks()) {
                core.tick(now);
            }
            self.carry_out(log, moments, &mut decided);
        }
        decided
    }

    fn take_settled(&mut self) {
        for (ticket, result) in self.rig.take_settled() {
            let Some((waiting, outcome)) = self.settles.get_mut(&ticket) else { continue };
            *waiting -= 1;
            if outcome.is_ok() {
                *outcome = result;
            }
            if *waiting > 0 {
                continue;
            }
            if let (Some((_, outcome)), Some(core)) =
                (self.settles.remove(&ticket), self.core.as_mut())
            {
                core.settled(ticket, outcome);
            }
        }
    }

    fn command(
        &mut self,
        command: &AdminCommand,
        log: &mut Log,
        moments: &mut Vec<Moment>,
        decided: &mut Vec<Decided>,
    ) {
        let opcode = command.command.opcode;
        let to = ConnectionRef { group: command.group, connection: command.connection };
        // A connection that has ended gets no answer.
        let Some(host) = self.owners.get(&command.admission).copied() else { return };
        let open = match opcode {
            Opcode::OpenVolume => OpenRequest::from_wire(&command.body).ok(),
            _ => None,
        };
        match opcode {
            Opcode::Login => moments.push(Moment::Login),
            Opcode::OpenVolume => moments.push(Moment::Open),
            Opcode::Drop => moments.push(Moment::Drop),
            _ => {}
        }
        if open.is_some_and(|open| open.generation.is_fresh()) {
            decided.push(Decided::Threatened(host));
        }
        let fresh = open.is_some_and(|open| open.generation.is_fresh());
        let ends = match opcode {
            Opcode::Login => LoginRequest::from_wire(&command.body)
                .ok()
                .and_then(|login| login.join)
                .map(|join| join.ends.into_iter().collect()),
            Opcode::Drop => {
                DropRequest::from_wire(&command.body).ok().map(|drop| drop.epochs().to_vec())
            }
            _ => None,
        };
        self.asked.push(Asked { to, tag: command.command.tag, opcode, host, fresh, ends });
        let now = self.rig.now();
        if let Some(core) = &mut self.core {
            core.command(to, command.admission, &command.command, &command.body, now);
        }
        self.carry_out(log, moments, decided);
    }

    fn carry_out(&mut self, log: &mut Log, moments: &mut Vec<Moment>, decided: &mut Vec<Decided>) {
        while let Some(effect) = self.core.as_mut().and_then(Core::next_effect) {
            match effect {
                Effect::Reply { to, tag, status, value, payload } => {
                    let is = |asked: &Asked| asked.to == to && asked.tag == tag;
                    if let Some(at) = self.asked.iter().position(is) {
                        let asked = self.asked.swap_remove(at);
                        Self::answered(&asked, status, log, moments, decided);
                    }
                    self.rig.reply_to(to.group, to.connection, tag, status, value, payload);
                }
                Effect::Adopt { connection: to, session, epoch, silence, .. } => {
                    let connection = to.connection;
                    let adopt = ToGroup::Adopt { connection, session, epoch, silence };
                    self.rig.mail_to(to.group, adopt);
                }
                Effect::Expel { connection: to } => {
                    self.rig.mail_to(to.group, ToGroup::Expel { connection: to.connection });
                }
                Effect::Evict { admission } => self.rig.mail(ToGroup::Evict { admission }),
                Effect::LimitHost { session, limits } => {
                    self.rig.mail(ToGroup::LimitHost { session, limits });
                }
                Effect::All(notice) => self.rig.mail(ToGroup::Notice(notice)),
                Effect::Persist { ticket, record } => {
                    moments.push(Moment::Persist);
                    log.add("persist", [record.generation.0, u64::from(record.present), 0]);
                    let delay = [0, 1, 5, 60][self.random.index(4)];
                    let due = self.rig.steps() + self.random.within(0, delay);
                    // Records arrive in order.
                    let due = self.persists.back().map_or(due, |(last, ..)| due.max(*last));
                    self.persists.push_back((due, ticket, record));
                }
                Effect::Settle { ticket, volume } => {
                    log.add("settle", [ticket.0, 0, 0]);
                    self.settles.insert(ticket, (self.plan.groups, Ok(())));
                    for group in 0..self.plan.groups {
                        self.rig.mail_to(group, ToGroup::Settle { ticket, volume });
                    }
                }
                Effect::Claim { .. } | Effect::Prove { .. } => {
                    unreachable!("no volume is of a group here")
                }
                Effect::Step(_) | Effect::GiveUpStep | Effect::GivenUp(_) | Effect::Altered(_) => {
                    unreachable!("no volume is changed here")
                }
                Effect::StopGroups => {
                    log.add("stop", [0; 3]);
                    self.stopping = true;
                    self.rig.mail(ToGroup::Stop);
                }
            }
        }
    }

    fn answered(
        asked: &Asked,
        status: Status,
        log: &mut Log,
        moments: &mut Vec<Moment>,
        decided: &mut Vec<Decided>,
    ) {
        let host = asked.host;
        let number = u64::from(status as u16);
        match asked.opcode {
            Opcode::Login => {
                log.add("LOGIN answered", [host.0.into(), number, 0]);
                moments.push(Moment::LoggedIn);
                match &asked.ends {
                    _ if status != Status::Ok => {}
                    None => decided.push(Decided::LoggedIn(host)),
                    Some(epochs) => decided.push(Decided::Ended { host, epochs: epochs.clone() }),
                }
            }
            Opcode::Drop => {
                log.add("DROP answered", [host.0.into(), number, 0]);
                moments.push(Moment::Dropped);
                if let Some(epochs) = asked.ends.clone().filter(|_| status == Status::Ok) {
                    decided.push(Decided::Ended { host, epochs });
                }
            }
            Opcode::OpenVolume => {
                log.add("OPEN answered", [host.0.into(), number, u64::from(asked.fresh)]);
                moments.push(Moment::Opened);
                if status == Status::Ok {
                    decided.push(Decided::Opened { host, fresh: asked.fresh });
                }
            }
            _ => {}
        }
    }

    /// Whether an event of it is due within a few steps.
    #[must_use]
    pub fn has_due(&self) -> bool {
        !self.persists.is_empty()
    }

    /// Asks it to drain.
    pub fn drain(&mut self, log: &mut Log) {
        log.add("drain", [0; 3]);
        let now = self.rig.now();
        if let Some(core) = &mut self.core {
            core.drain(now);
        }
    }

    /// Whether a drain is over; if so, whether everything acknowledged is durable.
    #[must_use]
    pub fn drained(&self) -> Option<bool> {
        if self.stopping { self.rig.stopped() } else { None }
    }

    /// Ends it after a drain, or by a death. Returns the contents of the store.
    pub fn end(&mut self, death: Option<Death>, log: &mut Log) -> Left {
        let chance = self.random.bits();
        let clean = death.is_none() && self.drained() == Some(true) && !self.renounced;
        log.add("target ends", [u64::from(clean), u64::from(death == Some(Death::Machine)), 0]);
        let store = self.rig.store_mut();
        self.breaches.extend(store.breaches());
        let in_place = death == Some(Death::Program) && self.plan.cache != CacheMode::WriteBack;
        let left = if in_place {
            store.settle(chance);
            Left::Everything
        } else if death == Some(Death::Program) || (death.is_none() && !clean) {
            Left::Image(store.kill(VOLUME, chance))
        } else {
            // After a clean end the machine may still lose its power.
            Left::Image(store.crash(VOLUME, chance))
        };
        // The record of the volume says the same.
        if clean {
            self.record.lower_risk(AtRisk::Nothing);
        }
        if self.renounced {
            self.record.renounce();
        }
        if death == Some(Death::Machine) {
            self.boot = BootId::new(&format!("{:x}", self.random.bits()));
        }
        self.renounced = false;
        // The disk may have some of the records on their way.
        let kept = self.random.index(self.persists.len() + 1);
        for (_, _, record) in self.persists.drain(..).take(kept) {
            self.holders.insert(record.volume, record);
        }
        self.core = None;
        self.stopping = false;
        self.asked.clear();
        self.settles.clear();
        self.owners.clear();
        left
    }

    /// Removes its process and its connections. Call it after [`Self::end`].
    pub fn vanish(&mut self, silent: bool) {
        self.rig.kill_target(silent);
    }

    /// Starts it on this store.
    ///
    /// # Panics
    /// The start fails.
    pub fn start(&mut self, left: &Left, before: Option<&CrashStore>, log: &mut Log) {
        log.add("target starts", [0; 3]);
        let plan = &self.plan;
        let seed = self.random.bits();
        let stores = CrashStore::shared(|region| match (left, before) {
            (Left::Everything, Some(before)) => before.over(region),
            (Left::Everything, None) => panic!("no disk"),
            (Left::Image(image), _) => disk(plan, image, region, seed),
        });
        self.rig.start_target(stores).expect("a target");
        self.begin();
    }

    /// Another store of the same disk, to keep it while there is no target.
    #[must_use]
    pub fn disk(&mut self) -> CrashStore {
        self.rig.store_mut().another()
    }
}

/// 16 bytes that are not all zero.
fn id(random: &mut Random) -> [u8; 16] {
    let mut bytes = [1; 16];
    random.fill(&mut bytes[1..]);
    bytes
}
