//! The target of a [`Rig`]: its poll groups, and the replacement of its control.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rblk_fabric::soft::network::FaultyWire;
use rblk_fabric::{
    AcceptParams, Access, Connection, ConnectionHello, Device, PageKind, PollerHandle,
    ProtectionDomain, QpLimits, Region, RemoteBuffer,
};
use rblk_operate::target::delays::DelayCounts;
use rblk_operate::target::group_counts::{Stats, StatsSnapshot};
use rblk_operate::target::traffic::{IoCounts, IoStats, VolumeTimes};
use rblk_operate::target::volume_counts::{LastError, VolumeCounts, VolumeStats};
use rblk_protocol::auth::{Hellos, QueueKey, SessionSecret};
use rblk_protocol::{
    AccessMode, BlockCount, BlockSize, ConnectionKind, Epoch, Features, HelloAccept, HelloRequest,
    InstanceId, Name, Nonce, Offer, QueueDepth, SessionId, Status, Tag, Version, limits, negotiate,
};
use rblk_runtime::Moment;
use rblk_target::cache::{ArenaEnds, Shard, ShardOptions};
use rblk_target::control::connect::grant::Terms;
use rblk_target::data::connection::{
    BounceMemory, ConnectionParams, ProofDue, SpareMemory, slots_of_recv,
};
use rblk_target::data::poll_group::other_groups::OtherGroups;
use rblk_target::data::poll_group::{
    FromGroup, Notice, PollGroup, PollerMemory, SettleTicket, ToGroup,
};
use rblk_target::memory::arena::Arena;
use rblk_target::store::Store;
use rblk_target::volume::ids::{AdmissionId, ConnectionId, HostIndex, SessionIndex, VolumeIndex};
use rblk_target::volume::limits::Limiter;
use rblk_target::volume::{CacheMode, Placement, Volume};

use super::destroying::Ended;
use super::poller::{CqBreaker, CqFault, breakable};
use super::{
    AdminCommand, Gone, Join, QueueOptions, Rig, VolumeKind, VolumeSpec, soft_domain, soft_handle,
};

/// The time that a queue has for its proof.
const PROVE_WITHIN: Duration = Duration::from_secs(5);
/// The features that the target of a rig agrees to.
const FEATURES: u32 = Features::WRITE_WITH_IMM.0
    | Features::CAPSULE_LISTS.0
    | Features::DATA_LISTS.0
    | Features::DATA_FIRST.0
    | Features::DIGEST.0
    // Nothing is encrypted in memory, but the target treats the connection as encrypted.
    | Features::ENCRYPT.0;

/// Extents that one WRITE of the target gathers.
const SEND_SGES: u32 = 4;
/// Steps in which the connections of an older epoch must end.
const QUIESCE_STEPS: u64 = 1_000_000;

#[derive(Debug)]
pub(super) struct SessionState {
    epoch: Epoch,
    // Epochs of the target's connections.
    connections: Vec<Epoch>,
}

#[derive(Debug)]
pub(super) struct Group<S> {
    pub(super) engine: PollGroup<S>,
    stats: Arc<Stats>,
    // By volume index.
    volumes: Vec<Arc<VolumeStats>>,
    // By device.
    cqs: Vec<Cq>,
    // `None` if every connection has its own memory (iWARP).
    memory: Option<PollerMemory>,
}

/// A CQ of a poll group, as control knows it.
#[derive(Debug)]
struct Cq {
    handle: PollerHandle,
    breaker: CqBreaker,
    // The reports about it.
    news: CqNews,
}

/// A connection that was made.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) connection: Connection,
    pub(super) wire: FaultyWire,
    pub(super) accept: HelloAccept,
    pub(super) hellos: Hellos,
}

/// The reports of a poll group about a CQ.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CqNews {
    /// How often it broke.
    pub broken: u32,
    /// How often it lost its last connection after that.
    pub gone: u32,
    /// How often it was polled or armed while it was broken.
    pub asked: u64,
}

impl<S: Store> Group<S> {
    /// One turn of the engine. Its own function, so that profiles name it.
    #[inline(never)]
    pub(super) fn turn(&mut self, now: Moment) -> bool {
        self.engine.turn(now)
    }
}

impl<S> Rig<S> {
    /// Drops the target's memory, with all that it has lent.
    fn drop_target(&mut self) {
        let _ends = ArenaEnds::begin();
        self.groups.clear();
        self.destroys.drop_target();
        self.gone.clear();
    }
}

impl<S> Drop for Rig<S> {
    fn drop(&mut self) {
        self.drop_target();
    }
}

impl<S: Store> Rig<S> {
    /// Starts the target again after [`Self::kill_target`], without sessions and with empty memory.
    /// `store` as for [`Self::new`].
    ///
    /// # Errors
    /// The target runs; memory is short, or the sizes do not fit.
    pub fn start_target(&mut self, mut store: impl FnMut(&Arc<Region>) -> S) -> Result<()> {
        ensure!(self.groups.is_empty(), "the target runs");
        let options = &self.options;
        let target_pd = Device::Soft(self.network.device()).alloc_pd()?;
        let arena = Region::allocate(options.arena_bytes, PageKind::Normal)?;
        let zeros = Region::allocate(options.io_max_bytes as usize, PageKind::Normal)?;
        let volumes = options
            .volumes
            .iter()
            .enumerate()
            .map(|(index, spec)| volume(index, spec))
            .collect::<Result<Vec<_>>>()?;
        let memory = match options.iwarp {
            true => None,
            false => Some(shared_memory(&target_pd, &arena, &zeros, &volumes)?),
        };
        let count = options.groups.max(1);
        let step = options.io_max_bytes as usize;
        let share = options.arena_bytes / count / step * step;
        let shard_options = ShardOptions {
            dirty_max_bytes: options.dirty_max_bytes / count,
            write_back_delay: options.write_back_delay,
            write_back_max_bytes: options.io_max_bytes,
            seed: options.seed,
        };
        for (index, others) in OtherGroups::connect(count)?.into_iter().enumerate() {
            let stats = Arc::new(Stats::default());
            let range = index * share..(index + 1) * share;
            let part = Arena::over(Arc::clone(&arena), range, options.io_max_bytes)?;
            let shard = Shard::new(store(&arena), part, shard_options, self.now);
            let mut engine = PollGroup::new(index, shard, others, Arc::clone(&stats), self.now);
            let mut cqs = Vec::new();
            for place in 0..options.devices {
                let (inner, handle) = target_pd.poller(options.cq_entries)?;
                let (poller, breaker) = breakable(inner);
                let memory = memory.clone();
                engine.take_mail(ToGroup::AddPoller { place, poller, memory }, self.now);
                cqs.push(Cq { handle, breaker, news: CqNews::default() });
            }
            let mut told = Vec::new();
            for volume in &volumes {
                let (volume, stats) = (Arc::clone(volume), Arc::new(VolumeStats::default()));
                told.push(Arc::clone(&stats));
                engine.take_mail(
                    ToGroup::AddVolume {
                        volume,
                        backing: None,
                        stats,
                        registered: Vec::new(),
                        step: None,
                    },
                    self.now,
                );
            }
            let memory = memory.clone();
            self.groups.push(Group { engine, stats, volumes: told, cqs, memory });
        }
        self.target_pd = target_pd;
        self.spares = SpareMemory::default();
        self.volumes = volumes;
        self.listened = self.now;
        Ok(())
    }

    /// Kills the target: its connections, its memory and its sessions. With `silent` its machine
    /// dies, so that the peers hear nothing; otherwise their links break. The caller saves the
    /// contents of the stores before this call.
    pub fn kill_target(&mut self, silent: bool) {
        for wire in std::mem::take(&mut self.wires) {
            if silent {
                wire.silence();
            } else {
                wire.cut();
            }
        }
        self.drop_target();
        self.sessions.clear();
        self.admin.clear();
        self.lost_writes = false;
        self.settled.clear();
        self.next_group = 0;
        self.note(&[5, u64::from(silent)]);
    }

    /// Whether the target lives.
    #[must_use]
    pub fn has_target(&self) -> bool {
        !self.groups.is_empty()
    }

    /// The volumes of the target.
    #[must_use]
    pub fn volumes(&self) -> &[Arc<Volume>] {
        &self.volumes
    }

    /// The store of the first poll group.
    ///
    /// # Panics
    /// The target is dead.
    pub fn store_mut(&mut self) -> &mut S {
        self.groups[0].engine.store_mut()
    }

    /// The first poll group.
    ///
    /// # Panics
    /// The target is dead.
    pub fn group_mut(&mut self) -> &mut PollGroup<S> {
        &mut self.groups[0].engine
    }

    /// All poll groups.
    pub fn groups_mut(&mut self) -> impl Iterator<Item = &mut PollGroup<S>> {
        self.groups.iter_mut().map(|group| &mut group.engine)
    }

    /// Whether the target ended after [`ToGroup::Stop`]: every acknowledged write is durable, or
    /// (false) not.
    #[must_use]
    pub fn stopped(&self) -> Option<bool> {
        self.groups
            .iter()
            .map(|group| group.engine.stopped())
            .try_fold(true, |all, one| one.map(|clean| all && clean))
    }

    /// The bytes of a memory volume.
    #[must_use]
    pub fn memory(&self, volume: VolumeIndex) -> Option<&Arc<Region>> {
        match &self.volumes.get(usize::from(volume.0))?.placement {
            Placement::Memory(region) => Some(region),
            Placement::Null | Placement::Store => None,
        }
    }

    /// Begins a session in its first epoch.
    pub fn begin_session(&mut self) -> SessionIndex {
        self.sessions.push(SessionState { epoch: Epoch(1), connections: Vec::new() });
        let index = u16::try_from(self.sessions.len() - 1).unwrap_or(u16::MAX);
        let session = SessionIndex { index, life: 1 };
        self.join_host(session, session);
        session
    }

    /// Assigns a session to the host of another session. Each session begins with its own host.
    pub fn join_host(&mut self, session: SessionIndex, other: SessionIndex) {
        let host = HostIndex::new(other.index + 1);
        self.mail(ToGroup::Notice(Notice::Host { session, host }));
    }

    /// Opens a volume for a session.
    pub fn open(&mut self, session: SessionIndex, volume: VolumeIndex, mode: AccessMode) {
        self.mail(ToGroup::Notice(Notice::Open { session, volume, mode }));
    }

    /// Closes a volume for a session, or takes it away. Later commands are answered with `refusal`.
    pub fn close(&mut self, session: SessionIndex, volume: VolumeIndex, refusal: Status) {
        self.mail(ToGroup::Notice(Notice::Close { session, volume, refusal }));
    }

    /// Sends the target a message of control. Messages for a session or for all go to every poll
    /// group, others to the first.
    pub fn mail(&mut self, message: ToGroup) {
        for at in 1..self.groups.len() {
            let copy = match &message {
                ToGroup::Notice(notice) => ToGroup::Notice(*notice),
                ToGroup::Evict { admission } => ToGroup::Evict { admission: *admission },
                ToGroup::LimitHost { session, limits } => {
                    ToGroup::LimitHost { session: *session, limits: limits.clone() }
                }
                ToGroup::Stop => ToGroup::Stop,
                _ => break,
            };
            self.mail_to(at, copy);
        }
        self.mail_to(0, message);
    }

    /// Sends one poll group a message of control.
    ///
    /// # Panics
    /// There is no such poll group.
    pub fn mail_to(&mut self, group: usize, message: ToGroup) {
        self.groups[group].engine.take_mail(message, self.now);
    }

    /// Breaks a device of the target for one poll group.
    ///
    /// # Panics
    /// There is no such poll group or device.
    pub fn break_cq(&mut self, group: usize, device: usize, how: CqFault) {
        self.groups[group].cqs[device].breaker.break_it(how);
    }

    /// The reports of a poll group about its CQ of a device.
    ///
    /// # Panics
    /// There is no such poll group or device.
    #[must_use]
    pub fn cq_news(&self, group: usize, device: usize) -> CqNews {
        let cq = &self.groups[group].cqs[device];
        CqNews { asked: cq.breaker.asked(), ..cq.news }
    }

    /// Gives a poll group a new CQ in an empty place.
    ///
    /// # Errors
    /// The sizes do not fit.
    ///
    /// # Panics
    /// There is no such poll group or device.
    pub fn mend_cq(&mut self, group: usize, device: usize) -> Result<()> {
        let (inner, handle) = self.target_pd.poller(self.options.cq_entries)?;
        let (poller, breaker) = breakable(inner);
        let memory = self.groups[group].memory.clone();
        self.mail_to(group, ToGroup::AddPoller { place: device, poller, memory });
        let cq = &mut self.groups[group].cqs[device];
        (cq.handle, cq.breaker) = (handle, breaker);
        Ok(())
    }

    /// The session's epoch; the first for none.
    ///
    /// # Panics
    /// There is no such session.
    #[must_use]
    pub fn epoch(&self, session: SessionIndex) -> Epoch {
        if session == SessionIndex::NONE {
            return Epoch(1);
        }
        self.sessions[usize::from(session.index)].epoch
    }

    /// Connections of a session that the target still has.
    ///
    /// # Panics
    /// There is no such session.
    #[must_use]
    pub fn connections(&self, session: SessionIndex) -> usize {
        self.sessions[usize::from(session.index)].connections.len()
    }

    /// Raises a session's epoch and waits until every connection of the older ones is reported
    /// gone.
    ///
    /// # Errors
    /// A connection does not end.
    pub fn new_epoch(&mut self, session: SessionIndex) -> Result<Epoch> {
        let state = &mut self.sessions[usize::from(session.index)];
        let epoch = state.epoch.next().context("no epoch is left")?;
        state.epoch = epoch;
        self.mail(ToGroup::Notice(Notice::EndConnections { session, before: epoch }));
        self.run(QUIESCE_STEPS, |rig| rig.connections(session) == 0)
            .context("the connections of an older epoch do not end")?;
        Ok(epoch)
    }

    /// The place of a new connection in the session's present epoch.
    ///
    /// # Errors
    /// Connections of an older epoch are not gone.
    pub fn join_by_hand(&self, session: SessionIndex, kind: ConnectionKind) -> Result<Join> {
        let epoch = self.epoch(session);
        let older = |state: &SessionState| state.connections.iter().any(|of| *of != epoch);
        let has_older = self.sessions.get(usize::from(session.index)).is_some_and(older);
        ensure!(!has_older, "connections of an older epoch are not gone");
        // The number of the admission does not matter here.
        Ok(Join { admission: AdmissionId(0), session, epoch, kind })
    }

    /// The hello of a connection, and the accept.
    fn shake_hands(
        &self,
        join: Join,
        options: QueueOptions,
        must_prove: bool,
    ) -> Result<(HelloRequest, HelloAccept)> {
        let Join { epoch, kind, .. } = join;
        let auth = if must_prove { Features::AUTH } else { Features::default() };
        let mut nonce = Nonce([3; 16]);
        nonce.0[..8].copy_from_slice(&(self.wires.len() as u64).to_le_bytes());
        let asked = HelloRequest {
            kind,
            newest: Version::NEWEST,
            oldest: Version::OLDEST,
            depth: QueueDepth::new(options.depth).context("queue depth")?,
            features: options.features.or(auth),
            in_capsule_bytes: options.in_capsule_bytes,
            io_max_bytes: options.io_max_bytes,
            epoch,
            reads_in: 0,
            session: SessionId([1; 16]),
        };
        let offer = Offer {
            depth: QueueDepth::new(limits::QUEUE_DEPTH_MAX).context("queue depth")?,
            features: self.offered_features().or(auth),
            in_capsule_bytes: limits::IN_CAPSULE_MAX_BYTES,
            io_max_bytes: self.options.io_max_bytes,
            instance: InstanceId([2; 16]),
            nonce,
        };
        let Ok(accept) = negotiate(&asked, &offer) else { bail!("nothing in common") };
        Ok((asked, accept))
    }

    /// The domain of a connection, and its bounce memory there, if it has any.
    fn domain(
        &mut self,
        admin: bool,
        io_max_bytes: u32,
    ) -> Result<(ProtectionDomain, Option<BounceMemory>)> {
        if admin || !self.options.iwarp {
            return Ok((self.target_pd.clone(), None));
        }
        let pd = Device::Soft(self.network.device()).alloc_pd()?;
        let bounce = BounceMemory::register(&pd, io_max_bytes)?;
        self.last_landing = Some(bounce.landing().remote(0));
        Ok((pd, Some(bounce)))
    }

    /// The key that the self-test of a connection must prove.
    fn key_due(&self, kind: ConnectionKind, epoch: Epoch) -> Option<QueueKey> {
        let ConnectionKind::Io { queue } = kind else { return None };
        self.secret.as_ref().map(|secret| QueueKey::new(secret, epoch, queue))
    }

    /// Connects a QP with these sizes to the target, as control's admission does.
    pub(super) fn connect(
        &mut self,
        join: Join,
        options: QueueOptions,
        initiator: &PollerHandle,
        sizes: QpLimits,
    ) -> Result<Made> {
        let Join { admission, session, epoch, kind } = join;
        let due = self.key_due(kind, epoch);
        let admin = kind == ConnectionKind::Admin;
        let (asked, accept) = self.shake_hands(join, options, due.is_some())?;
        let (pd, bounce) = self.domain(admin, accept.io_max_bytes)?;
        let spares = admin.then(|| self.spares.clone());
        let Terms { accept, memory } = Terms::new(&pd, accept, spares.as_ref())?;
        let hellos = Hellos::new(&asked, &accept);
        let proof = due.map(|key| Box::new(ProofDue { key, hellos, within: PROVE_WITHIN }));
        let reads_out = options.reads_out;
        let landing_slots = if bounce.is_none() { slots_of_recv(&accept, SEND_SGES) } else { 0 };
        let target_sizes = QpLimits {
            send_wrs: memory.layout().send_wrs(),
            recv_wrs: memory.layout().recv_wrs(),
            send_sges: SEND_SGES,
            recv_sges: landing_slots + 1,
            inline_bytes: u32::try_from(limits::RESPONSE_BYTES)?,
            reads_out,
            reads_in: 0,
        };
        let group = self.next_group % self.groups.len();
        if !admin {
            self.next_group += 1;
        }
        let place = usize::from(session.index) % self.options.devices;
        let (near, far, wire) = self.network.pair_in(
            (soft_handle(initiator)?, sizes),
            (soft_handle(&self.groups[group].cqs[place].handle)?, target_sizes),
            soft_domain(&pd)?,
        )?;
        let io = Arc::new(IoStats::default());
        self.ios.push(Arc::clone(&io));
        let params = ConnectionParams {
            kind,
            admission,
            session,
            epoch,
            proof,
            in_capsule_bytes: accept.in_capsule_bytes,
            io_max_bytes: accept.io_max_bytes,
            features: accept.features,
            reads_out,
            send_sges: SEND_SGES,
            landing_slots,
            memory,
            spares,
            bounce,
            progress_max: rblk_target::data::connection::progress_max(None),
            io,
            peer: format!("session {} {kind:?}", session.index),
        };
        if let Some(state) = self.sessions.get_mut(usize::from(session.index)) {
            state.connections.push(epoch);
        }
        self.wires.push(wire.clone());
        let hello = ConnectionHello(accept.to_wire().to_vec());
        // The initiator knows only the bytes of the accept.
        let accept = HelloAccept::from_wire(&hello.0, &asked)?;
        let add = ToGroup::AddConnection {
            poller: place,
            connection: Connection::Soft(far),
            params: Box::new(params),
            accept: AcceptParams { hello, reads_out, reads_in: 0 },
        };
        self.mail_to(group, add);
        Ok(Made { connection: Connection::Soft(near), wire, accept, hellos })
    }

    fn offered_features(&self) -> Features {
        let features = Features(FEATURES);
        if self.options.iwarp { features.without(Features::WRITE_WITH_IMM) } else { features }
    }

    /// The landing buffer of the newest connection, on devices with the rules of iWARP: READs on
    /// the wire land there.
    #[must_use]
    pub fn last_landing(&self) -> Option<RemoteBuffer> {
        self.last_landing
    }

    pub(super) fn on_message(&mut self, message: FromGroup) {
        match message {
            FromGroup::Proven { .. } => self.proven += 1,
            FromGroup::Admin { group, connection, admission, command, body } => {
                self.admin.push(AdminCommand { connection, admission, command, body, group });
            }
            FromGroup::ConnectionGone {
                admission,
                session,
                kind,
                epoch,
                connection,
                memory,
                ..
            } => {
                drop(connection);
                drop(memory);
                self.note(&[4, u64::from(session.index), u64::from(epoch.0)]);
                self.gone.push(Gone { admission, session, kind, epoch });
                let Some(state) = self.sessions.get_mut(usize::from(session.index)) else { return };
                if let Some(at) = state.connections.iter().position(|of| *of == epoch) {
                    state.connections.swap_remove(at);
                }
            }
            FromGroup::Ended { group, connection, qp } => {
                self.destroys.add(self.steps, Ended::Target { group, id: connection, qp });
                self.destroy_due();
            }
            FromGroup::PollerBroken { group, poller } => {
                self.groups[group].cqs[poller].news.broken += 1;
            }
            FromGroup::PollerGone { group, place, poller, memory } => {
                drop((poller, memory));
                self.groups[group].cqs[place].news.gone += 1;
            }
            FromGroup::LostWrites { .. } => self.lost_writes = true,
            FromGroup::KnowsLoss { group, volume } => self.losses_known.push((group, volume)),
            FromGroup::StoreFailed(_)
            | FromGroup::SlowIo { .. }
            | FromGroup::Refused { .. }
            | FromGroup::Stopped { .. } => {}
            FromGroup::Stepped { ticket, result, .. } => self.changing.stepped(ticket, result),
            FromGroup::Settled { ticket, result, .. } => self.settled.push((ticket, result)),
        }
    }

    /// Makes new I/O connections prove that they know this secret. Connections of
    /// [`Self::connect_queue`] cannot.
    pub fn require_proof(&mut self, secret: SessionSecret) {
        self.secret = Some(secret);
    }

    /// I/O connections with a complete proof.
    #[must_use]
    pub fn proven(&self) -> usize {
        self.proven
    }

    /// The answers of the poll groups to [`ToGroup::Settle`] since the last call.
    pub fn take_settled(&mut self) -> Vec<(SettleTicket, Result<(), String>)> {
        std::mem::take(&mut self.settled)
    }

    /// The poll groups that answered [`ToGroup::Lost`] since the last call, and the volumes.
    pub fn take_losses_known(&mut self) -> Vec<(usize, VolumeIndex)> {
        std::mem::take(&mut self.losses_known)
    }

    /// Whether a poll group has reported since the last call that acknowledged writes may be lost.
    pub fn take_lost_writes(&mut self) -> bool {
        std::mem::take(&mut self.lost_writes)
    }

    /// Answers an admin command.
    pub fn reply(&mut self, of: &AdminCommand, status: Status, value: u32, payload: Vec<u8>) {
        let (connection, tag) = (of.connection, of.command.tag);
        self.reply_to(of.group, connection, tag, status, value, payload);
    }

    /// Answers an admin command by its poll group and connection.
    ///
    /// # Panics
    /// There is no such poll group.
    pub fn reply_to(
        &mut self,
        group: usize,
        connection: ConnectionId,
        tag: Tag,
        status: Status,
        value: u32,
        payload: Vec<u8>,
    ) {
        self.mail_to(group, ToGroup::Reply { connection, tag, status, value, payload });
    }

    /// The target's counters.
    #[must_use]
    pub fn target_counts(&self) -> StatsSnapshot {
        let mut sum = StatsSnapshot::default();
        for group in &self.groups {
            group.engine.publish_stats();
            sum.add(&group.stats.snapshot());
        }
        sum
    }

    /// The counters and the last error of a volume, all poll groups together.
    ///
    /// # Panics
    /// There is no such volume.
    #[must_use]
    pub fn volume_counts(&self, volume: VolumeIndex) -> (VolumeCounts, LastError) {
        self.groups.iter().for_each(|group| group.engine.publish_stats());
        self.published(volume)
    }

    /// The commands for a volume, all poll groups together.
    ///
    /// # Panics
    /// There is no such volume.
    #[must_use]
    pub fn volume_io(&self, volume: VolumeIndex) -> IoCounts {
        let mut sum = IoCounts::default();
        let stats = self.groups.iter().map(|group| &group.volumes[usize::from(volume.0)]);
        stats.for_each(|stats| sum.add(&stats.io()));
        sum
    }

    /// The times of these commands.
    ///
    /// # Panics
    /// There is no such volume.
    #[must_use]
    pub fn volume_times(&self, volume: VolumeIndex) -> VolumeTimes {
        let mut sum = VolumeTimes::default();
        let stats = self.groups.iter().map(|group| &group.volumes[usize::from(volume.0)]);
        stats.for_each(|stats| sum.add(&stats.times()));
        sum
    }

    /// The commands for a volume that waited for a limit.
    ///
    /// # Panics
    /// There is no such volume.
    #[must_use]
    pub fn volume_delays(&self, volume: VolumeIndex) -> DelayCounts {
        let mut sum = DelayCounts::default();
        let stats = self.groups.iter().map(|group| &group.volumes[usize::from(volume.0)]);
        stats.for_each(|stats| sum.add(&stats.delays()));
        sum
    }

    /// The commands for a volume without an answer before their connections ended.
    ///
    /// # Panics
    /// There is no such volume.
    #[must_use]
    pub fn volume_abandoned(&self, volume: VolumeIndex) -> u64 {
        let stats = self.groups.iter().map(|group| &group.volumes[usize::from(volume.0)]);
        stats.map(|stats| stats.abandoned()).sum()
    }

    /// The commands of all connections so far.
    #[must_use]
    pub fn connections_io(&self) -> IoCounts {
        let mut sum = IoCounts::default();
        self.ios.iter().for_each(|io| sum.add(&io.snapshot()));
        sum
    }

    /// The published counters and the last error of a volume, all poll groups together.
    ///
    /// # Panics
    /// There is no such volume.
    #[must_use]
    pub fn published(&self, volume: VolumeIndex) -> (VolumeCounts, LastError) {
        let (mut sum, mut last) = (VolumeCounts::default(), LastError::default());
        for group in &self.groups {
            let stats = &group.volumes[usize::from(volume.0)];
            sum.add(&stats.snapshot());
            last = last.max(stats.last_error());
        }
        (sum, last)
    }
}

/// The memory that all connections of a device share.
fn shared_memory(
    pd: &ProtectionDomain,
    arena: &Arc<Region>,
    zeros: &Arc<Region>,
    volumes: &[Arc<Volume>],
) -> Result<PollerMemory> {
    let mut memories = Vec::new();
    for volume in volumes {
        if let Placement::Memory(region) = &volume.placement {
            memories.push((volume.index, Arc::new(pd.register(region, Access::LIVE_WRITE)?)));
        }
    }
    Ok(PollerMemory {
        arena: Arc::new(pd.register(arena, Access::LOCAL_WRITE)?),
        zeros: Arc::new(pd.register(zeros, Access::LOCAL_READ)?),
        volumes: memories,
    })
}

fn volume(index: usize, spec: &VolumeSpec) -> Result<Arc<Volume>> {
    let block_size = BlockSize::new(spec.block_size).context("block size")?;
    let blocks = BlockCount(spec.blocks);
    let bytes = blocks.bytes(block_size).filter(|b| *b > 0).context("capacity")?;
    let placement = match spec.kind {
        VolumeKind::Memory => {
            Placement::Memory(Region::allocate(usize::try_from(bytes)?, PageKind::Normal)?)
        }
        VolumeKind::Null => Placement::Null,
        VolumeKind::Store => Placement::Store,
    };
    Ok(Arc::new(Volume {
        index: VolumeIndex(u16::try_from(index)?),
        name: Name::new(&format!("v{index}"))?,
        uuid: [0; 16],
        block_size,
        blocks,
        read_only: spec.read_only,
        cache: match &placement {
            Placement::Store => spec.cache,
            _ => CacheMode::None,
        },
        placement,
        cache_min_bytes: spec.cache_min_bytes,
        cache_max_bytes: spec.cache_max_bytes,
        read_ahead_bytes: spec.read_ahead_bytes,
        discard: spec.discard,
        discard_granularity_bytes: spec.block_size,
        is_durable_at_once: false,
        limits: Limiter::renewed(None, spec.limits),
    }))
}
