//! [`Admissions`]: every admitted connection that has not ended, and its state.
//!
//! An admin connection is a *stranger* until its LOGIN is accepted. Then it is a *member* of a
//! session. An I/O connection is a member from the start. If proofs are required, it proves its
//! membership in its self-test.
//!
//! An unproven connection has a [place](super::places) and takes nothing else: no session, and
//! nothing of another's. Strangers, and I/O connections from another address than their session,
//! share one set of places. I/O connections from the address of their session have another set, so
//! that a host can connect all its queues at once. When the places are full, an unproven connection
//! [ends](Evicted) for the newcomer, or the newcomer is refused and has to try again. Their poll
//! group ends all that have not proven themselves in time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use rblk_protocol::auth::TargetHandshake;
use rblk_protocol::width::wide;
use rblk_protocol::{Epoch, SessionId};

use super::places::{Places, Room};
use crate::control::core::budget::Budget;
use crate::control::peers::account::Origin;
use crate::volume::ids::{AdmissionId, SessionIndex};

/// Strangers at a time.
pub(super) const STRANGERS_MAX: usize = 64;
/// The most that may join one session at a time, of connections from the address of the session:
/// several times its final budget, so that its own connections have the time to prove themselves.
const JOINING: Budget = Budget {
    connections_max: 4 * Budget::OF_A_SESSION.connections_max,
    memory_max: Budget::OF_A_SESSION.memory_max,
};
/// Connections at a time that gave their places up and have not ended yet: of each set of places.
pub(super) const ENDING_MAX: usize = 4 * STRANGERS_MAX;

/// An admin connection that has not logged in.
#[derive(Debug)]
pub(super) struct Stranger {
    /// Its address, for people.
    pub(super) peer: String,
    /// The id of the session that its LOGIN begins, if it begins one.
    pub(super) fresh: SessionId,
    /// The session that it wants to resume, and in which epoch.
    pub(super) resume: Option<(SessionId, Epoch)>,
    /// Bytes of its memory.
    pub(super) memory_bytes: u64,
    /// Both ends know [`WAYS`](rblk_protocol::Features::WAYS).
    pub(super) has_ways: bool,
    /// Its proof of identity, if one is required.
    pub(super) handshake: Option<TargetHandshake>,
}

/// A connection of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::control::core) struct Member {
    /// The session.
    pub(in crate::control::core) session: SessionIndex,
    /// The epoch.
    pub(in crate::control::core) epoch: Epoch,
    /// The queue; `None` for admin.
    pub(in crate::control::core) queue: Option<u16>,
    /// Bytes of its memory.
    pub(in crate::control::core) memory_bytes: u64,
    /// Proven to be of the session, or exempt. Otherwise it does not own its queue number.
    pub(in crate::control::core) is_proven: bool,
    /// Its stream is encrypted.
    pub(in crate::control::core) is_encrypted: bool,
}

/// A connection that gave its place up. The caller ends it.
#[must_use]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Evicted(pub(in crate::control::core) AdmissionId);

/// See the module.
#[derive(Debug)]
pub(super) struct Admissions {
    // Connections so far.
    count: u64,
    strangers: BTreeMap<AdmissionId, Stranger>,
    members: BTreeMap<AdmissionId, Member>,
    // Of strangers, and of unproven members from another address than their session.
    places: Places<Origin>,
    // Of unproven members from the address of their session.
    joining: Places<SessionIndex>,
    // Of all that are joining.
    joining_max: Budget,
    // Connections that gave up a place in either set and have not ended yet.
    ending: BTreeSet<AdmissionId>,
    ending_to_join: BTreeSet<AdmissionId>,
}

impl Admissions {
    /// No connections yet. `joining_max`: the most that all joining connections may take together
    /// until they have proven themselves.
    pub(super) fn new(joining_max: Budget) -> Self {
        Self {
            count: 0,
            strangers: BTreeMap::new(),
            members: BTreeMap::new(),
            places: Places::default(),
            joining: Places::default(),
            joining_max,
            ending: BTreeSet::new(),
            ending_to_join: BTreeSet::new(),
        }
    }

    /// Makes a place for another stranger from there. Returns the connection that gave it up.
    ///
    /// # Errors
    /// The text for the peer: there is no place.
    pub(super) fn make_place(
        &mut self,
        origin: &Origin,
        now: Instant,
    ) -> Result<Option<Evicted>, String> {
        let crowded = || "too many connections wait for their login here: connect again".to_owned();
        match self.places.room_for(origin, STRANGERS_MAX, now) {
            Room::Free => Ok(None),
            Room::InPlaceOf(id) if self.ending.len() < ENDING_MAX => {
                Ok(Some(self.give_place_up(id)))
            }
            Room::InPlaceOf(_) | Room::None => Err(crowded()),
        }
    }

    /// Makes room for another unproven I/O connection from the address of its session. Returns the
    /// connections that gave up their places. Within one session the newest ends the oldest;
    /// between sessions, those end that [may](Places::in_place_of).
    ///
    /// # Errors
    /// The text for the peer: there is no room. No connection gave up its place.
    pub(super) fn make_room_to_join(
        &mut self,
        session: SessionIndex,
        memory_bytes: u64,
        now: Instant,
    ) -> Result<Vec<Evicted>, String> {
        let is_full = |joining: &Places<SessionIndex>| {
            let (count, used) = (joining.len(), joining.memory_bytes());
            !self.joining_max.has_room(count, used, memory_bytes)
        };
        let is_its_own_full = |joining: &Places<SessionIndex>| {
            let (count, used) = joining.of(&session);
            !JOINING.has_room(count, used, memory_bytes)
        };
        if !is_full(&self.joining) && !is_its_own_full(&self.joining) {
            return Ok(Vec::new());
        }
        let crowded = || "too many connections have proven nothing here: connect again".to_owned();
        if self.ending_to_join.len() >= ENDING_MAX {
            return Err(crowded());
        }
        // No connection ends in vain: first see whether there would be room.
        let (mut left, mut going) = (self.joining.clone(), Vec::new());
        loop {
            // Of more connections than a session may have in the end, not all are its own.
            let has_strange = || left.of(&session).0 >= wide(Budget::OF_A_SESSION.connections_max);
            let its_own = || left.oldest_of(&session);
            let next = if is_its_own_full(&left) {
                its_own()
            } else if is_full(&left) {
                let other = left.in_place_of(&session, now);
                other.or_else(|| has_strange().then(its_own).flatten())
            } else {
                break;
            };
            let next = next.ok_or_else(crowded)?;
            left.remove(next);
            going.push(next);
        }
        Ok(going.into_iter().map(|id| self.give_place_up(id)).collect())
    }

    fn give_place_up(&mut self, id: AdmissionId) -> Evicted {
        // Its later commands are ignored.
        self.strangers.remove(&id);
        if self.joining.remove(id) {
            self.ending_to_join.insert(id);
        } else {
            self.places.remove(id);
            self.ending.insert(id);
        }
        Evicted(id)
    }

    /// Adds an admin connection that has a [place](Self::make_place).
    pub(super) fn add_stranger(
        &mut self,
        stranger: Stranger,
        origin: Origin,
        now: Instant,
    ) -> AdmissionId {
        let id = self.next_id();
        self.places.add(id, origin, stranger.memory_bytes, now);
        self.strangers.insert(id, stranger);
        id
    }

    /// Adds an I/O connection. An unproven one has a place: that of a stranger if it is `foreign`.
    pub(super) fn add_member(
        &mut self,
        member: Member,
        foreign: Option<Origin>,
        now: Instant,
    ) -> AdmissionId {
        let id = self.next_id();
        self.members.insert(id, member);
        let Member { session, memory_bytes, is_proven, .. } = member;
        match foreign {
            _ if is_proven => {}
            Some(origin) => self.places.add(id, origin, memory_bytes, now),
            None => self.joining.add(id, session, memory_bytes, now),
        }
        id
    }

    fn next_id(&mut self) -> AdmissionId {
        self.count += 1;
        AdmissionId(self.count)
    }

    /// A connection that has not logged in.
    pub(super) fn stranger_mut(&mut self, id: AdmissionId) -> Option<&mut Stranger> {
        self.strangers.get_mut(&id)
    }

    /// A connection of a session.
    pub(super) fn member(&self, id: AdmissionId) -> Option<Member> {
        self.members.get(&id).copied()
    }

    /// A connection of a session that is unproven and still has its place.
    pub(super) fn unproven(&self, id: AdmissionId) -> Option<Member> {
        self.member(id).filter(|_| self.places.has(id) || self.joining.has(id))
    }

    /// The sessions that have I/O connections, and whether all of these are encrypted. In one pass
    /// over all connections.
    pub(super) fn encryption(&self) -> BTreeMap<SessionIndex, bool> {
        let mut sessions = BTreeMap::new();
        for member in self.members.values().filter(|member| member.queue.is_some()) {
            let is_encrypted = sessions.entry(member.session).or_insert(true);
            *is_encrypted &= member.is_encrypted;
        }
        sessions
    }

    /// A stranger logged in.
    pub(super) fn adopt(&mut self, id: AdmissionId, member: Member) {
        let stranger = self.strangers.remove(&id);
        debug_assert!(stranger.is_some(), "{id:?} is no stranger");
        self.places.remove(id);
        self.members.insert(id, member);
    }

    /// A connection has proven that it is of its session.
    pub(super) fn prove(&mut self, id: AdmissionId) {
        self.places.remove(id);
        self.joining.remove(id);
        if let Some(member) = self.members.get_mut(&id) {
            member.is_proven = true;
        }
    }

    /// A connection ended. Returns its membership if it was of a session.
    pub(super) fn remove(&mut self, id: AdmissionId) -> Option<Member> {
        self.strangers.remove(&id);
        self.places.remove(id);
        self.joining.remove(id);
        self.ending.remove(&id);
        self.ending_to_join.remove(&id);
        self.members.remove(&id)
    }

    /// Connections that take the places of strangers.
    pub(super) fn strangers(&self) -> usize {
        self.places.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Budget = Budget { connections_max: 300, memory_max: 1 << 30 };

    fn origin(name: &str) -> Origin {
        Origin::of(name)
    }

    fn stranger(peer: &str) -> Stranger {
        let (peer, fresh) = (peer.to_owned(), SessionId([1; 16]));
        Stranger { peer, fresh, resume: None, memory_bytes: 1, has_ways: false, handshake: None }
    }

    fn session(index: u16) -> SessionIndex {
        SessionIndex { index, life: 1 }
    }

    fn member(session: SessionIndex, queue: Option<u16>, is_proven: bool) -> Member {
        let (epoch, memory_bytes, is_encrypted) = (Epoch(1), 1, false);
        Member { session, epoch, queue, memory_bytes, is_proven, is_encrypted }
    }

    #[test]
    fn a_place_is_free_when_its_stranger_logs_in_or_ends() {
        let (mut all, now) = (Admissions::new(BUDGET), Instant::now());
        let one = session(0);
        let ids: Vec<_> = (0..STRANGERS_MAX)
            .map(|n| all.add_stranger(stranger(&format!("a:{n}")), origin("a"), now))
            .collect();
        assert!(all.make_place(&origin("a"), now).is_err(), "all may log in in a moment");
        all.adopt(ids[0], member(one, None, true));
        assert_eq!(all.make_place(&origin("a"), now), Ok(None));
        // A connection that has not proven its session.
        let foreign = all.add_member(member(one, Some(1), false), Some(origin("a")), now);
        assert!(all.make_place(&origin("a"), now).is_err());
        all.add_member(member(one, Some(2), true), None, now);
        assert_eq!(all.strangers(), STRANGERS_MAX);
        assert!(all.unproven(foreign).is_some());
        all.prove(foreign);
        assert!(all.unproven(foreign).is_none());
        assert_eq!(all.make_place(&origin("a"), now), Ok(None));
        assert_eq!(all.remove(ids[1]), None, "of no session");
        assert_eq!(all.remove(foreign), Some(member(one, Some(1), true)));
        assert_eq!(all.strangers(), STRANGERS_MAX - 2);
    }

    #[test]
    fn an_evicted_connection_is_ignored_and_counts_until_it_ends() {
        let (mut all, now) = (Admissions::new(BUDGET), Instant::now());
        let ids: Vec<_> = (0..STRANGERS_MAX)
            .map(|n| all.add_stranger(stranger(&format!("a:{n}")), origin("a"), now))
            .collect();
        assert_eq!(all.make_place(&origin("b"), now), Ok(Some(Evicted(ids[0]))));
        assert!(all.stranger_mut(ids[0]).is_none() && all.stranger_mut(ids[1]).is_some());
        // Newcomers find a place as long as those before them really end.
        for n in 0..ENDING_MAX - 1 {
            let from = origin(&format!("c{n}"));
            all.add_stranger(stranger("c"), from, now);
            assert!(matches!(all.make_place(&origin("d"), now), Ok(Some(_))), "{n}");
        }
        let last = all.add_stranger(stranger("c"), origin("d"), now);
        assert!(all.make_place(&origin("e"), now).is_err());
        // A place that becomes free goes to none of the connections that are ending.
        while all.strangers() >= STRANGERS_MAX {
            let other = all.strangers.keys().copied().find(|id| *id != last).unwrap();
            all.remove(other);
        }
        assert_eq!(all.ending.len(), ENDING_MAX);
        assert_eq!(all.make_place(&origin("e"), now), Ok(None));
        while all.strangers() < STRANGERS_MAX {
            all.add_stranger(stranger("c"), origin("c"), now);
        }
        assert!(all.make_place(&origin("e"), now).is_err());
        all.remove(ids[0]);
        assert!(matches!(all.make_place(&origin("e"), now), Ok(Some(_))));
    }

    #[test]
    fn joining_a_full_session_ends_its_oldest_joiner() {
        let (mut all, now) = (Admissions::new(BUDGET), Instant::now());
        let join = |all: &mut Admissions, of: u16| {
            let gone = all.make_room_to_join(session(of), 1, now).unwrap();
            (all.add_member(member(session(of), Some(0), false), None, now), gone)
        };
        let ids: Vec<_> = (0..260).map(|_| join(&mut all, 0).0).collect();
        assert_eq!(join(&mut all, 0).1, [Evicted(ids[0])]);
        assert!(all.unproven(ids[0]).is_none() && all.unproven(ids[1]).is_some());
        // All together: the session that has most gives one up.
        (0..40).for_each(|_| assert_eq!(join(&mut all, 1).1, []));
        assert_eq!(join(&mut all, 2).1, [Evicted(ids[1])]);
        // Memory counts as well.
        let half = Budget::OF_A_SESSION.memory_max / 2;
        let gone = all.make_room_to_join(session(2), half, now).unwrap();
        assert_eq!(gone.len(), 1);
        let large = Member { memory_bytes: half + 1, ..member(session(2), Some(1), false) };
        let large = all.add_member(large, None, now);
        let gone = all.make_room_to_join(session(2), half, now).unwrap();
        assert!(gone.contains(&Evicted(large)), "{gone:?}");
        assert_eq!(all.strangers(), 0);
    }

    #[test]
    fn sessions_that_join_at_once_end_no_timely_joiner() {
        let few = Budget { connections_max: 100, memory_max: 80 << 20 };
        let (mut all, now) = (Admissions::new(few), Instant::now());
        let lane = 10 << 20;
        let join = |all: &mut Admissions, of: u16, now| {
            let gone = all.make_room_to_join(session(of), lane, now)?;
            let member = Member { memory_bytes: lane, ..member(session(of), Some(0), false) };
            Ok::<_, String>((all.add_member(member, None, now), gone))
        };
        let ids: Vec<_> = (0..8).map(|of| join(&mut all, of / 2, now).unwrap().0).collect();
        // Others have as many, or one more: the newcomer has to try again.
        for _ in 0..10 {
            let text = join(&mut all, 0, now).unwrap_err();
            assert!(text.contains("connect again"), "{text}");
        }
        assert!(ids.iter().all(|id| all.unproven(*id).is_some()), "nobody ended");
        // A connection of a session without any finds its place, and no more.
        let (first, gone) = join(&mut all, 9, now).unwrap();
        assert_eq!(gone, [Evicted(ids[0])]);
        join(&mut all, 9, now).unwrap_err();
        // A large connection without room ends none in vain.
        let text = all.make_room_to_join(session(8), 80 << 20, now).unwrap_err();
        assert!(text.len() <= rblk_protocol::limits::REJECT_TEXT_BYTES, "{text}");
        assert_eq!((all.joining.len(), all.ending_to_join.len()), (8, 1));
        // Connections that had their time make room.
        let late = now + super::super::places::GRACE + std::time::Duration::from_millis(1);
        assert_eq!(join(&mut all, 9, late).unwrap().1, [Evicted(ids[2])]);
        all.prove(first);
        assert_eq!(join(&mut all, 9, late).unwrap().1, []);
    }
}
