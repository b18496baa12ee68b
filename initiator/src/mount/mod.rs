//! [`run`]: a mount from the first connect to the last goodbye. One task owns the session, the device and the
//! mail to the queue threads.
//!
//! Order of the start: socket (so that a second mount of the name sees the first), session, volume, buffers,
//! I/O connections, ublk device, queue threads, START_DEV, ready. What fails before that leaves nothing.
//!
//! Losing the target is a stall: requests wait in their queues while the session is connected again in a
//! higher epoch; the target admits it when nothing of the old epoch is left, and everything unanswered is
//! sent again. Only `--fail-after` turns a stall into errors, and they end when the target is back.
//!
//! A volume that comes back with another write verifier may have lost acknowledged writes that no FLUSH covered:
//! before the queues go on, they are written again (`retain`), or it is arranged that the next FLUSH fails.

mod device;
mod reconnect;
pub mod settle;
pub mod socket;
pub mod status;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_config::MountConfig;
use rblk_fabric::{Address, ConnectOptions, PageKind, Region};
use rblk_protocol::{
    AccessMode, AsyncEvent, Epoch, Features, InstanceId, Name, OpenReply, QueueDepth, SessionId,
    VolumeFlags, limits,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::admin::Pulse;
use crate::durability::{Durability, Ledger};
use crate::engine::{PathEnd, QueueCounts};
use crate::error::SessionError;
use crate::path::Path;
use crate::queue::{FromQueue, QueueHandle, QueueParts, ToQueue};
use crate::retain::RetainRing;
use crate::session::{HostIdentity, QueueWish, Session};
use crate::ublk::{Buffers, Control, Device, DeviceState, UblkError};
use reconnect::{Again, Try, VolumeChanged};
use settle::Account;
use socket::{Ask, Asked, MountSocket, Remains, Response};
use status::MountStatus;

const EIO: i32 = 5;
/// Longest pause between two tries to connect again.
const BACKOFF_MAX: Duration = Duration::from_secs(10);
/// A session that lived this long was a good one.
const LASTING: Duration = Duration::from_secs(2);
/// How often a lost session is looked after.
const TICK: Duration = Duration::from_millis(50);
/// Time for START_DEV, which reads the partition table through us.
const START_DEADLINE: Duration = Duration::from_secs(30);
/// Time for the device to go away when the target answers.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Time for the device to go away by force. With what follows it, clearly less than the 5 s that whoever asked waits.
const FORCE_DEADLINE: Duration = Duration::from_millis(2500);
/// Time for the target to hear of an unmount by force.
const FORCE_LOGOUT: Duration = Duration::from_millis(250);

/// A mount of that name is there already.
#[derive(Debug, thiserror::Error)]
#[error("`{name}` is mounted already; see `rblk-initiator list`, or give another --name")]
pub struct AlreadyMounted {
    /// The name.
    pub name: String,
}

/// Removes what a mount of that name left when its process died: its ublk device and its note. Returns
/// whether there was anything.
///
/// # Errors
/// The device cannot be removed.
pub fn sweep(control: &mut Control, name: &str) -> Result<bool, UblkError> {
    let Some(remains) = Remains::read(name) else { return Ok(false) };
    match control.info(remains.device_id) {
        // Another server's device has the number by now.
        Ok(info) if info.server_pid.is_some_and(|pid| i64::from(pid) != i64::from(remains.pid)) => {
        }
        Ok(info) => {
            if info.state == DeviceState::Live {
                control.stop(info.id, STOP_DEADLINE)?;
            }
            control.delete(info.id, STOP_DEADLINE)?;
            tracing::info!(device = info.id, "removed the device of a dead mount");
        }
        Err(UblkError::NoSuchDevice { .. }) => {}
        Err(error) => return Err(error),
    }
    Remains::remove(name);
    Ok(true)
}

/// Told when the device is there.
pub type OnReady<'r> = &'r mut dyn FnMut(&MountStatus);

struct Mount {
    config: MountConfig,
    name: String,
    volume_name: Name,
    addresses: Vec<Address>,
    host: HostIdentity,
    features: Features,
    wish: QueueWish,
    volume: OpenReply,
    session: Option<Session>,
    resume: Option<(SessionId, Epoch)>,
    instance: InstanceId,
    durability: Arc<Durability>,
    queues: Vec<QueueHandle>,
    buffers: Vec<Arc<Region>>,
    status: MountStatus,
    since: Instant,
    lost_at: Option<Instant>,
    connected_at: Instant,
    failing: bool,
    changed: bool,
    attempt: u32,
    stopped: usize,
    // The try to connect again that is under way.
    again: Option<JoinHandle<anyhow::Result<Again>>>,
    // When to try next.
    retry_at: Option<tokio::time::Instant>,
}

/// Mounts and serves until unmounted.
///
/// # Errors
/// Anything that keeps the volume from being mounted, or a queue that broke.
pub async fn run(
    config: &MountConfig,
    name: &str,
    host: HostIdentity,
    on_ready: OnReady<'_>,
) -> anyhow::Result<()> {
    let Some(socket) = MountSocket::bind(name)
        .await
        .with_context(|| format!("the mount's socket in {}", socket::RUN_DIR))?
    else {
        return Err(AlreadyMounted { name: name.to_owned() }.into());
    };
    // Looked for before anything is asked of the target.
    let mut control = Control::open()?;
    sweep(&mut control, name)?;
    let (outbox, mut from_queues) = mpsc::unbounded_channel();
    let (mut mount, paths) = Mount::connect_first(config, name, host).await?;
    let mut device = mount.build_device(control, paths, &outbox).await?;
    let remains = Remains { pid: std::process::id(), device_id: device.info().id };
    let noted = remains.write(name).context("noting the device")?;
    tracing::info!(
        device = mount.status.device,
        volume = mount.status.volume,
        address = mount.status.address,
        "mounted"
    );
    on_ready(&mount.status());
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);

    let (asked_sender, mut asked) = mpsc::channel(16);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let serving = socket.serve(asked_sender);
    tokio::pin!(serving);
    let pulse = pulse(config);
    let mut tick = tokio::time::interval(TICK);
    let mut pending: Option<Asked> = None;
    loop {
        let unmount = tokio::select! {
            () = &mut serving => false,
            Some(message) = from_queues.recv() => {
                mount.on_queue(message)?;
                false
            }
            event = next_event(&mut mount.session, pulse) => {
                mount.on_event(event);
                false
            }
            result = next_try(&mut mount.again) => {
                mount.on_try(result);
                false
            }
            _ = tick.tick(), if mount.session.is_none() => {
                mount.on_tick();
                false
            }
            Some(request) = asked.recv() => {
                match request.ask {
                    Ask::Status => {
                        let _ = request.reply.send(Response::Status(Box::new(mount.status())));
                        false
                    }
                    Ask::Unmount { force } => match mount.may_unmount(force) {
                        Ok(()) => {
                            pending = Some(request);
                            true
                        }
                        Err(response) => {
                            let _ = request.reply.send(response);
                            false
                        }
                    },
                }
            }
            _ = terminate.recv() => true,
            _ = interrupt.recv() => true,
        };
        if mount.stopped > 0 && !unmount {
            anyhow::bail!(
                "a queue of {} stopped: was the device removed by someone else?",
                mount.status.device
            );
        }
        if unmount {
            let force = matches!(pending, Some(Asked { ask: Ask::Unmount { force: true }, .. }));
            let force = force || mount.session.is_none();
            let result = mount.unmount(&mut device, force, &mut from_queues).await;
            let response = match &result {
                Ok(()) => {
                    // Before the answer goes out, so that a mount right after finds the name free.
                    drop(device);
                    drop(noted);
                    socket.unlink();
                    Response::Done
                }
                // The driver is stuck. The device goes with this process, later than whoever asked waits.
                Err(error) => Response::Error(format!("{error:#}")),
            };
            if let Some(pending) = pending {
                let _ = pending.reply.send(response);
                // Let the answer out before the process ends.
                let _ = tokio::time::timeout(Duration::from_millis(200), &mut serving).await;
            }
            return result;
        }
    }
}

async fn next_event(
    session: &mut Option<Session>,
    pulse: Pulse,
) -> Result<Option<AsyncEvent>, SessionError> {
    match session {
        Some(session) => session.admin.event(pulse).await,
        None => std::future::pending().await,
    }
}

async fn next_try(again: &mut Option<JoinHandle<anyhow::Result<Again>>>) -> anyhow::Result<Again> {
    match again {
        Some(task) => {
            let result = task.await;
            *again = None;
            result?
        }
        None => std::future::pending().await,
    }
}

impl Mount {
    async fn connect_first(
        config: &MountConfig,
        name: &str,
        host: HostIdentity,
    ) -> anyhow::Result<(Self, Vec<Path>)> {
        let addresses =
            config.target.iter().map(|t| t.parse()).collect::<Result<Vec<Address>, _>>()?;
        let volume_name = Name::new(&config.volume)?;
        let mut session = connect_any(&addresses, config, &host).await?;
        match Self::open_first(config, name, host, addresses, volume_name, &mut session).await {
            Ok((mut mount, paths)) => {
                mount.session = Some(session);
                Ok((mount, paths))
            }
            Err(error) => {
                // Else the target keeps it for the lease.
                session.logout(Duration::from_secs(1)).await;
                Err(error)
            }
        }
    }

    async fn open_first(
        config: &MountConfig,
        name: &str,
        host: HostIdentity,
        addresses: Vec<Address>,
        volume_name: Name,
        session: &mut Session,
    ) -> anyhow::Result<(Self, Vec<Path>)> {
        let volume = session.open(&volume_name, access_mode(config)).await?;
        let queues = config
            .queues
            .unwrap_or_else(|| {
                let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
                u16::try_from(cpus.min(4)).unwrap_or(1)
            })
            .min(session.queues_max);
        let io_max_bytes = u32::try_from(config.max_io.0).context("max_io")?;
        let depth = QueueDepth::new(config.queue_depth).context("queue_depth")?;
        let mut wish = QueueWish {
            depth,
            io_max_bytes,
            in_capsule_bytes: limits::IN_CAPSULE_MAX_BYTES,
            features: Features::WRITE_WITH_IMM,
        };
        let mut buffers = Vec::new();
        let mut paths = Vec::new();
        for queue in 0..queues {
            let bytes = usize::from(wish.depth.get()) * wish.io_max_bytes as usize;
            let region = Region::allocate(bytes, PageKind::Normal)?;
            let path = session.connect_queue(queue, wish, volume.handle, &region).await?;
            if queue == 0
                && (path.accept.depth != wish.depth
                    || path.accept.io_max_bytes != wish.io_max_bytes)
            {
                // The target gives less: what it gives is what every queue asks for, now and later.
                tracing::info!(
                    depth = path.accept.depth.get(),
                    io_max_bytes = path.accept.io_max_bytes,
                    "the target grants less than was asked"
                );
                wish.depth = path.accept.depth;
                wish.io_max_bytes = path.accept.io_max_bytes;
            }
            buffers.push(region);
            paths.push(path);
        }
        wish.in_capsule_bytes = paths[0].accept.in_capsule_bytes;
        let caps = session.device().caps();
        let size_bytes = volume.blocks.bytes(volume.block_size).unwrap_or(0);
        let status = MountStatus {
            name: name.to_owned(),
            device: String::new(),
            volume: config.volume.clone(),
            target: config.target.clone(),
            address: session.address.to_string(),
            target_name: session.target_name.to_string(),
            rdma_device: caps.name.clone(),
            transport: caps.transport.to_string(),
            state: String::new(),
            last_loss: None,
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: 0,
            size_bytes,
            block_size: volume.block_size.bytes(),
            read_only: volume.flags.has(VolumeFlags::READ_ONLY),
            volatile_cache: volume.flags.has(VolumeFlags::VOLATILE_CACHE),
            queues,
            queue_depth: wish.depth.get(),
            max_io_bytes: wish.io_max_bytes,
            in_capsule_bytes: wish.in_capsule_bytes,
            write_with_imm: paths[0].accept.features.has(Features::WRITE_WITH_IMM),
            retain_bytes: 0,
            unflushed_writes: 0,
            verifier_changes: 0,
            writes_rewritten: 0,
            losses: 0,
            loss_untold: false,
            epoch: session.epoch.0,
            total: QueueCounts::default(),
            by_queue: Vec::new(),
        };
        let mount = Self {
            config: config.clone(),
            name: name.to_owned(),
            volume_name,
            addresses,
            host,
            features: wish.features,
            wish,
            volume,
            resume: Some((session.id, session.epoch)),
            instance: session.instance,
            durability: Durability::new(),
            session: None,
            connected_at: Instant::now(),
            queues: Vec::new(),
            buffers,
            status,
            since: Instant::now(),
            lost_at: None,
            failing: false,
            changed: false,
            attempt: 0,
            stopped: 0,
            again: None,
            retry_at: None,
        };
        Ok((mount, paths))
    }

    async fn build_device(
        &mut self,
        control: Control,
        paths: Vec<Path>,
        outbox: &mpsc::UnboundedSender<FromQueue>,
    ) -> anyhow::Result<Device> {
        let queues = u16::try_from(paths.len()).context("queues")?;
        let device = device::add(control, &self.config, &self.volume, queues, &self.wish)?;
        self.status.queues = device.info().queues;
        let retain_bytes = self.retain_bytes(device.info().queues);
        self.status.retain_bytes = retain_bytes as u64 * u64::from(device.info().queues);
        for (queue, path) in (0u16..).zip(paths) {
            // The driver may have cut the number of queues to that of the CPUs; their paths just end.
            let Some(config) = device.queue_config(queue) else { continue };
            let region = Arc::clone(&self.buffers[usize::from(queue)]);
            let buffers =
                Buffers::new(region, 0, self.wish.io_max_bytes as usize, self.wish.depth.get())?;
            let parts = QueueParts {
                config,
                buffers,
                block_size: self.volume.block_size,
                ledger: self.ledger(retain_bytes),
                spin: self.config.spin.get(),
                outbox: outbox.clone(),
            };
            let handle = crate::queue::start(parts)?;
            send(&handle, ToQueue::Connect(Box::new(path)));
            self.queues.push(handle);
        }
        // START_DEV waits for the queue threads, and on older kernels reads the disk: not on this thread.
        let (device, started) = tokio::task::spawn_blocking(move || {
            let mut device = device;
            let started = device.start(START_DEADLINE);
            (device, started)
        })
        .await?;
        self.status.device = started?.display().to_string();
        Ok(device)
    }

    /// Memory for retained writes of each queue; 0 when none are to be kept.
    fn retain_bytes(&self, queues: u16) -> usize {
        let asked = self.config.retain;
        if asked.0 == 0 || self.status.read_only {
            return 0;
        }
        if !self.status.volatile_cache {
            tracing::info!(
                "writes of this volume need not be retained: they are durable at once, or gone with it"
            );
            return 0;
        }
        let share = asked.0 / u64::from(queues.max(1));
        let share = usize::try_from(share).unwrap_or(usize::MAX);
        if share < self.wish.io_max_bytes as usize {
            tracing::warn!(
                retain = %asked,
                queues,
                "longer writes than {share} bytes do not fit a queue's share of retain, and are made durable one by one"
            );
        }
        share
    }

    /// A queue's account of what is durable. Without a volatile cache everything is that is acknowledged.
    fn ledger(&self, retain_bytes: usize) -> Option<Ledger> {
        if !self.status.volatile_cache {
            return None;
        }
        let ring = (retain_bytes > 0).then(|| RetainRing::for_queue(retain_bytes, self.wish.depth));
        Some(Ledger::new(Arc::clone(&self.durability), self.wish.depth, ring))
    }

    fn status(&self) -> MountStatus {
        let by_queue: Vec<QueueCounts> = self.queues.iter().map(|q| q.stats.snapshot()).collect();
        let mut total = QueueCounts::default();
        by_queue.iter().for_each(|queue| total.add(queue));
        let state = match (&self.session, self.changed, self.failing) {
            (_, true, _) => "volume lost",
            (Some(_), ..) => "connected",
            (None, _, true) => "failing",
            (None, ..) => "reconnecting",
        };
        MountStatus {
            state: state.to_owned(),
            unflushed_writes: self.durability.unflushed(),
            writes_rewritten: self.durability.writes_rewritten(),
            losses: self.durability.losses(),
            loss_untold: self.durability.has_untold_loss(),
            uptime_s: self.since.elapsed().as_secs(),
            total,
            by_queue,
            ..self.status.clone()
        }
    }

    fn on_queue(&mut self, message: FromQueue) -> anyhow::Result<()> {
        match message {
            FromQueue::PathEnded { queue, end, dead } => {
                // Destroying QP, CQ and MRs may block shortly.
                drop(dead);
                match end {
                    PathEnd::Dropped => {}
                    PathEnd::SelfTest if self.features.has(Features::WRITE_WITH_IMM) => {
                        tracing::warn!(
                            queue,
                            "WRITE_WITH_IMM does not work on this path; going on without"
                        );
                        self.features = self.features.without(Features::WRITE_WITH_IMM);
                        self.wish.features = self.features;
                        self.status.write_with_imm = false;
                        self.lose("the self-test failed");
                    }
                    end => self.lose(&format!("queue {queue}: {end:?}")),
                }
                Ok(())
            }
            FromQueue::Stopped { queue, error } => {
                self.stopped += 1;
                match error {
                    Some(error) => Err(anyhow::anyhow!("queue {queue} broke: {error}")),
                    None => Ok(()),
                }
            }
        }
    }

    fn on_event(&mut self, event: Result<Option<AsyncEvent>, SessionError>) {
        match event {
            // Leaving lets it stop at once; what is unanswered is sent again when it is back.
            Ok(Some(AsyncEvent::Draining)) => self.lose("the target drains"),
            Ok(event) => tracing::debug!(?event, "event of the target"),
            Err(error) => self.lose(&error.to_string()),
        }
    }

    /// The session is lost: every queue keeps its requests, and control connects again.
    fn lose(&mut self, why: &str) {
        let Some(session) = self.session.take() else { return };
        tracing::warn!(why, address = %session.address, "lost the target; requests wait");
        self.status.last_loss = Some(why.to_owned());
        self.lost_at.get_or_insert_with(Instant::now);
        // A session that does not last is not tried again in a hurry.
        let pause = if self.connected_at.elapsed() > LASTING {
            self.attempt = 0;
            Duration::ZERO
        } else {
            self.backoff()
        };
        self.retry_at = Some(tokio::time::Instant::now() + pause);
        session.admin.close();
        for queue in &self.queues {
            send(queue, ToQueue::Disconnect);
        }
    }

    /// Pause before the next try: the configured one, doubled with every failure, with jitter so that the
    /// initiators of a restarted target do not come all at once.
    fn backoff(&self) -> Duration {
        let doublings = self.attempt.saturating_sub(1).min(4);
        let base =
            self.config.reconnect_delay.get().saturating_mul(1 << doublings).min(BACKOFF_MAX);
        let mut random = [0; 2];
        let _ = getrandom::fill(&mut random);
        base.mul_f64(0.5 + f64::from(u16::from_ne_bytes(random)) / f64::from(u16::MAX))
    }

    fn check_fail_after(&mut self) {
        let Some(limit) = self.config.fail_after else { return };
        let late = self.lost_at.is_some_and(|at| at.elapsed() >= limit.get());
        if late && !self.failing && self.session.is_none() {
            tracing::error!(after = %limit, "the target is gone for too long: requests fail until it is back");
            self.failing = true;
            self.fail_all(Some(EIO));
        }
    }

    fn fail_all(&self, errno: Option<i32>) {
        for queue in &self.queues {
            send(queue, ToQueue::Fail(errno));
        }
    }

    /// While there is no session: starts the next try when it is due.
    fn on_tick(&mut self) {
        self.check_fail_after();
        let due = self.retry_at.is_some_and(|at| tokio::time::Instant::now() >= at);
        if self.again.is_some() || !due {
            return;
        }
        let address = self.addresses[self.attempt as usize % self.addresses.len()].clone();
        self.attempt = self.attempt.saturating_add(1);
        // A try that fails half way has used its epoch up.
        self.resume = self.resume.and_then(|(id, epoch)| epoch.next().map(|next| (id, next)));
        let attempt = Try {
            address,
            options: options(&self.config),
            host: self.host,
            resume: self.resume,
            volume_name: self.volume_name,
            mode: access_mode(&self.config),
            wish: self.wish,
            buffers: self.buffers[..self.queues.len()].to_vec(),
            volume: self.volume,
            instance: self.instance,
            account: Account {
                durability: Arc::clone(&self.durability),
                queues: self.queues.iter().map(|q| q.mail.clone()).collect(),
                wish: self.wish,
                pulse: pulse(&self.config),
            },
        };
        self.again = Some(tokio::spawn(attempt.run()));
    }

    fn on_try(&mut self, result: anyhow::Result<Again>) {
        match result {
            Ok(Again { session, volume, paths }) => {
                self.resume = Some((session.id, session.epoch));
                self.instance = session.instance;
                self.volume.handle = volume.handle;
                if volume.verifier != self.volume.verifier {
                    self.status.verifier_changes += 1;
                    self.volume.verifier = volume.verifier;
                }
                self.status.epoch = session.epoch.0;
                self.status.address = session.address.to_string();
                self.session = Some(session);
                self.connected_at = Instant::now();
                self.retry_at = None;
                for (queue, path) in self.queues.iter().zip(paths) {
                    send(queue, ToQueue::Connect(Box::new(path)));
                }
                if self.failing {
                    self.failing = false;
                    self.fail_all(None);
                }
                let stalled = self.lost_at.take().map(|at| at.elapsed());
                tracing::info!(?stalled, epoch = self.status.epoch, "connected again");
            }
            Err(error) if error.is::<VolumeChanged>() => {
                tracing::error!("{error}");
                self.status.last_loss = Some(error.to_string());
                self.changed = true;
                self.retry_at = None;
                self.fail_all(Some(EIO));
            }
            Err(error) => {
                let text = format!("{error:#}");
                tracing::warn!(attempt = self.attempt, error = text, "cannot connect again yet");
                self.status.last_loss = Some(text);
                let gone =
                    error.downcast_ref::<SessionError>().is_some_and(SessionError::is_session_gone);
                if gone && self.resume.is_some() {
                    // The target restarted, or gave the session up: a new one, at once.
                    self.resume = None;
                    self.retry_at = Some(tokio::time::Instant::now());
                } else {
                    self.retry_at = Some(tokio::time::Instant::now() + self.backoff());
                }
            }
        }
    }

    fn may_unmount(&self, force: bool) -> Result<(), Response> {
        if force {
            return Ok(());
        }
        if let Some(holder) = device::holder(&self.status.device) {
            return Err(Response::Busy(format!("{} is in use: {holder}", self.status.device)));
        }
        if self.session.is_none() {
            return Err(Response::Busy(format!(
                "{}: the target is not connected, and requests may wait for it; --force fails them",
                self.status.device
            )));
        }
        Ok(())
    }

    async fn unmount(
        &mut self,
        device: &mut Device,
        force: bool,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) -> anyhow::Result<()> {
        tracing::info!(device = self.status.device, force, "unmounting");
        if let Some(task) = self.again.take() {
            task.abort();
        }
        if force {
            // Whatever waits, waits no longer; whatever was sent is not waited for.
            self.fail_all(Some(EIO));
            for queue in &self.queues {
                send(queue, ToQueue::Disconnect);
            }
        }
        let deadline = if force { FORCE_DEADLINE } else { STOP_DEADLINE };
        if !force {
            // What the page cache holds goes with the disk.
            let path = self.status.device.clone();
            let synced = tokio::task::spawn_blocking(move || {
                std::fs::OpenOptions::new().write(true).open(path).and_then(|disk| disk.sync_all())
            });
            match synced.await? {
                Err(error) if !self.status.read_only => {
                    return Err(error).context("writing back the page cache");
                }
                _ => {}
            }
        }
        // Blocks this thread, not the queue threads, which answer what is in flight.
        let stopped = device.stop(deadline);
        for queue in &mut self.queues {
            if stopped.is_ok() {
                queue.join();
            }
        }
        while let Ok(message) = from_queues.try_recv() {
            // What is left of the paths is destroyed here.
            let _ = self.on_queue(message);
        }
        if let Some(session) = self.session.take() {
            session.logout(if force { FORCE_LOGOUT } else { Duration::from_secs(2) }).await;
        }
        stopped.with_context(|| format!("stopping {}", self.status.device))
    }
}

fn send(queue: &QueueHandle, message: ToQueue) {
    if queue.mail.send(message).is_err() {
        // It left, and says so elsewhere.
        tracing::debug!("a queue thread takes no mail");
    }
}

fn access_mode(config: &MountConfig) -> AccessMode {
    if config.read_only { AccessMode::ReadOnly } else { AccessMode::Exclusive }
}

fn options(config: &MountConfig) -> ConnectOptions {
    ConnectOptions {
        timeout: config.connect_timeout.get(),
        bind: None,
        detect: config.detect.get(),
    }
}

fn pulse(config: &MountConfig) -> Pulse {
    Pulse { period: config.detect.get() / 2, timeout: config.detect.get() }
}

/// The first address that answers; each is tried once.
async fn connect_any(
    addresses: &[Address],
    config: &MountConfig,
    host: &HostIdentity,
) -> Result<Session, SessionError> {
    let mut last = None;
    for address in addresses {
        match Session::begin(address, &options(config), host).await {
            Ok(session) => return Ok(session),
            Err(error) => {
                tracing::debug!(%address, %error, "no session");
                last = Some(error);
            }
        }
    }
    Err(last.unwrap_or(SessionError::Protocol("no address")))
}

impl std::fmt::Debug for Mount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mount").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A mount needs root.
#[derive(Debug, thiserror::Error)]
#[error("mounting needs root: the ublk driver is root's. Run it with sudo")]
pub struct NotRoot;

/// No such mount.
#[derive(Debug, thiserror::Error)]
#[error("`{what}` is not mounted; see `rblk-initiator list`")]
pub struct NotMounted {
    /// Name or device.
    pub what: String,
}
