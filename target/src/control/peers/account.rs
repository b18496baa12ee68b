//! [`Payer`]: the account that is charged for the resources of a connection. Pure.
//!
//! A host that has proven its key is identified by the key, wherever it connects from. Any other
//! peer is identified by the place it connects from ([`Origin`]).

use rblk_fabric::Source;
use rblk_protocol::HostId;

/// The place a peer connects from, for the limits of its resources.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Origin {
    /// An address, or a network of one machine.
    Source(Source),
    /// A text that is no IP address.
    Other(String),
}

/// The account that is charged for the resources of a connection.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Payer {
    /// A host that has proven its key.
    Host(HostId),
    /// All peers of one origin.
    Origin(Origin),
}

impl Origin {
    /// The origin of a peer as a connection names it: `tcp://192.0.2.1:5000`, `[2001:db8::1]:5000`.
    pub(crate) fn of(peer: &str) -> Self {
        let address = address_of(peer);
        let bare = address.split_once("://").map_or(address, |(_, rest)| rest);
        let bare = bare.trim_start_matches('[').trim_end_matches(']');
        // Strips the interface of a link-local address.
        let bare = bare.split_once('%').map_or(bare, |(address, _)| address);
        match bare.parse() {
            Ok(address) => Self::Source(Source::of(address)),
            Err(_) => Self::Other(address.to_owned()),
        }
    }
}

/// The address of a peer without its port: `tcp://192.0.2.1` of `tcp://192.0.2.1:5000`.
pub(crate) fn address_of(peer: &str) -> &str {
    match peer.rsplit_once(':') {
        Some((address, port))
            if !port.is_empty()
                && port.bytes().all(|byte| byte.is_ascii_digit())
                // Excludes the last group of an IPv6 address without a port.
                && (address.ends_with(']') || !address.trim_start_matches("tcp:").contains(':')) =>
        {
            address
        }
        _ => peer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_no_port() {
        for (peer, address) in [
            ("tcp://192.0.2.1:5000", "tcp://192.0.2.1"),
            ("192.0.2.1:5000", "192.0.2.1"),
            ("192.0.2.1", "192.0.2.1"),
            ("tcp://[fe80::1]:5000", "tcp://[fe80::1]"),
            ("[fe80::1]:5000", "[fe80::1]"),
            ("fe80::1", "fe80::1"),
            ("an unknown address", "an unknown address"),
        ] {
            assert_eq!(address_of(peer), address);
        }
    }

    #[test]
    fn a_peer_counts_for_its_address_or_its_network() {
        let same = |one: &str, other: &str| Origin::of(one) == Origin::of(other);
        assert!(same("tcp://192.0.2.1:5000", "192.0.2.1:6000"), "by TCP and by RDMA");
        assert!(same("tcp://192.0.2.1:5000", "tcp://[::ffff:192.0.2.1]:5000"));
        assert!(!same("192.0.2.1:5000", "192.0.2.2:5000"));
        assert!(same("tcp://[2001:db8:0:7::1]:5000", "[2001:db8:0:7:ffff::9]:1"), "one /64");
        assert!(!same("[2001:db8:0:7::1]:5000", "[2001:db8:0:8::1]:5000"));
        assert!(same("[fe80::1%2]:5000", "[fe80::1%eth0]:6000"));
        assert!(!same("[fe80::1%2]:5000", "[fe80::2%2]:5000"), "the link is everybody's");
        assert!(same("a peer in memory", "a peer in memory") && !same("peer1", "peer2"));
    }
}
