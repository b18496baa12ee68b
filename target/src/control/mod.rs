//! Control: everything of a target that is not I/O. One task owns it all: sessions, devices, volumes and the
//! mail to the poll groups, so there is nothing to lock.

mod admin;
mod admission;
mod devices;
pub mod socket;
pub mod status;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::{Incoming, Region};
use rblk_protocol::{CommandCapsule, ConnectionKind, Epoch, InstanceId, Name, Status, Tag};
use tokio::sync::{mpsc, oneshot};

use crate::connection::{ConnectionId, SessionSlot};
use crate::poll_group::{FromGroup, ToGroup, thread::Handle};
use crate::session::{After, SessionTable};
use crate::verifier::{Lineage, LineageFile};
use crate::volume::Volume;

use devices::DeviceEntry;

/// How long a LOGIN may wait for the connections of older epochs to end.
const QUIESCE_DEADLINE: Duration = Duration::from_secs(30);

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
}

/// What was asked through the control socket or by a signal.
#[derive(Debug)]
pub enum Request {
    /// The state of everything.
    Status(oneshot::Sender<status::TargetStatus>),
    /// Take no new sessions, tell initiators, stop when I/O has ended.
    Drain,
}

struct WaitingLogin {
    group: usize,
    connection: ConnectionId,
    tag: Tag,
    epoch: Epoch,
    since: Instant,
}

/// An ASYNC_EVENT that waits for something to happen.
struct Parked {
    group: usize,
    connection: ConnectionId,
    tag: Tag,
    session: SessionSlot,
}

/// The control task's state.
pub struct Control {
    name: Name,
    instance: InstanceId,
    lineage: Lineage,
    lineage_file: Arc<LineageFile>,
    started: Instant,
    limits: Limits,
    groups: Vec<Handle>,
    next_group: usize,
    // One region, cut among the poll groups.
    arena: Arc<Region>,
    zeros: Arc<Region>,
    devices: Vec<DeviceEntry>,
    volumes: Vec<Arc<Volume>>,
    volume_notes: HashMap<String, status::VolumeNotes>,
    sessions: SessionTable,
    waiting_logins: HashMap<SessionSlot, WaitingLogin>,
    parked: Vec<Parked>,
    listening: Vec<String>,
    draining: Option<Instant>,
    drain_timeout: Duration,
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
    /// What people want to know of volumes, by name.
    pub volume_notes: HashMap<String, status::VolumeNotes>,
    /// Addresses listened on.
    pub listening: Vec<String>,
    /// How long a drain may take.
    pub drain_timeout: Duration,
}

impl Control {
    /// A target that has no connections yet.
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        Self {
            name: parts.name,
            instance: parts.instance,
            lineage: parts.lineage.lineage(),
            lineage_file: parts.lineage,
            started: Instant::now(),
            limits: parts.limits,
            groups: parts.groups,
            next_group: 0,
            arena: parts.arena,
            zeros: parts.zeros,
            devices: Vec::new(),
            volumes: parts.volumes,
            volume_notes: parts.volume_notes,
            sessions: SessionTable::new(parts.limits.sessions_max),
            waiting_logins: HashMap::new(),
            parked: Vec::new(),
            listening: parts.listening,
            draining: None,
            drain_timeout: parts.drain_timeout,
            stopped: 0,
            clean: true,
            failure: None,
        }
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
        let mut tick = tokio::time::interval(Duration::from_millis(500));
        loop {
            tokio::select! {
                Some(incoming) = incoming.recv() => self.admit(incoming),
                Some(message) = from_groups.recv() => self.on_group(message),
                Some(request) = requests.recv() => self.on_request(request),
                _ = tick.tick() => self.on_tick(Instant::now()),
            }
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
        if let Some(handle) = self.groups.get(group)
            && handle.mail.send(message).is_err()
        {
            // The box holds thousands of messages: the thread is stuck or gone, and says so elsewhere.
            tracing::error!(group, "a poll group takes no mail");
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
            Request::Drain => self.drain(),
        }
    }

    fn drain(&mut self) {
        if self.draining.is_some() {
            return;
        }
        tracing::info!(sessions = self.sessions.iter().count(), "draining");
        self.draining = Some(Instant::now());
        for parked in std::mem::take(&mut self.parked) {
            self.reply(
                parked.group,
                parked.connection,
                parked.tag,
                Status::Ok,
                event_number(),
                Vec::new(),
            );
        }
        self.stop_if_drained(Instant::now());
    }

    fn stop_if_drained(&mut self, now: Instant) {
        let Some(since) = self.draining else { return };
        let late = now.saturating_duration_since(since) > self.drain_timeout;
        let busy = self.sessions.iter().any(|s| s.connections() > 0);
        if (!busy || late) && self.drain_timeout != Duration::MAX {
            if busy {
                let sessions = self.sessions.iter().filter(|s| s.connections() > 0).count();
                tracing::info!(sessions, "drained: ending the sessions that stayed");
            }
            // Once: the timeout is spent.
            self.drain_timeout = Duration::MAX;
            self.send_all(|| ToGroup::Stop);
        }
    }

    fn on_tick(&mut self, now: Instant) {
        for slot in self.sessions.expire(now) {
            tracing::info!(session = slot.0, "a lost session's lease ended");
            self.send_all(|| ToGroup::ForgetSession { session: slot });
        }
        let late: Vec<SessionSlot> = self
            .waiting_logins
            .iter()
            .filter(|(_, login)| now.saturating_duration_since(login.since) > QUIESCE_DEADLINE)
            .map(|(slot, _)| *slot)
            .collect();
        for slot in late {
            if let Some(login) = self.waiting_logins.remove(&slot) {
                tracing::error!(session = slot.0, "connections of an older epoch do not end");
                self.reply(
                    login.group,
                    login.connection,
                    login.tag,
                    Status::TimedOut,
                    0,
                    Vec::new(),
                );
            }
        }
        self.stop_if_drained(now);
    }

    fn reply(
        &self,
        group: usize,
        connection: ConnectionId,
        tag: Tag,
        status: Status,
        value: u32,
        payload: Vec<u8>,
    ) {
        self.send(group, ToGroup::Reply { connection, tag, status, value, payload });
    }

    fn on_group(&mut self, message: FromGroup) {
        match message {
            FromGroup::Admin { group, connection, session, command, body } => {
                self.on_admin(group, connection, session, &command, &body);
            }
            FromGroup::ConnectionGone {
                session,
                kind,
                epoch,
                connection,
                memory,
                undrained,
                reason,
            } => {
                // The QP first, then its memory. Destroying may block shortly, which is why it is done here.
                drop(connection);
                drop(memory);
                if let Some((group, connection)) = undrained {
                    self.send(group, ToGroup::Destroyed { connection });
                }
                let queue = match kind {
                    ConnectionKind::Admin => None,
                    ConnectionKind::Io { queue } => Some(queue),
                };
                tracing::debug!(
                    session = session.0,
                    ?kind,
                    epoch = epoch.0,
                    reason,
                    "connection gone"
                );
                if kind == ConnectionKind::Admin {
                    self.parked.retain(|p| p.session != session);
                    // A session without its admin connection is lost: its queues do not outlive it.
                    if let Some(before) = epoch.next() {
                        self.send_all(|| ToGroup::EndConnections { session, before });
                    }
                }
                match self.sessions.connection_gone(session, epoch, queue, Instant::now()) {
                    After::Lives => {}
                    After::Quiesced => self.finish_login(session),
                    After::Ended => {
                        self.waiting_logins.remove(&session);
                        self.send_all(|| ToGroup::ForgetSession { session });
                    }
                }
                self.stop_if_drained(Instant::now());
            }
            FromGroup::LostWrites { volume } => {
                self.clean = false;
                let volume = self.volumes.iter().find(|v| v.index == volume).map(|v| v.name);
                tracing::error!(
                    ?volume,
                    "the store could not make acknowledged writes durable: every flush of the volume fails from now \
                     on; mend the disk or file system and restart the target"
                );
                self.lineage_file.renounce();
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

    fn on_admin(
        &mut self,
        group: usize,
        connection: ConnectionId,
        session: SessionSlot,
        command: &CommandCapsule,
        body: &[u8],
    ) {
        match self.admin(group, connection, session, command, body) {
            admin::Answer::Now(status, value, payload) => {
                self.reply(group, connection, command.tag, status, value, payload);
            }
            admin::Answer::Later => {}
        }
    }
}

fn event_number() -> u32 {
    rblk_protocol::AsyncEvent::Draining as u32
}
