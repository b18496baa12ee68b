//! [`HostPlaces`]: the hosts of sessions, for the shares of the arena. Pure.
//!
//! A host is the [`Payer`] of the connections of a session.

use std::collections::BTreeMap;

use crate::control::peers::account::Payer;
use crate::volume::ids::{HostIndex, SessionIndex};

#[derive(Debug)]
struct PlaceOfHost {
    index: HostIndex,
    // Its sessions.
    sessions: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub(in crate::control) struct HostPlaces {
    places: BTreeMap<Payer, PlaceOfHost>,
    by_session: BTreeMap<SessionIndex, Payer>,
    // Places that were in use and are free.
    free: Vec<HostIndex>,
}

impl HostPlaces {
    /// Notes the host of a session. Returns its place, if the poll groups must learn it.
    pub(in crate::control) fn put(
        &mut self,
        session: SessionIndex,
        host: Payer,
    ) -> Option<HostIndex> {
        if self.by_session.get(&session).is_some_and(|former| *former == host) {
            return None;
        }
        self.end(session);
        // The places suffice for all sessions: place 0 is of no host, and one session index of
        // none.
        let next = u16::try_from(self.places.len() + 1).unwrap_or(u16::MAX);
        let place = self.places.entry(host.clone()).or_insert_with(|| {
            let index = self.free.pop().unwrap_or(HostIndex::new(next));
            PlaceOfHost { index, sessions: 0 }
        });
        place.sessions += 1;
        self.by_session.insert(session, host);
        Some(place.index)
    }

    /// A session has ended.
    pub(in crate::control) fn end(&mut self, session: SessionIndex) {
        let Some(host) = self.by_session.remove(&session) else { return };
        let Some(place) = self.places.get_mut(&host) else { return };
        place.sessions -= 1;
        if place.sessions == 0 {
            self.free.push(place.index);
            self.places.remove(&host);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::peers::account::Origin;

    fn session(index: u16, life: u32) -> SessionIndex {
        SessionIndex { index, life }
    }

    fn of(host: &str) -> Payer {
        Payer::Origin(Origin::Other(host.to_owned()))
    }

    #[test]
    fn sessions_of_a_host_have_one_place_which_others_get_later() {
        let mut places = HostPlaces::default();
        let first = places.put(session(0, 1), of("a")).unwrap();
        assert_ne!(first, HostIndex::NONE);
        assert_eq!(places.put(session(1, 2), of("a")), Some(first));
        let second = places.put(session(2, 3), of("b")).unwrap();
        assert_ne!(first, second);
        // The session comes back, from the same host and from another one.
        assert_eq!(places.put(session(1, 2), of("a")), None);
        assert_eq!(places.put(session(1, 2), of("b")), Some(second));
        places.end(session(0, 1));
        assert_eq!(places.put(session(0, 4), of("c")), Some(first));
        places.end(session(9, 9));
        let all: std::collections::BTreeSet<_> =
            (10..500).map(|at| places.put(session(at, 5), of(&at.to_string())).unwrap()).collect();
        assert_eq!(all.len(), 490);
        assert!(!all.contains(&first) && !all.contains(&second));
    }
}
