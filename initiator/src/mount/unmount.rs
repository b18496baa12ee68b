//! The end of a mount, in good order or by force.
//!
//! In good order the page cache is written back first, while the mount goes on as ever: the driver
//! fails what comes after the stop, and a write-back may take as long as the target does. A loss
//! after which every FLUSH fails (`on_loss`) does not keep a disk from being unmounted: that is how
//! its users get out of it.

use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::sync::mpsc;

use super::link::Running;
use super::socket::{Ask, Asked, Response};
use super::write_back::{WrittenBack, elsewhere};
use super::{EIO, End, Mount, send};
use crate::queue::{FromQueue, ToQueue};
use crate::ublk::Device;

/// How long an unmount waits for a lost target to be back.
const RECONNECT_PATIENCE: Duration = Duration::from_secs(2);
/// Time for the write-back when somebody waits for the answer; a little less than he waits.
const SYNC_ASKED: Duration = Duration::from_secs(55);
/// Time for the write-back when this process is told to end.
const SYNC_TERMINATED: Duration = Duration::from_secs(80);
/// Time for the device to go away when the target answers.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Time for the device to go away by force. With what follows it, clearly less than the 5 s that
/// whoever asked waits.
const FORCE_DEADLINE: Duration = Duration::from_millis(2500);
/// Time for the target to hear of an unmount.
const LOGOUT: Duration = Duration::from_secs(2);
/// The same, by force.
const FORCE_LOGOUT: Duration = Duration::from_millis(250);

/// What is under way on the way to the end.
#[derive(Debug, Default)]
pub(super) struct Ending {
    /// Who waits for the end.
    pub(super) pending: Option<Asked>,
    /// The write-back ahead of it.
    pub(super) syncing: Running<WrittenBack>,
    // Who asked, unless this process was told to end, and how long a lost target is waited for.
    waiting: Option<(Option<Asked>, Instant)>,
}

impl Ending {
    /// An unmount in good order is under way.
    fn has_begun(&self) -> bool {
        self.syncing.is_some() || self.waiting.is_some()
    }

    /// When the patience with a lost target ends.
    pub(super) fn patience(&self) -> Option<Instant> {
        self.waiting.as_ref().map(|(_, until)| *until)
    }
}

impl Mount {
    /// A request of the mount's socket.
    pub(super) fn on_ask(&self, request: Asked, ending: &mut Ending) -> Option<End> {
        let device = &self.status.device;
        let response = match &request.ask {
            Ask::Status => Response::Status(Box::new(self.status())),
            Ask::Unmount { force: false } | Ask::Upgrade { .. } if ending.has_begun() => {
                Response::Busy(format!("{device} is being unmounted"))
            }
            Ask::Upgrade { program } => match self.may_upgrade(program) {
                Ok(()) => {
                    let end = End::HandOver(program.clone());
                    ending.pending = Some(request);
                    return Some(end);
                }
                Err(response) => response,
            },
            Ask::Unmount { force: true } => {
                ending.pending = Some(request);
                return Some(End::Unmount { force: true });
            }
            Ask::Unmount { force: false } => {
                // A moment later a lost target may be back: right after a recovery, that is so.
                ending.waiting = Some((Some(request), Instant::now() + RECONNECT_PATIENCE));
                return None;
            }
        };
        let _ = request.reply.send(response);
        None
    }

    /// Goes on with an unmount that waits for a lost target. In the end it is refused; this process
    /// has to end.
    pub(super) fn on_patience(&self, ending: &mut Ending) -> Option<End> {
        let (request, until) = ending.waiting.take()?;
        if !self.is_without_target() {
            ending.pending = request;
            return self.begin_unmount(ending);
        }
        if Instant::now() < until {
            ending.waiting = Some((request, until));
            return None;
        }
        let Some(request) = request else { return Some(End::Unmount { force: true }) };
        let _ = request.reply.send(Response::Busy(format!(
            "{}: the target is not connected, and requests may wait for it; --force fails them",
            self.status.device
        )));
        None
    }

    /// Requests wait for the target. Not if the mount is over: what fails anyhow is not waited for
    /// by anybody.
    fn is_without_target(&self) -> bool {
        self.session.is_none() && !self.course.is_over()
    }

    /// This process is told to end: the second time, at once.
    pub(super) fn on_terminate(&self, ending: &mut Ending) -> Option<End> {
        if ending.has_begun() {
            return Some(End::Unmount { force: true });
        }
        ending.waiting = Some((None, Instant::now() + RECONNECT_PATIENCE));
        None
    }

    /// Begins the write-back. Who asked is refused if somebody uses the disk; this process ends all
    /// the same.
    fn begin_unmount(&self, ending: &mut Ending) -> Option<End> {
        // Every write fails, and has for some time, if the mount is over.
        if self.course.is_over() {
            return Some(End::Unmount { force: true });
        }
        let (disk, asked) = (self.status.device.clone(), ending.pending.is_some());
        let within = if asked { SYNC_ASKED } else { SYNC_TERMINATED };
        let written = tokio::task::spawn_blocking(move || elsewhere(&disk, asked, within));
        ending.syncing = Some(tokio::spawn(async move { written.await? }));
        None
    }

    /// The page cache is written back, or is not: whoever asked for the unmount is told, and the
    /// mount goes on.
    pub(super) fn on_synced(
        &self,
        result: anyhow::Result<WrittenBack>,
        ending: &mut Ending,
    ) -> Option<End> {
        let device = &self.status.device;
        let result = match result {
            Ok(WrittenBack::Unflushed(errno)) if self.durability.fails_every_flush() => {
                tracing::warn!(
                    device,
                    errno,
                    "lost: acknowledged writes may be lost, so the FLUSH of the unmount failed, too; every page is \
                     written, and the unmount goes on"
                );
                Ok(WrittenBack::Done)
            }
            Ok(WrittenBack::Unflushed(errno)) => {
                Err(std::io::Error::from_raw_os_error(errno).into())
            }
            result => result,
        };
        let response = match result {
            Ok(WrittenBack::Done | WrittenBack::Unflushed(_)) => {
                return Some(End::Unmount { force: false });
            }
            Ok(WrittenBack::InUse(holder)) => {
                Response::Busy(format!("{device} is in use: {holder}"))
            }
            Err(error) => {
                let text = format!(
                    "{device}: writing back the page cache: {error:#}; it stays mounted, --force gives up what cannot \
                     be written"
                );
                tracing::error!("{text}");
                Response::Error(text)
            }
        };
        match ending.pending.take() {
            Some(request) => {
                let _ = request.reply.send(response);
                None
            }
            // Nobody else decides, and this process has to end.
            None => Some(End::Unmount { force: true }),
        }
    }

    pub(super) async fn unmount(
        &mut self,
        device: &mut Device,
        force: bool,
        from_queues: &mut mpsc::UnboundedReceiver<FromQueue>,
    ) -> anyhow::Result<()> {
        tracing::info!(device = self.status.device, force, "unmounting");
        if let Some(task) = self.again.take() {
            task.abort();
        }
        if let Some(task) = self.probing.take() {
            task.abort();
        }
        if force {
            self.give_up_requests();
        }
        device.own();
        // Blocks this thread, not the queue threads, which answer what is in flight.
        let mut stopped = device.stop(if force { FORCE_DEADLINE } else { STOP_DEADLINE });
        if stopped.is_err() && !force {
            // The target went away meanwhile.
            self.give_up_requests();
            stopped = device.stop(FORCE_DEADLINE);
        }
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
            session.logout(if force { FORCE_LOGOUT } else { LOGOUT }).await;
        }
        stopped.with_context(|| format!("stopping {}", self.status.device))
    }

    /// Whatever waits, waits no longer; whatever was sent is not waited for.
    fn give_up_requests(&self) {
        if !self.course.is_over() {
            self.fail_all(Some(EIO));
        }
        for queue in &self.queues {
            send(queue, ToQueue::Disconnect);
        }
    }
}
