//! The initiators as control knows them: sessions, and who is at the other end. Pure.

pub(crate) mod account;
pub(super) mod peer_lines;
pub mod session;
pub(super) mod whom;
