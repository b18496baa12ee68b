//! [`Mount`]: a mount's parts together: the [link](crate::volume::link) to its target, its queue
//! threads, its note and its status. The device is held apart ([`super::serving`]).

use std::io;
use std::path::Path as FilePath;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rblk_operate::{CpuList, said_once};
use rblk_protocol::VolumeFlags;
use rblk_protocol::auth::PublicKey;
use rblk_runtime::LatencyCounts;
use rblk_runtime::rates::{RateWindow, Rates, Work};
use tokio::sync::mpsc;

use super::device;
use super::device::disk::Disk;
use super::device::queue_settings::usual_requests;
use super::device::queues::start_queues;
use super::device::request_limit::{FILL, RequestLimit};
use super::note::NO_DEVICE;
use super::note::note_keeper::NoteKeeper;
use crate::engine::durability::Durability;
use crate::engine::ways::{PLACES, WayIndex};
use crate::front::ublk::{Control, Device, DeviceToken, LEFT_DEADLINE, LeaveGate};
use crate::front::vhost::GuestLeft;
use crate::queue::FromQueue;
use crate::volume::link::AfterNote;
use crate::volume::setup::credentials_of;
use crate::volume::{FORCE_LOGOUT, LOGOUT, Volume, target_keys};
use rblk_operate::mount::mount_ask::Response;
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::mount::mount_times::MountTimes;
use rblk_operate::mount::path_status::PathWork;
use rblk_operate::mount::queue_counts::QueueCounts;

/// Time to remove the device while the target answers.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Time to remove the device by force. With the steps that follow, clearly less than the 5 s that
/// the command waits.
const FORCE_DEADLINE: Duration = Duration::from_millis(2500);
/// Extra time for a queue thread, after the time for its answers: the queues are filled, and the
/// kernel takes their requests back.
const QUEUE_GRACE: Duration =
    FILL.saturating_add(LEFT_DEADLINE).saturating_add(Duration::from_secs(2));
/// Time to limit the requests of a disk: the running ones end meanwhile.
const LIMIT: Duration = Duration::from_secs(2);

const NOT_LIMITED: &str = "the kernel does not limit the requests of the disk: a request that is on its way while this \
                           process leaves may be lost (a fault of kernels before 6.16)";

const NO_NOTE: &str = "writing the note by which the device could be recovered";

/// A mount without its device.
#[derive(Debug)]
pub(super) struct Mount {
    volume: Volume,
    note: NoteKeeper,
    disk: Disk,
    // The part of the status that does not change while the mount is served. `status` adds the
    // rest.
    status: MountStatus,
    since: Instant,
    rates: RateWindow<(Work, [PathWork; PLACES])>,
}

impl Mount {
    /// A new mount of that name.
    pub(super) fn new(name: &str, volume: Volume) -> Self {
        Self::recovered(name, volume, 0)
    }

    /// A mount that takes over the device of a process that ended. It is the process of that
    /// number.
    pub(super) fn recovered(name: &str, volume: Volume, times: u32) -> Self {
        let status = status_of(&volume, name, times);
        let (config, account) = (volume.config(), volume.durability());
        let note = NoteKeeper::new(name, config, account, volume.has_volatile_cache(), times);
        let (disk, since, rates) = (Disk::default(), Instant::now(), RateWindow::default());
        Self { volume, note, disk, status, since, rates }
    }

    /// The name of the mount.
    pub(super) fn name(&self) -> &str {
        &self.status.name
    }

    /// The path of its disk, once there is one.
    pub(super) fn disk(&self) -> &str {
        &self.status.device
    }

    /// Its volume.
    pub(super) fn volume(&self) -> &Volume {
        &self.volume
    }

    /// Its volume, for the front end that drives the queues.
    pub(super) fn volume_mut(&mut self) -> &mut Volume {
        &mut self.volume
    }

    /// The note.
    pub(super) fn note(&self) -> &NoteKeeper {
        &self.note
    }

    /// Whether the device belonged to another process before.
    pub(super) fn is_recovered(&self) -> bool {
        self.status.recovered > 0
    }

    /// A client asks for rates: starts to measure them.
    pub(super) fn ask_rates(&mut self) {
        if self.rates.ask(Instant::now()) {
            self.take_rates();
        }
    }

    /// The time of the next [`Self::take_rates`].
    pub(super) fn rates_due(&self) -> Option<Instant> {
        self.rates.due()
    }

    /// Takes the counts up to now.
    pub(super) fn take_rates(&mut self) {
        let mut work = Work::default();
        let queues = self.volume.queues();
        for (counts, times) in queues.counts().iter().zip(queues.times()) {
            work.add(&Work {
                reads: times.read.total,
                writes: times.write.total,
                store: LatencyCounts::default(),
                read_bytes: counts.read_bytes,
                written_bytes: counts.written_bytes,
            });
        }
        self.rates.take(Instant::now(), (work, self.work_by_path()));
    }

    /// What was sent by each path of a mount that has several.
    fn work_by_path(&self) -> [PathWork; PLACES] {
        let queues = self.volume.queues();
        let work = |at| WayIndex::new(at).map(|way| queues.sent_by(way)).unwrap_or_default();
        std::array::from_fn(work)
    }

    /// The present status.
    pub(super) fn status(&self) -> MountStatus {
        let (queues, durability) = (self.volume.queues(), self.volume.durability());
        let by_queue = queues.counts();
        let mut total = QueueCounts::default();
        by_queue.iter().for_each(|queue| total.add(queue));
        let latency_by_queue = queues.times();
        let mut latency = MountTimes::default();
        latency_by_queue.iter().for_each(|queue| latency.add(queue));
        let mut status = MountStatus {
            lanes: queues.lanes(),
            digest: queues.digest(),
            unflushed_writes: durability.unflushed(),
            writes_rewritten: durability.writes_rewritten(),
            losses: durability.losses(),
            loss_untold: durability.has_untold_loss(),
            uptime_s: self.since.elapsed().as_secs(),
            total,
            by_queue,
            latency,
            latency_by_queue,
            rates: self.rates.moments().map(|((a, _), (b, _), time)| Rates::between(a, b, time)),
            ..self.status.clone()
        };
        let facts = self.volume.facts();
        status.size_bytes = facts.size_bytes();
        status.disk_size_bytes = self.disk.size_bytes();
        status.read_only = facts.has(VolumeFlags::READ_ONLY);
        status.retain_bytes = self.volume.retain_bytes();
        self.volume.link().report(&mut status);
        let paths = status.paths.iter_mut().zip(self.work_by_path());
        for (at, (path, work)) in paths.enumerate() {
            path.work = work;
            path.rates = self.rates.moments().map(|((_, a), (_, b), t)| b[at].rates(&a[at], t));
        }
        status.with_lost()
    }

    /// Carries out the due acts, and then handles the next event between the mount and its target.
    /// Cancel safe.
    pub(super) async fn attend(&mut self) {
        let Self { volume, disk, .. } = self;
        let after = tokio::select! {
            after = volume.attend() => after,
            () = disk.attend() => None,
        };
        if let Some(after) = after {
            self.note_and_go_on(after);
        }
    }

    /// Writes the note, and lets the volume go on.
    fn note_and_go_on(&mut self, after: AfterNote) {
        let is_noted = self.note.write(self.volume.setup(), self.volume.facts());
        self.volume.go_on(after, is_noted);
    }

    /// Adapts the disk to the volume while the target is connected.
    pub(super) fn follow(&mut self, device: &mut Device) {
        if self.volume.link().is_connected() {
            self.disk.follow(&self.volume.facts().volume, device);
        }
    }

    /// Reads the keys of both ends again: the target's keys from the file of the mount, unless
    /// `keys` names them. After an error all keys stay as they are.
    pub(super) fn reload_keys(&mut self, keys: &[String]) -> Response {
        match self.reread_keys(keys) {
            Ok(text) => Response::Reloaded(text),
            Err(error) => Response::Error(said_once(error.as_ref())),
        }
    }

    fn reread_keys(&mut self, keys: &[String]) -> anyhow::Result<String> {
        let keys = keys.iter().map(|key| key.parse()).collect::<Result<Vec<PublicKey>, _>>()?;
        let file = self.volume.setup().keys_file.as_ref();
        let config = target_keys::reread(self.volume.config(), file, &self.status.name, keys)?;
        let credentials = credentials_of(&config)?;
        let count = config.target_keys.len();
        let config = Arc::new(config);
        self.note.reconfigured(&config);
        self.volume.change_keys(config, credentials);
        // The next process may need the keys.
        self.write_note();
        tracing::info!(target_keys = count, "read the keys again");
        Ok(match count {
            0 => "it has no target_keys, so neither end proves a key".to_owned(),
            1 => "the target may prove 1 key".to_owned(),
            n => format!("the target may prove one of {n} keys"),
        })
    }

    /// Writes the note.
    pub(super) fn write_note(&mut self) {
        self.note.write(self.volume.setup(), self.volume.facts());
    }

    /// Writes the note, if it does not have the present state of the loss. Returns the time of the
    /// next try after a failure.
    pub(super) fn note_loss(&mut self) -> Option<Instant> {
        if self.note.owes_loss() {
            self.write_note();
        }
        self.note.again(Instant::now())
    }

    /// Adds the device. Its disk does not exist yet. The note names the device by its token before
    /// it exists, and by its number afterwards, so there is never a device without a note: without
    /// a note no process could recover it.
    pub(super) fn add_device(&mut self, control: Control) -> anyhow::Result<Device> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| anyhow!("random numbers: {error}"))?;
        let token = DeviceToken::new(u64::from_ne_bytes(random));
        self.note.set_device(NO_DEVICE, token);
        self.note.must_write(self.volume.setup(), self.volume.facts()).context(NO_NOTE)?;
        let (setup, volume) = (self.volume.setup(), &self.volume.facts().volume);
        let id = self.volume.config().device_id;
        let device = device::add(control, setup, volume, id, token)?;
        // The driver makes at most one queue per CPU.
        self.volume.is_registered(device.info().queues)?;
        self.note.set_device(device.info().id, token);
        self.note.must_write(self.volume.setup(), self.volume.facts()).context(NO_NOTE)?;
        Ok(device)
    }

    /// Takes over the account of the process that served the guest before. Call it before there are
    /// queues.
    pub(super) fn inherit(&mut self, account: &Arc<Durability>) {
        self.volume.inherit(account);
        self.note.inherit(account);
        self.status.on_loss = account.on_loss();
    }

    /// Sets the guest at that socket, and writes the first note.
    ///
    /// # Errors
    /// The note cannot be written.
    pub(super) fn set_guest(&mut self, socket: &FilePath, left: &GuestLeft) -> io::Result<()> {
        self.note.set_guest(socket, self.volume.setup().queues, left);
        self.note.must_write(self.volume.setup(), self.volume.facts())
    }

    /// Writes the last note of a guest's mount, with the final state of its rings.
    pub(super) fn leave_guest(&mut self, left: GuestLeft) {
        if let Err(error) = self.note.write_last_of_guest(self.volume.facts(), left) {
            tracing::error!(%error, "the note of the guest stays as it was: the next process may tell more than is true");
        }
    }

    /// Takes over a device with a note.
    pub(super) fn adopt_device(&mut self, id: u32, token: DeviceToken) {
        self.note.set_device(id, token);
    }

    /// Starts the queues of the device.
    pub(super) fn start_queues(
        &mut self,
        device: &mut Device,
        outbox: &mpsc::UnboundedSender<FromQueue>,
    ) -> anyhow::Result<()> {
        let count = device.info().queues;
        self.status.queues = count;
        self.volume.make_queues(count, outbox, |queues, plan| start_queues(queues, device, plan))
    }

    /// Sets the path of the disk.
    pub(super) fn set_disk(&mut self, path: &FilePath) {
        self.status.device = path.display().to_string();
    }

    /// Records the disk's size and mode.
    pub(super) fn see_disk(&mut self, device: &Device) {
        self.disk.appeared(device);
    }

    /// The reason why the device cannot be handed over now.
    pub(super) fn refuses_hand_over(&self) -> Option<Response> {
        if self.note.hides_loss() {
            return Some(Response::Busy(format!(
                "{}: acknowledged writes may be lost, and the note that says so to the next program cannot be written",
                self.disk()
            )));
        }
        let durability = self.volume.durability();
        let unflushed = durability.unflushed();
        let why = match (self.volume.link().is_connected(), durability.holds_copies()) {
            (false, _) => "the target is away, and copies",
            (true, true) => "copies that the target refuses",
            (true, false) => return None,
        };
        let has_only_copies = self.volume.retain_bytes() > 0 && unflushed > 0;
        has_only_copies.then(|| {
            Response::Busy(format!(
                "{}: {why} of {unflushed} writes that it has not flushed are kept in this process only",
                self.disk()
            ))
        })
    }

    /// Leaves the device to another program. As far as the target allows within its time, every
    /// sent request is answered then, and every acknowledged write is flushed. The note records the
    /// rest.
    pub(super) async fn leave(
        &mut self,
        mut device: Device,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) {
        let detect = self.volume.config().detect.get();
        let mut limit = self.limit_disk(&mut device, from_queues).await;
        self.volume.leave(detect);
        let deadline = Instant::now() + detect + QUEUE_GRACE;
        let left = self.queues_left(deadline, limit.as_mut(), from_queues).await;
        drop(limit);
        if left {
            self.volume.join_queues();
        } else {
            // The exec ends their threads; the driver notices it then.
            tracing::error!(
                device = self.disk(),
                "queue threads do not end; handing over all the same"
            );
        }
        self.volume.take_last_words(from_queues);
        let flushed = left && self.volume.flush(detect).await;
        let maybe_unflushed = self.volume.has_volatile_cache() && !flushed;
        // No LOGOUT: the next program resumes the session.
        self.volume.end_session(None).await;
        self.note.write_last(self.volume.setup(), self.volume.facts(), maybe_unflushed);
        if device.holders() > 1 {
            tracing::error!(
                "something still holds the device's node: no other process can serve it"
            );
        }
    }

    /// Limits the requests of the disk, and closes the gate of the device, if it has one. The
    /// queues answer requests meanwhile.
    async fn limit_disk(
        &mut self,
        device: &mut Device,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) -> Option<RequestLimit> {
        let gate = Arc::clone(device.gate()?);
        let limited = match self.limit_of(device, gate) {
            Some(limit) => {
                let limit = tokio::time::timeout(LIMIT, limit);
                tokio::pin!(limit);
                loop {
                    tokio::select! {
                        limited = &mut limit => break limited.unwrap_or_else(|e| Err(e.into())),
                        () = self.attend_on_the_way_out(from_queues) => {}
                    }
                }
            }
            None => Err(io::ErrorKind::Unsupported.into()),
        };
        if let Err(error) = &limited {
            tracing::warn!(device = self.disk(), %error, "{NOT_LIMITED}");
        }
        limited.ok()
    }

    /// The beginning of the limit of a disk. `None`: it is of no use. Without a tag to spare, the
    /// driver would not see the end of this process at once. While the target is away, the requests
    /// that wait for it would keep the limit waiting, or they all fail.
    fn limit_of(
        &self,
        device: &mut Device,
        gate: Arc<LeaveGate>,
    ) -> Option<impl Future<Output = io::Result<RequestLimit>> + use<>> {
        let usual = usual_requests(device)?;
        let cpus_of = |queue| {
            let cpus = device.queue_cpus(queue).ok()?;
            Some(cpus.into_iter().filter_map(|cpu| u16::try_from(cpu).ok()).collect())
        };
        let cpus = (0..gate.queues()).map(cpus_of).collect::<Option<Vec<CpuList>>>()?;
        self.volume.link().is_connected().then(|| RequestLimit::begin(gate, usual, cpus))
    }

    /// Attends to the queues and the session of a mount that is handed over. Cancel safe.
    async fn attend_on_the_way_out(
        &mut self,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) {
        tokio::select! {
            Some(message) = from_queues.recv() => {
                if let Err(error) = self.volume.on_queue(message) {
                    tracing::warn!(%error, "on the way out");
                }
            }
            () = self.volume.keep_alive() => {}
        }
    }

    /// Waits until every queue thread has left, and fills the queues of a limited disk. Returns
    /// false at the deadline.
    async fn queues_left(
        &mut self,
        deadline: Instant,
        limit: Option<&mut RequestLimit>,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) -> bool {
        let mut fills = limit.is_some();
        let filling = async {
            if let Some(limit) = limit
                && let Err(error) = limit.fill().await
            {
                tracing::warn!(%error, "handing the disk over");
            }
        };
        tokio::pin!(filling);
        while !self.volume.queues().have_stopped() {
            tokio::select! {
                () = self.attend_on_the_way_out(from_queues) => {}
                () = &mut filling, if fills => fills = false,
                () = tokio::time::sleep_until(deadline.into()) => return false,
            }
        }
        true
    }

    /// Removes the device, and ends the session. Flushes the acknowledged writes, if the target
    /// does so in time: afterwards no process has an account of them.
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
        self.volume.dismiss_tries();
        if force {
            self.volume.give_up_requests();
        }
        device.own();
        // This thread blocks. The queue threads do not: they answer the requests in flight.
        let mut stopped = device.stop(if force { FORCE_DEADLINE } else { STOP_DEADLINE });
        if stopped.is_err() && !force {
            // The target was lost meanwhile.
            self.volume.give_up_requests();
            stopped = device.stop(FORCE_DEADLINE);
        }
        if stopped.is_ok() {
            self.volume.join_queues();
        }
        self.volume.take_last_words(from_queues);
        let within = if force { FORCE_LOGOUT } else { LOGOUT };
        if stopped.is_ok() {
            self.volume.flush(within).await;
        }
        self.volume.end_session(Some(within)).await;
        stopped.with_context(|| format!("stopping {}", self.disk()))
    }
}

/// The part of the status that does not change while the mount is served.
fn status_of(volume: &Volume, name: &str, recovered: u32) -> MountStatus {
    let (config, setup, facts) = (volume.config(), volume.setup(), volume.facts());
    MountStatus {
        name: name.to_owned(),
        volume: config.volume.clone(),
        target: config.target.clone(),
        target_name: facts.target_name.to_string(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        size_bytes: facts.size_bytes(),
        block_size: facts.volume.block_size.bytes(),
        read_only: facts.has(VolumeFlags::READ_ONLY),
        volatile_cache: volume.has_volatile_cache(),
        ephemeral: facts.has(VolumeFlags::EPHEMERAL),
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
