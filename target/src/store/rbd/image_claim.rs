//! [`Claim`]: how a member of a group becomes the owner of an image. Pure: events in, acts out.
//!
//! Nobody watches over the owners. A host that has lost its target goes to another member, and that
//! one claims the image:
//!
//! 1. It looks at the [`OwnerNote`] and at the exclusive lock.
//! 2. It asks the owner for the image, if the host may have it. An owner that answers hands over in
//!    good order, or stays.
//! 3. An owner that does not answer is fenced for ever, and then its lock is broken. If no host may
//!    have the image, the member waits until the cluster drops the owner, or a host comes that may.
//! 4. It takes the lock, fences the owner that the note still names, and notes itself.
//!
//! The fence comes first, by the client that will do the I/O, which then waits for the map of OSDs
//! that has it. Librbd would fence a client whose lock it breaks, too, but for an hour: a machine
//! that was suspended for longer would write again. The first fence of a client counts until its
//! end, and a later one changes nothing (measured with Ceph 16.2.15). So librbd is told not to
//! fence, and a dead owner is also fenced before librbd takes its lock. When the lock is taken, the
//! owner in the note is fenced, which may be another one by then.
//!
//! A dead owner has no watch of the image at two looks, a second apart. A living one has none for a
//! moment, when a slow OSD broke its watch: librbd ends that watch, and then begins another one.
//!
//! A member that fences nobody waits for the newest map, too. Its own may be older than the fence
//! of an owner before the last one: an OSD that learns of no newer map would take a late write of
//! that owner after those of this member.
//!
//! A member may die between two acts: then its lock is not noted, or it is free and the note names
//! somebody. Both states pass when a living member is at work. If one lasts, librbd takes the lock
//! of a dead owner, and the claim goes on. But then another client than a member may have had the
//! image, and written to it. The claim raises the *lineage* of the image, which is a part of the
//! identity of its store: no host that held the volume may resume. The same holds after a target
//! without a group.
//!
//! Invariants:
//! - An image has a new owner only when the client in the note has given it back, or is fenced.
//! - A lock is broken only if its owner is the one in the note, is fenced, and did not answer.
//! - No state of lock and note lasts for ever when only living members claim.
//! - Only for its holder that comes back, or for a host that takes over, is an owner disturbed. The
//!   record beside the image says who is the holder, before the owner is asked.
//! - A former owner that was fenced may still answer hosts from its cache, until it notices that
//!   nothing proves its lock. Nothing is served before that, unless the only host that had the
//!   volume there has come back here ([`Claim::former`]). The record that decides is read when no
//!   former owner can change it any more. That host may have gone back to the former owner since.
//!   So until then no other host gets the volume, and the image is not given back.

use rblk_protocol::{AccessMode, Generation, HostId, Mutation};
use serde::{Deserialize, Serialize};

use super::ownership::owner_note::OwnerNote;

/// Looks at a lock that does not fit the note: a member at work notes itself within that.
const LOOKS_AT_UNCLEAR: u32 = 10;
/// Pauses in which an owner that hands over is expected to end.
const PAUSES_OF_HAND_OVER: u32 = 300;
/// Pauses between two questions to an owner that hands over.
const PAUSES_PER_ASK: u32 = 10;
/// Pauses in which the cluster is expected to drop an owner that is dead.
const PAUSES_OF_DEAD: u32 = 350;
/// Pauses between two looks at an owner that does not watch the image: librbd replaces a broken
/// watch by a new one within that.
const PAUSES_OF_MISSED: u32 = 10;
/// Pauses in which another member is expected to take an image that was given back for it.
const PAUSES_OF_PROMISE: u32 = 50;
/// Tries to get a lock that nobody should have.
const LOCKS: u32 = 10;

/// Why a member claims an image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish {
    /// It is to be served if nobody serves it.
    Idle,
    /// A host asks for it that has not held it before.
    Fresh,
    /// It is to be moved here, by a person. The owner has told this member so by an order of this
    /// number, or (none) the person is here. No owner is fenced for that.
    Order(Option<u64>),
    /// A host has come that names this generation. Unless it is the holder, or one of several, it
    /// is as any other host.
    Return(HostId, Generation),
    /// A host takes it over.
    TakeOver,
}

impl Wish {
    /// Whether an owner that hands over is waited for.
    fn waits(self) -> bool {
        self.strength() > 1
    }

    /// Whether a living owner is to be asked for it, and one that does not answer is fenced.
    pub(crate) fn disturbs(self) -> bool {
        self.strength() > 2
    }

    fn strength(self) -> u8 {
        match self {
            Self::Idle => 0,
            Self::Fresh => 1,
            Self::Order(_) => 2,
            Self::Return(..) => 3,
            Self::TakeOver => 4,
        }
    }
}

/// The answer of an owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AskAnswer {
    /// It hands over in good order: the lock will be free.
    HandsOver,
    /// It has other hosts, and stays.
    Stays,
}

/// What has happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// The claim begins.
    Begin,
    /// The note, and the client that has the lock.
    Seen(OwnerNote, Option<String>),
    /// How the host that comes back had the volume by the record: alone, or as one of several;
    /// none: it is not the holder.
    Holder(Option<AccessMode>),
    /// The answer of the owner; none: it did not answer in time.
    Answered(Option<AskAnswer>),
    /// Whether the cluster still has a watch of the owner.
    Watched(bool),
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
pub enum Act {
    /// Read the note and the owner of the lock.
    Look,
    /// Read the record of the holder.
    ReadHolder,
    /// Ask the owner for the image.
    Ask,
    /// Find out whether the cluster has dropped the owner of the lock.
    FindWatch(String),
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

/// The hosts that a former owner may still answer from its cache, for as long as it believes the
/// last proof of its lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FormerHosts {
    /// None.
    Nobody,
    /// Only the holder, for which the image was claimed: no other host had the volume there.
    Holder,
    /// Any host that had the volume there.
    All,
}

/// The end of a claim.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
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
    ReadHolder(OwnerNote),
    Ask(OwnerNote),
    // The owner hands over.
    HandsOver(OwnerNote),
    // The owner does not answer, and is to be fenced, unless it has given the image back meanwhile.
    Silent(OwnerNote),
    // The owner does not answer, and is not to be fenced: it may be dead.
    Dies(OwnerNote),
    // The client gave the image back, and is about to close it, unless it has died.
    Closes(String),
    // The owner of the lock is not noted, and may be dead.
    Unnoted(String),
    // No watch of the owner of the lock was found once.
    Missed(Missed),
    // The owner of the lock is dead, and is fenced.
    FenceDead(LockedBy),
    // The owner of the lock may be dead, which librbd finds out.
    Lock(LockedBy),
    // The owner is fenced, and its lock is broken next.
    Fence(String),
    Break(String),
    // This client, under this name, has the lock.
    HasLock(String),
    // It fences these former owners, or none, and waits for the map.
    Map(String, OwnerNote, Vec<String>),
    Swap(OwnerNote),
    // This member is the owner, and reads the record that the former one left.
    LastRecord(OwnerNote),
    Unlock(OwnerNote),
    End,
}

/// The owner of a lock that is to be taken.
#[derive(Clone, PartialEq, Eq, Debug)]
enum LockedBy {
    Nobody,
    Member(OwnerNote),
    Unknown(String),
}

/// An owner of the lock whose watch was not found, and that may be about to renew it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Missed {
    by: LockedBy,
    client: String,
    // The epoch then.
    epoch: u64,
    // Pauses until the next look.
    pauses: u32,
}

impl Missed {
    fn new(by: LockedBy, client: String, epoch: u64) -> Self {
        Self { by, client, epoch, pauses: PAUSES_OF_MISSED }
    }
}

/// The last look before a lock is taken.
#[derive(Clone, Default, Debug)]
struct LastLook {
    epoch: u64,
    lock: Option<String>,
    // Lock and note did not fit.
    is_unclear: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Claim {
    // This member, without a client and an epoch.
    own: OwnerNote,
    wish: Wish,
    may_break: bool,
    stage: Stage,
    // Other wishes since.
    raised: Vec<Wish>,
    unclear: u32,
    pauses: u32,
    deadly: u32,
    locks: u32,
    promises: u32,
    last: LastLook,
    // The owner whose lock this claim has broken.
    broke: Option<String>,
    // The host that comes back is the holder, and had the volume so. The owner of this epoch may
    // have changed that since.
    holder: Option<(u64, AccessMode)>,
    // A former owner was fenced.
    has_fenced: bool,
}

impl Claim {
    /// A claim by a member. `may_break`: an owner that does not answer may be fenced.
    pub fn new(own: OwnerNote, wish: Wish, may_break: bool) -> Self {
        Self {
            own,
            wish,
            may_break,
            stage: Stage::Look,
            raised: Vec::new(),
            unclear: 0,
            pauses: 0,
            deadly: 0,
            locks: 0,
            promises: 0,
            last: LastLook::default(),
            broke: None,
            holder: None,
            has_fenced: false,
        }
    }

    /// Another host asks for the volume meanwhile. Its wish counts from the next look on, if it is
    /// stronger than the one that the claim has then.
    pub fn raise(&mut self, wish: Wish) {
        self.raised.push(wish);
    }

    /// Whether a claim that nobody waits for ends here: it has disturbed no owner, or would disturb
    /// another one. A claim that has fenced an owner comes to its end, and gives the image back.
    pub fn may_stop_before(&self, act: &Act) -> bool {
        match act {
            Act::Look | Act::Break(_) | Act::Unlock | Act::End(_) => false,
            Act::Lock | Act::NewestMap | Act::Swap(..) | Act::Pause => !self.has_fenced,
            Act::ReadHolder | Act::Ask | Act::FindWatch(_) | Act::Fence(_) => true,
        }
    }

    /// The hosts that a former owner may still answer, if the claim ends with the image now.
    pub fn former(&self) -> FormerHosts {
        match (self.has_fenced, &self.holder) {
            (false, _) => FormerHosts::Nobody,
            (true, Some((_, AccessMode::Exclusive))) => FormerHosts::Holder,
            (true, _) => FormerHosts::All,
        }
    }

    /// Why the member claims the image, as far as is known now.
    pub fn wish(&self) -> Wish {
        self.wish
    }

    /// The event that stands for a failure of the act under way. None: the claim fails with it.
    ///
    /// This member is noted as the owner when it reads the record once more. A claim that failed
    /// there would leave the note of a client that is gone: as after another client's write, no
    /// host could resume. A record that nobody could read only costs the wait for a former owner.
    pub fn despite_failure(&self) -> Option<Event> {
        matches!(self.stage, Stage::LastRecord(_)).then_some(Event::Holder(None))
    }

    /// Takes an event, and says what to do next. An event that does not fit the last act begins
    /// again with a look.
    pub fn next(&mut self, event: Event) -> Act {
        let is_late = event == Event::Swapped(false) && Mutation::GroupTwoClaims.is_on();
        let event = if is_late { Event::Swapped(true) } else { event };
        match (std::mem::replace(&mut self.stage, Stage::End), event) {
            (Stage::Look, Event::Seen(note, lock)) => self.seen(note, lock),
            (Stage::ReadHolder(note), Event::Holder(holder)) => {
                self.holder = holder.map(|mode| (note.epoch, mode));
                if holder.is_none() {
                    self.wish = Wish::Fresh;
                }
                self.ask(note)
            }
            (Stage::Ask(note), Event::Answered(answer)) => self.answered(note, answer),
            (Stage::HandsOver(note), Event::Paused) => {
                self.stage = Stage::HandsOver(note);
                Act::Look
            }
            (Stage::HandsOver(note), Event::Seen(now, lock)) => self.handing_over(note, now, lock),
            (Stage::Silent(note), Event::Seen(now, lock)) => {
                if now.epoch != note.epoch || lock.as_ref() != Some(&note.client) {
                    return self.seen(now, lock);
                }
                self.stage = Stage::Fence(note.client.clone());
                Act::Fence(note.client)
            }
            (Stage::Dies(note), Event::Paused) => {
                self.stage = Stage::Dies(note);
                Act::Look
            }
            (Stage::Dies(note), Event::Seen(now, lock)) => self.dying(note, now, lock),
            (stage @ Stage::Dies(_), Event::Watched(true)) => self.pause(stage),
            (Stage::Dies(note), Event::Watched(false)) => self.died(note),
            (Stage::Unnoted(client), Event::Watched(true)) => self.end(Outcome::Foreign(client)),
            (Stage::Unnoted(client), Event::Watched(false)) => {
                let (by, epoch) = (LockedBy::Unknown(client.clone()), self.last.epoch);
                self.pause(Stage::Missed(Missed::new(by, client, epoch)))
            }
            (Stage::Missed(missed), event) => self.missed(missed, event),
            (Stage::FenceDead(by), Event::Fenced) => {
                self.has_fenced = true;
                self.lock(by)
            }
            (Stage::Closes(_), Event::Watched(true)) => self.pause(Stage::Look),
            (Stage::Closes(client), Event::Watched(false)) => self.lock(LockedBy::Unknown(client)),
            (stage, event) => self.take(stage, event),
        }
    }

    /// The same from the fence of an owner on.
    fn take(&mut self, stage: Stage, event: Event) -> Act {
        match (stage, event) {
            (Stage::Fence(client), Event::Fenced) => {
                self.has_fenced = true;
                self.stage = Stage::Break(client.clone());
                Act::Break(client)
            }
            (Stage::Break(client), Event::Broken(is_broken)) => {
                self.broke = Some(client).filter(|_| is_broken);
                self.look()
            }
            (Stage::Lock(_), Event::Locked(Some(client))) => {
                self.stage = Stage::HasLock(client);
                Act::Look
            }
            (Stage::Lock(by), Event::Locked(None)) => self.not_locked(by),
            (Stage::HasLock(client), Event::Seen(note, _)) => self.locked(client, note),
            (Stage::Map(client, note, former), event @ (Event::Fenced | Event::HasMap)) => {
                self.has_fenced |= event == Event::Fenced;
                self.fence_former(client, note, former)
            }
            (Stage::Swap(own), Event::Swapped(true)) => self.swapped(own),
            (Stage::LastRecord(own), Event::Holder(holder)) => {
                self.holder = holder.map(|mode| (own.epoch, mode));
                self.end(Outcome::Owned(own))
            }
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

    /// The former owner may have changed the record until it was fenced.
    fn swapped(&mut self, own: OwnerNote) -> Act {
        if self.has_fenced && self.holder.is_some() {
            self.stage = Stage::LastRecord(own);
            return Act::ReadHolder;
        }
        self.end(Outcome::Owned(own))
    }

    fn look(&mut self) -> Act {
        self.stage = Stage::Look;
        Act::Look
    }

    fn pause(&mut self, next: Stage) -> Act {
        self.stage = next;
        Act::Pause
    }

    fn end(&mut self, outcome: Outcome) -> Act {
        if matches!(outcome, Outcome::Elsewhere(_)) && self.rise() {
            return self.look();
        }
        self.stage = Stage::End;
        Act::End(outcome)
    }

    /// Takes the strongest wish that came, if it is stronger. Returns whether there is one.
    fn rise(&mut self) -> bool {
        let strongest = self.raised.iter().map(|wish| wish.strength()).max();
        let at = self.raised.iter().position(|wish| Some(wish.strength()) == strongest);
        let Some(at) = at.filter(|_| strongest > Some(self.wish.strength())) else { return false };
        (self.wish, self.holder) = (self.raised.remove(at), None);
        true
    }

    fn not_locked(&mut self, by: LockedBy) -> Act {
        match by {
            LockedBy::Member(owner) => self.end(Outcome::Elsewhere(owner)),
            LockedBy::Unknown(client) => self.end(Outcome::Foreign(client)),
            LockedBy::Nobody => {
                self.locks += 1;
                self.stage = Stage::Look;
                Act::Pause
            }
        }
    }

    fn seen(&mut self, note: OwnerNote, lock: Option<String>) -> Act {
        if self.locks > LOCKS {
            return self.end(Outcome::Elsewhere(note));
        }
        self.rise();
        // Another owner has the record.
        self.holder.take_if(|(epoch, _)| *epoch != note.epoch);
        let is_closing = note.is_closing(lock.as_deref());
        let fits = match &lock {
            Some(client) => is_closing || (*client == note.client && !note.is_alone()),
            None => note.client.is_empty() || self.broke.as_ref() == Some(&note.client),
        };
        if fits {
            self.unclear = 0;
        }
        self.last = LastLook { epoch: note.epoch, lock: lock.clone(), is_unclear: !fits };
        let waits = self.promises < PAUSES_OF_PROMISE && self.wish != Wish::TakeOver;
        if waits && note.is_promised_beside(&self.own.member) {
            self.promises += 1;
            return self.pause(Stage::Look);
        }
        match lock {
            _ if !fits && self.unclear < LOOKS_AT_UNCLEAR => {
                self.unclear += 1;
                self.stage = Stage::Look;
                Act::Pause
            }
            Some(client) if is_closing && self.pauses < PAUSES_OF_HAND_OVER => {
                self.pauses += 1;
                self.stage = Stage::Closes(client.clone());
                Act::FindWatch(client)
            }
            // No write of it is under way.
            Some(client) if is_closing => self.lock(LockedBy::Unknown(client)),
            Some(client) if !fits => {
                self.stage = Stage::Unnoted(client.clone());
                Act::FindWatch(client)
            }
            None => self.lock(LockedBy::Nobody),
            Some(_) if matches!(self.wish, Wish::Return(..)) && self.holder.is_none() => {
                self.stage = Stage::ReadHolder(note);
                Act::ReadHolder
            }
            Some(_) => self.ask(note),
        }
    }

    fn ask(&mut self, note: OwnerNote) -> Act {
        self.stage = Stage::Ask(note);
        Act::Ask
    }

    /// The owner has no watch, and may have one again.
    fn died(&mut self, owner: OwnerNote) -> Act {
        if owner.member == self.own.member && Mutation::GroupReopensEarly.is_on() {
            return self.lock(LockedBy::Member(owner));
        }
        let (client, epoch) = (owner.client.clone(), owner.epoch);
        self.pause(Stage::Missed(Missed::new(LockedBy::Member(owner), client, epoch)))
    }

    /// No watch of the owner was found.
    fn missed(&mut self, mut missed: Missed, event: Event) -> Act {
        match (event, missed.pauses) {
            (Event::Paused, 2..) => {
                missed.pauses -= 1;
                self.pause(Stage::Missed(missed))
            }
            (Event::Paused, _) => {
                self.stage = Stage::Missed(missed);
                Act::Look
            }
            (Event::Seen(note, lock), _) => {
                let is_same = lock.as_ref() == Some(&missed.client) && note.epoch == missed.epoch;
                if !is_same || self.may_disturb() {
                    return self.seen(note, lock);
                }
                let client = missed.client.clone();
                self.stage = Stage::Missed(missed);
                Act::FindWatch(client)
            }
            (Event::Watched(false), _) => self.fence_dead(missed.by, missed.client),
            (Event::Watched(true), _) => match missed.by {
                LockedBy::Member(note) => self.pause(Stage::Dies(note)),
                LockedBy::Unknown(client) => self.end(Outcome::Foreign(client)),
                LockedBy::Nobody => self.look(),
            },
            _ => self.look(),
        }
    }

    fn fence_dead(&mut self, by: LockedBy, client: String) -> Act {
        self.stage = Stage::FenceDead(by);
        Act::Fence(client)
    }

    fn lock(&mut self, by: LockedBy) -> Act {
        self.stage = Stage::Lock(by);
        Act::Lock
    }

    fn answered(&mut self, owner: OwnerNote, answer: Option<AskAnswer>) -> Act {
        match answer {
            Some(AskAnswer::HandsOver) if self.wish.waits() => {
                self.stage = Stage::HandsOver(owner);
                Act::Pause
            }
            Some(_) => self.end(Outcome::Elsewhere(owner)),
            None if self.wish.disturbs() && self.may_break => {
                self.stage = Stage::Silent(owner);
                Act::Look
            }
            None => {
                self.stage = Stage::Dies(owner.clone());
                Act::FindWatch(owner.client)
            }
        }
    }

    /// The owner does not answer, and is not to be fenced now.
    fn dying(&mut self, owner: OwnerNote, now: OwnerNote, lock: Option<String>) -> Act {
        self.deadly += 1;
        let is_owner = lock.as_ref() == Some(&owner.client) && now.client == owner.client;
        if !is_owner || self.may_disturb() {
            return self.seen(now, lock);
        }
        if self.deadly > PAUSES_OF_DEAD {
            return self.end(Outcome::Elsewhere(owner));
        }
        self.stage = Stage::Dies(owner.clone());
        Act::FindWatch(owner.client)
    }

    /// Whether a wish came that is a reason to fence an owner.
    fn may_disturb(&self) -> bool {
        let stronger = |wish: &Wish| wish.strength() > self.wish.strength() && wish.disturbs();
        self.may_break && self.raised.iter().any(stronger)
    }

    fn handing_over(&mut self, owner: OwnerNote, now: OwnerNote, lock: Option<String>) -> Act {
        if lock.as_ref() != Some(&owner.client) || now.is_closing(lock.as_deref()) {
            return self.seen(now, lock);
        }
        self.pauses += 1;
        // It has given the image back, and is about to close it. The cluster drops a dead client
        // within that time.
        let is_closing = now.client.is_empty();
        if self.pauses > PAUSES_OF_HAND_OVER {
            return match is_closing {
                true => self.seen(now, lock),
                false => self.end(Outcome::Late(owner)),
            };
        }
        if self.pauses.is_multiple_of(PAUSES_PER_ASK) && !is_closing {
            return self.ask(owner);
        }
        self.stage = Stage::HandsOver(owner);
        Act::Pause
    }

    fn locked(&mut self, client: String, note: OwnerNote) -> Act {
        let mut former = vec![note.client.clone()];
        let is_former = |owner: &String| *owner != note.client && !note.is_closing(Some(owner));
        former.extend(self.last.lock.take().filter(is_former));
        former.retain(|other| !other.is_empty() && *other != client);
        if note.member == self.own.member && Mutation::GroupReopensEarly.is_on() {
            former.retain(|other| *other != note.client);
        }
        if former.is_empty() {
            self.stage = Stage::Map(client, note, former);
            return Act::NewestMap;
        }
        self.fence_former(client, note, former)
    }

    fn fence_former(&mut self, client: String, note: OwnerNote, mut former: Vec<String>) -> Act {
        let Some(next) = former.pop() else { return self.swap(client, &note) };
        self.stage = Stage::Map(client, note, former);
        Act::Fence(next)
    }

    fn swap(&mut self, client: String, former: &OwnerNote) -> Act {
        let is_unclear = match former.epoch == self.last.epoch {
            true => self.last.is_unclear,
            // Another member was the owner meanwhile, and gave the image back, or did not.
            false => !former.client.is_empty(),
        };
        let lineage = former.lineage + u64::from(is_unclear || former.is_alone());
        let own = OwnerNote { client, epoch: former.epoch + 1, lineage, ..self.own.clone() };
        self.stage = Stage::Swap(own.clone());
        Act::Swap(former.epoch, own)
    }
}

#[cfg(test)]
mod tests;
