//! The parameters of a connection: sizes, options, and the bytes that travel with the handshake.

pub(crate) mod ack_timeout;
pub(crate) mod cipher_keys;

use std::net::SocketAddr;
use std::time::Duration;

use crate::connect::ack_timeout::AckTimeout;
use crate::work::MemoryOrder;

/// Sizes of one QP, as asked of the provider.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpLimits {
    /// WRs that may be on the send queue at once. An unsignaled WR counts until a later signaled WR
    /// completes.
    pub send_wrs: u32,
    /// RECVs that may be posted at once.
    pub recv_wrs: u32,
    /// SGEs per send WR.
    pub send_sges: u32,
    /// SGEs per RECV.
    pub recv_sges: u32,
    /// Bytes of inline payload wanted. Lowered silently to the limit of the device.
    pub inline_bytes: u32,
    /// READs that this side will have outstanding.
    pub reads_out: u8,
    /// READs of the peer that this side serves at once.
    pub reads_in: u8,
}

/// How to reach a peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConnectOptions {
    /// Deadline of each step: resolve, connect.
    pub timeout: Duration,
    /// Local address to bind to, with port 0. For a host with several. A link-local one of IPv6
    /// names its interface; without that it has the interface of the peer's address.
    pub bind: Option<SocketAddr>,
    /// After how long a silent path should count as dead.
    pub detect: Duration,
    /// How long the device waits for an acknowledgement. `None`: it follows from `detect`.
    pub ack_timeout: Option<AckTimeout>,
    /// In which order devices may write to the memory that is registered for the connection.
    pub order: MemoryOrder,
    /// The type of service (IPv4) or traffic class (IPv6) of its packets: DSCP and, in the two
    /// lowest bits, ECN. `None`: the default of the system.
    pub tos: Option<u8>,
}

impl ConnectOptions {
    /// How long the device waits for an acknowledgement.
    #[cfg(feature = "verbs")]
    pub(crate) fn ack_timeout(&self) -> AckTimeout {
        self.ack_timeout.unwrap_or_else(|| AckTimeout::within(self.detect))
    }

    /// The address to bind to, to reach `to`.
    pub(crate) fn bind_for(&self, to: SocketAddr) -> Option<SocketAddr> {
        match (self.bind?, to) {
            (SocketAddr::V6(mut from), SocketAddr::V6(to)) => {
                if from.scope_id() == 0 && from.ip().is_unicast_link_local() {
                    from.set_scope_id(to.scope_id());
                }
                Some(from.into())
            }
            (from, _) => Some(from),
        }
    }
}

/// The longest time in which an acceptor sees that a path is dead or that the peer takes nothing,
/// even if the peer asks for a longer one.
pub const ACCEPTED_DETECT_MAX: Duration = Duration::from_secs(5);

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(5),
            bind: None,
            detect: Duration::from_secs(5),
            ack_timeout: None,
            order: MemoryOrder::default(),
            tos: None,
        }
    }
}

/// How to listen.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ListenOptions {
    /// As [`ConnectOptions::tos`], for the connections that are accepted. On RoCE the kernel takes
    /// that of the peer for both directions, and this counts for nothing.
    pub tos: Option<u8>,
    /// The reply to a peer for which the queue of the listener has no room. Empty: the peer learns
    /// that the listener is [busy](crate::FabricError::Busy).
    pub busy: ConnectionHello,
}

/// Bytes that travel with connect, accept and reject. CMs pad them, so the bytes themselves must
/// say how long they are.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ConnectionHello(pub Vec<u8>);

impl ConnectionHello {
    /// Most bytes of a request (rdma_cm over IB: 92 of the MAD less 36 of its own header).
    pub const REQUEST_MAX: usize = 56;
    /// Most bytes of a reply or a rejection that every CM carries (a reject has 148 on IB).
    pub const REPLY_MAX: usize = 148;
}

/// The answer of the acceptor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AcceptParams {
    /// Reply that the peer gets with ESTABLISHED.
    pub hello: ConnectionHello,
    /// READs that this side will have outstanding. At most as many as the peer serves.
    pub reads_out: u8,
    /// READs of the peer that this side serves at once.
    pub reads_in: u8,
}

/// An established connection, on the side that connected.
#[derive(Debug)]
pub struct Established<C> {
    /// The QP, for [`crate::Poller::attach`].
    pub connection: C,
    /// The peer's reply. The CM may have padded it.
    pub hello: ConnectionHello,
    /// READs that this side may have outstanding.
    pub reads_out: u8,
    /// READs of the peer that this side serves at once.
    pub reads_in: u8,
}

impl<C> Established<C> {
    /// The connection behind the type of both providers.
    pub(crate) fn map<D>(self, wrap: impl FnOnce(C) -> D) -> Established<D> {
        let Self { connection, hello, reads_out, reads_in } = self;
        Established { connection: wrap(connection), hello, reads_out, reads_in }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_local_address_has_an_interface() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        let from = |bind: &str, to: &str| {
            let options = ConnectOptions { bind: Some(at(bind)), ..ConnectOptions::default() };
            options.bind_for(at(to)).unwrap()
        };
        assert_eq!(from("[fe80::1]:0", "[fe80::2%3]:7720"), at("[fe80::1%3]:0"));
        assert_eq!(from("[fe80::1%2]:0", "[fe80::2%3]:7720"), at("[fe80::1%2]:0"), "named");
        assert_eq!(from("[fd00::1]:0", "[fe80::2%3]:7720"), at("[fd00::1]:0"), "not link-local");
        assert_eq!(from("192.0.2.1:0", "192.0.2.2:7720"), at("192.0.2.1:0"));
        assert_eq!(ConnectOptions::default().bind_for(at("192.0.2.2:7720")), None);
    }
}
