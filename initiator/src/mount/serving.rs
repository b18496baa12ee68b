//! [`Serving`]: a mount with its device, its socket and its lock, and the loop that serves it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_operate::{Watchdog, said_once};
use tokio::sync::mpsc;

use super::OnReady;
use super::end_signals::EndSignals;
use super::mounted::Mount;
use super::note::Note;
use super::socket::{Asked, MountSocket};
use super::unmount::{MountEnd, UnmountProgress};
use crate::front::ublk::Device;
use crate::queue::FromQueue;
use crate::volume::task;
use rblk_operate::mount::lock::MountLock;
use rblk_operate::mount::mount_ask::{Ask, Response};
use rblk_operate::mount::mount_status::MountStatus;

/// Time to deliver an answer before the process ends.
pub(super) const LAST_WORDS: Duration = Duration::from_millis(200);

/// The longest time from the order to hand over to the first sign of the next program: the queue
/// threads leave, a FLUSH, and the driver that has to notice that they left. `detect` comes twice
/// to this.
const HAND_OVER: Duration = Duration::from_secs(150);
/// The longest end of a mount: 30 s in good order, a few seconds by force, FLUSH and LOGOUT.
const END: Duration = Duration::from_secs(120);

/// A mount that is served.
#[derive(Debug)]
pub(super) struct Serving {
    pub(super) mount: Mount,
    pub(super) device: Device,
    pub(super) socket: MountSocket,
    pub(super) lock: MountLock,
    pub(super) from_queues: mpsc::UnboundedReceiver<FromQueue>,
}

/// A device handed over to a program, which replaces this process.
#[derive(Debug)]
pub(super) struct DeviceHandOver {
    pub(super) lock: MountLock,
    pub(super) program: PathBuf,
}

impl Serving {
    /// Serves a device with running queues, until an unmount, a hand-over, or a broken queue. A
    /// mount that has lost its target reconnects.
    ///
    /// # Errors
    /// A queue broke, or the driver does not let the device go.
    pub(super) async fn serve(
        self,
        signals: &mut EndSignals,
        on_ready: OnReady<'_>,
    ) -> anyhow::Result<Option<DeviceHandOver>> {
        let Self { mut mount, mut device, socket, lock, mut from_queues } = self;
        mount.see_disk(&device);
        announce(&mount, &mut device, on_ready);
        let mut watchdog = Watchdog::of_service();
        let (asked_sender, mut asked) = mpsc::channel(16);
        let answering = socket.serve(asked_sender);
        tokio::pin!(answering);
        let mut ending = UnmountProgress::default();
        let mut note_at = mount.note().is_behind().then(Instant::now);
        let end = loop {
            let end = tokio::select! {
                () = &mut answering => None,
                end = next(&mut mount, &mut from_queues, &mut asked, &mut ending, &mut note_at) => {
                    end?
                }
                () = signals.next() => ending.on_terminate(mount.disk()),
                () = watchdog.due() => {
                    watchdog.sign();
                    None
                }
            };
            if let Some(end) = end.or_else(|| ending.go_on(&mount)) {
                break end;
            }
            mount.follow(&mut device);
            if mount.volume().queues().has_stopped() {
                let disk = mount.disk();
                anyhow::bail!("a queue of {disk} stopped: did another program remove the device?");
            }
        };
        match end {
            MountEnd::HandOver(program) => {
                watchdog.allow(HAND_OVER + mount.volume().config().detect.get() * 2);
                let _ = sd_notify::notify(&[sd_notify::NotifyState::Reloading]);
                // The answer is delivered while the queues leave. The command looks for the new
                // program anyway.
                ending.answer(Response::Done);
                mount.leave(device, &mut from_queues).await;
                Ok(Some(DeviceHandOver { lock, program }))
            }
            MountEnd::Unmount { force } => {
                watchdog.allow(END);
                let result = mount.unmount(&mut device, force, &mut from_queues).await;
                let response = match &result {
                    Ok(()) => {
                        // Before the answer, so that a following mount finds the name free.
                        drop(device);
                        Note::remove(mount.name());
                        socket.unlink();
                        drop(lock);
                        Response::Done
                    }
                    // The driver hangs. The device goes with this process, after the command has
                    // stopped waiting.
                    Err(error) => Response::Error(said_once(error.as_ref())),
                };
                if ending.answer(response) {
                    let _ = tokio::time::timeout(LAST_WORDS, &mut answering).await;
                }
                result.map(|()| None)
            }
        }
    }
}

/// Reports the device. After this, any end of the process but an unmount leaves the device to the
/// next process.
fn announce(mount: &Mount, device: &mut Device, on_ready: OnReady<'_>) {
    let status = mount.status();
    tracing::info!(
        rblk_event = "mount",
        device = status.device,
        volume = status.volume,
        address = status.address,
        "mounted"
    );
    device.disown();
    on_ready(&status);
    let MountStatus { volume, target_name, device, .. } = &status;
    let facts = format!("{volume} of {target_name} is {device}");
    let facts = sd_notify::NotifyState::Status(&facts);
    let _ = sd_notify::notify(&[facts, sd_notify::NotifyState::Ready]);
}

/// Handles the next event of the mount. Returns the end, if it has come.
async fn next(
    mount: &mut Mount,
    from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    asked: &mut mpsc::Receiver<Asked>,
    ending: &mut UnmountProgress,
    note_at: &mut Option<Instant>,
) -> anyhow::Result<Option<MountEnd>> {
    let durability = Arc::clone(mount.volume().durability());
    let deadline = ending.deadline();
    let rates_due = mount.rates_due();
    tokio::select! {
        Some(message) = from_queues.recv() => mount.volume_mut().on_queue(message)?,
        () = mount.attend() => {}
        result = ending.synced() => return Ok(ending.on_synced(result, mount)),
        Some(request) = asked.recv() => {
            if request.ask == Ask::Status {
                mount.ask_rates();
            }
            return Ok(ending.on_ask(request, mount));
        }
        () = task::until(deadline) => {}
        () = task::until(rates_due) => mount.take_rates(),
        () = durability.loss_changed(), if note_at.is_none() => {
            *note_at = Some(Instant::now() + mount.note().step());
        }
        () = task::until(*note_at) => {
            *note_at = mount.note_loss();
        }
    }
    Ok(None)
}
