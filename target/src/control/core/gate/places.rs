//! [`Places`]: the places of unproven connections, few in all. Pure.
//!
//! An early arrival does not keep its place for that: only a proof counts. Each place has a key:
//! the address that its connection comes from, or the session that it names. When the places are
//! full, a key that has more than the newcomer's gives one up, and of its connections the oldest.
//! Connections of one key wait for each other.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::volume::ids::AdmissionId;

/// How long a connection may take for its proof while others wait for its place. A LOGIN takes
/// milliseconds, and more on a busy host or a long way.
pub(super) const GRACE: Duration = Duration::from_millis(250);

#[derive(Clone, Debug)]
struct WaitingPeer<K> {
    key: K,
    since: Instant,
    memory_bytes: u64,
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Places<K> {
    // Names are given in the order of arrival: the first one is the oldest.
    waiting: BTreeMap<AdmissionId, WaitingPeer<K>>,
    memory_bytes: u64,
}

/// Whether there is a place for another connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Room {
    /// A place is free.
    Free,
    /// This connection has to go.
    InPlaceOf(AdmissionId),
    /// None: the key has about as many as any other. The connections before the newcomer soon prove
    /// themselves or end.
    None,
}

impl<K> WaitingPeer<K> {
    fn is_late(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) > GRACE
    }
}

impl<K> Default for Places<K> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), memory_bytes: 0 }
    }
}

impl<K: Ord + Clone> Places<K> {
    /// Gives a connection a place.
    pub(super) fn add(&mut self, id: AdmissionId, key: K, memory_bytes: u64, now: Instant) {
        self.memory_bytes = self.memory_bytes.saturating_add(memory_bytes);
        self.waiting.insert(id, WaitingPeer { key, since: now, memory_bytes });
    }

    /// A connection proved itself, or ended, or gave its place up. Returns whether it had a place.
    pub(super) fn remove(&mut self, id: AdmissionId) -> bool {
        let Some(waiting) = self.waiting.remove(&id) else { return false };
        self.memory_bytes = self.memory_bytes.saturating_sub(waiting.memory_bytes);
        true
    }

    /// Whether a connection has a place.
    pub(super) fn has(&self, id: AdmissionId) -> bool {
        self.waiting.contains_key(&id)
    }

    /// The number of places taken.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// The number of places of that key, and the bytes of their memory.
    pub(super) fn of(&self, key: &K) -> (usize, u64) {
        let theirs = self.waiting.values().filter(|waiting| waiting.key == *key);
        theirs.fold((0, 0), |(count, bytes), one| (count + 1, bytes + one.memory_bytes))
    }

    /// The bytes of memory of all.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// The oldest connection of a key.
    pub(super) fn oldest_of(&self, key: &K) -> Option<AdmissionId> {
        self.waiting.iter().find(|(_, waiting)| waiting.key == *key).map(|(id, _)| *id)
    }

    fn counts(&self) -> BTreeMap<&K, usize> {
        let mut counts = BTreeMap::new();
        self.waiting.values().for_each(|waiting| *counts.entry(&waiting.key).or_insert(0) += 1);
        counts
    }

    // The oldest connection of the key with most places, among connections that may go. `may_go`
    // takes the connection and the number of places of its key. Of several such keys, the oldest
    // connection of all.
    fn oldest_where(&self, may_go: impl Fn(&WaitingPeer<K>, usize) -> bool) -> Option<AdmissionId> {
        let counts = self.counts();
        let of = |waiting: &WaitingPeer<K>| counts.get(&waiting.key).copied().unwrap_or(0);
        let may_go = self.waiting.iter().filter(|(_, waiting)| may_go(waiting, of(waiting)));
        may_go.min_by_key(|(id, waiting)| (usize::MAX - of(waiting), **id)).map(|(id, _)| *id)
    }

    /// The connection that goes for another one of that key when all together are too many: one
    /// that had its time for the proof, if its key has no fewer places than the newcomer's.
    /// Otherwise the oldest one of the key with most places, if that key would still have no fewer
    /// than the newcomer's. `None`: all may prove themselves in a moment.
    pub(super) fn in_place_of(&self, key: &K, now: Instant) -> Option<AdmissionId> {
        let own = self.of(key).0;
        let late = self.oldest_where(|waiting, count| waiting.is_late(now) && count >= own);
        late.or_else(|| self.oldest_where(|_, count| count > own + 1))
    }

    /// Whether another connection of that key gets one of `most` places. First a connection goes
    /// that had its time for the proof, if its key has more places than the newcomer's. Otherwise a
    /// key without a place takes one from the key with most, and so does a key that would still
    /// have fewer than that.
    pub(super) fn room_for(&self, key: &K, most: usize, now: Instant) -> Room {
        if self.len() < most {
            return Room::Free;
        }
        let own = self.of(key).0;
        let late = self.oldest_where(|waiting, count| waiting.is_late(now) && count > own);
        let of_most = || self.oldest_where(|_, count| own == 0 || count > own + 1);
        late.or_else(of_most).map_or(Room::None, Room::InPlaceOf)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(keys: &[&'static str], now: Instant) -> Places<&'static str> {
        let mut places = Places::default();
        for (id, key) in (1..).zip(keys) {
            places.add(AdmissionId(id), *key, 10, now);
        }
        places
    }

    #[test]
    fn the_key_with_most_places_gives_one_up() {
        let now = Instant::now();
        let all = places(&["a", "b", "b", "c", "c", "c"], now);
        assert_eq!(all.room_for(&"z", 7, now), Room::Free);
        // The oldest of c, although others are older.
        assert_eq!(all.room_for(&"z", 6, now), Room::InPlaceOf(AdmissionId(4)));
        assert_eq!(all.room_for(&"a", 6, now), Room::InPlaceOf(AdmissionId(4)), "2 of a, 2 of c");
        // A place would only change sides for ever.
        assert_eq!(all.room_for(&"b", 6, now), Room::None);
        assert_eq!(all.room_for(&"c", 6, now), Room::None);
        // Of many keys with one place each, the oldest.
        let all = places(&["d", "a", "b"], now);
        assert_eq!(all.room_for(&"z", 3, now), Room::InPlaceOf(AdmissionId(1)));
        assert_eq!(all.oldest_of(&"b"), Some(AdmissionId(3)));
    }

    #[test]
    fn a_late_connection_goes_first_for_a_key_with_fewer_places() {
        let now = Instant::now();
        let mut all = places(&["a", "b"], now);
        let later = now + GRACE + Duration::from_millis(1);
        for id in 3..6 {
            all.add(AdmissionId(id), "c", 10, later);
        }
        assert_eq!(all.room_for(&"z", 5, now), Room::InPlaceOf(AdmissionId(3)));
        assert_eq!(all.room_for(&"z", 5, later), Room::InPlaceOf(AdmissionId(1)));
        // A crowd of one key ends no slow connection of another.
        assert_eq!(all.room_for(&"c", 5, later), Room::None);
        assert_eq!(all.room_for(&"a", 5, later), Room::InPlaceOf(AdmissionId(3)));
        assert_eq!((all.of(&"c"), all.memory_bytes()), ((3, 30), 50));
        assert!(all.remove(AdmissionId(1)) && !all.remove(AdmissionId(1)));
        assert_eq!((all.len(), all.memory_bytes(), all.has(AdmissionId(1))), (4, 40, false));
    }

    #[test]
    fn siblings_wait_for_each_other_however_long() {
        let now = Instant::now();
        let all = places(&["a"; 64], now);
        for waited in [Duration::ZERO, 2 * GRACE, 100 * GRACE] {
            assert_eq!(all.room_for(&"a", 64, now + waited), Room::None, "{waited:?}");
        }
        assert_eq!(all.room_for(&"b", 64, now), Room::InPlaceOf(AdmissionId(1)));
    }

    #[test]
    fn between_equal_keys_only_late_connections_go() {
        let now = Instant::now();
        let later = now + GRACE + Duration::from_millis(1);
        let all = places(&["a", "b", "b", "c", "c", "c"], now);
        assert_eq!(all.in_place_of(&"z", now), Some(AdmissionId(4)));
        assert_eq!(all.in_place_of(&"a", now), Some(AdmissionId(4)));
        assert_eq!(all.in_place_of(&"b", now), None, "it would only change sides for ever");
        assert_eq!(all.in_place_of(&"c", now), None);
        assert_eq!(all.in_place_of(&"c", later), Some(AdmissionId(4)), "its own");
        // A key with more takes from none with less.
        assert_eq!(places(&["a", "b"], now).in_place_of(&"z", now), None);
        assert_eq!(places(&["a", "b"], now).in_place_of(&"z", later), Some(AdmissionId(1)));
        let mut one = places(&["a"], now);
        (2..5).for_each(|id| one.add(AdmissionId(id), "b", 10, later));
        assert_eq!(one.in_place_of(&"b", later), None);
    }
}
