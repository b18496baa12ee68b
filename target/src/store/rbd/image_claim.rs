//! [`Claim`]: how a member of a group becomes the owner of an image. Pure: events in, acts out.
//!
//! Nobody watches over the owners. A host that has lost its target goes to another member, and that
//! one claims the image:
//!
//! 1. It looks at the [`OwnerNote`] and at the exclusive lock.
//! 2. It asks the owner for the image, if the host may have it. An owner that answers hands over in
//!    good order, or stays.
//! 3. An owner that does not answer is fenced for ever, and then its lock is broken.
//! 4. It takes the lock, fences the owner that the note still names, and notes itself.
//!
//! The fence comes first, by the client that will do the I/O, which then waits for the map of OSDs
//! that has it. Librbd fences a client whose lock it breaks, too, but for an hour: a machine that
//! was suspended for longer would write again. That entry replaces the first one, so the owner is
//! fenced once more when the lock is taken.
//!
//! A member that fences nobody waits for the newest map, too. Its own may be older than the fence
//! of an owner before the last one: an OSD that learns of no newer map would take a late write of
//! that owner after those of this member.
//!
//! Invariants:
//! - An image has a new owner only when the client in the note has given it back, or is fenced.
//! - A lock is broken only if its owner is the one in the note, is fenced, and did not answer.
//! - Only for its holder that comes back, or for a host that takes over, is an owner disturbed.

use rblk_protocol::{Generation, HostId};
use serde::{Deserialize, Serialize};

use super::state_object::OwnerNote;

/// Looks at a lock whose owner is not noted yet.
const LOOKS_AT_UNKNOWN: u32 = 10;
/// Pauses in which an owner that hands over is expected to end.
const PAUSES_OF_HAND_OVER: u32 = 300;
/// Pauses between two questions to an owner that hands over.
const PAUSES_PER_ASK: u32 = 10;
/// Tries to get a lock that nobody should have.
const LOCKS: u32 = 10;

/// Why a member claims an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish {
    /// It is to be served if nobody serves it.
    Idle,
    /// A host asks for it that has not held it before.
    Fresh,
    /// The host that holds it in this generation has come.
    Return(HostId, Generation),
    /// A host takes it over.
    TakeOver,
}

impl Wish {
    /// Whether a living owner is to be asked for it, and one that does not answer is fenced.
    pub(crate) fn disturbs(self) -> bool {
        matches!(self, Self::Return(..) | Self::TakeOver)
    }
}

/// The answer of an owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AskAnswer {
    /// It hands over in good order: the lock will be free.
    HandsOver,
    /// It has other hosts, and stays.
    Stays,
}

/// What has happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Event {
    /// The claim begins.
    Begin,
    /// The note, and the client that has the lock.
    Seen(OwnerNote, Option<String>),
    /// The answer of the owner; none: it did not answer in time.
    Answered(Option<AskAnswer>),
    /// This client has the lock, under this name; none: another one has it.
    Locked(Option<String>),
    /// The client is fenced, and this one has the map that says so.
    Fenced,
    /// This client has the newest map.
    HasMap,
    /// The lock is broken, or (false) the client does not have it any more.
    Broken(bool),
    /// This member is the owner, or (false) another one was faster.
    Swapped(bool),
    /// The lock is given back.
    Unlocked,
    /// A pause is over.
    Paused,
}

/// What is to be done next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Act {
    /// Read the note and the owner of the lock.
    Look,
    /// Ask the owner for the image.
    Ask,
    /// Take the lock, if its owner is gone or dead.
    Lock,
    /// Fence a client for ever, and wait for the map.
    Fence(String),
    /// Wait for the newest map.
    NewestMap,
    /// Break the lock of a client.
    Break(String),
    /// Note the new owner, if the note has this epoch.
    Swap(u64, OwnerNote),
    /// Give the lock back.
    Unlock,
    /// Wait a moment.
    Pause,
    /// Nothing: the claim has ended.
    End(Outcome),
}

/// The end of a claim.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    /// This member is the owner.
    Owned(OwnerNote),
    /// Another member has the image.
    Elsewhere(OwnerNote),
    /// A client has the lock that is no member.
    Foreign(String),
    /// The owner hands over, and does not end.
    Late(OwnerNote),
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Stage {
    Look,
    Ask(OwnerNote),
    // The owner hands over.
    HandsOver(OwnerNote),
    // None: the lock was free. The owner of the lock may be dead, which librbd finds out.
    Lock(Option<OwnerNote>),
    // The owner is fenced, and its lock is broken next.
    Fence(String),
    Break,
    // This client, under this name, has the lock.
    HasLock(String),
    // It waits for the map, with a fence or without.
    Map(String, OwnerNote),
    Swap(OwnerNote),
    Unlock(OwnerNote),
    End,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Claim {
    // This member, without a client and an epoch.
    own: OwnerNote,
    wish: Wish,
    may_break: bool,
    stage: Stage,
    unknown: u32,
    pauses: u32,
    locks: u32,
}

impl Claim {
    /// A claim by a member. `may_break`: an owner that does not answer may be fenced.
    pub(super) fn new(own: OwnerNote, wish: Wish, may_break: bool) -> Self {
        let (unknown, pauses, locks) = (0, 0, 0);
        Self { own, wish, may_break, stage: Stage::Look, unknown, pauses, locks }
    }

    /// Takes an event, and says what to do next. An event that does not fit the last act begins
    /// again with a look.
    pub(super) fn next(&mut self, event: Event) -> Act {
        match (std::mem::replace(&mut self.stage, Stage::End), event) {
            (Stage::Look, Event::Seen(note, lock)) => self.seen(note, lock),
            (Stage::Ask(note), Event::Answered(answer)) => self.answered(note, answer),
            (Stage::HandsOver(note), Event::Paused) => {
                self.stage = Stage::HandsOver(note);
                Act::Look
            }
            (Stage::HandsOver(note), Event::Seen(now, lock)) => self.handing_over(note, now, lock),
            (Stage::Fence(client), Event::Fenced) => {
                self.stage = Stage::Break;
                Act::Break(client)
            }
            (Stage::Break, Event::Broken(_)) => self.look(),
            (Stage::Lock(_), Event::Locked(Some(client))) => {
                self.stage = Stage::HasLock(client);
                Act::Look
            }
            (Stage::Lock(Some(owner)), Event::Locked(None)) => self.end(Outcome::Elsewhere(owner)),
            (Stage::Lock(None), Event::Locked(None)) => {
                self.locks += 1;
                self.stage = Stage::Look;
                Act::Pause
            }
            (Stage::HasLock(client), Event::Seen(note, _)) => self.locked(client, note),
            (Stage::Map(client, note), Event::Fenced | Event::HasMap) => self.swap(client, &note),
            (Stage::Swap(own), Event::Swapped(true)) => self.end(Outcome::Owned(own)),
            (Stage::Swap(own), Event::Swapped(false)) => {
                self.stage = Stage::Unlock(own);
                Act::Unlock
            }
            (Stage::Unlock(own), Event::Unlocked) => {
                // The winner names itself by the time that a host asks again.
                self.end(Outcome::Elsewhere(OwnerNote { epoch: own.epoch, ..OwnerNote::default() }))
            }
            _ => self.look(),
        }
    }

    fn look(&mut self) -> Act {
        self.stage = Stage::Look;
        Act::Look
    }

    fn end(&mut self, outcome: Outcome) -> Act {
        self.stage = Stage::End;
        Act::End(outcome)
    }

    fn seen(&mut self, note: OwnerNote, lock: Option<String>) -> Act {
        let Some(client) = lock else {
            self.stage = Stage::Lock(None);
            return Act::Lock;
        };
        if client != note.client {
            // A member that has just taken the lock notes itself soon.
            self.unknown += 1;
            if self.unknown > LOOKS_AT_UNKNOWN {
                return self.end(Outcome::Foreign(client));
            }
            self.stage = Stage::Look;
            return Act::Pause;
        }
        if self.locks > LOCKS {
            return self.end(Outcome::Elsewhere(note));
        }
        match self.wish {
            Wish::Idle => {
                self.stage = Stage::Lock(Some(note));
                Act::Lock
            }
            Wish::Fresh | Wish::Return(..) | Wish::TakeOver => {
                self.stage = Stage::Ask(note);
                Act::Ask
            }
        }
    }

    fn answered(&mut self, owner: OwnerNote, answer: Option<AskAnswer>) -> Act {
        match answer {
            Some(AskAnswer::HandsOver) if self.wish.disturbs() => {
                self.stage = Stage::HandsOver(owner);
                Act::Pause
            }
            Some(_) => self.end(Outcome::Elsewhere(owner)),
            None if self.wish.disturbs() && self.may_break => {
                self.stage = Stage::Fence(owner.client.clone());
                Act::Fence(owner.client)
            }
            None => {
                self.stage = Stage::Lock(Some(owner));
                Act::Lock
            }
        }
    }

    fn handing_over(&mut self, owner: OwnerNote, now: OwnerNote, lock: Option<String>) -> Act {
        if lock.as_ref() != Some(&owner.client) {
            return self.seen(now, lock);
        }
        self.pauses += 1;
        if self.pauses > PAUSES_OF_HAND_OVER {
            return self.end(Outcome::Late(owner));
        }
        if self.pauses.is_multiple_of(PAUSES_PER_ASK) {
            self.stage = Stage::Ask(owner);
            return Act::Ask;
        }
        self.stage = Stage::HandsOver(owner);
        Act::Pause
    }

    fn locked(&mut self, client: String, note: OwnerNote) -> Act {
        let former = note.client.clone();
        let has_former = !former.is_empty() && former != client;
        self.stage = Stage::Map(client, note);
        if has_former { Act::Fence(former) } else { Act::NewestMap }
    }

    fn swap(&mut self, client: String, former: &OwnerNote) -> Act {
        let own = OwnerNote { client, epoch: former.epoch + 1, ..self.own.clone() };
        self.stage = Stage::Swap(own.clone());
        Act::Swap(former.epoch, own)
    }
}

#[cfg(test)]
mod tests;
