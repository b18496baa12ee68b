//! [`PendingHandshakes`]: handshakes that are not finished. They have few places. Pure.
//!
//! When the places are full, a new one takes the place of the oldest one of the address that has
//! most: peers that stall lose theirs, and peers that speak do not, however far away they are.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use crate::Source;

/// See the module. `T` is how a handshake is known.
#[derive(Debug)]
pub(in crate::soft) struct PendingHandshakes<T> {
    most: usize,
    // Oldest first.
    handshakes: VecDeque<(Source, T)>,
}

impl<T> PendingHandshakes<T> {
    /// Room for at most `most` handshakes.
    pub(in crate::soft) fn new(most: usize) -> Self {
        Self { most, handshakes: VecDeque::with_capacity(most) }
    }

    /// Forgets those that are finished.
    pub(in crate::soft) fn forget(&mut self, is_finished: impl Fn(&T) -> bool) {
        self.handshakes.retain(|(_, handshake)| !is_finished(handshake));
    }

    /// Takes the one out that has to go before a new one comes, if one has.
    pub(in crate::soft) fn make_room(&mut self) -> Option<T> {
        if self.handshakes.len() < self.most {
            return None;
        }
        let mut counts: BTreeMap<Source, usize> = BTreeMap::new();
        self.handshakes.iter().for_each(|(from, _)| *counts.entry(*from).or_default() += 1);
        let top = counts.values().copied().max()?;
        let at = self.handshakes.iter().position(|(from, _)| counts.get(from) == Some(&top))?;
        self.handshakes.remove(at).map(|(_, handshake)| handshake)
    }

    /// A handshake begins, for which there is [room](Self::make_room).
    pub(in crate::soft) fn add(&mut self, peer: SocketAddr, handshake: T) {
        self.handshakes.push_back((Source::of(peer.ip()), handshake));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(pending: &mut PendingHandshakes<u32>, peer: &str, handshake: u32) -> Option<u32> {
        let gone = pending.make_room();
        pending.add(peer.parse().unwrap(), handshake);
        gone
    }

    #[test]
    fn the_oldest_of_the_address_that_has_most_goes() {
        let mut pending = PendingHandshakes::new(4);
        assert_eq!(add(&mut pending, "192.0.2.1:1", 1), None);
        for (n, port) in (2..5).zip(1..) {
            assert_eq!(add(&mut pending, &format!("192.0.2.2:{port}"), n), None);
        }
        // A peer far away keeps its place while another one comes again and again.
        for n in 5..100 {
            assert_eq!(add(&mut pending, "192.0.2.2:9", n), Some(n - 3));
        }
        assert_eq!(add(&mut pending, "192.0.2.3:1", 100), Some(97));
        pending.forget(|handshake| *handshake == 1);
        assert_eq!(add(&mut pending, "192.0.2.3:1", 101), None, "one has finished");
    }

    #[test]
    fn a_machine_with_a_network_has_one_address() {
        let mut pending = PendingHandshakes::new(4);
        for (n, peer) in (1..).zip(["192.0.2.1:1", "[2001:db8::1]:1", "[2001:db8::2]:1"]) {
            add(&mut pending, peer, n);
        }
        add(&mut pending, "[::ffff:192.0.2.9]:1", 4);
        assert_eq!(add(&mut pending, "192.0.2.9:2", 5), Some(2));
        assert_eq!(add(&mut pending, "192.0.2.2:1", 6), Some(4), "an address of IPv4 all the same");
        // Each machine of a link has one of its own.
        let mut pending = PendingHandshakes::new(2);
        add(&mut pending, "192.0.2.1:1", 1);
        add(&mut pending, "[fe80::1]:1", 2);
        assert_eq!(add(&mut pending, "[fe80::2]:1", 3), Some(1));
    }
}
