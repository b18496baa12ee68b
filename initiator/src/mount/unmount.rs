//! The end of a mount, in good order or by force.

use std::time::Duration;

use anyhow::Context;
use tokio::sync::mpsc;

use super::socket::Response;
use super::{EIO, Mount, device, send};
use crate::queue::{FromQueue, ToQueue};
use crate::ublk::Device;

/// Time for the device to go away when the target answers.
const STOP_DEADLINE: Duration = Duration::from_secs(30);
/// Time for the device to go away by force. With what follows it, clearly less than the 5 s that whoever asked waits.
const FORCE_DEADLINE: Duration = Duration::from_millis(2500);
/// Time for the target to hear of an unmount by force.
const FORCE_LOGOUT: Duration = Duration::from_millis(250);

impl Mount {
    pub(super) fn may_unmount(&self, force: bool) -> Result<(), Response> {
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
