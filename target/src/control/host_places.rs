//! [`HostPlaces`]: which sessions are of one host, for the shares of the arena. Pure.
//!
//! A host is its id where hosts prove who they are, else its address: [`household`].

use std::collections::BTreeMap;
use std::net::Ipv6Addr;

use super::core::address_of;
use crate::identity::{HostIndex, SessionIndex};

#[derive(Debug)]
struct Place {
    index: HostIndex,
    // Its sessions.
    sessions: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct HostPlaces {
    places: BTreeMap<String, Place>,
    by_session: BTreeMap<SessionIndex, String>,
    // Places that were in use and are free.
    free: Vec<HostIndex>,
}

impl HostPlaces {
    /// A session is of that host. Returns its place, if the poll groups must be told.
    pub(super) fn put(&mut self, session: SessionIndex, host: String) -> Option<HostIndex> {
        if self.by_session.get(&session).is_some_and(|former| *former == host) {
            return None;
        }
        self.end(session);
        // There is a place for every session: place 0 is of no host, and one session index of none.
        let next = u16::try_from(self.places.len() + 1).unwrap_or(u16::MAX);
        let place = self.places.entry(host.clone()).or_insert_with(|| {
            let index = self.free.pop().unwrap_or(HostIndex::new(next));
            Place { index, sessions: 0 }
        });
        place.sessions += 1;
        self.by_session.insert(session, host);
        Some(place.index)
    }

    /// A session has ended.
    pub(super) fn end(&mut self, session: SessionIndex) {
        let Some(host) = self.by_session.remove(&session) else { return };
        let Some(place) = self.places.get_mut(&host) else { return };
        place.sessions -= 1;
        if place.sessions == 0 {
            self.free.push(place.index);
            self.places.remove(&host);
        }
    }
}

/// What counts as one host among peers that prove nothing: an address, and of IPv6 the network of
/// 64 bits, all of which one machine may have.
pub(super) fn household(peer: &str) -> String {
    let address = address_of(peer);
    let bare = address.rsplit_once('/').map_or(address, |(_, host)| host);
    let bare = bare.trim_start_matches('[').trim_end_matches(']');
    let bare = bare.split('%').next().unwrap_or_default();
    let Ok(ip) = bare.parse::<Ipv6Addr>() else { return address.to_owned() };
    if let Some(ip) = ip.to_ipv4_mapped() {
        return ip.to_string();
    }
    let network = u128::from(ip) & !u128::from(u64::MAX);
    format!("{}/64", Ipv6Addr::from(network))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(index: u16, life: u32) -> SessionIndex {
        SessionIndex { index, life }
    }

    #[test]
    fn sessions_of_a_host_have_one_place_which_others_get_later() {
        let mut places = HostPlaces::default();
        let first = places.put(session(0, 1), "a".to_owned()).unwrap();
        assert_ne!(first, HostIndex::NONE);
        assert_eq!(places.put(session(1, 2), "a".to_owned()), Some(first));
        let second = places.put(session(2, 3), "b".to_owned()).unwrap();
        assert_ne!(first, second);
        // It comes back, from the same host and from another one.
        assert_eq!(places.put(session(1, 2), "a".to_owned()), None);
        assert_eq!(places.put(session(1, 2), "b".to_owned()), Some(second));
        places.end(session(0, 1));
        assert_eq!(places.put(session(0, 4), "c".to_owned()), Some(first));
        places.end(session(9, 9));
        let all: std::collections::BTreeSet<_> =
            (10..500).map(|at| places.put(session(at, 5), at.to_string()).unwrap()).collect();
        assert_eq!(all.len(), 490);
        assert!(!all.contains(&first) && !all.contains(&second));
    }

    #[test]
    fn a_network_of_ipv6_is_one_host() {
        for (peer, host) in [
            ("tcp://192.0.2.1:4000", "tcp://192.0.2.1"),
            ("192.0.2.1", "192.0.2.1"),
            ("tcp://[2001:db8:1:2:3:4:5:6]:4000", "2001:db8:1:2::/64"),
            ("[2001:db8:1:2::9]:1", "2001:db8:1:2::/64"),
            ("[2001:db8:1:3::9]:1", "2001:db8:1:3::/64"),
            ("fe80::1%eth0", "fe80::/64"),
            ("[::ffff:192.0.2.7]:4000", "192.0.2.7"),
        ] {
            assert_eq!(household(peer), host, "{peer}");
        }
    }
}
