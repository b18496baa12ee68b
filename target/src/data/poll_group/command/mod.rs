//! The steps of a command: what a poll group does between a message of the peer and the answer.

pub(super) mod account;
pub(super) mod admin;
pub(super) mod block;
pub(super) mod change;
mod cut;
mod digest;
pub(super) mod proof;
mod read;
pub(super) mod reply;
pub(super) mod respond;
pub(super) mod write;
