//! Control: everything of a target that is not I/O. One task owns it all: sessions, devices,
//! volumes and the mail to the poll groups, so there is nothing to lock. [`core::Core`] decides;
//! what is here brings it the news and does what it says.

mod admission;
mod burial;
pub mod core;
mod devices;
mod losses;
pub mod socket;
pub mod status;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_fabric::{Incoming, Region};
use rblk_protocol::{InstanceId, Name};
use tokio::sync::{mpsc, oneshot};

use crate::connection::ConnectionId;
use crate::holders::file::HoldersFile;
use crate::holders::{Holders, Served, VolumeUuid};
use crate::poll_group::{FromGroup, ToGroup, thread::Handle};
use crate::store::StoreIdentity;
use crate::verifier::{Beside, LineageFile};
use crate::volume::{Placement, Volume};

use self::burial::{Burials, Buried};
use self::core::{ConnectionRef, Core, CoreParts, Effect, Ticket};
use devices::DeviceEntry;
use losses::{LossNotes, Noted};

/// How often it is looked for what is over, while there may be something.
const TICK: Duration = Duration::from_millis(500);

/// What a target offers on every connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Deepest I/O queue.
    pub queue_depth_max: u16,
    /// In-capsule data that receive slots hold.
    pub in_capsule_bytes: u32,
    /// Most data per command.
    pub io_max_bytes: u32,
    /// Sessions at a time.
    pub sessions_max: u32,
    /// How long a session without connections keeps what it opened.
    pub lease: Duration,
}

/// What was asked through the control socket or by a signal.
#[derive(Debug)]
pub enum Request {
    /// The state of everything.
    Status(oneshot::Sender<status::TargetStatus>),
    /// Take no new sessions, tell initiators, stop when I/O has ended.
    Drain,
}

/// The control task's state.
pub struct Control {
    name: Name,
    instance: InstanceId,
    losses: LossNotes,
    loss_tries: mpsc::UnboundedReceiver<Noted>,
    started: Instant,
    limits: Limits,
    groups: Vec<Handle>,
    next_group: usize,
    // One region, cut among the poll groups.
    arena: Arc<Region>,
    zeros: Arc<Region>,
    // By place.
    devices: Vec<Option<DeviceEntry>>,
    core: Core,
    // `None` where nothing can be remembered.
    holders_file: Option<HoldersFile>,
    persisted: mpsc::UnboundedReceiver<(Ticket, Result<(), String>)>,
    burials: Burials,
    // News for poll groups whose mailbox was full: a connection waits for each.
    undelivered: Vec<(usize, ConnectionId)>,
    buried: mpsc::UnboundedReceiver<Buried>,
    volume_notes: HashMap<String, status::VolumeNotes>,
    listening: Vec<String>,
    stopped: usize,
    // Every poll group that stopped had brought its dirty blocks to the stores.
    clean: bool,
    failure: Option<String>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control")
            .field("name", &self.name)
            .field("instance", &self.instance)
            .finish_non_exhaustive()
    }
}

/// What control is made of.
#[derive(Debug)]
pub struct Parts {
    /// The target's name.
    pub name: Name,
    /// This run.
    pub instance: InstanceId,
    /// What the verifiers of its volumes are made of.
    pub lineage: Arc<LineageFile>,
    /// What it offers.
    pub limits: Limits,
    /// Running poll groups.
    pub groups: Vec<Handle>,
    /// The region their arenas are cut from.
    pub arena: Arc<Region>,
    /// Zeros, as long as the largest read.
    pub zeros: Arc<Region>,
    /// Volumes that the poll groups already know.
    pub volumes: Vec<Arc<Volume>>,
    /// What volumes with a store are served from, where that has an identity.
    pub stores: Vec<(VolumeUuid, Option<StoreIdentity>)>,
    /// What people want to know of volumes, by name.
    pub volume_notes: HashMap<String, status::VolumeNotes>,
    /// Addresses listened on.
    pub listening: Vec<String>,
    /// How long a drain may take.
    pub drain_timeout: Duration,
}

impl Control {
    /// A target that has no connections yet.
    ///
    /// # Errors
    /// The file of the holders is there and cannot be read, or the system has no thread left for
    /// it.
    pub fn new(parts: Parts) -> anyhow::Result<Self> {
        let (confirmed, persisted) = mpsc::unbounded_channel();
        let (mut holders, path) = match parts.lineage.beside("holders") {
            // Where it cannot be replaced, whoever changes the holder is refused: those who were
            // fenced stay so.
            Beside::Ours(path) => (remembered(&path, &parts.lineage)?, Some(path)),
            Beside::Foreign(path) => (remembered(&path, &parts.lineage)?, None),
            Beside::Nothing => (HoldersFile::nothing(), None),
        };
        let changed = compare_stores(&mut holders, &parts);
        let stays = |volume: &Arc<Volume>| matches!(volume.placement, Placement::Store);
        if path.is_none() && parts.volumes.iter().any(stays) {
            tracing::warn!(
                "cannot remember who holds the volumes (state_dir): after the next start of this target an initiator \
                 that comes back is let in, even if another held its volume meanwhile"
            );
        }
        let confirm = Box::new(move |number, result| {
            // Control is gone: nobody waits.
            let _ = confirmed.send((Ticket(number), result));
        });
        let holders_file =
            path.map(|path| HoldersFile::keep(path, &holders, changed, confirm)).transpose()?;
        let (burials, buried) = Burials::new();
        let lineage = parts.lineage.lineage();
        let (losses, loss_tries) = LossNotes::new(parts.lineage);
        let core = CoreParts {
            name: parts.name,
            instance: parts.instance,
            lineage,
            volumes: parts.volumes,
            sessions_max: parts.limits.sessions_max,
            lease: parts.limits.lease,
            drain_timeout: parts.drain_timeout,
            holders,
        };
        Ok(Self {
            name: parts.name,
            instance: parts.instance,
            losses,
            loss_tries,
            started: Instant::now(),
            limits: parts.limits,
            groups: parts.groups,
            next_group: 0,
            arena: parts.arena,
            zeros: parts.zeros,
            devices: Vec::new(),
            core: Core::new(core, Instant::now()),
            holders_file,
            persisted,
            burials,
            undelivered: Vec::new(),
            buried,
            volume_notes: parts.volume_notes,
            listening: parts.listening,
            stopped: 0,
            clean: true,
            failure: None,
        })
    }

    /// Runs until a drain has ended. Returns whether every acknowledged write is durable.
    ///
    /// # Errors
    /// A poll group broke; the target cannot go on.
    pub async fn run(
        mut self,
        mut incoming: mpsc::Receiver<Incoming>,
        mut from_groups: mpsc::UnboundedReceiver<FromGroup>,
        mut requests: mpsc::Receiver<Request>,
    ) -> anyhow::Result<bool> {
        // Only after news, and while something may be over: else nothing wakes this thread.
        let mut ticks = true;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let mut is_news = true;
            tokio::select! {
                Some(incoming) = incoming.recv() => self.admit(incoming),
                Some(message) = from_groups.recv() => self.on_group(message),
                Some(request) = requests.recv() => self.on_request(request),
                Some((ticket, result)) = self.persisted.recv() => {
                    self.core.persisted(ticket, result);
                }
                Some(buried) = self.buried.recv() => self.on_buried(buried),
                Some(noted) = self.loss_tries.recv() => self.losses.ended(noted),
                _ = tick.tick(), if ticks => {
                    self.core.tick(Instant::now());
                    self.losses.tick();
                    is_news = false;
                }
            }
            self.carry_out();
            self.deliver_destroyed();
            // It looks at every session: not with all the news.
            let owes = self.losses.owes() || !self.undelivered.is_empty();
            ticks = is_news || self.core.needs_ticks() || owes;
            if self.stopped == self.groups.len() {
                break;
            }
        }
        for group in &mut self.groups {
            group.join();
        }
        match self.failure {
            Some(failure) => Err(anyhow::anyhow!(failure)),
            None => Ok(self.clean),
        }
    }

    fn send(&self, group: usize, message: ToGroup) {
        let _ = self.try_send(group, message);
    }

    /// Returns what could not be sent.
    fn try_send(&self, group: usize, message: ToGroup) -> Option<ToGroup> {
        let Some(handle) = self.groups.get(group) else { return Some(message) };
        let refused = handle.mail.send(message).err()?;
        // The box holds thousands of messages: the thread is stuck or gone, and says so elsewhere.
        tracing::error!(group, "a poll group takes no mail");
        Some(refused.0)
    }

    /// Hands an admitted connection to a poll group. One that it does not take is over, and told of
    /// as any other: its session must not wait for it.
    fn hand_over(&self, group: usize, connection: ToGroup) {
        if let Some(ToGroup::AddConnection { connection, params, .. }) =
            self.try_send(group, connection)
        {
            let (session, kind, epoch) = (params.session, params.kind, params.epoch);
            let gone = Buried::Gone { session, kind, epoch };
            self.burials.bury(Some(connection), Some(params.memory), gone);
        }
    }

    fn send_all(&self, make: impl Fn() -> ToGroup) {
        for group in 0..self.groups.len() {
            self.send(group, make());
        }
    }

    fn on_request(&mut self, request: Request) {
        match request {
            Request::Status(reply) => {
                let _ = reply.send(self.status());
            }
            Request::Drain => self.core.drain(Instant::now()),
        }
    }

    /// Does what was decided.
    fn carry_out(&mut self) {
        while let Some(effect) = self.core.next_effect() {
            match effect {
                Effect::Reply { to, tag, status, value, payload } => {
                    let connection = to.connection;
                    let reply = ToGroup::Reply { connection, tag, status, value, payload };
                    self.send(to.group, reply);
                }
                Effect::Watch { on, silence } => {
                    self.send(on.group, ToGroup::Watch { connection: on.connection, silence });
                }
                Effect::All(notice) => self.send_all(|| ToGroup::Notice(notice)),
                Effect::Persist { ticket, record } => match &self.holders_file {
                    // There is nothing to remember, or nowhere, which was said at the start.
                    None => self.core.persisted(ticket, Ok(())),
                    Some(file) => {
                        if !file.write(ticket.0, record) {
                            self.core.persisted(ticket, Err("its thread is gone".to_owned()));
                        }
                    }
                },
                Effect::StopGroups => self.send_all(|| ToGroup::Stop),
            }
        }
    }

    fn on_group(&mut self, message: FromGroup) {
        match message {
            FromGroup::Admin { group, connection, session, command, body } => {
                let from = ConnectionRef { group, connection };
                self.core.command(from, session, &command, &body, Instant::now());
            }
            FromGroup::ConnectionGone { session, kind, epoch, connection, memory, reason } => {
                tracing::debug!(
                    session = session.0,
                    ?kind,
                    epoch = epoch.0,
                    reason,
                    "connection gone"
                );
                let gone = Buried::Gone { session, kind, epoch };
                self.burials.bury(connection, Some(memory), gone);
            }
            FromGroup::Ended { group, connection, qp } => {
                self.burials.bury(qp, None, Buried::Destroyed { group, connection });
            }
            FromGroup::PollerBroken { group, poller } => self.on_poller_broken(group, poller),
            FromGroup::PollerGone { group, place, poller, memory } => {
                self.on_poller_gone(group, place, poller, memory);
            }
            FromGroup::LostWrites { volume, backing } => {
                self.clean = false;
                let volume = self.core.volumes().iter().find(|v| v.index == volume).map(|v| v.name);
                tracing::error!(
                    ?volume,
                    "the store could not make acknowledged writes durable: every flush of the volume fails from now \
                     on; mend the disk or file system and restart the target"
                );
                self.losses.lost(backing);
            }
            FromGroup::Stopped { group, clean, error } => {
                self.stopped += 1;
                self.clean &= clean;
                if let Some(error) = error {
                    tracing::error!(group, error, "a poll group broke; the target ends");
                    self.failure.get_or_insert(format!("poll group {group} broke: {error}"));
                    self.send_all(|| ToGroup::Stop);
                    // A broken thread never stops again; do not wait for its peers for ever either.
                    self.stopped = self.groups.len();
                }
            }
        }
    }

    /// Tells poll groups whose connections' QPs are destroyed. One that takes no mail now is told
    /// later: it keeps what it lent until it knows.
    fn deliver_destroyed(&mut self) {
        let waiting = std::mem::take(&mut self.undelivered);
        self.undelivered = waiting
            .into_iter()
            .filter(|(group, connection)| {
                let told = ToGroup::Destroyed { connection: *connection };
                self.try_send(*group, told).is_some()
            })
            .collect();
    }

    fn on_buried(&mut self, buried: Buried) {
        match buried {
            Buried::Gone { session, kind, epoch } => {
                self.core.gone(session, epoch, kind, Instant::now());
            }
            Buried::Destroyed { group, connection } => self.undelivered.push((group, connection)),
        }
    }
}

/// What earlier runs remembered of the holders.
fn remembered(path: &Path, lineage: &LineageFile) -> anyhow::Result<Holders> {
    let holders = HoldersFile::read(path).with_context(|| {
        format!(
            "cannot read {}, which says who may write to the volumes: let this target read it, or put back what was \
             there (state_dir); only without the file does it start as if nobody had ever held them, and fences every \
             mount that comes back",
            path.display()
        )
    })?;
    if holders.is_none() && lineage.is_inherited() {
        tracing::error!(
            path = %path.display(),
            "what was remembered of the holders of the volumes is gone: every mount that comes back is refused (fenced) \
             and has to be mounted anew. If it was moved away, stop this target and put it back"
        );
    }
    Ok(match holders {
        Some(holders) => holders,
        // Generations may have been given that nobody knows any more.
        None if lineage.is_inherited() => HoldersFile::missing(),
        None => Holders::durable([]),
    })
}

/// Fences the mounts of volumes that are served from other files or devices than before. Returns
/// whether there is anything new to remember.
fn compare_stores(holders: &mut Holders, parts: &Parts) -> bool {
    let mut changed = false;
    for (uuid, store) in &parts.stores {
        let served = holders.serve(*uuid, store.as_ref());
        changed |= served != Served::AsBefore;
        let volume = parts.volumes.iter().find(|volume| volume.uuid == *uuid);
        if let (Served::Replaced, Some(volume)) = (served, volume) {
            let path = parts.volume_notes.get(volume.name.as_str()).and_then(|n| n.path.as_deref());
            tracing::error!(
                volume = %volume.name,
                path,
                "this is another file or device than the one this volume was served from before: a mount that comes \
                 back is refused (fenced), since its caches belong to the other one. Unmount it and mount it again; if \
                 the path is wrong, stop this target and put the old store back"
            );
        }
    }
    changed
}

#[cfg(test)]
mod tests;
