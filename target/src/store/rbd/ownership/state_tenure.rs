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
    // The member that the image is promised to.
    promised: Option<String>,
}

impl StateTenure {
    /// That of the owner of this note.
    #[must_use]
    pub fn new(note: OwnerNote) -> Self {
        Self { note, untold: None, promised: None }
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

    /// A member was told that it gets the image, or (false) that it does not. The first one of
    /// several gets it: its claim goes on, and others may come on the way of a host to it. One that
    /// asks by an order gets it in any case.
    pub fn promise(&mut self, member: &str, gets_it: bool, by_order: bool) {
        match (gets_it, &self.promised) {
            (true, promised) if promised.is_none() || by_order => {
                self.promised = Some(member.to_owned());
            }
            (false, Some(promised)) if promised == member => self.promised = None,
            _ => {}
        }
    }

    /// Notes that nobody owns the image. Without this, the next owner fences this client. False:
    /// another member has it by now.
    ///
    /// # Errors
    /// The cluster's.
    pub fn give_back(&self, place: &impl StatePlace) -> Result<bool, Errno> {
        place.swap_owner(self.note.epoch, &self.note.given_back(self.promised.as_deref()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_promised_to_the_first_member_that_gets_it() {
        let mut tenure = StateTenure::new(OwnerNote::default());
        tenure.promise("b", false, false);
        tenure.promise("c", true, false);
        tenure.promise("b", true, false);
        tenure.promise("d", false, false);
        assert_eq!(tenure.promised.as_deref(), Some("c"));
        let note = OwnerNote { client: "x".to_owned(), epoch: 4, ..OwnerNote::default() };
        let back = note.given_back(tenure.promised.as_deref());
        assert_eq!((&*back.client, &*back.closing, &*back.next, back.epoch), ("", "x", "c", 5));
        assert!(back.is_promised_beside("b") && !back.is_promised_beside("c"));
        let owned = OwnerNote { client: "y".to_owned(), ..back };
        assert!(!owned.is_promised_beside("b"));
        // A hand-over that was promised before may never have begun.
        tenure.promise("b", true, true);
        assert_eq!(tenure.promised.as_deref(), Some("b"));
        tenure.promise("c", true, true);
        // It stays here after all.
        tenure.promise("c", false, false);
        assert_eq!(tenure.promised, None);
        assert!(!note.given_back(None).is_promised_beside("b"));
    }
}
