//! Byte streams, and the frames on them.

mod call_bytes;
pub(super) mod frame;
pub(super) mod gathered;
pub(super) mod inbound;
pub(super) mod late;
pub(super) mod metered_link;
pub(super) mod pending_handshakes;
pub(super) mod pieces;
pub(super) mod tcp_handshake;
pub(super) mod tcp_link;
pub mod tls;
