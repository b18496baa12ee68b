//! What a connection is made with: sizes, options, and the bytes that travel with the handshake.

use std::time::Duration;

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
    /// Bytes of inline payload wanted. Lowered silently to what the device can do.
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
    /// Local address to bind to. For a host with several.
    pub bind: Option<std::net::IpAddr>,
    /// After how long a silent path should count as dead. Timeouts and retry counts of the QP
    /// follow from it.
    pub detect: Duration,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(5), bind: None, detect: Duration::from_secs(5) }
    }
}

/// How to listen.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ListenOptions {
    /// What a peer is told for which the queue of the listener has no room. Empty: it learns that
    /// the listener is [busy](crate::FabricError::Busy).
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

/// What the acceptor answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AcceptParams {
    /// Reply that the peer gets with ESTABLISHED.
    pub hello: ConnectionHello,
    /// READs that this side will have outstanding. At most what the peer serves.
    pub reads_out: u8,
    /// READs of the peer that this side serves at once.
    pub reads_in: u8,
}
