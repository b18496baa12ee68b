//! Byte streams, and the frames on them.

pub(super) mod frame;
pub(super) mod gathered;
pub(super) mod handshake;
pub(super) mod inbound;
pub(super) mod late;
pub(super) mod link;
pub(super) mod metered_link;
pub(super) mod pending;
pub(super) mod pieces;
pub mod tls;
