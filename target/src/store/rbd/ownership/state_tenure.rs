//! [`StateTenure`]: the writes of an owner to the object beside its image, from the claim until it
//! gives the image back.

use nix::errno::Errno;

use super::owner_note::OwnerNote;
use super::state_change::StatePlace;

/// See the module.
#[derive(Clone, Debug)]
pub struct StateTenure {
    note: OwnerNote,
    // A change that was made, and nobody waited for: both revisions.
    untold: Option<(u64, u64)>,
}

impl StateTenure {
    /// That of the owner of this note.
    #[must_use]
    pub fn new(note: OwnerNote) -> Self {
        Self { note, untold: None }
    }

    /// The note of the owner.
    #[must_use]
    pub fn note(&self) -> &OwnerNote {
        &self.note
    }

    /// Replaces the record: the expected and the next revision. False: another program wrote it, or
    /// owns the image.
    ///
    /// # Errors
    /// The cluster's.
    pub fn replace(
        &mut self,
        place: &impl StatePlace,
        (expected, next): (u64, u64),
        text: &[u8],
    ) -> Result<bool, Errno> {
        let expected = match self.untold {
            Some((before, written)) if before == expected => written,
            _ => expected,
        };
        let replaced = place.replace(self.note.epoch, (expected, next), text);
        if replaced == Ok(true) {
            self.untold = None;
        }
        replaced
    }

    /// A change of the record was made, and nobody waited for its end.
    pub fn not_told(&mut self, revisions: (u64, u64)) {
        self.untold = Some(revisions);
    }

    /// Notes that nobody owns the image. Without this, the next owner fences this client. False:
    /// another member has it by now.
    ///
    /// # Errors
    /// The cluster's.
    pub fn give_back(&self, place: &impl StatePlace) -> Result<bool, Errno> {
        place.swap_owner(self.note.epoch, &self.note.given_back())
    }
}
