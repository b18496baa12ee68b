//! Control: everything of a target that is not I/O. One task owns sessions, devices, volumes and
//! the mail to the poll groups, so there are no locks. [`core::Core`] decides. [`Control`] feeds it
//! events and carries out its decisions.
//!
//! Control only puts its parts together. Each part owns its state, and its functions take the other
//! parts that they need:
//!
//! | part | it has |
//! | --- | --- |
//! | [`Core`] | the decisions: sessions, holders, changes of volumes |
//! | [`Groups`] | the poll groups, and the mail to them |
//! | [`Reception`] | connections: devices, CQs, QPs that are made and destroyed |
//! | [`Volumes`] | stores of volumes, and the work of the change that is carried out |
//! | [`RunningConfig`] | the configuration now |
//! | [`Persister`] | the records for the next run |
//! | [`Claims`] | the images of a group that are taken and handed over |
//! | [`Moves`] | the volumes of a group that go to a member that a person names |
//! | [`EventLog`], [`PlaceWatch`], [`VolumeRates`], [`Sampling`], [`Traces`] | what people see |
//! | [`Ends`], [`Upgrades`] | the end of the run, and the program that follows |

mod answering;
pub mod claims;
pub mod connect;
pub mod core;
pub(crate) mod ends;
mod groups;
pub mod hand_over;
mod moves;
pub mod observe;
pub mod peers;
mod persist;
pub mod requests;
mod running_config;
pub(crate) mod volumes;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};
use rblk_config::{Encrypt, HostConfig, TargetConfig, VolumeConfig};
use rblk_fabric::soft::tls::kernel_has_tls;
use rblk_fabric::{Device, Incoming, Region};
use rblk_operate::Watchdog;
use rblk_operate::target::ask::LimitsWish;
use rblk_operate::target::events::{EventKind, EventsReport, Occurrence};
use rblk_operate::target::refusal::Refusal;
use rblk_operate::target::status::TargetStatus;
use rblk_operate::target::store_fault::StoreFault;
use rblk_operate::target::volume_notes::VolumeNotes;
use rblk_protocol::{InstanceId, Name};
use tokio::sync::{mpsc, oneshot};

use crate::cache::Unsaved;
use crate::control::hand_over::HandOver;
use crate::control::observe::outages::Outages;
use crate::data::poll_group::group_thread::GroupHandle;
use crate::data::poll_group::{FromGroup, Notice, StepTicket, ToGroup, VolumeStep};
use crate::pool::opening::AwayVolume;
use crate::record::holders::VolumeUuid;
use crate::record::{RecordOutcome, StateDirectory};
use crate::store::rbd::ImageError;
use crate::store::rbd::calls::member_calls::TakeCall;
use crate::store::rbd::image_claim::{AskAnswer, Wish};
use crate::store::rbd::owner_question::Ask;
use crate::store::{OpenStore, StoreIdentity};
use crate::volume::Volume;
use crate::volume::ids::{SessionIndex, VolumeIndex};

use self::core::{
    AuthConfig, Capacity, ConnectionRef, Core, CoreParts, Effect, Ticket, VolumeChange,
};
use claims::{ClaimNews, Claims, EndedChange, LEAVES, LONG_CHANGE, answer_to};
use connect::admission::House;
use connect::devices::Devices;
use connect::file_room::FileRoom;
use connect::reception::Reception;
use ends::{EndReply, Ends, RunEnd, is_clean};
use groups::Groups;
use moves::{JUST_MOVED, MoveNews, Moves, NO_ORDER, TakeReply};
use observe::event_log::{EventLog, name_of};
use observe::past::PastReport;
use observe::place_watch::PlaceWatch;
use observe::sampling::Sampling;
use observe::volume_rates::VolumeRates;
use persist::Persister;
use requests::departure::{Departure, Upgrades};
use requests::predecessor::{Agreed, Predecessor};
use requests::reread::Reading;
use requests::trace_stream::{BegunTrace, Traces};
use running_config::RunningConfig;
use volumes::change_files::ChangeFiles;
use volumes::lost_images::LostImage;
use volumes::{ChangeOutcome, VolumeNews, Volumes};

/// Why a volume of the group is not served any more.
fn handed_over(name: &str) -> String {
    format!(
        "it was handed over, and no member is known to have taken it: a member takes it when a host comes to it, or by \
         `rblk-target volume move {name} --to MEMBER`"
    )
}

const NOT_HAD: &str =
    "it could not be opened at the reload: another member of this target may serve it";

/// Time between two looks for waits that have ended, while there are waits.
const TICK: Duration = Duration::from_millis(500);

/// The longest time from the stop of the poll groups to the end of this program, or to the first
/// sign of the program that takes its place: records are written, and a large arena is registered.
const END: Duration = Duration::from_secs(300);

/// The parameters that a target offers on every connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ConnectionLimits {
    /// Deepest I/O queue.
    pub queue_depth_max: u16,
    /// In-capsule data that receive slots hold.
    pub in_capsule_bytes: u32,
    /// Most data per command.
    pub io_max_bytes: u32,
    /// Its resources for connections.
    pub capacity: Capacity,
    /// How long a session without connections keeps its volumes.
    pub lease: Duration,
    /// Whether connections over TCP are encrypted.
    pub encrypt: Encrypt,
}

/// A request from the control socket or a signal.
#[derive(Debug)]
pub(crate) enum ToControl {
    /// The state of everything.
    Status(oneshot::Sender<TargetStatus>),
    /// The faults of the stores of volumes now, by name.
    StoreFaults(oneshot::Sender<HashMap<String, StoreFault>>),
    /// The events after this number.
    Events(u64, oneshot::Sender<EventsReport>),
    /// The recent work of volumes.
    Past(oneshot::Sender<PastReport>),
    /// Take no new sessions, tell the initiators, stop when I/O has ended. The reply, if any,
    /// carries the outcome.
    Drain(Option<EndReply>),
    /// Ask for the state that the next program has to serve, or why none can take over. The flag: a
    /// forced upgrade.
    MayUpgrade(bool, oneshot::Sender<Result<Predecessor, String>>),
    /// Let this program take the place of the running one.
    Upgrade(Box<Agreed>),
    /// Allow these hosts and no others, unless the hosts in force are of a later reading of the
    /// files. The reply: the names of the hosts that lost sessions, one for each session; or why
    /// the hosts stay as they were.
    Hosts(Vec<HostConfig>, Reading, oneshot::Sender<Result<Vec<String>, String>>),
    /// Change the limits of a host that may log in. The reply: its entry now; or why it stays as it
    /// was.
    LimitHost(String, LimitsWish, oneshot::Sender<Result<HostConfig, Refusal>>),
    /// Ask for the running configuration.
    Running(oneshot::Sender<Box<TargetConfig>>),
    /// Judge changes before they are carried out. The reply: one reason for each change that is
    /// refused.
    Judge(Vec<(VolumeChange, ChangeFiles)>, oneshot::Sender<Vec<String>>),
    /// Change a volume. `alone`: the change is not a part of a configuration that was checked as a
    /// whole.
    Change {
        /// The change.
        change: Box<VolumeChange>,
        /// The open files that it works with.
        files: ChangeFiles,
        /// See above.
        alone: bool,
        /// Takes the outcome.
        reply: oneshot::Sender<ChangeOutcome>,
    },
    /// Hand a volume over to another member of the group. The reply comes when nothing of it is
    /// left here.
    HandOver(String, oneshot::Sender<Result<(), String>>),
    /// Move a volume to the member of this name. The reply comes when that one serves it.
    MoveTo(String, String, oneshot::Sender<Result<(), String>>),
    /// The volumes of the configuration as it was read again, after all changes, and those that
    /// could not be opened. The reply comes when those of the group are known.
    VolumesOfFiles(Vec<VolumeConfig>, Vec<AwayVolume>, oneshot::Sender<()>),
    /// Close the volume to hosts that do not have it open; or (false) open it to all again.
    CloseToOthers {
        /// Its name.
        name: String,
        /// The volume's index: another volume of this name is left alone.
        which: Option<VolumeIndex>,
        /// See above.
        close: bool,
        /// Takes the volume's index and its users; `None`: it is not served.
        reply: oneshot::Sender<Option<(VolumeIndex, Vec<String>)>>,
    },
    /// End the sessions of this host, peer or number. The reply: their names; or why the word is
    /// ambiguous.
    Kick(String, oneshot::Sender<Result<Vec<String>, String>>),
    /// Trace the commands of this volume that take at least this long.
    BeginTrace(String, Duration, oneshot::Sender<Result<BegunTrace, Refusal>>),
    /// End the trace of this number.
    EndTrace(u64),
    /// The host of a session.
    HostOf(SessionIndex, oneshot::Sender<String>),
}

/// The constants of a run.
#[derive(Debug)]
struct Description {
    name: Name,
    instance: InstanceId,
    started: Instant,
    lease: Duration,
    listening: Vec<String>,
    outages: Outages,
    insecure: bool,
    stop_timeout: Duration,
    away: Vec<AwayVolume>,
}

/// The control task's state. See the module.
#[derive(Debug)]
pub(crate) struct Control {
    description: Description,
    core: Core,
    groups: Groups,
    reception: Reception,
    volumes: Volumes,
    claims: Claims,
    moves: Moves,
    running: RunningConfig,
    persister: Persister,
    events: EventLog,
    watch: PlaceWatch,
    rates: VolumeRates,
    sampling: Sampling,
    traces: Traces,
    ends: Ends,
    upgrades: Upgrades,
}

/// The parts of control.
#[derive(Debug)]
pub(crate) struct ControlParts {
    /// The target's name.
    pub name: Name,
    /// This run.
    pub instance: InstanceId,
    /// The directory of the records for the next run.
    pub state: StateDirectory,
    /// The parameters that it offers.
    pub limits: ConnectionLimits,
    /// Running poll groups.
    pub groups: Vec<GroupHandle>,
    /// The region their arenas are cut from.
    pub arena: Arc<Region>,
    /// Zeros, as long as the largest read.
    pub zeros: Arc<Region>,
    /// Volumes that the poll groups already know.
    pub volumes: Vec<Arc<Volume>>,
    /// The identities of the stores of volumes; `None` for a store without one.
    pub stores: Vec<(VolumeUuid, Option<StoreIdentity>)>,
    /// Notes on volumes for people, by name.
    pub volume_notes: HashMap<String, VolumeNotes>,
    /// Addresses listened on.
    pub listening: Vec<String>,
    /// The broken ones among them.
    pub outages: Outages,
    /// Volumes of the configuration that are not served.
    pub away: Vec<AwayVolume>,
    /// Volumes of the configuration that are not served, as they are configured.
    pub others: Vec<VolumeConfig>,
    /// How long a drain may take.
    pub drain_timeout: Duration,
    /// How long stopping poll groups go on with the write of dirty blocks.
    pub stop_timeout: Duration,
    /// How hosts prove their identity; `None`: no host has to.
    pub auth: Option<AuthConfig>,
    /// No proof is required, and other hosts reach an address.
    pub insecure: bool,
    /// The running configuration.
    pub running: TargetConfig,
    /// The stores of volumes that have one.
    pub backings: HashMap<VolumeIndex, OpenStore>,
    /// The most volumes that this run can serve in its life, removed ones included.
    pub places: u16,
    /// The last message of the program before this one, if this one took over from it.
    pub took_over: Option<HandOver>,
}

impl Control {
    /// A target without connections.
    ///
    /// # Errors
    /// The record of a volume is there and cannot be read, or the system has no thread left.
    pub(crate) fn new(mut parts: ControlParts) -> anyhow::Result<Self> {
        let probe = parts.state.probe();
        let (persister, holders) = Persister::open(&mut parts)?;
        let ControlParts { name, instance, limits, volumes, arena, zeros, running, .. } = parts;
        let devices = Devices::new(arena, zeros, &volumes, &running);
        let requires_proof = parts.auth.is_some();
        if requires_proof && limits.encrypt != Encrypt::Off {
            // The kernel may load modules for the answer: not while hosts wait. Each connection
            // asks again, and gets the same answer.
            let _ = kernel_has_tls();
        }
        let core = CoreParts {
            name,
            instance,
            volumes,
            capacity: limits.capacity,
            lease: limits.lease,
            drain_timeout: parts.drain_timeout,
            holders,
            auth: parts.auth,
        };
        let (started, files) = (Instant::now(), getrlimit(Resource::RLIMIT_NOFILE));
        let files = FileRoom::new(files.ok().map(|(limit, _)| limit), &parts.listening);
        let house = House { limits, instance, requires_proof };
        let ack_timeout = running.transport.ack_timeout.map(|time| time.get());
        let (count, notes) = (running.volumes.len(), parts.volume_notes);
        Ok(Self {
            core: Core::new(core, started),
            groups: Groups::new(parts.groups),
            reception: Reception::new(house, ack_timeout, devices, files),
            volumes: Volumes::new(count, parts.backings, notes, parts.places),
            claims: Claims::new(name, &running, parts.others),
            moves: Moves::new(name, running.member.clone()),
            persister,
            events: EventLog::default(),
            watch: PlaceWatch::new(probe, Some("/".into())),
            rates: VolumeRates::default(),
            sampling: Sampling::new(running.http.is_some(), started),
            running: RunningConfig::new(running),
            traces: Traces::default(),
            ends: Ends::default(),
            upgrades: Upgrades::after(parts.took_over),
            description: Description {
                name,
                instance,
                started,
                lease: limits.lease,
                listening: parts.listening,
                outages: parts.outages,
                insecure: parts.insecure,
                stop_timeout: parts.stop_timeout,
                away: parts.away,
            },
        })
    }

    /// Prepares to serve by a device, before its first connection comes.
    ///
    /// # Errors
    /// Memory cannot be registered, a CQ cannot be made, or the target has too many devices.
    pub(crate) fn serve_by(&mut self, device: &Device) -> rblk_fabric::Result<()> {
        self.reception.devices_mut().place(device, &mut self.groups).map(drop)
    }

    /// Notes for the next run that hosts may write. Call it when nothing of the start can fail any
    /// more, and before [`Self::run`]. Waits for the disk.
    pub(crate) fn begin(&mut self) {
        for (volume, verifier) in self.persister.begin() {
            self.core.vouch(volume, verifier);
        }
    }

    /// Runs until a drain has ended. Returns its outcome.
    ///
    /// # Errors
    /// A poll group broke; the target cannot go on.
    pub(crate) async fn run(
        mut self,
        mut incoming: mpsc::Receiver<Incoming>,
        mut from_groups: mpsc::UnboundedReceiver<FromGroup>,
        mut requests: mpsc::Receiver<ToControl>,
    ) -> anyhow::Result<RunEnd> {
        self.ready(Instant::now());
        let mut watchdog = Watchdog::of_service();
        // The timer runs only after news, and while something waits: otherwise this thread sleeps.
        let mut ticks = true;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let (mut is_news, has_sessions) = (true, self.has_sessions());
            tokio::select! {
                Some(incoming) = incoming.recv() => {
                    self.reception.admit(incoming, &mut self.core, &mut self.groups);
                }
                Some(message) = from_groups.recv() => self.on_group(message),
                Some(request) = requests.recv() => self.on_request(request),
                Some(news) = self.persister.next() => self.on_record(news),
                Some(news) = self.reception.next() => {
                    self.reception.on_news(news, &mut self.core, &mut self.groups);
                }
                Some(news) = self.claims.next() => self.on_claim(news),
                Some(news) = self.moves.next() => self.on_move(news),
                Some(news) = self.volumes.next() => self.on_volume(news),
                looked = self.watch.next() => {
                    let told = (&self.core, &mut self.events);
                    self.watch.on_looked(looked, self.volumes.backings(), told);
                    self.answer_askers();
                    is_news = false;
                }
                _ = tick.tick(), if ticks => {
                    self.on_tick(Instant::now());
                    is_news = false;
                }
                () = self.sampling.due(has_sessions) => {
                    self.sampling.take(&self.groups, self.core.volumes(), has_sessions);
                    is_news = false;
                }
                () = watchdog.due() => {
                    watchdog.sign();
                    is_news = false;
                }
                () = self.rates.due() => {
                    self.rates.take(&self.groups, self.core.volumes(), Instant::now());
                    is_news = false;
                }
            }
            self.carry_out();
            self.groups.deliver();
            if self.upgrades.is_waiting() {
                self.upgrades.look_for_mounts(&self.core, &mut self.events);
            }
            if self.core.is_upgrading() {
                // New connect requests wait in the socket for the next program.
                incoming.close();
            }
            // `needs_ticks` looks at every session, so it is not called after each piece of news.
            ticks = is_news || self.core.needs_ticks() || self.owes();
            if self.groups.have_stopped() {
                self.take_last_requests(requests);
                watchdog.allow(END);
                return self.end().await;
            }
        }
    }

    /// Begins to serve.
    fn ready(&mut self, now: Instant) {
        self.core.ready(now);
        for name in self.claims.others() {
            self.core.leave_to_others(name, None);
        }
        for (volume, store) in self.volumes.backings() {
            self.claims.listen_to(*volume, store);
        }
        let others = self.claims.others().filter_map(|name| self.claims.other(name));
        self.moves.listen(self.running.get().volumes.iter().chain(others));
        self.upgrades.ready(now + self.core.sessions().lease());
        self.upgrades.tell(&mut self.events);
        self.watch.look_at_stores(self.volumes.backings());
    }

    /// Handles requests that came during the stop, such as another stop. Later ones fail: the
    /// channel is closed.
    fn take_last_requests(&mut self, mut requests: mpsc::Receiver<ToControl>) {
        requests.close();
        while let Ok(request) = requests.try_recv() {
            self.on_request(request);
        }
    }

    fn has_sessions(&self) -> bool {
        self.core.sessions().iter().next().is_some()
    }

    /// Whether something is to be tried again.
    fn owes(&mut self) -> bool {
        self.persister.owes_losses()
            || self.groups.owes_mail()
            || self.core.lines().owes()
            || self.volumes.has_lost()
            || self.claims.owes()
    }

    fn on_tick(&mut self, now: Instant) {
        self.core.tick(now);
        self.persister.note_losses_again();
        self.volumes.end_lost(&mut self.core, (&self.running, &self.persister));
        self.change_for_group();
        let busy = self.volumes.long_change(LONG_CHANGE);
        self.claims.end_late_orders(now, busy.as_deref());
        self.stop_if_left(now);
        // The number of lines that were left out.
        while let Some(left_out) = self.core.lines().take_left_out(now) {
            left_out.log();
        }
    }

    /// The poll groups have stopped, and may have given up dirty blocks: notes which data is
    /// durable.
    async fn end(mut self) -> anyhow::Result<RunEnd> {
        self.answer_all_askers();
        let parts = (&self.core, &self.groups);
        let given_up = self.ends.tell_end(parts, &mut self.events).await;
        let name = &self.description.name;
        let left = (self.running.get(), &self.volumes);
        let mut departure: Option<Departure> = self.upgrades.departure(name, parts, left);
        let clean = is_clean(&given_up, &self.core, &self.persister);
        let Self { core, groups, persister, .. } = self;
        let joined = groups.join();
        let mut lost: Vec<VolumeUuid> = persister.losses().collect();
        lost.extend(core.owed_fences());
        // Data that was given up may be lost, even if neither the machine nor the kernel fails: the
        // kernel reports a failed sync once, and no later run hears it.
        let is_given_up = |volume: &&Arc<Volume>| {
            let of_volume = |unsaved: &Unsaved| unsaved.volume == volume.index;
            joined.as_ref().is_ok_and(|unsaved| unsaved.iter().any(of_volume))
        };
        let given: Vec<&Arc<Volume>> = core.volumes().iter().filter(is_given_up).collect();
        lost.extend(given.iter().map(|volume| volume.uuid));
        if let Some(departure) = &mut departure {
            // The kernel may still carry out a write of this run. The next program may not serve
            // the volume before, and only the lock of an open file of its own tells it so.
            let is_given = |name: &str| given.iter().any(|volume| volume.name.as_str() == name);
            departure.leaves.stores.retain(|(name, _)| !is_given(name));
        }
        // A broken run proves nothing about its volumes.
        let is_saved = |volume: &&Arc<Volume>| joined.is_ok() && !lost.contains(&volume.uuid);
        let saved: Vec<VolumeUuid> =
            core.volumes().iter().filter(is_saved).map(|volume| volume.uuid).collect();
        let records = persister.end(&saved, &lost);
        if let Some(departure) = &mut departure {
            departure.leaves.records = records;
        }
        let stayed = core.stayed();
        joined.map(|_| RunEnd { clean, given_up, stayed, departure })
    }

    /// Carries out the decisions of core.
    fn carry_out(&mut self) {
        loop {
            while let Some(effect) = self.core.next_effect() {
                self.carry_out_one(effect);
            }
            if !self.change_for_group() {
                break;
            }
        }
        while let Some(what) = self.core.next_occurrence() {
            self.events.happened(what);
        }
    }

    fn carry_out_one(&mut self, effect: Effect) {
        let Self { core, groups, reception, volumes, persister, events, claims, .. } = self;
        match effect {
            Effect::Reply { to, tag, status, value, payload } => {
                let connection = to.connection;
                let reply = ToGroup::Reply { connection, tag, status, value, payload };
                groups.send(to.group, reply);
            }
            Effect::Adopt { connection: to, admission, session, epoch, silence } => {
                reception.adopted(session, admission, core, groups);
                let connection = to.connection;
                groups.send(to.group, ToGroup::Adopt { connection, session, epoch, silence });
            }
            Effect::Expel { connection: to } => {
                groups.send(to.group, ToGroup::Expel { connection: to.connection });
            }
            Effect::Evict { admission } => reception.evict(admission, groups),
            Effect::LimitHost { session, limits } => groups.limit_host(session, &limits),
            Effect::All(notice) => {
                match notice {
                    Notice::EndConnections { session, before } => {
                        reception.end_connections(session, |epoch| epoch < before);
                    }
                    Notice::EndEpoch { session, epoch: ended } => {
                        reception.end_connections(session, |epoch| epoch == ended);
                    }
                    Notice::ForgetSession { session } => reception.session_ended(session),
                    Notice::Open { .. } | Notice::Close { .. } | Notice::Host { .. } => {}
                }
                groups.notify(notice);
            }
            Effect::Persist { ticket, record } => {
                if let Some(result) = persister.persist(ticket, record) {
                    core.persisted(ticket, result);
                }
            }
            Effect::Prove { ticket, volume } => {
                claims.prove((volume, ticket), volumes.backing(volume));
            }
            Effect::Claim { name, wish } => claims.begin(name, wish),
            Effect::Settle { ticket, volume } => volumes.settle(ticket, volume, groups),
            Effect::Step(step) => {
                if step == VolumeStep::Abandon {
                    volumes.tell_dropped_blocks(groups, events);
                }
                volumes.begin_step(step, core, groups, (reception.devices_mut(), persister));
            }
            Effect::GiveUpStep => volumes.give_up_step(),
            Effect::GivenUp(why) => volumes.go_without_store(&why, groups, events),
            Effect::Altered(result) => self.altered(result),
            Effect::StopGroups => {
                reception.end_all();
                groups.stop();
            }
        }
    }

    /// A change of a volume has ended.
    fn altered(&mut self, result: Result<(), String>) {
        let Self { core, groups, volumes, running, persister, claims, moves, .. } = self;
        let begun = volumes.changed(result, core, groups, (running, persister));
        if let Some((name, volume)) = begun
            && let Some(store) = volumes.backing(volume)
        {
            claims.begins(name, volume, store);
            moves.seek_no_longer(name);
            moves.listen(running.volume(name.as_str()));
        }
        // Before any other change.
        volumes.end_lost(core, (running, persister));
    }

    fn on_group(&mut self, message: FromGroup) {
        let Self { core, groups, reception, volumes, persister, events, .. } = self;
        match message {
            FromGroup::Admin { group, connection, admission, command, body } => {
                let from = ConnectionRef { group, connection };
                core.command(from, admission, &command, &body, Instant::now());
            }
            FromGroup::Proven { group, connection, admission } => {
                let from = ConnectionRef { group, connection };
                reception.proven(from, admission, core, groups);
            }
            FromGroup::ConnectionGone {
                admission,
                kind,
                epoch,
                connection,
                memory,
                reason,
                ..
            } => {
                let (number, epoch) = (admission.0, epoch.0);
                tracing::debug!(connection = number, ?kind, epoch, reason, "connection gone");
                reception.connection_gone(admission, connection, memory);
            }
            FromGroup::Ended { group, connection, qp } => {
                reception.destroy_qp(ConnectionRef { group, connection }, qp);
            }
            FromGroup::PollerBroken { group, poller } => {
                let device = reception.poller_broke(group, poller);
                events.poller_broke(group, &device);
            }
            FromGroup::PollerGone { group, place, poller, memory } => {
                reception.devices_mut().poller_gone(group, place, poller, memory);
            }
            FromGroup::LostWrites { volume, backing } => {
                match core.volume(volume) {
                    Some(volume) => persister.lost(volume.uuid, Some(backing)),
                    // The volume was given up, as its record says.
                    None => backing.loss_noted(),
                }
                events.lost_writes(volume, core);
            }
            FromGroup::StoreFailed(failure) => {
                events.store_failed(&failure, core);
                // The cause may be the file: cut, or read-only.
                self.watch.look_at_stores(volumes.backings());
            }
            FromGroup::SlowIo { group, slow } => events.slow_io(group, &slow, core),
            FromGroup::Stepped { group, ticket, result } => {
                volumes.group_stepped(group, ticket, result, core);
            }
            FromGroup::Settled { ticket, result, .. } => volumes.settled(ticket, result, core),
            FromGroup::Refused { group, unsaved } => {
                self.ends.on_refused(group, unsaved, (core, groups), events);
            }
            FromGroup::KnowsLoss { group, volume } => {
                volumes.knows_loss(group, Some(volume), groups);
            }
            FromGroup::Stopped { group, unsaved, error } => {
                groups.stopped(group, unsaved, error);
                volumes.knows_loss(group, None, groups);
            }
        }
    }

    fn on_volume(&mut self, news: VolumeNews) {
        match news {
            VolumeNews::StoreDone(done) => self.volumes.on_store_done(done, &mut self.core),
            VolumeNews::Lost(lost) => self.on_image_lost(lost),
        }
    }

    /// Another client has the image of a volume: its hosts get nothing more from here.
    fn on_image_lost(&mut self, (volume, why): LostImage) {
        // Also of a volume that was removed by force: ops of it are held until this is known.
        self.volumes.lose(volume, &mut self.groups);
        let Some(name) = name_of(volume, &self.core) else { return };
        self.core.lose(volume);
        self.leave_to_others(&name);
        let text = format!("its image is lost: {why}");
        let what = Occurrence::new(EventKind::StoreFault, text.clone());
        self.events.happened(Occurrence { volume: Some(name.clone()), ..what });
        let why = format!("{text}. `rblk-target reload` serves it again when its lock is free");
        self.is_away(AwayVolume::new(name, why));
        self.volumes.end_lost(&mut self.core, (&self.running, &self.persister));
    }

    /// Another member of the group may serve a volume that this one served.
    fn leave_to_others(&mut self, name: &str) {
        let config = self.running.volume(name).cloned();
        if let (Ok(config), Ok(name), true) = (config, Name::new(name), self.claims.is_member()) {
            self.claims.leaves(name, config);
            self.claims.loses(name, Instant::now());
            self.core.leave_to_others(name, None);
        }
    }

    /// The volumes of the configuration were read again. Those of the group that this member does
    /// not serve can be claimed, and no others.
    fn configure_others(
        &mut self,
        volumes: Vec<VolumeConfig>,
        mut unopened: Vec<AwayVolume>,
        known: oneshot::Sender<()>,
    ) {
        // An error means that the client is gone.
        let _ = known.send(());
        if !self.claims.is_member() {
            return;
        }
        self.moves.listen(&volumes);
        let is_other = |volume: &VolumeConfig| {
            volume.image.is_some() && self.core.volume_named(&volume.name).is_none()
        };
        let others = volumes.into_iter().filter(is_other);
        let others: BTreeMap<Name, VolumeConfig> =
            others.filter_map(|volume| Some((Name::new(&volume.name).ok()?, volume))).collect();
        let names: BTreeSet<Name> = others.keys().copied().collect();
        self.core.configure_others(&names);
        let before = self.claims.configure(others);
        let is_gone = |name: &str| before.iter().any(|gone| gone.as_str() == name);
        self.description.away.retain(|away| {
            !is_gone(&away.name) || names.iter().any(|name| name.as_str() == away.name)
        });
        before.difference(&names).for_each(|name| self.moves.seek_no_longer(*name));
        for name in names.difference(&before) {
            let of_name = |away: &AwayVolume| away.name == name.as_str();
            let found = unopened.iter().position(of_name).map(|at| unopened.swap_remove(at));
            self.is_away(found.unwrap_or_else(|| AwayVolume::new(name, NOT_HAD)));
        }
    }

    fn on_claim(&mut self, news: ClaimNews) {
        match news {
            ClaimNews::Ended(name, Ok(opened)) => {
                if let Err(why) = self.claims.serve_soon(name, opened) {
                    self.claim_ended(name, Err(AwayVolume::new(name, why)));
                }
            }
            ClaimNews::Ended(name, Err(why)) => self.claim_ended(name, Err(why)),
            ClaimNews::Proven(volume, ticket) => self.core.proven(volume, ticket),
            ClaimNews::Asked(volume, ticket, ask) => {
                let name = name_of(volume, &self.core);
                let named = name.as_deref().and_then(|name| Name::new(name).ok());
                let (answer, why) = self.answer_ask(&ask, volume, named);
                tracing::info!(
                    volume = name,
                    asks = ask.member,
                    ?answer,
                    why,
                    "another member asks for a volume"
                );
                if let Some(image) = self.volumes.backing(volume).and_then(OpenStore::image) {
                    image.answer(ticket, answer, why);
                }
                match (answer, named) {
                    (AskAnswer::HandsOver, Some(name)) => self.claims.yield_soon(name),
                    (AskAnswer::Stays, Some(name)) if self.moves.has_orders(name) => {}
                    (AskAnswer::Stays, Some(name)) => self.claims.refuses(name),
                    (_, None) => {}
                }
            }
        }
    }

    /// Whether this member hands a volume over to the one that asks, or the reason to stay.
    fn answer_ask(
        &self,
        ask: &Ask,
        volume: VolumeIndex,
        named: Option<Name>,
    ) -> (AskAnswer, Option<String>) {
        let stays = |why: &str| (AskAnswer::Stays, Some(why.to_owned()));
        let is_yielding = named.is_some_and(|name| self.claims.is_yielding(name));
        let busy = self.volumes.long_change(LONG_CHANGE).filter(|_| !is_yielding);
        match (ask.order, named) {
            (Some(order), Some(name)) if !is_yielding && !self.moves.has_order(name, order) => {
                stays(NO_ORDER)
            }
            (Some(_), _) => busy.map_or((AskAnswer::HandsOver, None), |busy| stays(&busy)),
            (None, Some(name))
                if !ask.take_over && self.moves.is_moved_here(name, Instant::now()) =>
            {
                stays(JUST_MOVED)
            }
            (None, _) => answer_to(ask, volume, &self.core, busy),
        }
    }

    fn on_move(&mut self, news: MoveNews) {
        match news {
            MoveNews::Told(from, take, reply) => {
                let TakeCall { volume, image, order } = take;
                tracing::info!(
                    volume,
                    from,
                    order,
                    "another member tells this one to take a volume"
                );
                self.take(&volume, (Some(&image), Wish::Order(Some(order))), reply);
            }
            MoveNews::Ended(name, result, reply) => {
                self.moves.order_ended(name);
                if let Err(why) = &result {
                    tracing::warn!(volume = %name, why, "a volume is not moved");
                }
                // An error means that the client is gone.
                let _ = reply.send(result);
            }
            MoveNews::Found(name, image, note) => {
                self.moves.seek_no_longer(name);
                let is_sought = |away: &AwayVolume| away.name == name.as_str() && away.handed_over;
                if self.description.away.iter().any(is_sought) {
                    let (image, member, addresses) =
                        (image.to_string(), note.member, note.addresses);
                    let owned = ImageError::Elsewhere { image, member, addresses, why: None };
                    self.is_away(AwayVolume::elsewhere(name, owned.to_string()));
                }
            }
        }
    }

    /// This member is to take a volume from the one that serves it. `image`: the one that the
    /// volume must have.
    pub(in crate::control) fn take(
        &mut self,
        name: &str,
        (image, wish): (Option<&str>, Wish),
        reply: TakeReply,
    ) {
        let own = self.moves.member().unwrap_or_default();
        let named = Name::new(name).ok();
        let config = named.and_then(|name| Some((name, self.claims.other(name)?)));
        let why = match config {
            _ if self.core.is_draining() => LEAVES.to_owned(),
            _ if self.core.volume_named(name).is_some() => {
                format!("member `{own}` serves {name} already")
            }
            None => format!("member `{own}` has no volume {name}, or not on an image"),
            Some((_, VolumeConfig { image: Some(its), .. }))
                if image.is_some_and(|it| it != its) =>
            {
                format!("the volume {name} of member `{own}` is on another image, {its}")
            }
            Some((name, _)) => {
                self.moves.take(name, reply);
                return self.claims.begin(name, wish);
            }
        };
        self.moves.reply(reply, Err(why));
    }

    /// Begins the next change for the group, if no other one is under way, and tells the end of the
    /// last one. Returns whether core may have orders therefore.
    fn change_for_group(&mut self) -> bool {
        if let Some(ended) = self.claims.ended_change() {
            match ended {
                EndedChange::Served(name, result) => {
                    self.claim_ended(name, result.map_err(|why| AwayVolume::new(name, why)));
                }
                EndedChange::Yielded(name, Ok(())) => {
                    tracing::info!(volume = %name, "a volume is handed over");
                    self.is_away(AwayVolume::handed_over(name, handed_over(name.as_str())));
                    if let Some(config) = self.claims.other(name) {
                        self.moves.seek_owner(name, config);
                    }
                }
                EndedChange::Yielded(name, Err(why)) => {
                    tracing::error!(volume = %name, why, "a volume is not handed over");
                }
            }
            self.stop_if_left(Instant::now());
            return true;
        }
        if self.volumes.is_changing() {
            return false;
        }
        let Some((change, files, reply)) = self.claims.next_change() else { return false };
        if let VolumeChange::Yield { name } = &change
            && let (Ok(config), Ok(name)) = (self.running.volume(name), Name::new(name))
        {
            self.claims.leaves(name, config.clone());
        }
        let parts = (&self.running, &self.persister);
        self.volumes.change((change, files, false), &mut self.core, parts, reply);
        true
    }

    /// The target is to stop. A member of a group first hands its images over: their hosts go on at
    /// another member within a second, and do not wait for the end of this one.
    fn leave(&mut self, now: Instant) {
        let is_of_group = |store: &OpenStore| store.image().is_some_and(|it| it.record().is_some());
        let images = self.volumes.backings().iter().filter(|(_, store)| is_of_group(store));
        let names = images.filter_map(|(volume, store)| {
            Some((has_fault(store), self.core.volume(*volume)?.name))
        });
        // One whose cluster does not answer comes last: the others would wait for it.
        let names: BTreeSet<(bool, Name)> = names.collect();
        if names.is_empty() || self.core.is_draining() {
            return self.core.drain(now);
        }
        if self.claims.leaving(now).is_none() {
            tracing::info!(
                volumes = names.len(),
                "hands the volumes of the group over, and stops then"
            );
            for name in self.claims.leave(names.into_iter().map(|(_, name)| name), now) {
                self.claim_ended(name, Err(AwayVolume::new(name, LEAVES)));
            }
        }
    }

    /// Stops if this member has handed over what it could.
    fn stop_if_left(&mut self, now: Instant) {
        if self.claims.has_left(self.is_stuck(), now) && !self.core.is_draining() {
            self.claims.end_leave();
            self.core.drain(now);
        }
    }

    /// Whether a change has been under way for long, and is no hand-over that gets on.
    fn is_stuck(&self) -> bool {
        let yielding = self.claims.yielding();
        let gets_on = yielding.is_some_and(|name| {
            let volume = self.core.volume_named(name.as_str());
            let store = volume.and_then(|volume| self.volumes.backing(volume.index));
            !store.is_some_and(has_fault)
        });
        !gets_on && self.volumes.long_change(LONG_CHANGE).is_some()
    }

    fn claim_ended(&mut self, name: Name, result: Result<(), AwayVolume>) {
        match &result {
            Ok(()) => {
                self.description.away.retain(|away| away.name != name.as_str());
            }
            Err(away) => {
                tracing::info!(volume = %name, why = away.why, "cannot claim a volume");
                self.is_away(away.clone());
            }
        }
        let result = result.map_err(|away| away.why);
        self.moves.claim_ended(name, &result, Instant::now());
        self.core.claim_ended(name, &result);
    }

    fn is_away(&mut self, volume: AwayVolume) {
        self.description.away.retain(|away| away.name != volume.name);
        self.description.away.push(volume);
    }

    /// The outcome of a write to the records for the next run.
    fn on_record(&mut self, news: RecordOutcome) {
        let Self { core, volumes, persister, .. } = self;
        match news {
            RecordOutcome::Holder(ticket, result) => core.persisted(Ticket(ticket), result),
            RecordOutcome::Serve(ticket, result) => {
                volumes.on_served(StepTicket(ticket), result, core, persister);
            }
            RecordOutcome::Lower(ticket, result) => {
                volumes.on_lowered(StepTicket(ticket), result, core);
            }
            RecordOutcome::Loss(volume, noted) => persister.loss_noted(volume, noted),
        }
    }
}

/// Whether the cluster of a volume's image does not answer, or the image is lost.
fn has_fault(store: &OpenStore) -> bool {
    store.image().is_some_and(|image| image.look().is_some())
}

#[cfg(test)]
mod tests;
