//! [`run`]: a mount from the first connect to the last goodbye. One task owns the session, the
//! device and the mail to the queue threads.
//!
//! Order of the start: lock of the name, what a dead mount of that name left (a disk that waits is
//! gone on with), socket, session, volume, buffers, I/O connections, note, ublk device, queue
//! threads, START_DEV, ready. What fails before that leaves nothing. After it only an unmount takes
//! the device away: whatever else ends this process leaves it to the next ([`recover`]).
//!
//! Losing the target is a stall: requests wait in their queues while the session is connected again
//! in a higher epoch; the target admits it when nothing of the old epoch is left, and everything
//! unanswered is sent again. Only `--fail-after` turns a stall into errors, and they end when the
//! target is back.
//!
//! A volume that comes back with another write verifier may have lost acknowledged writes that no
//! FLUSH covered: before the queues go on, they are written again (`retain`), or it is arranged
//! that FLUSHes fail (`on_loss`).

mod begin;
pub mod course;
mod device;
mod known;
mod link;
pub mod lock;
pub mod namespace;
mod neighbour;
pub mod note;
mod reconnect;
pub mod recover;
pub mod remains;
pub mod settle;
mod signals;
pub mod socket;
pub mod status;
mod unmount;
mod upgrade;
mod waiting;
pub mod write_back;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_config::MountConfig;
use rblk_fabric::ConnectOptions;
use rblk_protocol::{AccessMode, AsyncEvent};
use tokio::sync::mpsc;

use crate::admin::Pulse;
use crate::durability::Durability;
use crate::engine::QueueCounts;
use crate::error::SessionError;
use crate::queue::{FromQueue, QueueHandle, ToQueue};
use crate::session::{HostIdentity, Session};
use crate::ublk::{Control, Device, DeviceToken};
use course::Course;
use known::Known;
use link::Running;
use lock::MountLock;
pub use neighbour::HeldHere;
use reconnect::{Again, Step};
use remains::{Claimed, Purpose};
use signals::Signals;
use socket::{MountSocket, Response};
use status::MountStatus;
use unmount::Ending;
use upgrade::{HandOver, Serving};
pub use waiting::ToldToEnd;

const EIO: i32 = 5;

/// Time for an answer to get out before the process ends.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Why a mount is served no longer.
#[derive(Debug)]
enum End {
    Unmount { force: bool },
    HandOver(PathBuf),
}

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
    known: Known,
    // Number and mark of the device, once there is one.
    device: Option<(u32, DeviceToken)>,
    session: Option<Session>,
    durability: Arc<Durability>,
    // Whether the note says that a loss is to be told.
    noted_loss: bool,
    queues: Vec<QueueHandle>,
    status: MountStatus,
    since: Instant,
    course: Course,
    // The try to connect again that is under way, where it goes, and what it reached.
    again: Running<Again>,
    trying: String,
    // What tries failed of since the target was lost: each is logged once.
    said: Vec<String>,
    steps: (mpsc::Sender<Step>, mpsc::Receiver<Step>),
    // The probe of a better address that is under way, and its index.
    probing: Running<(usize, bool)>,
    probed: usize,
    // By queue: paths that did not end yet, and whether it is held and quiet.
    paths: Vec<u32>,
    quiet: Vec<bool>,
    stopped: usize,
}

/// Mounts and serves until unmounted. `take_over` fences whoever holds the volume: the first OPEN
/// says so, and no later one.
///
/// # Errors
/// Anything that keeps the volume from being mounted, or a queue that broke.
pub async fn run(
    config: &MountConfig,
    name: &str,
    host: HostIdentity,
    take_over: bool,
    on_ready: OnReady<'_>,
) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let lock = recover::lock(name, false).await?;
    // Looked for before anything is asked of the target.
    let same = |note: Option<&note::Note>| note.is_some_and(|note| recover::is_same(note, config));
    if let Claimed::Waiting(note) =
        remains::claim(&lock, |note| Purpose::Mount { same: same(note) })?
    {
        let serving = recover::take_over(lock, *note, Some(config), &mut signals).await?;
        return serving.run(&mut signals, on_ready).await;
    }
    if !take_over {
        neighbour::must_not_hold(name, config, host.id, None)?;
    }
    let control = device::aside(|| {
        let mut control = Control::open()?;
        device::must_be_free(&mut control, config.device_id)?;
        Ok(control)
    })?;
    let socket = MountSocket::bind(&lock).context("the mount's socket")?;
    let (outbox, mut from_queues) = mpsc::unbounded_channel();
    let (mut mount, paths) =
        waiting::connect(&socket, config, name, host, take_over, &mut signals).await?;
    let built = mount.build_device(control, paths, &outbox, &mut from_queues, &mut signals).await;
    match built {
        Ok(device) => {
            let serving = Serving { mount, device, socket, lock, from_queues };
            serving.run(&mut signals, on_ready).await
        }
        Err(error) => {
            // The device went with the attempt.
            recover::forget_if_gone(name).await;
            Err(error)
        }
    }
}

async fn next_event(
    session: &mut Option<Session>,
    pulse: Pulse,
    queues: &[QueueHandle],
) -> Result<Option<AsyncEvent>, SessionError> {
    let ios = || queues.iter().map(|queue| queue.stats.answered()).sum();
    match session {
        Some(session) => session.admin.event_of_disk(pulse, ios).await,
        None => std::future::pending().await,
    }
}

impl Mount {
    /// Serves a device whose queues run, until it is unmounted, left to another program, or a queue
    /// breaks. A mount that is lost connects.
    async fn serve(
        mut self,
        mut device: Device,
        socket: MountSocket,
        lock: MountLock,
        mut from_queues: mpsc::UnboundedReceiver<FromQueue>,
        signals: &mut Signals,
        on_ready: OnReady<'_>,
    ) -> anyhow::Result<Option<HandOver>> {
        tracing::info!(
            device = self.status.device,
            volume = self.status.volume,
            address = self.status.address,
            "mounted"
        );
        // From now on, whatever ends this process leaves the device to the next one; only an
        // unmount takes it away.
        device.disown();
        on_ready(&self.status());
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        let (asked_sender, mut asked) = mpsc::channel(16);
        let durability = Arc::clone(&self.durability);
        let owes_note = self.status.volatile_cache && self.owes_note();
        let mut note_at = owes_note.then(Instant::now);
        let serving = socket.serve(asked_sender);
        tokio::pin!(serving);
        let mut ending = Ending::default();
        loop {
            let patience = ending.patience();
            let end = tokio::select! {
                () = &mut serving => None,
                Some(message) = from_queues.recv() => {
                    self.on_queue(message)?;
                    None
                }
                () = self.attend() => None,
                result = link::next(&mut ending.syncing) => self.on_synced(result, &mut ending),
                Some(request) = asked.recv() => self.on_ask(request, &mut ending),
                () = link::until(patience) => None,
                () = signals.next() => self.on_terminate(&mut ending),
                () = durability.loss_changed(), if note_at.is_none() => {
                    note_at = Some(Instant::now() + self.note_step());
                    None
                }
                () = link::until(note_at) => {
                    note_at = None;
                    if self.owes_note() {
                        self.note();
                    }
                    None
                }
            };
            let end = end.or_else(|| self.on_patience(&mut ending));
            if self.stopped > 0 && end.is_none() {
                anyhow::bail!(
                    "a queue of {} stopped: was the device removed by someone else?",
                    self.status.device
                );
            }
            if let Some(End::HandOver(program)) = end {
                let _ = sd_notify::notify(&[sd_notify::NotifyState::Reloading]);
                if let Some(pending) = ending.pending {
                    // It gets out while the queues leave; whoever asked looks for the new program
                    // anyway.
                    let _ = pending.reply.send(Response::Done);
                }
                self.leave(device, &mut from_queues).await?;
                return Ok(Some(HandOver { lock, program }));
            }
            if let Some(End::Unmount { force }) = end {
                let result = self.unmount(&mut device, force, &mut from_queues).await;
                let response = match &result {
                    Ok(()) => {
                        // Before the answer goes out, so that a mount right after finds the name
                        // free.
                        drop(device);
                        note::Note::remove(&self.name);
                        socket.unlink();
                        drop(lock);
                        Response::Done
                    }
                    // The driver is stuck. The device goes with this process, later than whoever
                    // asked waits.
                    Err(error) => Response::Error(format!("{error:#}")),
                };
                if let Some(pending) = ending.pending {
                    let _ = pending.reply.send(response);
                    // Let the answer out before the process ends.
                    let _ = tokio::time::timeout(LAST_WORDS, &mut serving).await;
                }
                return result.map(|()| None);
            }
        }
    }

    fn status(&self) -> MountStatus {
        let by_queue: Vec<QueueCounts> = self.queues.iter().map(|q| q.stats.snapshot()).collect();
        let mut total = QueueCounts::default();
        by_queue.iter().for_each(|queue| total.add(queue));
        let (state, lost_ms_ago) = self.standing();
        MountStatus {
            state: state.to_owned(),
            lost_ms_ago,
            stall_ms_max: self.status.stall_ms_max.max(lost_ms_ago.unwrap_or(0)),
            unflushed_writes: self.durability.unflushed(),
            writes_rewritten: self.durability.writes_rewritten(),
            losses: self.durability.losses(),
            loss_untold: self.durability.has_untold_loss(),
            on_loss: self.config.on_loss,
            uptime_s: self.since.elapsed().as_secs(),
            total,
            by_queue,
            ..self.status.clone()
        }
        .with_lost()
    }

    fn on_queue(&mut self, message: FromQueue) -> anyhow::Result<()> {
        match message {
            FromQueue::PathEnded { queue, end, dead, undestroyed } => {
                dead.retire(undestroyed);
                self.on_path_end(queue, end);
                Ok(())
            }
            FromQueue::Quiet { queue } => {
                self.on_quiet(queue);
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
}

fn send(queue: &QueueHandle, message: ToQueue) {
    if queue.mail.send(message).is_err() {
        // It left, and says so elsewhere.
        tracing::debug!("a queue thread takes no mail");
    }
}

fn access_mode(config: &MountConfig) -> AccessMode {
    match (config.read_only, config.shared) {
        (true, _) => AccessMode::ReadOnly,
        (false, true) => AccessMode::Shared,
        (false, false) => AccessMode::Exclusive,
    }
}

fn options(config: &MountConfig) -> ConnectOptions {
    ConnectOptions {
        timeout: config.connect_timeout.get(),
        bind: None,
        detect: config.detect.get(),
    }
}

fn pulse(config: &MountConfig) -> Pulse {
    Pulse::of(config.detect.get())
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
