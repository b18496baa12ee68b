//! Control: everything of a target that is not I/O. One task owns sessions, devices, volumes and
//! the mail to the poll groups, so there are no locks. [`core::Core`] decides. [`Control`] feeds it
//! events and carries out its decisions.

pub mod connect;
pub mod core;
pub(crate) mod ends;
mod groups;
pub mod hand_over;
pub mod observe;
pub mod peers;
mod persist;
pub mod requests;
mod settling;
pub(crate) mod volume_changes;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit};
use rblk_config::{Encrypt, HostConfig, TargetConfig};
use rblk_fabric::{AckTimeout, ConnectOptions, Device, Incoming, Region};
use rblk_protocol::width::wide64;
use rblk_protocol::{Features, HelloRequest, InstanceId, Name, RejectReason, SessionId};
use tokio::sync::{mpsc, oneshot};

use crate::cache::Unsaved;
use crate::control::hand_over::HandOver;
use crate::control::observe::outages::Outages;
use crate::control::observe::past::PastReport;
use crate::control::peers::account::{Origin, Payer};
use crate::control::peers::session::Session;
use crate::data::poll_group::group_thread::GroupHandle;
use crate::data::poll_group::{FromGroup, Notice, StepTicket, ToGroup};
use crate::memory::demand::FILES_BESIDES;
use crate::pool::opening::AwayVolume;
use crate::record::holders::VolumeUuid;
use crate::record::{RecordOutcome, StateDirectory};
use crate::store::{Backing, StoreIdentity};
use crate::volume::Volume;
use crate::volume::ids::{AdmissionId, SessionIndex, VolumeIndex};
use rblk_operate::target::events::{Events, EventsReport};
use rblk_operate::target::store_fault::StoreFault;
use rblk_operate::target::volume_notes::VolumeNotes;

use self::core::{
    Admitted, AuthConfig, Capacity, ConnectRefusal, ConnectionRef, Core, CoreParts, Effect, Hosts,
    Knock, Ticket,
};
use crate::record::losses::LossNotes;
use connect::admission::{Granted, House, log_refusal, no_room, refusal};
use connect::cq_shares::{CqPlace, CqShares, NoEntries};
use connect::destroy::{Destroyed, Destroyer};
use connect::devices::Devices;
use connect::file_room::FileRoom;
use connect::host_places::HostPlaces;
use connect::making::{Made, Making};
use connect::registration::Registering;
use connect::tally::Tally;
use ends::{EndReply, Ends, RunEnd};
use groups::Groups;
use observe::place_watch::PlaceWatch;
use observe::sampling::Sampling;
use observe::volume_rates::VolumeRates;
use peers::peer_lines::PeerLine;
use persist::Persister;
use rblk_operate::target::ask::LimitsWish;
use rblk_operate::target::refusal::Refusal;
use rblk_operate::target::status::UnsavedStatus;
use requests::departure::{Departure, Upgrades};
use requests::predecessor::{Agreed, Predecessor};
use requests::reread::Reading;
use requests::trace_stream::Traces;
use settling::SettlesUnderWay;
use volume_changes::{VolumeChange, Volumes};

/// Time between two looks for waits that have ended, while there are waits.
const TICK: Duration = Duration::from_millis(500);

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
    Status(oneshot::Sender<rblk_operate::target::status::TargetStatus>),
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
    Judge(Vec<VolumeChange>, oneshot::Sender<Vec<String>>),
    /// Change a volume. `alone`: the change is not a part of a configuration that was checked as a
    /// whole.
    Change {
        /// The change.
        change: VolumeChange,
        /// See above.
        alone: bool,
        /// Takes the outcome.
        reply: oneshot::Sender<volume_changes::ChangeOutcome>,
    },
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
    BeginTrace(
        String,
        Duration,
        oneshot::Sender<Result<requests::trace_stream::BegunTrace, Refusal>>,
    ),
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
    limits: ConnectionLimits,
    volume_notes: HashMap<String, VolumeNotes>,
    listening: Vec<String>,
    outages: Outages,
    insecure: bool,
    stop_timeout: Duration,
    away: Vec<AwayVolume>,
}

/// The control task's state.
#[derive(Debug)]
pub(crate) struct Control {
    description: Description,
    core: Core,
    groups: Groups,
    devices: Devices,
    registering: Registering,
    registered: mpsc::UnboundedReceiver<connect::registration::Registration>,
    making: Making,
    made: mpsc::UnboundedReceiver<Made>,
    shares: CqShares,
    host_places: HostPlaces,
    tally: Tally,
    rates: VolumeRates,
    sampling: Sampling,
    persister: Persister,
    losses: LossNotes,
    ends: Ends,
    files: FileRoom,
    events: Events,
    volumes: Volumes,
    settling: SettlesUnderWay,
    watch: PlaceWatch,
    // The reading of the files that the hosts in force came from.
    hosts_of: Reading,
    upgrades: Upgrades,
    traces: Traces,
    destroyer: Destroyer,
    destroyed: mpsc::UnboundedReceiver<Destroyed>,
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
    pub backings: HashMap<VolumeIndex, Arc<Backing>>,
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
        let (destroyer, destroyed) = Destroyer::new();
        let watch = PlaceWatch::new(probe, Some("/".into()));
        let ControlParts { name, instance, limits, volumes, arena, zeros, .. } = parts;
        let devices = Devices::new(arena, zeros, &volumes, &parts.running);
        let (registering, registered) = Registering::new();
        let (making, made) = Making::new();
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
        Ok(Self {
            core: Core::new(core, started),
            groups: Groups::new(parts.groups),
            devices,
            registering,
            registered,
            making,
            made,
            shares: CqShares::default(),
            host_places: HostPlaces::default(),
            tally: Tally::default(),
            rates: VolumeRates::default(),
            sampling: Sampling::new(parts.running.http.is_some(), started),
            persister,
            losses: LossNotes::default(),
            ends: Ends::default(),
            files: FileRoom::new(files.ok().map(|(limit, _)| limit), &parts.listening),
            events: Events::default(),
            settling: SettlesUnderWay::default(),
            volumes: Volumes::new(parts.running, parts.backings, parts.places),
            watch,
            hosts_of: Reading::default(),
            upgrades: Upgrades::after(parts.took_over),
            traces: Traces::default(),
            destroyer,
            destroyed,
            description: Description {
                name,
                instance,
                started,
                limits,
                volume_notes: parts.volume_notes,
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
        self.devices.place(device, &mut self.groups).map(drop)
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
        self.core.ready(Instant::now());
        self.upgrades.ready(Instant::now() + self.core.sessions().lease());
        self.tell_take_over();
        self.look_at_stores();
        // The timer runs only after news, and while something waits: otherwise this thread sleeps.
        let mut ticks = true;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let mut is_news = true;
            tokio::select! {
                Some(incoming) = incoming.recv() => self.admit(incoming),
                Some(message) = from_groups.recv() => self.on_group(message),
                Some(request) = requests.recv() => self.on_request(request),
                Some(news) = self.persister.next() => self.on_record(news),
                Some(done) = self.registered.recv() => self.on_registered(done),
                Some(made) = self.made.recv() => self.on_made(made),
                Some(destroyed) = self.destroyed.recv() => self.on_destroyed(destroyed),
                Some(done) = self.volumes.store_done() => self.on_store_done(done),
                looked = self.watch.next() => {
                    self.on_looked(looked);
                    is_news = false;
                }
                _ = tick.tick(), if ticks => {
                    self.core.tick(Instant::now());
                    self.note_losses_again();
                    self.tell_left_out(Instant::now());
                    is_news = false;
                }
                () = self.sampling.due(self.core.sessions().iter().next().is_some()) => {
                    let has_sessions = self.core.sessions().iter().next().is_some();
                    self.sampling.take(&self.groups, self.core.volumes(), has_sessions);
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
                self.look_for_mounts();
            }
            if self.core.is_upgrading() {
                // New connect requests wait in the socket for the next program.
                incoming.close();
            }
            // `needs_ticks` looks at every session, so it is not called after each piece of news.
            let owes = self.losses.owes() || self.groups.owes_mail() || self.core.lines().owes();
            ticks = is_news || self.core.needs_ticks() || owes;
            if self.groups.have_stopped() {
                // Requests that came meanwhile, such as a stop. Later ones fail: the channel is
                // closed.
                requests.close();
                while let Ok(request) = requests.try_recv() {
                    self.on_request(request);
                }
                self.answer_all_askers();
                let (given_up, departure) = (self.tell_end().await, self.departure());
                return self.end(given_up, departure);
            }
        }
    }

    /// The poll groups have stopped, and may have given up dirty blocks: notes which data is
    /// durable.
    fn end(
        self,
        given_up: Vec<UnsavedStatus>,
        mut departure: Option<Departure>,
    ) -> anyhow::Result<RunEnd> {
        let (clean, stayed) = (self.is_clean(&given_up), self.core.stayed());
        let Self { core, groups, losses, persister, .. } = self;
        let joined = groups.join();
        let mut lost: Vec<VolumeUuid> = losses.volumes().copied().collect();
        lost.extend(core.owed_fences());
        // Data that was given up may be lost, even if neither the machine nor the kernel fails: the
        // kernel reports a failed sync once, and no later run hears it.
        let is_given_up = |volume: &&Arc<Volume>| {
            let of_volume = |unsaved: &Unsaved| unsaved.volume == volume.index;
            joined.as_ref().is_ok_and(|unsaved| unsaved.iter().any(of_volume))
        };
        lost.extend(core.volumes().iter().filter(is_given_up).map(|volume| volume.uuid));
        // A broken run proves nothing about its volumes.
        let is_saved = |volume: &&Arc<Volume>| joined.is_ok() && !lost.contains(&volume.uuid);
        let saved: Vec<VolumeUuid> =
            core.volumes().iter().filter(is_saved).map(|volume| volume.uuid).collect();
        let records = persister.end(&saved, &lost);
        if let Some(departure) = &mut departure {
            departure.leaves.records = records;
        }
        joined.map(|_| RunEnd { clean, given_up, stayed, departure })
    }

    fn on_request(&mut self, request: ToControl) {
        match request {
            ToControl::Status(reply) => {
                if self.rates.ask(Instant::now()) {
                    self.rates.take(&self.groups, self.core.volumes(), Instant::now());
                }
                self.ask_status(reply);
            }
            ToControl::StoreFaults(reply) => self.ask_faults(reply),
            ToControl::Events(after, reply) => {
                let _ = reply.send(self.events_after(after));
            }
            ToControl::Past(reply) => {
                let Description { instance, started, .. } = self.description;
                let _ = reply.send(self.sampling.report(instance, started));
            }
            ToControl::Drain(reply) => {
                self.warn_of_stores();
                self.ends.ask(reply);
                self.core.drain(Instant::now());
            }
            ToControl::MayUpgrade(forced, reply) => {
                let _ = reply.send(self.may_upgrade(forced));
            }
            ToControl::Upgrade(agreed) => self.begin_upgrade(*agreed),
            ToControl::Hosts(hosts, reading, reply) => {
                let _ = reply.send(self.let_in_only(&hosts, reading));
            }
            ToControl::LimitHost(name, limits, reply) => {
                let _ = reply.send(self.limit_host(&name, limits));
            }
            ToControl::Running(reply) => {
                let _ = reply.send(Box::new(self.volumes.running().clone()));
            }
            ToControl::Judge(changes, reply) => {
                let faults = changes.iter().filter_map(|change| self.judge(change).err());
                let _ = reply.send(faults.collect());
            }
            ToControl::Change { change, alone, reply } => self.change(&change, alone, reply),
            ToControl::CloseToOthers { name, which, close, reply } => {
                let _ = reply.send(self.close_to_others(&name, which, close));
            }
            ToControl::BeginTrace(volume, slower, reply) => {
                let begun = match self.volume_named(&volume).map(Arc::clone) {
                    Some(volume) => self.traces.begin(&volume, slower, &mut self.groups),
                    None => Err(Refusal::no_volume(&volume)),
                };
                if let Err(Ok(begun)) = reply.send(begun) {
                    // The client is gone already.
                    self.traces.end(begun.number(), &mut self.groups);
                }
            }
            ToControl::EndTrace(number) => self.traces.end(number, &mut self.groups),
            ToControl::HostOf(session, reply) => {
                let session = self.core.sessions().get(session);
                let host = session.map_or_else(String::new, |s| s.host_name.to_string());
                let _ = reply.send(host);
            }
            ToControl::Kick(whom, reply) => {
                let _ = reply.send(self.kick(&whom));
            }
        }
    }

    /// Lets in these hosts and no others, unless those in force were read later. Returns the names
    /// of the hosts that lost sessions.
    fn let_in_only(
        &mut self,
        hosts: &[HostConfig],
        reading: Reading,
    ) -> Result<Vec<String>, String> {
        if reading < self.hosts_of {
            tracing::info!(
                "the hosts were read anew meanwhile: those that were read before are not used"
            );
            return Ok(Vec::new());
        }
        let configured = hosts.to_vec();
        let hosts = Hosts::new(hosts).map_err(|error| error.to_string())?;
        self.volumes.running_mut().hosts = configured;
        self.hosts_of = reading;
        let ended = self.core.set_hosts(hosts, Instant::now());
        let ended: Vec<String> = ended.iter().map(ToString::to_string).collect();
        tracing::info!(?ended, "hosts were reloaded");
        Ok(ended)
    }

    /// Changes the limits of a host among those in force now. Returns its entry.
    fn limit_host(&mut self, name: &str, limits: LimitsWish) -> Result<HostConfig, Refusal> {
        let (hosts, host) = requests::reconfigure::limited(self.volumes.running(), name, limits)?;
        self.let_in_only(&hosts, self.hosts_of)?;
        Ok(host)
    }

    /// Closes a volume to hosts that do not have it open, or (false) opens it to all again. Returns
    /// the volume's index and its users.
    fn close_to_others(
        &mut self,
        name: &str,
        which: Option<VolumeIndex>,
        close: bool,
    ) -> Option<(VolumeIndex, Vec<String>)> {
        let volume = self.core.volumes().iter().find(|volume| volume.name.as_str() == name)?;
        let index = volume.index;
        if which.is_some_and(|which| which != index) {
            return None;
        }
        self.core.close_to_others(index, close);
        Some((index, self.core.users(index)))
    }

    /// Ends the sessions of a host or a peer, or the session of that number. Returns their names.
    fn kick(&mut self, whom: &str) -> Result<Vec<String>, String> {
        let name = |session: &Session| {
            (session.index, format!("{} ({})", session.host_name, session.peer))
        };
        let meant = peers::whom::meant(self.core.sessions().iter(), whom)?;
        let meant: Vec<_> = meant.into_iter().map(name).collect();
        let now = Instant::now();
        let kicked = meant.into_iter().filter(|(session, _)| self.core.kick(*session, now));
        Ok(kicked.map(|(_, name)| name).collect())
    }

    /// Handles a connect request.
    fn admit(&mut self, incoming: Incoming) {
        let peer = incoming.peer();
        let asked = match HelloRequest::from_wire(&incoming.hello().0) {
            Ok(asked) => asked,
            Err(error) => {
                let text = error.to_string();
                if self.core.lines().may_say(PeerLine::Refused, &peer, &text, Instant::now()) {
                    tracing::warn!(peer, error = text, "refused a connection");
                }
                return incoming.reject(&refusal(RejectReason::Malformed, &text));
            }
        };
        if self.devices.find(&incoming.device()).is_none() {
            return self.come_by_new_device(incoming);
        }
        match self.grant(&incoming, &asked, &peer) {
            Ok(granted) => self.connect(incoming, &asked, granted),
            Err(refused) => {
                log_refusal(self.core.lines(), &asked, &peer, &refused);
                incoming.reject(&refusal(refused.reason, &refused.text));
            }
        }
    }

    /// Warns if sessions leave few files to be opened.
    fn look_at_file_room(&mut self) {
        let connections = self.core.sessions().iter().map(|session| session.connections());
        let files = connections.map(wide64).sum::<u64>().saturating_add(FILES_BESIDES);
        if let Some(warning) = self.files.look(files) {
            tracing::warn!("{warning}");
        }
    }

    /// Decides whether a connection is made. If so, it counts at once.
    fn grant(
        &mut self,
        incoming: &Incoming,
        asked: &HelloRequest,
        peer: &str,
    ) -> Result<Granted, ConnectRefusal> {
        let Description { limits, instance, .. } = self.description;
        let house = House { limits, instance, requires_proof: self.core.requires_proof() };
        let device = incoming.device();
        let accept = connect::admission::agree(asked, &house, &device)?;
        let place = self.devices.place(&device, &mut self.groups).map_err(|error| {
            // The line in the log about the refusal contains this.
            no_room(format!("cannot serve by this device: {error}"))
        })?;
        let mut fresh = [0; 16];
        getrandom::fill(&mut fresh).map_err(|error| no_room(error.to_string()))?;
        let knock = Knock {
            asked,
            introduction: connect::admission::introduction(incoming, &accept)?,
            peer,
            memory_bytes: wide64(connect::admission::memory_bytes(&accept, asked.kind, &device)),
            fresh: SessionId(fresh),
            is_encrypted: accept.features.has(Features::ENCRYPT),
        };
        let admitted = self.core.connect(&knock, Instant::now())?;
        if admitted.queue.is_some() {
            self.core.note_digest(admitted.session, accept.features.has(Features::DIGEST));
        }
        let group = self.groups.for_connection(admitted.session, admitted.queue);
        let whose = self.payer(&admitted, peer);
        let entries = connect::admission::cq_entries(&accept, asked.kind);
        let (cq, capacity) = (CqPlace { device: place, group }, self.devices.cq_entries(place));
        let made = connect::admission::reads_out(incoming, asked).and_then(|reads_out| {
            let taken = match admitted.is_stranger {
                true => self.shares.take_for_stranger(admitted.id, cq, whose, entries, capacity),
                false => self.shares.take(admitted.id, cq, whose, entries, capacity),
            };
            taken.map_err(ConnectRefusal::from)?;
            let poller = self.devices.poller(place, group, &mut self.groups).map_err(no_room)?;
            Ok((reads_out, poller))
        });
        match made {
            Ok((reads_out, (pd, poller))) => {
                let ack_timeout = self.ack_timeout(admitted.session);
                let spares = admitted.queue.is_none().then(|| self.devices.spares(place));
                Ok(Granted {
                    accept,
                    admitted,
                    place,
                    group,
                    reads_out,
                    ack_timeout,
                    pd,
                    spares,
                    poller,
                })
            }
            Err(refused) => {
                self.gone(admitted.id);
                Err(refused)
            }
        }
    }

    /// How long a device waits for an acknowledgement of a host. On InfiniBand the kernel would
    /// take the subnet manager's value, for this end alone. Before LOGIN no `detect` of the host is
    /// known.
    fn ack_timeout(&self, session: SessionIndex) -> AckTimeout {
        if let Some(time) = self.volumes.running().transport.ack_timeout {
            return AckTimeout::of(time.get());
        }
        let session = self.core.sessions().get(session);
        AckTimeout::within(session.map_or(ConnectOptions::default().detect, |s| s.detect))
    }

    /// The account for the CQ entries of a new connection: the address that it comes from, as long
    /// as it has not proven its session.
    fn payer(&self, admitted: &Admitted, peer: &str) -> Payer {
        let session = self.core.sessions().get(admitted.session);
        let account = session.filter(|_| admitted.secret.is_none()).map(|s| s.account.clone());
        account.unwrap_or_else(|| Payer::Origin(Origin::of(peer)))
    }

    /// Tells the poll groups the host of a session that begins or comes back.
    fn place_host(&mut self, session: SessionIndex) {
        let Some(whose) = self.core.sessions().get(session).map(|s| s.account.clone()) else {
            return;
        };
        if let Some(host) = self.host_places.put(session, whose) {
            self.groups.notify(Notice::Host { session, host });
        }
    }

    /// Books the CQ entries of a connection on the host that it has proven.
    ///
    /// # Errors
    /// The host has no room in the CQ: the entries stay booked on the address.
    fn book(&mut self, id: AdmissionId, session: SessionIndex) -> Result<(), NoEntries> {
        let Self { core, shares, devices, .. } = self;
        let Some(session) = core.sessions().get(session) else { return Ok(()) };
        let capacity = |cq: CqPlace| devices.cq_entries(cq.device);
        shares.book_on(id, session.account.clone(), capacity)
    }

    /// Ends a proven connection because its host has no room for it in the CQ.
    fn end_too_much(&mut self, connection: ConnectionRef, session: SessionIndex, why: &NoEntries) {
        let (host, peer) = self
            .core
            .sessions()
            .get(session)
            .map(|session| (session.host_name, session.peer.clone()))
            .unzip();
        let (of, text) = (peer.as_deref().unwrap_or_default(), why.text());
        if self.core.lines().may_say(PeerLine::Refused, of, text, Instant::now()) {
            let host = host.map(tracing::field::display);
            tracing::warn!(host, peer, text, "ending a connection that its host may not have");
        }
        self.groups.send(connection.group, ToGroup::Expel { connection: connection.connection });
    }

    /// Ends a connection that lost its place to another one.
    fn evict(&mut self, admission: AdmissionId) {
        if self.making.end_one(admission) {
            return;
        }
        if let Some(CqPlace { group, .. }) = self.shares.cq_of(admission) {
            self.groups.send(group, ToGroup::Evict { admission });
        }
    }

    /// Removes a connection after the last use of its resources.
    fn gone(&mut self, id: AdmissionId) {
        self.shares.gone(id);
        self.core.gone(id, Instant::now());
        let sessions = self.core.sessions();
        self.tally.ended(id, |session| sessions.get(session).is_some());
    }

    /// Hands a connection to its poll group. If the poll group does not take it, it is destroyed
    /// and reported as ended: its session must not wait for it.
    fn hand_over(&self, group: usize, connection: ToGroup) {
        if let Some(ToGroup::AddConnection { connection, params, .. }) =
            self.groups.try_send(group, connection)
        {
            let gone = Destroyed::Connection { admission: params.admission };
            self.destroyer.destroy(Some(connection), params, gone);
        }
    }

    /// Carries out the decisions of core.
    fn carry_out(&mut self) {
        while let Some(effect) = self.core.next_effect() {
            match effect {
                Effect::Reply { to, tag, status, value, payload } => {
                    let connection = to.connection;
                    let reply = ToGroup::Reply { connection, tag, status, value, payload };
                    self.groups.send(to.group, reply);
                }
                Effect::Adopt { connection: to, admission, session, epoch, silence } => {
                    self.place_host(session);
                    // An admin connection is small, and its host may log in: if the host has no
                    // room in the CQ, the connection stays booked on its address.
                    let _ = self.book(admission, session);
                    self.look_at_file_room();
                    let connection = to.connection;
                    let adopt = ToGroup::Adopt { connection, session, epoch, silence };
                    self.groups.send(to.group, adopt);
                }
                Effect::Expel { connection: to } => {
                    self.groups.send(to.group, ToGroup::Expel { connection: to.connection });
                }
                Effect::Evict { admission } => self.evict(admission),
                Effect::LimitHost { session, limits } => self.groups.limit_host(session, &limits),
                Effect::All(notice) => {
                    if let Notice::EndConnections { session, before } = notice {
                        self.making.end_connections(session, before);
                    }
                    if let Notice::ForgetSession { session } = notice {
                        self.host_places.end(session);
                    }
                    self.groups.notify(notice);
                }
                Effect::Persist { ticket, record } => {
                    if let Some(result) = self.persister.persist(ticket, record) {
                        self.core.persisted(ticket, result);
                    }
                }
                Effect::Settle { ticket, volume } => {
                    self.settling.begin(ticket, volume, &mut self.groups)
                }
                Effect::Step(step) => self.begin_step(step),
                Effect::GiveUpStep => self.give_up_step(),
                Effect::GivenUp(why) => self.given_up(why),
                Effect::Altered(result) => self.changed(result),
                Effect::StopGroups => {
                    self.making.end_all();
                    self.groups.stop();
                }
            }
        }
        while let Some(what) = self.core.next_occurrence() {
            self.happened(what);
        }
    }

    fn on_group(&mut self, message: FromGroup) {
        match message {
            FromGroup::Admin { group, connection, admission, command, body } => {
                let from = ConnectionRef { group, connection };
                self.core.command(from, admission, &command, &body, Instant::now());
            }
            FromGroup::Proven { group, connection, admission } => {
                self.on_proven(ConnectionRef { group, connection }, admission);
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
                let gone = Destroyed::Connection { admission };
                self.destroyer.destroy(connection, memory, gone);
            }
            FromGroup::Ended { group, connection, qp } => {
                self.destroyer.destroy(qp, (), Destroyed::Qp { group, connection });
            }
            FromGroup::PollerBroken { group, poller } => self.on_poller_broken(group, poller),
            FromGroup::PollerGone { group, place, poller, memory } => {
                self.devices.poller_gone(group, place, poller, memory);
            }
            FromGroup::LostWrites { volume, backing } => self.on_lost_writes(volume, backing),
            FromGroup::StoreFailed(failure) => self.on_store_failed(failure),
            FromGroup::SlowIo { group, slow } => self.on_slow_io(group, &slow),
            FromGroup::Stepped { group, ticket, result } => self.stepped(group, ticket, result),
            FromGroup::Settled { ticket, result, .. } => {
                if let Some(result) = self.settling.ended(ticket, result) {
                    self.core.settled(ticket, result);
                }
            }
            FromGroup::Refused { group, unsaved } => self.on_refused(group, unsaved),
            FromGroup::Stopped { group, unsaved, error } => {
                self.groups.stopped(group, unsaved, error);
            }
        }
    }

    fn on_proven(&mut self, from: ConnectionRef, admission: AdmissionId) {
        let Some(session) = self.core.proved(from, admission, Instant::now()) else { return };
        if let Err(why) = self.book(admission, session) {
            self.end_too_much(from, session, &why);
        }
    }

    /// The outcome of a write to the records for the next run.
    fn on_record(&mut self, news: RecordOutcome) {
        match news {
            RecordOutcome::Holder(ticket, result) => self.core.persisted(Ticket(ticket), result),
            RecordOutcome::Serve(ticket, result) => self.on_served(StepTicket(ticket), result),
            RecordOutcome::Lower(ticket, result) => self.on_lowered(StepTicket(ticket), result),
            RecordOutcome::Loss(volume, noted) => {
                if self.losses.ended(&volume, noted) {
                    self.note_loss(volume);
                }
            }
        }
    }

    fn note_loss(&mut self, volume: VolumeUuid) {
        if !self.persister.lose(volume) {
            let _ = self.losses.ended(&volume, false);
        }
    }

    fn note_losses_again(&mut self) {
        self.losses.due().into_iter().for_each(|volume| self.note_loss(volume));
    }

    /// Logs the number of lines that were left out.
    fn tell_left_out(&mut self, now: Instant) {
        while let Some(left_out) = self.core.lines().take_left_out(now) {
            left_out.log();
        }
    }

    fn on_lost_writes(&mut self, volume: VolumeIndex, backing: Arc<Backing>) {
        let uuid = self.core.volumes().iter().find(|served| served.index == volume);
        match uuid.map(|served| served.uuid) {
            Some(uuid) => {
                if self.losses.lost(uuid, Some(backing)) {
                    self.note_loss(uuid);
                }
            }
            // The volume was given up, as its record says.
            None => backing.loss_noted(),
        }
        let volume = self.name_of(volume);
        tracing::error!(
            ?volume,
            "the store could not make acknowledged writes durable: every flush of the volume fails from now \
             on; mend the disk or file system and restart the target"
        );
        self.tell_lost_writes(volume);
    }

    fn on_destroyed(&mut self, destroyed: Destroyed) {
        match destroyed {
            Destroyed::Connection { admission } => self.gone(admission),
            Destroyed::Qp { group, connection } => self.groups.qp_destroyed(group, connection),
        }
    }
}

#[cfg(test)]
mod tests;
