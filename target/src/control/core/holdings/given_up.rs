//! Volumes that were removed although their stores miss writes of hosts. No host that held one may
//! resume, not even after a restart: the target repeats the write of the record until it is
//! durable, and a run that ends before that does not end clean.

use std::collections::BTreeSet;

use super::changes::{Changes, Undurable};
use crate::record::holders::VolumeUuid;

/// The volumes of which the next run may not know yet that their hosts may not resume.
#[derive(Debug, Default)]
pub(super) struct OwedFences {
    volumes: BTreeSet<VolumeUuid>,
}

impl OwedFences {
    /// A volume goes without its store.
    pub(super) fn owe(&mut self, volume: VolumeUuid) {
        self.volumes.insert(volume);
    }

    /// The record of a volume is at another target now.
    pub(super) fn forget(&mut self, volume: &VolumeUuid) {
        self.volumes.remove(volume);
    }

    /// Whether there is one.
    pub(super) fn are_owed(&self) -> bool {
        !self.volumes.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = VolumeUuid> {
        self.volumes.iter().copied()
    }

    /// A record is durable, or may not be.
    pub(super) fn look(&mut self, changes: &Changes, result: &Result<(), String>) {
        self.volumes.retain(|volume| changes.undurable(volume).is_some());
        let not_written = |volume| changes.undurable(volume) == Some(Undurable::NotWritten);
        if let (true, Err(error)) = (self.volumes.iter().any(not_written), result) {
            tracing::error!(
                error,
                "cannot remember that the hosts of a volume may not resume, which was removed without its store: the \
                 target tries again"
            );
        }
    }

    /// Those whose records could not be written, and are to be written again.
    pub(super) fn due(&self, changes: &Changes) -> Vec<VolumeUuid> {
        let is_due = |volume: &VolumeUuid| {
            changes.undurable(volume) == Some(Undurable::NotWritten) && !changes.has_claim(volume)
        };
        self.iter().filter(is_due).collect()
    }
}
