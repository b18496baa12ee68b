//! [`GuestEnd`]: how the disk of a guest comes to its end. What is under way is answered and
//! flushed first, for some time. Then the process ends whatever its threads do: one that a front
//! end or the kernel holds up keeps neither the process nor the volume.

use std::time::{Duration, Instant};

use super::socket::{Asked, Response};
use crate::front::vhost::Served;

/// How long the disk may take to end: a front end may be waiting for answers of a lost target, then
/// what the guest wrote is flushed, and the kernel may be slow to destroy QPs.
const PATIENCE: Duration = Duration::from_secs(30);
/// The same, by force. With what follows, clearly less than the 5 s that the command waits.
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

/// The end of a disk, which may not have begun.
#[derive(Debug, Default)]
pub(super) struct GuestEnd {
    // The command that waits for it.
    pending: Option<Asked>,
    by: Option<Instant>,
    force: bool,
}

impl GuestEnd {
    /// This process is told to end: the second time, soon.
    pub(super) fn on_signal(&mut self, served: &Served) {
        self.begin(self.by.is_some(), served);
    }

    /// An unmount is asked for. One that waits already is enough, unless this one is by force.
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

    /// When nobody waits for the disk any longer, if it is to end.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.by
    }

    /// Whether there is little time.
    pub(super) fn is_forced(&self) -> bool {
        self.force
    }

    /// The disk did not end by its deadline.
    pub(super) fn held_up(&self, disk: &str) -> HeldUp {
        HeldUp { disk: disk.to_owned() }
    }

    /// The threads of the disk are gone.
    ///
    /// # Errors
    /// It broke.
    pub(super) fn on_gone(disk: &str, served: &Served) -> Result<(), BrokenGuestDisk> {
        match served.news().broke_by() {
            None => Ok(()),
            Some(why) => Err(BrokenGuestDisk { disk: disk.to_owned(), why: why.to_owned() }),
        }
    }

    /// Tells the command that waits that the disk is gone. Returns whether there is one.
    pub(super) fn answer(self) -> bool {
        // An error means that the command does not wait any more.
        self.pending.map(|request| request.reply.send(Response::Done)).is_some()
    }
}
