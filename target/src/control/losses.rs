//! [`LossNotes`]: losses of acknowledged writes on their way into the lineage file.
//!
//! A flush that fails because of a loss is answered only after the loss was noted. If the target
//! died between the answer and the note, its next run would have the same write verifiers, and
//! initiators would take lost writes for durable.
//!
//! The note goes to a disk, which may hang, so a thread of its own writes it. When a note cannot be
//! written, the answers wait for that one try and no longer. The note is tried again. Until a try
//! succeeds, a crash of the target could still hide the loss.

use std::sync::Arc;
use std::thread;

use tokio::sync::mpsc;

use crate::store::Backing;
use crate::verifier::LineageFile;

/// How a try to note ended: whether the loss is noted.
pub(super) type Noted = bool;

/// Losses that are to be noted, and the stores whose flushes wait for that.
#[derive(Debug)]
pub(super) struct LossNotes {
    file: Arc<LineageFile>,
    ended: mpsc::UnboundedSender<Noted>,
    tries: mpsc::UnboundedReceiver<Noted>,
    // A thread is writing.
    writes: bool,
    // Stores whose flushes wait for the try under way, and for the one after it.
    waiting: Vec<Arc<Backing>>,
    late: Vec<Arc<Backing>>,
}

impl LossNotes {
    /// Whether this run keeps a file of its losses, and of the holders of its volumes.
    pub(super) fn can_remember(&self) -> bool {
        !self.file.is_forgetful()
    }

    /// What this run remembers for the next one.
    pub(super) fn file(&self) -> &LineageFile {
        &self.file
    }

    /// No loss yet.
    pub(super) fn new(file: Arc<LineageFile>) -> Self {
        let (ended, tries) = mpsc::unbounded_channel();
        Self { file, ended, tries, writes: false, waiting: Vec::new(), late: Vec::new() }
    }

    /// How the next try ended, for [`Self::ended`]. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<Noted> {
        self.tries.recv().await
    }

    /// Acknowledged writes of a store are lost.
    pub(super) fn lost(&mut self, backing: Arc<Backing>) {
        self.late.push(backing);
        self.write();
    }

    /// A try has ended.
    pub(super) fn ended(&mut self, noted: Noted) {
        self.writes = false;
        for backing in self.waiting.drain(..) {
            backing.loss_noted();
        }
        if noted {
            // One note is for all stores of the target.
            for backing in self.late.drain(..) {
                backing.loss_noted();
            }
        } else if !self.late.is_empty() {
            self.write();
        }
    }

    /// Tries again what could not be noted.
    pub(super) fn tick(&mut self) {
        if self.owes() {
            self.write();
        }
    }

    /// Whether a loss is not noted yet.
    pub(super) fn owes(&self) -> bool {
        self.file.owes_note()
    }

    fn write(&mut self) {
        if std::mem::replace(&mut self.writes, true) {
            return;
        }
        self.waiting.append(&mut self.late);
        let (file, ended) = (Arc::clone(&self.file), self.ended.clone());
        let writer = thread::Builder::new().name("loss-note".to_owned()).spawn(move || {
            // An error means that control has ended: no flush waits for the note.
            let _ = ended.send(file.renounce());
        });
        if writer.is_err() {
            // The host has no thread left, so this thread waits for the disk.
            let _ = self.ended.send(self.file.renounce());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rblk_protocol::Name;

    use super::*;

    fn notes(directory: &std::path::Path) -> LossNotes {
        let name = Name::new("store1").unwrap();
        LossNotes::new(Arc::new(LineageFile::open(directory, &name).unwrap()))
    }

    fn backing(directory: &std::path::Path) -> Arc<Backing> {
        let path = directory.join("disk");
        fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        Arc::new(Backing::open(&path, &crate::store::OpenOptions::default()).unwrap())
    }

    #[test]
    fn one_note_is_for_all_stores() {
        let directory = tempfile::tempdir().unwrap();
        let mut notes = notes(directory.path());
        let backing = backing(directory.path());
        assert!(!notes.owes());
        for _ in 0..3 {
            notes.lost(Arc::clone(&backing));
        }
        assert_eq!(notes.tries.blocking_recv(), Some(true));
        notes.ended(true);
        assert!(!notes.owes() && notes.waiting.is_empty() && notes.late.is_empty());
        assert_eq!(Arc::strong_count(&backing), 1, "all flushes were answered");
    }

    #[test]
    fn what_cannot_be_noted_is_answered_and_tried_again() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("state");
        let mut notes = notes(&state);
        // Neither a new file nor the removal of the old one has a place.
        let away = directory.path().join("away");
        fs::rename(&state, &away).unwrap();
        fs::write(&state, "").unwrap();
        let backing = backing(directory.path());
        notes.lost(Arc::clone(&backing));
        assert_eq!(notes.tries.blocking_recv(), Some(false));
        notes.lost(Arc::clone(&backing));
        notes.ended(false);
        assert_eq!(notes.waiting.len(), 1, "the second waits for a try of its own");
        assert_eq!(notes.tries.blocking_recv(), Some(false));
        notes.ended(false);
        assert!(notes.owes() && notes.waiting.is_empty());
        fs::remove_file(&state).unwrap();
        fs::rename(&away, &state).unwrap();
        notes.tick();
        assert_eq!(notes.tries.blocking_recv(), Some(true));
        notes.ended(true);
        assert!(!notes.owes());
    }
}
