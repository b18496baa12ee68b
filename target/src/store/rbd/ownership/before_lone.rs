//! [`BeforeLone`]: a target in no group is about to take the lock of an image, which a member of a
//! group may have. Pure.

use super::owner_note::OwnerNote;

/// What it does next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LoneStep {
    /// Try to take the lock.
    Take,
    /// Fence this member for ever, and then try.
    Fence(String),
    /// Look again after a moment: the member has no watch, and may be about to renew it.
    LookAgain,
    /// The member lives.
    Wait,
}

/// See the module.
#[derive(Debug, Default)]
pub struct BeforeLone {
    // The epoch at which the member had no watch.
    missed: Option<u64>,
}

impl BeforeLone {
    /// Whether a member has the lock, which librbd would fence for an hour if it is dead.
    #[must_use]
    pub fn is_of_member(note: &OwnerNote, lock: Option<&str>) -> bool {
        !note.is_alone() && !note.client.is_empty() && lock == Some(&note.client)
    }

    /// The step after a look at a member that has the lock.
    pub fn next(&mut self, note: &OwnerNote, is_watched: bool) -> LoneStep {
        if is_watched {
            self.missed = None;
            return LoneStep::Wait;
        }
        match self.missed.replace(note.epoch) == Some(note.epoch) {
            true => LoneStep::Fence(note.client.clone()),
            false => LoneStep::LookAgain,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(client: &str, epoch: u64) -> OwnerNote {
        let (member, client) = ("a".to_owned(), client.to_owned());
        OwnerNote { member, client, epoch, ..OwnerNote::default() }
    }

    #[test]
    fn a_dead_member_is_fenced_before_its_lock_is_taken() {
        assert!(BeforeLone::is_of_member(&note("x", 7), Some("x")));
        let mut before = BeforeLone::default();
        assert_eq!(before.next(&note("x", 7), true), LoneStep::Wait);
        assert_eq!(before.next(&note("x", 7), false), LoneStep::LookAgain);
        assert_eq!(before.next(&note("x", 7), false), LoneStep::Fence("x".to_owned()));
    }

    #[test]
    fn a_member_that_lives_is_not_fenced() {
        let mut before = BeforeLone::default();
        for _ in 0..3 {
            assert_eq!(before.next(&note("x", 7), false), LoneStep::LookAgain);
            assert_eq!(before.next(&note("x", 7), true), LoneStep::Wait, "it watches again");
        }
        // Another member is the owner meanwhile.
        assert_eq!(before.next(&note("x", 7), false), LoneStep::LookAgain);
        assert_eq!(before.next(&note("z", 8), false), LoneStep::LookAgain);
    }

    #[test]
    fn librbd_alone_looks_at_a_lock_that_no_member_has() {
        assert!(!BeforeLone::is_of_member(&note("x", 7), None), "it is free");
        assert!(!BeforeLone::is_of_member(&note("x", 7), Some("y")), "another client's");
        assert!(!BeforeLone::is_of_member(&note("", 8), Some("x")), "it was given back");
        assert!(!BeforeLone::is_of_member(&OwnerNote::default(), Some("x")), "no group");
        let alone = OwnerNote { member: String::new(), ..note("x", 7) };
        assert!(!BeforeLone::is_of_member(&alone, Some("x")), "a target in no group");
    }
}
