//! [`Source`]: which addresses count as one where a peer may take only so much. Pure.

use std::net::IpAddr;

/// An address of IPv4, or the first half of one of IPv6: one machine may have every address of its
/// /64. Of a link-local address all of it counts: every machine of the link has the same half.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Source {
    /// An address.
    Address(IpAddr),
    /// The first half of an address of IPv6.
    Net(u64),
}

impl Source {
    /// Of that address.
    #[must_use]
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) if !address.is_unicast_link_local() => {
                Self::Net((address.to_bits() >> 64) as u64)
            }
            address => Self::Address(address),
        }
    }
}
