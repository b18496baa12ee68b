//! [`LossNotes`]: losses of acknowledged writes on their way into the records of their volumes.
//! Pure.
//!
//! A flush that fails because of a loss is answered only after the loss was noted. If the target
//! died between the answer and the note, its next run would have the same write verifier, and
//! initiators would take lost writes for durable.
//!
//! If a note cannot be written, the answers wait for that one try and no longer. The target tries
//! again. Until a try succeeds, a crash of the target could still hide the loss.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::record::holders::VolumeUuid;
use crate::store::Backing;

/// The loss of one volume.
#[derive(Debug, Default)]
struct VolumeLoss {
    // The note is being written.
    writes: bool,
    // The last try failed.
    is_owed: bool,
    // Stores that hold flushes for the try under way, and for the one after it.
    waiting: Vec<Arc<Backing>>,
    late: Vec<Arc<Backing>>,
}

/// Losses of this run, by volume.
#[derive(Debug, Default)]
pub(crate) struct LossNotes {
    losses: BTreeMap<VolumeUuid, VolumeLoss>,
}

impl LossNotes {
    /// Acknowledged writes of a volume are lost. The flushes of its store, if that reports them,
    /// wait for the note. Returns whether to note the loss now.
    #[must_use]
    pub(crate) fn lost(&mut self, volume: VolumeUuid, backing: Option<Arc<Backing>>) -> bool {
        let loss = self.losses.entry(volume).or_default();
        loss.late.extend(backing);
        loss.begin()
    }

    /// A volume is served anew, with a new verifier.
    pub(crate) fn forget(&mut self, volume: &VolumeUuid) {
        self.losses.remove(volume);
    }

    /// A try to note the loss of a volume has ended. Returns whether to try again now, for flushes
    /// that came meanwhile.
    #[must_use]
    pub(crate) fn ended(&mut self, volume: &VolumeUuid, noted: bool) -> bool {
        let Some(loss) = self.losses.get_mut(volume) else { return false };
        (loss.writes, loss.is_owed) = (false, !noted);
        loss.waiting.drain(..).for_each(|backing| backing.loss_noted());
        if noted {
            loss.late.drain(..).for_each(|backing| backing.loss_noted());
        }
        !loss.late.is_empty() && loss.begin()
    }

    /// The losses to note again, since their notes failed.
    #[must_use]
    pub(crate) fn due(&mut self) -> Vec<VolumeUuid> {
        let due = self.losses.iter_mut().filter_map(|(volume, loss)| {
            let is_due = loss.is_owed && loss.begin();
            is_due.then_some(*volume)
        });
        due.collect()
    }

    /// Whether a loss is not noted yet.
    pub(crate) fn owes(&self) -> bool {
        self.losses.values().any(|loss| loss.is_owed)
    }

    /// Volumes that lost writes in this run.
    pub(crate) fn volumes(&self) -> impl Iterator<Item = &VolumeUuid> {
        self.losses.keys()
    }
}

impl VolumeLoss {
    // One try at a time.
    fn begin(&mut self) -> bool {
        if std::mem::replace(&mut self.writes, true) {
            return false;
        }
        self.waiting.append(&mut self.late);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const V: VolumeUuid = [1; 16];

    fn backing(directory: &std::path::Path) -> Arc<Backing> {
        let path = directory.join("disk");
        fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        Arc::new(Backing::open(&path, &crate::store::OpenOptions::default()).unwrap())
    }

    #[test]
    fn one_note_is_for_all_flushes_of_a_volume() {
        let directory = tempfile::tempdir().unwrap();
        let mut notes = LossNotes::default();
        let backing = backing(directory.path());
        let begun: Vec<bool> = (0..3).map(|_| notes.lost(V, Some(Arc::clone(&backing)))).collect();
        assert_eq!(begun, [true, false, false]);
        assert!(
            notes.lost([2; 16], Some(Arc::clone(&backing))),
            "another volume has a note of its own"
        );
        assert!(!notes.ended(&V, true) && !notes.owes());
        assert!(!notes.ended(&[2; 16], true));
        assert_eq!(Arc::strong_count(&backing), 1, "all flushes were answered");
        assert_eq!(notes.volumes().count(), 2);
    }

    #[test]
    fn a_failed_note_answers_its_flushes_and_is_tried_again() {
        let directory = tempfile::tempdir().unwrap();
        let mut notes = LossNotes::default();
        let backing = backing(directory.path());
        assert!(notes.lost(V, Some(Arc::clone(&backing))));
        assert!(!notes.lost(V, Some(Arc::clone(&backing))));
        assert!(notes.due().is_empty(), "a try is under way");
        assert!(notes.ended(&V, false), "the second waits for a try of its own");
        assert!(notes.owes());
        assert!(!notes.ended(&V, false));
        assert_eq!(Arc::strong_count(&backing), 1);
        assert_eq!(notes.due(), [V]);
        assert!(notes.due().is_empty(), "one at a time");
        assert!(!notes.ended(&V, true) && !notes.owes());
        assert!(notes.due().is_empty());
    }
}
