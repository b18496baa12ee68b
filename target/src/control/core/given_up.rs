//! Volumes that were removed although their stores miss writes of hosts. No host that held one may
//! resume, not even after a restart: the target repeats the write of the record until it is
//! durable, and a run that ends before that does not end clean.

use crate::record::holders::VolumeUuid;
use crate::volume::Volume;

use super::changes::Undurable;
use super::{Core, Effect};

impl Core {
    /// Gives up a volume although its store misses writes of hosts.
    pub(super) fn abandon(&mut self, volume: &Volume, why: String) {
        tracing::error!(volume = %volume.name, why, "a volume is removed without its store");
        if let Some(record) = self.holders.fence(volume.uuid) {
            self.given_up.insert(volume.uuid);
            if self.changes.has_claim(&volume.uuid) {
                self.changes.postpone(volume.uuid);
            } else {
                self.persist_change(record);
            }
        }
        self.effects.push_back(Effect::GivenUp(why));
    }

    /// True while a fence is not durable.
    #[must_use]
    pub fn owes_fences(&self) -> bool {
        !self.given_up.is_empty()
    }

    /// The volumes with such a fence. Their mounts must learn of a loss.
    pub(crate) fn owed_fences(&self) -> impl Iterator<Item = VolumeUuid> {
        self.given_up.iter().copied()
    }

    /// A record is durable, or may not be.
    pub(super) fn look_at_fences(&mut self, result: &Result<(), String>) {
        let Self { given_up, changes, .. } = self;
        given_up.retain(|volume| changes.undurable(volume).is_some());
        let not_written = |volume| changes.undurable(volume) == Some(Undurable::NotWritten);
        if let (true, Err(error)) = (given_up.iter().any(not_written), result) {
            tracing::error!(
                error,
                "cannot remember that the hosts of a volume may not resume, which was removed without its store: the \
                 target tries again"
            );
        }
    }

    /// Writes the records again that could not be written.
    pub(super) fn fence_again(&mut self) {
        let is_due = |volume: &&VolumeUuid| {
            self.changes.undurable(volume) == Some(Undurable::NotWritten)
                && !self.changes.has_claim(volume)
        };
        let due: Vec<VolumeUuid> = self.given_up.iter().filter(is_due).copied().collect();
        for volume in due {
            if let Some(record) = self.holders.record(&volume).cloned() {
                self.persist_change(record);
            }
        }
    }
}
