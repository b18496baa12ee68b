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

mod begin;
mod device;
mod reconnect;
pub mod remains;
pub mod settle;
pub mod socket;
pub mod status;
mod unmount;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_config::MountConfig;
use rblk_fabric::{Address, ConnectOptions, Region};
use rblk_protocol::{
    AccessMode, AsyncEvent, Epoch, Features, InstanceId, Name, OpenReply, SessionId,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::admin::Pulse;
use crate::durability::Durability;
use crate::engine::{PathEnd, QueueCounts};
use crate::error::SessionError;
use crate::queue::{FromQueue, QueueHandle, ToQueue};
use crate::session::{HostIdentity, QueueWish, Session};
use crate::ublk::Control;
use reconnect::{Again, Try, VolumeChanged};
use remains::{Remains, sweep};
use settle::Account;
use socket::{Ask, Asked, MountSocket, Response};
use status::MountStatus;

const EIO: i32 = 5;
/// Longest pause between two tries to connect again.
const BACKOFF_MAX: Duration = Duration::from_secs(10);
/// A session that lived this long was a good one.
const LASTING: Duration = Duration::from_secs(2);
/// How often a lost session is looked after.
const TICK: Duration = Duration::from_millis(50);

/// A mount of that name is there already.
#[derive(Debug, thiserror::Error)]
#[error("`{name}` is mounted already; see `rblk-initiator list`, or give another --name")]
pub struct AlreadyMounted {
    /// The name.
    pub name: String,
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
