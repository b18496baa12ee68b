//! The end of a mount, in good order or by force.
//!
//! In good order the page cache is written back first, while the mount goes on as ever: the driver fails what comes
//! after the stop, and a write-back may take as long as the target does.

use std::time::Duration;

use anyhow::Context;
use tokio::sync::mpsc;

use super::link::Running;
use super::socket::{Ask, Asked, Response};
use super::{EIO, End, Mount, device, send};
use crate::queue::{FromQueue, ToQueue};
use crate::ublk::Device;

/// Time for the write-back when somebody waits for the answer; a little less than he waits.
const SYNC_ASKED: Duration = Duration::from_secs(55);
/// Time for the write-back when this process is told to end.
const SYNC_TERMINATED: Duration = Duration::from_secs(80);
/// Time for the device to go away when the target answers.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Time for the device to go away by force. With what follows it, clearly less than the 5 s that whoever asked waits.
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
    pub(super) syncing: Running<()>,
}

impl Mount {
    /// A request of the mount's socket.
    pub(super) async fn on_ask(&self, request: Asked, ending: &mut Ending) -> Option<End> {
        let device = &self.status.device;
        let response = match &request.ask {
            Ask::Status => Response::Status(Box::new(self.status())),
            Ask::Unmount { force: false } | Ask::Upgrade { .. } if ending.syncing.is_some() => {
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
            Ask::Unmount { force } => {
                let force = *force;
                match self.may_unmount(force).await {
                    Ok(()) => {
                        ending.pending = Some(request);
                        return self.begin_unmount(ending, force, SYNC_ASKED);
                    }
                    Err(response) => response,
                }
            }
        };
        let _ = request.reply.send(response);
        None
    }

    /// This process is told to end: the second time, at once.
    pub(super) fn on_terminate(&self, ending: &mut Ending) -> Option<End> {
        let force = ending.syncing.is_some() || self.session.is_none();
        self.begin_unmount(ending, force, SYNC_TERMINATED)
    }

    async fn may_unmount(&self, force: bool) -> Result<(), Response> {
        if force {
            return Ok(());
        }
        let device = &self.status.device;
        if let Some(holder) = device::holder(device).await {
            return Err(Response::Busy(format!("{device} is in use: {holder}")));
        }
        // What fails anyhow is not waited for by anybody.
        if self.session.is_none() && !self.course.is_over() {
            return Err(Response::Busy(format!(
                "{device}: the target is not connected, and requests may wait for it; --force fails them"
            )));
        }
        Ok(())
    }

    fn begin_unmount(&self, ending: &mut Ending, force: bool, within: Duration) -> Option<End> {
        // Every write fails, and has for some time, if the mount is over.
        if force || self.course.is_over() {
            return Some(End::Unmount { force: true });
        }
        let path = self.status.device.clone();
        let sync = tokio::task::spawn_blocking(move || {
            std::fs::OpenOptions::new().write(true).open(path)?.sync_all()
        });
        let read_only = self.status.read_only;
        ending.syncing = Some(tokio::spawn(async move {
            match tokio::time::timeout(within, sync).await {
                Err(_) => anyhow::bail!("it takes longer than {within:?}"),
                // A disk that is read-only has nothing to write back, and cannot be opened for writing.
                Ok(done) if !read_only => Ok(done??),
                Ok(_) => Ok(()),
            }
        }));
        None
    }

    /// The page cache is written back, or cannot be: whoever asked for the unmount is told, and the mount goes on.
    pub(super) fn on_synced(&self, result: anyhow::Result<()>, ending: &mut Ending) -> Option<End> {
        let Err(error) = result else { return Some(End::Unmount { force: false }) };
        let device = &self.status.device;
        let text = format!(
            "{device}: writing back the page cache: {error:#}; it stays mounted, --force gives up what cannot be written"
        );
        tracing::error!("{text}");
        match ending.pending.take() {
            Some(request) => {
                let _ = request.reply.send(Response::Error(text));
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
