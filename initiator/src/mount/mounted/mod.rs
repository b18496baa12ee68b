//! [`Mount`]: a mount's parts together: the [link](crate::volume::link) to its target, its queue
//! threads, its note, and what people are told of it. Its device is held apart
//! ([`super::serving`]).

use std::io;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rblk_config::{MountConfig, said_once};
use rblk_fabric::rates::{RateWindow, Rates, Work};
use rblk_fabric::{LatencyCounts, Region};
use rblk_protocol::auth::PublicKey;
use rblk_protocol::width::{wide, wide64};
use rblk_protocol::{Status, VolumeFlags};
use tokio::sync::mpsc;

use super::device;
use super::device::disk::Disk;
use super::device::queues::start_queues;
use super::note::NO_DEVICE;
use super::note::keeper::NoteKeeper;
use super::socket::Response;
use crate::engine::durability::Durability;
use crate::engine::path::Path;
use crate::engine::{DigestFailure, MountTimes, QueueCounts};
use crate::front::ublk::{Control, Device, DeviceToken};
use crate::front::vhost::Left;
use crate::queue::{FromQueue, TargetParts};
use crate::volume::EIO;
use crate::volume::course::Facts;
use crate::volume::link::{AfterNote, Link, pulse};
use crate::volume::queues::{QueuePlan, Queues};
use crate::volume::session::Session;
use crate::volume::setup::{Setup, credentials_of};
use crate::volume::status::MountStatus;
use crate::volume::target_keys;

/// Time for the device to go away when the target answers.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Time for the device to go away by force. Together with what follows it, clearly less than the 5
/// s that the command waits.
const FORCE_DEADLINE: Duration = Duration::from_millis(2500);
/// Time for the target to flush what is left at an unmount, and again to hear of the unmount.
const LOGOUT: Duration = Duration::from_secs(2);
/// The same, by force.
const FORCE_LOGOUT: Duration = Duration::from_millis(250);
/// What a queue thread may take beyond the time it has for its answers.
const QUEUE_GRACE: Duration = Duration::from_secs(5);

const NO_NOTE: &str = "writing the note by which the device could be recovered";

/// A mount, apart from its device.
#[derive(Debug)]
pub(super) struct Mount {
    config: Arc<MountConfig>,
    link: Link,
    queues: Queues,
    note: NoteKeeper,
    disk: Disk,
    durability: Arc<Durability>,
    // What does not change while the mount is served. `status` adds the rest.
    status: MountStatus,
    since: Instant,
    rates: RateWindow<Work>,
}

/// Whether a volume has a flag.
fn has(facts: &Facts, flag: VolumeFlags) -> bool {
    facts.volume.flags.has(flag)
}

impl Mount {
    /// A new mount, with its first session, and why each address before that of the session does
    /// not work.
    pub(super) fn connected(
        config: &MountConfig,
        name: &str,
        setup: Setup,
        facts: Facts,
        session: (Session, Vec<String>),
    ) -> Self {
        let config = Arc::new(config.clone());
        let durability = Durability::new(config.on_loss);
        let status = status_of(&config, name, &setup, &facts, 0);
        let link = Link::connected(&config, setup, facts, &durability, session);
        Self::of(config, link, durability, status)
    }

    /// A mount whose target is lost, and which reconnects when it is served. It takes over the
    /// device of a process that ended.
    pub(super) fn recovered(
        config: &MountConfig,
        name: &str,
        setup: Setup,
        facts: Facts,
        durability: Arc<Durability>,
        times: u32,
    ) -> Self {
        let config = Arc::new(config.clone());
        let status = status_of(&config, name, &setup, &facts, times);
        let link = Link::lost(&config, setup, facts, &durability, Instant::now());
        Self::of(config, link, durability, status)
    }

    fn of(
        config: Arc<MountConfig>,
        link: Link,
        durability: Arc<Durability>,
        status: MountStatus,
    ) -> Self {
        let MountStatus { name, volatile_cache, recovered, .. } = &status;
        let note = NoteKeeper::new(name, &config, &durability, *volatile_cache, *recovered);
        let (queues, disk, since) = (Queues::default(), Disk::default(), Instant::now());
        let rates = RateWindow::default();
        Self { config, link, queues, note, disk, durability, status, since, rates }
    }

    /// The name of the mount.
    pub(super) fn name(&self) -> &str {
        &self.status.name
    }

    /// The path of its disk, once there is one.
    pub(super) fn disk(&self) -> &str {
        &self.status.device
    }

    /// The link to its target.
    pub(super) fn link(&self) -> &Link {
        &self.link
    }

    /// Its note.
    pub(super) fn note(&self) -> &NoteKeeper {
        &self.note
    }

    /// Which acknowledged writes are durable.
    pub(super) fn durability(&self) -> &Arc<Durability> {
        &self.durability
    }

    /// Whether its device was another process's before.
    pub(super) fn is_recovered(&self) -> bool {
        self.status.recovered > 0
    }

    /// Whether requests wait for the target. They do not when the mount is over, for then they
    /// fail.
    pub(super) fn waits_for_target(&self) -> bool {
        !self.link.is_connected() && !self.link.is_over()
    }

    /// Whether a queue thread has left.
    pub(super) fn has_stopped_queue(&self) -> bool {
        self.queues.has_stopped()
    }

    /// Somebody asks what it does: its rates are measured from now on.
    pub(super) fn ask_rates(&mut self) {
        if self.rates.ask(Instant::now()) {
            self.take_rates();
        }
    }

    /// When [`Self::take_rates`] is due.
    pub(super) fn rates_due(&self) -> Option<Instant> {
        self.rates.due()
    }

    /// Takes what was counted up to now.
    pub(super) fn take_rates(&mut self) {
        let mut work = Work::default();
        for (counts, times) in self.queues.counts().iter().zip(self.queues.times()) {
            work.add(&Work {
                reads: times.read.total,
                writes: times.write.total,
                store: LatencyCounts::default(),
                read_bytes: counts.read_bytes,
                written_bytes: counts.written_bytes,
            });
        }
        self.rates.take(Instant::now(), work);
    }

    /// Its state now.
    pub(super) fn status(&self) -> MountStatus {
        let by_queue = self.queues.counts();
        let mut total = QueueCounts::default();
        by_queue.iter().for_each(|queue| total.add(queue));
        let latency_by_queue = self.queues.times();
        let mut latency = MountTimes::default();
        latency_by_queue.iter().for_each(|queue| latency.add(queue));
        let mut status = MountStatus {
            lanes: self.queues.lanes(),
            digest: self.queues.digest(),
            unflushed_writes: self.durability.unflushed(),
            writes_rewritten: self.durability.writes_rewritten(),
            losses: self.durability.losses(),
            loss_untold: self.durability.has_untold_loss(),
            uptime_s: self.since.elapsed().as_secs(),
            total,
            by_queue,
            latency,
            latency_by_queue,
            rates: self.rates.moments().map(|(a, b, apart)| Rates::between(a, b, apart)),
            ..self.status.clone()
        };
        let facts = self.link.facts();
        status.size_bytes = size_bytes(facts);
        status.disk_size_bytes = self.disk.size_bytes();
        status.read_only = has(facts, VolumeFlags::READ_ONLY);
        self.link.report(&mut status);
        status.with_lost()
    }

    /// Does what is due, and then the next thing that happens between the mount and its target.
    /// Cancel safe.
    pub(super) async fn attend(&mut self) {
        let Self { link, queues, disk, .. } = self;
        let after = tokio::select! {
            after = link.attend(queues) => after,
            () = disk.attend() => None,
        };
        if let Some(after) = after {
            self.note_and_go_on(after);
        }
    }

    /// Writes the note, and lets the link go on.
    fn note_and_go_on(&mut self, after: AfterNote) {
        let is_noted = self.note.write(self.link.setup(), self.link.facts());
        self.link.go_on(after, is_noted, &mut self.queues);
    }

    /// The disk follows the volume, as far as the target is there and says how it is.
    pub(super) fn follow(&mut self, device: &mut Device) {
        if self.link.is_connected() {
            self.disk.follow(&self.link.facts().volume, device);
        }
    }

    /// Takes what a queue thread says.
    ///
    /// # Errors
    /// The thread broke.
    pub(super) fn on_queue(&mut self, message: FromQueue) -> anyhow::Result<()> {
        match message {
            FromQueue::PathEnded { queue, end, dead, undestroyed } => {
                dead.retire(undestroyed);
                self.link.on_path_end(queue, end, &mut self.queues);
                Ok(())
            }
            FromQueue::DigestFailure { queue, failure } => {
                self.tell_digest_failure(queue, failure);
                Ok(())
            }
            FromQueue::Quiet { queue } => {
                self.link.on_quiet(queue, &mut self.queues);
                Ok(())
            }
            FromQueue::Stopped { queue, error } => {
                self.queues.stopped(queue);
                self.link.forget_queue(queue);
                match error {
                    Some(error) => Err(anyhow!("queue {queue} broke: {error}")),
                    None => Ok(()),
                }
            }
        }
    }

    /// Says in the log which requests failed because their data did not come through.
    fn tell_digest_failure(&self, queue: u16, failure: DigestFailure) {
        let DigestFailure { io, count } = failure;
        tracing::error!(
            volume = self.status.volume,
            queue,
            op = ?io.op,
            lba = io.lba.0,
            bytes = io.data_bytes,
            count,
            "EIO: data did not come through, twice: its digest does not fit. Memory, a driver, a switch or a card on the way changes data"
        );
    }

    /// Reads the keys of both ends again: those of the target from the file of the mount, unless
    /// `keys` names them. Where that fails, they stay as they are.
    pub(super) fn reload_keys(&mut self, keys: &[String]) -> Response {
        match self.reread_keys(keys) {
            Ok(text) => Response::Reloaded(text),
            Err(error) => Response::Error(said_once(error.as_ref())),
        }
    }

    fn reread_keys(&mut self, keys: &[String]) -> anyhow::Result<String> {
        let keys = keys.iter().map(|key| key.parse()).collect::<Result<Vec<PublicKey>, _>>()?;
        let file = self.link.setup().keys_file.as_ref();
        let config = target_keys::reread(&self.config, file, &self.status.name, keys)?;
        let credentials = credentials_of(&config)?;
        let config = Arc::new(config);
        self.link.change_keys(&config, credentials);
        self.note.reconfigured(&config);
        self.config = config;
        // Another process may have to go on with them.
        self.write_note();
        let count = self.config.target_keys.len();
        tracing::info!(target_keys = count, "read the keys again");
        Ok(match count {
            0 => "it has no target_keys, so neither end proves a key".to_owned(),
            1 => "the target may prove 1 key".to_owned(),
            n => format!("the target may prove one of {n} keys"),
        })
    }

    /// Every request fails from now on.
    pub(super) fn fail_requests(&mut self) {
        self.queues.fail(Some(EIO));
    }

    /// Writes its note.
    pub(super) fn write_note(&mut self) {
        self.note.write(self.link.setup(), self.link.facts());
    }

    /// Writes the note, if it does not say yet whether a loss is to be told. Returns when to try
    /// again, where that fails.
    pub(super) fn note_loss(&mut self) -> Option<Instant> {
        if self.note.owes_loss() {
            self.write_note();
        }
        self.note.again(Instant::now())
    }

    /// Adds the device, whose disk is not there yet. The note names the device by its mark before
    /// it exists, and by its number afterwards, so there is never a device without a note: without
    /// a note no process could recover it.
    pub(super) fn add_device(&mut self, control: Control) -> anyhow::Result<Device> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| anyhow!("random numbers: {error}"))?;
        let token = DeviceToken::new(u64::from_ne_bytes(random));
        self.note.set_device(NO_DEVICE, token);
        self.note.must_write(self.link.setup(), self.link.facts()).context(NO_NOTE)?;
        let (setup, volume) = (self.link.setup(), &self.link.facts().volume);
        let device = device::add(control, setup, volume, self.config.device_id, token)?;
        self.link.shared_memory_is_registered()?;
        // The driver makes at most as many queues as there are CPUs.
        self.link.set_queues(device.info().queues);
        self.note.set_device(device.info().id, token);
        self.note.must_write(self.link.setup(), self.link.facts()).context(NO_NOTE)?;
        Ok(device)
    }

    /// Another process served the same guest before. Told before there are queues.
    pub(super) fn inherit(&mut self, account: &Arc<Durability>) {
        self.durability = Arc::clone(account);
        self.link.inherit(account);
        self.note.inherit(account);
        self.status.on_loss = account.on_loss();
    }

    /// A guest uses the mount, whose front end connects to that socket. Writes the first note.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn set_guest(&mut self, socket: &FilePath, left: &Left) -> io::Result<()> {
        self.note.set_guest(socket, self.link.setup().queues, left);
        self.note.must_write(self.link.setup(), self.link.facts())
    }

    /// Writes the last note of a guest's mount, whose rings are left like this.
    pub(super) fn leave_guest(&mut self, left: Left) {
        if let Err(error) = self.note.write_last_of_guest(self.link.facts(), left) {
            tracing::error!(%error, "the note of the guest stays as it was: the next process may tell more than is true");
        }
    }

    /// Takes over a device that has a note.
    pub(super) fn adopt_device(&mut self, id: u32, token: DeviceToken) {
        self.note.set_device(id, token);
    }

    /// Starts the queues of the device.
    pub(super) fn start_queues(
        &mut self,
        device: &mut Device,
        outbox: &mpsc::UnboundedSender<FromQueue>,
    ) -> anyhow::Result<()> {
        let retain_bytes = self.retain_for(device.info().queues);
        let durability = self.status.volatile_cache.then_some(&self.durability);
        let plan = plan(&self.link, &self.config, durability, retain_bytes, outbox);
        let started = start_queues(&mut self.queues, device, &plan);
        if self.link.facts().fenced.is_some() {
            // Permanently: no request waits.
            self.queues.fail(Some(Status::Fenced.errno()));
        }
        started
    }

    /// Makes the queues of a mount that has no device, for the program that drives them.
    pub(super) fn give_queues(
        &mut self,
        outbox: &mpsc::UnboundedSender<FromQueue>,
    ) -> anyhow::Result<Vec<TargetParts>> {
        let retain_bytes = self.retain_for(self.link.setup().queues);
        let durability = self.status.volatile_cache.then_some(&self.durability);
        let plan = plan(&self.link, &self.config, durability, retain_bytes, outbox);
        self.queues.give(&plan)
    }

    /// Queues have their data in these memories from now on. They know it already, and have no path
    /// that is made with others.
    pub(super) fn replace_shared(&mut self, regions: Arc<[Arc<Region>]>) {
        self.link.replace_shared(regions, &mut self.queues);
    }

    /// Whether every queue has left.
    pub(super) fn have_queues_stopped(&self) -> bool {
        self.queues.have_stopped()
    }

    /// Memory for retained writes of each of so many queues, which the status tells from now on.
    fn retain_for(&mut self, queues: u16) -> usize {
        let retain_bytes = self.retain_bytes(queues);
        self.status.queues = queues;
        self.status.retain_bytes = wide64(retain_bytes) * u64::from(queues);
        retain_bytes
    }

    /// Gives the queues their first paths.
    pub(super) fn connect_queues(&mut self, paths: Vec<Path>) {
        self.queues.connect((0..).zip(paths).collect());
    }

    /// The disk is there.
    pub(super) fn set_disk(&mut self, path: &FilePath) {
        self.status.device = path.display().to_string();
    }

    /// How the disk is that is there.
    pub(super) fn see_disk(&mut self, device: &Device) {
        self.disk.appeared(device);
    }

    /// Memory for retained writes of each queue; 0 when none are to be kept.
    fn retain_bytes(&self, queues: u16) -> usize {
        let asked = self.config.retain;
        // A write of another host must not be replaced by an older one that is written again.
        if asked.0 == 0 || self.status.read_only || self.config.shared {
            return 0;
        }
        if !self.status.volatile_cache {
            tracing::info!(
                "writes of this volume need not be retained: they are durable at once, or gone with it"
            );
            return 0;
        }
        let share = wide(asked.0 / u64::from(queues.max(1)));
        if share < wide(self.link.setup().wish.io_max_bytes) {
            tracing::warn!(
                retain = %asked,
                queues,
                "longer writes than {share} bytes do not fit a queue's share of retain, and are made durable one by one"
            );
        }
        share
    }

    /// Why a device cannot be handed over to another program now.
    pub(super) fn refuses_hand_over(&self) -> Option<Response> {
        if self.note.hides_loss() {
            return Some(Response::Busy(format!(
                "{}: acknowledged writes may be lost, and the note that says so to the next program cannot be written",
                self.disk()
            )));
        }
        let unflushed = self.durability.unflushed();
        let why = match (self.link.is_connected(), self.durability.holds_copies()) {
            (false, _) => "the target is away, and copies",
            (true, true) => "copies that the target refuses",
            (true, false) => return None,
        };
        let has_only_copies = self.status.retain_bytes > 0 && unflushed > 0;
        has_only_copies.then(|| {
            Response::Busy(format!(
                "{}: {why} of {unflushed} writes that it has not flushed are kept in this process only",
                self.disk()
            ))
        })
    }

    /// Leaves the device to another program. As far as the target allows within its time, nothing
    /// that was sent is unanswered then, and nothing acknowledged is unflushed. The note says how
    /// far that was.
    pub(super) async fn leave(
        &mut self,
        device: Device,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) {
        let detect = self.config.detect.get();
        self.link.abort_tries();
        self.queues.leave(detect);
        let left = self.queues_left(Instant::now() + detect + QUEUE_GRACE, from_queues).await;
        if left {
            self.queues.join();
        } else {
            // The exec ends their threads, and then the driver sees that they are gone.
            tracing::error!(
                device = self.disk(),
                "queue threads do not end; handing over all the same"
            );
        }
        while let Ok(message) = from_queues.try_recv() {
            let _ = self.on_queue(message);
        }
        let flushed = left && self.link.flush(&self.queues, detect).await;
        let maybe_unflushed = self.status.volatile_cache && !flushed;
        // No LOGOUT: the next program resumes the session.
        self.link.end_session(None).await;
        self.note.write_last(self.link.setup(), self.link.facts(), maybe_unflushed);
        if device.holders() > 1 {
            tracing::error!(
                "something still holds the device's node: no other process can serve it"
            );
        }
    }

    /// Waits until every queue thread has left. Returns false if they have not by then.
    async fn queues_left(
        &mut self,
        deadline: Instant,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) -> bool {
        while !self.queues.have_stopped() {
            tokio::select! {
                Some(message) = from_queues.recv() => {
                    if let Err(error) = self.on_queue(message) {
                        tracing::warn!(%error, "on the way out");
                    }
                }
                () = self.link.keep_alive(&mut self.queues) => {}
                () = tokio::time::sleep_until(deadline.into()) => return false,
            }
        }
        true
    }

    /// Takes the device away, and ends the session. What was acknowledged after the last FLUSH is
    /// flushed, as far as the target does that in time: nobody will know of it afterwards.
    ///
    /// # Errors
    /// The driver does not let the device go.
    pub(super) async fn unmount(
        &mut self,
        device: &mut Device,
        force: bool,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) -> anyhow::Result<()> {
        tracing::info!(rblk_event = "unmount", device = self.disk(), force, "unmounting");
        self.link.dismiss_tries();
        if force {
            self.give_up_requests();
        }
        device.own();
        // Blocks this thread, not the queue threads, which answer what is in flight.
        let mut stopped = device.stop(if force { FORCE_DEADLINE } else { STOP_DEADLINE });
        if stopped.is_err() && !force {
            // The target was lost meanwhile.
            self.give_up_requests();
            stopped = device.stop(FORCE_DEADLINE);
        }
        if stopped.is_ok() {
            self.queues.join();
        }
        while let Ok(message) = from_queues.try_recv() {
            // What is left of the paths is destroyed here.
            let _ = self.on_queue(message);
        }
        let within = if force { FORCE_LOGOUT } else { LOGOUT };
        if stopped.is_ok() {
            self.link.flush(&self.queues, within).await;
        }
        self.link.end_session(Some(within)).await;
        stopped.with_context(|| format!("stopping {}", self.disk()))
    }

    /// Ends a mount without a device, whose queues have left: what is left of their paths is
    /// destroyed, what was acknowledged is flushed as far as the target does that in time, and the
    /// target hears that the session is over.
    pub(super) async fn end(&mut self, from_queues: &mut mpsc::UnboundedReceiver<FromQueue>) {
        self.end_within(LOGOUT, from_queues).await;
    }

    /// The same, with less time for the target.
    pub(super) async fn end_by_force(
        &mut self,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) {
        self.end_within(FORCE_LOGOUT, from_queues).await;
    }

    async fn end_within(
        &mut self,
        limit: Duration,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) {
        self.link.dismiss_tries();
        while let Ok(message) = from_queues.try_recv() {
            let _ = self.on_queue(message);
        }
        self.link.flush(&self.queues, limit).await;
        self.link.end_session(Some(limit)).await;
    }

    /// Requests that wait fail, and no answer to a request that was sent is waited for.
    fn give_up_requests(&mut self) {
        if !self.link.is_over() {
            self.fail_requests();
        }
        self.queues.disconnect();
    }
}

/// What the queues are made of.
fn plan<'p>(
    link: &'p Link,
    config: &MountConfig,
    durability: Option<&'p Arc<Durability>>,
    retain_bytes: usize,
    outbox: &'p mpsc::UnboundedSender<FromQueue>,
) -> QueuePlan<'p> {
    QueuePlan {
        setup: link.setup(),
        block_size: link.facts().volume.block_size,
        durability,
        retain_bytes,
        pulse: pulse(config),
        spin: config.spin,
        pin: config.pin_queues,
        outbox,
    }
}

/// The size of the volume.
pub(super) fn size_bytes(facts: &Facts) -> u64 {
    facts.volume.blocks.bytes(facts.volume.block_size).unwrap_or(0)
}

/// The status of a mount, as far as it does not change while the mount is served.
fn status_of(
    config: &MountConfig,
    name: &str,
    setup: &Setup,
    facts: &Facts,
    recovered: u32,
) -> MountStatus {
    let volume = &facts.volume;
    MountStatus {
        name: name.to_owned(),
        volume: config.volume.clone(),
        target: config.target.clone(),
        target_name: facts.target_name.to_string(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        size_bytes: size_bytes(facts),
        block_size: volume.block_size.bytes(),
        read_only: has(facts, VolumeFlags::READ_ONLY),
        volatile_cache: has(facts, VolumeFlags::VOLATILE_CACHE),
        ephemeral: has(facts, VolumeFlags::EPHEMERAL),
        queues: setup.queues,
        queue_depth: setup.wish.depth.get(),
        max_io_bytes: setup.wish.io_max_bytes,
        in_capsule_bytes: setup.wish.in_capsule_bytes,
        on_loss: config.on_loss,
        recovered,
        ..MountStatus::default()
    }
}

#[cfg(test)]
mod tests;
