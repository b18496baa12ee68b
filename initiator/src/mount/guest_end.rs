//! [`GuestEnd`]: how the disk of a guest ends. For some time, requests under way are answered and
//! flushed. Then the process ends even if a thread hangs: a thread that a front end or the kernel
//! holds up keeps neither the process nor the volume.

use std::time::{Duration, Instant};

use super::socket::Asked;
use crate::front::vhost::Served;
use rblk_operate::mount::mount_ask::Response;

/// Time for the disk to end: a front end may wait for replies of a lost target, then the guest's
/// writes are flushed, and the kernel may be slow to destroy QPs.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time for the disk to end by force. With the steps that follow, clearly less than the 5 s that
/// the command waits.
const FORCE_PATIENCE: Duration = Duration::from_millis(2500);

/// A thread of the disk was held up.
#[derive(Debug, thiserror::Error)]
#[error(
    "{disk}: a thread of the disk did not end in time, so the process ends without it, as if it were killed: the next \
     process leaves the rings of the guest alone until the guest is reset"
)]
pub(crate) struct HeldUp {
    disk: String,
}

/// The disk broke.
#[derive(Debug, thiserror::Error)]
#[error("{disk}: the disk of the guest broke: {why}. Start the program again, and reset the guest")]
pub(crate) struct BrokenGuestDisk {
    disk: String,
    why: String,
}

/// The state of a disk's end.
#[derive(Debug, Default)]
pub(super) struct GuestEnd {
    // The command that waits for the end.
    pending: Option<Asked>,
    by: Option<Instant>,
    force: bool,
}

impl GuestEnd {
    /// A signal asks the process to end. The second signal shortens the time.
    pub(super) fn on_signal(&mut self, served: &Served) {
        self.begin(self.by.is_some(), served);
    }

    /// An unmount is requested. An earlier one is enough, unless this one is by force.
    pub(super) fn on_unmount(&mut self, request: Asked, force: bool, disk: &str, served: &Served) {
        let busy = || Response::Busy(format!("{disk} is being removed"));
        if self.pending.is_some() && !force {
            let _ = request.reply.send(busy());
            return;
        }
        if let Some(earlier) = self.pending.replace(request) {
            let _ = earlier.reply.send(busy());
        }
        self.begin(force, served);
    }

    fn begin(&mut self, force: bool, served: &Served) {
        let by = Instant::now() + if force { FORCE_PATIENCE } else { PATIENCE };
        self.by = Some(self.by.map_or(by, |earlier| earlier.min(by)));
        self.force |= force;
        served.end(self.force);
    }

    /// The time to stop waiting for the disk, once it has to end.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.by
    }

    /// Whether the end is by force.
    pub(super) fn is_forced(&self) -> bool {
        self.force
    }

    /// The disk did not end by its deadline.
    pub(super) fn held_up(&self, disk: &str) -> HeldUp {
        HeldUp { disk: disk.to_owned() }
    }

    /// The threads of the disk have ended.
    ///
    /// # Errors
    /// The disk broke.
    pub(super) fn on_gone(disk: &str, served: &Served) -> Result<(), BrokenGuestDisk> {
        match served.news().broke_by() {
            None => Ok(()),
            Some(why) => Err(BrokenGuestDisk { disk: disk.to_owned(), why: why.to_owned() }),
        }
    }

    /// Reports to the waiting command that the disk is gone. Returns whether there is one.
    pub(super) fn answer(self) -> bool {
        // An error means that the command no longer waits.
        self.pending.map(|request| request.reply.send(Response::Done)).is_some()
    }
}
