//! [`NoteKeeper`]: writes the note of a mount, and remembers its last content. A mount that a guest
//! uses has a [`GuestNote`].
//!
//! Invariant: once there is a device, the note on disk names it. An unreported loss is in the note
//! soon after it became known, and at once where every FLUSH reports it. After a failed write, the
//! note is owed until a write succeeds.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_config::{MountConfig, OnLoss};

use super::guest::{self, GuestNote, UnwrittenGuestNote};
use super::{Doubts, Note};
use crate::engine::durability::Durability;
use crate::front::ublk::DeviceToken;
use crate::front::vhost::GuestLeft;
use crate::volume::course::Facts;
use crate::volume::setup::Setup;

/// The delay before a new or reported loss is noted, where FLUSHes report each of many losses.
const NOTE_STEP: Duration = Duration::from_secs(1);

/// The delay before the next try, after a note could not be written.
const NOTE_AGAIN: Duration = Duration::from_secs(5);

/// Writes the note of a mount.
#[derive(Debug)]
pub(crate) struct NoteKeeper {
    name: String,
    config: Arc<MountConfig>,
    durability: Arc<Durability>,
    // Acknowledged writes may be in the target's memory only.
    volatile_cache: bool,
    recovered: u32,
    subject: Subject,
    // Whether the last note has an unreported loss.
    noted_loss: bool,
}

/// The subject of the note.
#[derive(Debug)]
enum Subject {
    /// There is nothing to note yet.
    None,
    /// A device, by its number and token.
    Device(u32, DeviceToken),
    /// The guest of that socket, and the rings that are in doubt if this process is killed.
    Guest(PathBuf, Vec<u16>),
}

impl NoteKeeper {
    /// For a mount without a device yet. `recovered` counts the processes that took its device
    /// over, this one included.
    pub(crate) fn new(
        name: &str,
        config: &Arc<MountConfig>,
        durability: &Arc<Durability>,
        volatile_cache: bool,
        recovered: u32,
    ) -> Self {
        Self {
            name: name.to_owned(),
            config: Arc::clone(config),
            durability: Arc::clone(durability),
            volatile_cache,
            recovered,
            subject: Subject::None,
            noted_loss: false,
        }
    }

    /// Takes the mount's new keys.
    pub(crate) fn reconfigured(&mut self, config: &Arc<MountConfig>) {
        self.config = Arc::clone(config);
    }

    /// Sets the device of the mount.
    pub(crate) fn set_device(&mut self, id: u32, token: DeviceToken) {
        self.subject = Subject::Device(id, token);
    }

    /// Sets the guest at that socket and its number of rings. `left`: the state of the rings after
    /// the process before.
    pub(crate) fn set_guest(&mut self, socket: &Path, rings: u16, left: &GuestLeft) {
        self.subject = Subject::Guest(socket.to_owned(), left.rings_of_killed(rings));
    }

    /// Replaces the account of durable writes.
    pub(crate) fn inherit(&mut self, durability: &Arc<Durability>) {
        self.durability = Arc::clone(durability);
    }

    /// Writes the last note of a guest's mount that ended in good order, or removes the note if the
    /// next process does not need it.
    ///
    /// # Errors
    /// The older note is still there; it describes a worse state than the true one.
    pub(crate) fn write_last_of_guest(
        &mut self,
        facts: &Facts,
        left: GuestLeft,
    ) -> Result<(), UnwrittenGuestNote> {
        let Subject::Guest(socket, _) = &self.subject else { return Ok(()) };
        let doubts = self.guest_doubts(self.durability.unflushed() > 0);
        if !GuestNote::outlives(doubts, &left) {
            return GuestNote::remove(socket);
        }
        self.guest_note(facts, doubts, left.rings_in_doubt).write(socket)
    }

    fn guest_doubts(&self, maybe_unflushed: bool) -> guest::GuestDoubts {
        let writes = self.volatile_cache && !self.config.read_only;
        let maybe_unflushed = maybe_unflushed && writes;
        guest::GuestDoubts { maybe_unflushed, loss_untold: self.durability.has_untold_loss() }
    }

    fn guest_note(
        &self,
        facts: &Facts,
        doubts: guest::GuestDoubts,
        rings_in_doubt: Vec<u16>,
    ) -> GuestNote {
        let on_loss = self.durability.on_loss();
        GuestNote::of(&self.config.volume, facts, doubts, on_loss, rings_in_doubt)
    }

    /// Notes what another process needs to serve the device. Where that fails the mount goes on:
    /// only the way to recover it is lost.
    /// Returns whether it is written.
    pub(crate) fn write(&mut self, setup: &Setup, facts: &Facts) -> bool {
        self.write_last(setup, facts, self.volatile_cache)
    }

    /// Writes the note of a device that is handed over. `maybe_unflushed` states whether
    /// acknowledged writes may be in the target's memory only.
    pub(crate) fn write_last(
        &mut self,
        setup: &Setup,
        facts: &Facts,
        maybe_unflushed: bool,
    ) -> bool {
        let written = self.try_write(setup, facts, maybe_unflushed);
        if let Err(error) = &written {
            tracing::error!(%error, "cannot note the state of the mount: it could not be recovered now");
        }
        written.is_ok()
    }

    /// Writes a note without which the mount cannot go on.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn must_write(&mut self, setup: &Setup, facts: &Facts) -> io::Result<()> {
        self.try_write(setup, facts, self.volatile_cache)
    }

    fn try_write(&mut self, setup: &Setup, facts: &Facts, maybe_unflushed: bool) -> io::Result<()> {
        let device = match &self.subject {
            Subject::None => return Ok(()),
            Subject::Device(id, token) => (*id, *token),
            Subject::Guest(socket, rings) => {
                let doubts = self.guest_doubts(true);
                // Describes this process as killed.
                let note = self.guest_note(facts, doubts, rings.clone());
                note.write(socket).map_err(io::Error::other)?;
                self.noted_loss = doubts.loss_untold;
                return Ok(());
            }
        };
        let loss_untold = self.durability.has_untold_loss();
        let doubts = Doubts { maybe_unflushed, loss_untold, recovered: self.recovered };
        Note::of(&self.name, device, &self.config, (setup, facts), doubts).write()?;
        self.noted_loss = loss_untold;
        Ok(())
    }

    /// Whether a loss became known, or was reported, since the last note. A process that recovers
    /// the mount by the old note would report the loss again, or not at all.
    pub(crate) fn owes_loss(&self) -> bool {
        !matches!(self.subject, Subject::None)
            && self.noted_loss != self.durability.has_untold_loss()
    }

    /// Whether the note must be written now, at the start of serving.
    pub(crate) fn is_behind(&self) -> bool {
        self.volatile_cache && self.owes_loss()
    }

    /// The time that a change of the loss may wait. A loss that every FLUSH reports is noted once
    /// in the life of the mount, and at once: the next process has to know of it.
    pub(crate) fn step(&self) -> Duration {
        match self.durability.on_loss() {
            OnLoss::Once => NOTE_STEP,
            OnLoss::UntilRemount => Duration::ZERO,
        }
    }

    /// The time of the next try, if the note is still behind.
    pub(crate) fn again(&self, now: Instant) -> Option<Instant> {
        self.owes_loss().then(|| now + NOTE_AGAIN)
    }

    /// Whether the next process would not know of a loss that it has to report.
    pub(crate) fn hides_loss(&self) -> bool {
        self.owes_loss() && self.durability.has_untold_loss()
    }

    /// Counts the loss as noted.
    #[cfg(test)]
    pub(crate) fn set_noted_loss(&mut self) {
        self.noted_loss = true;
    }
}
