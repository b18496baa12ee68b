//! The steps of a command: what a poll group does between a message of the peer and the answer.

pub(super) mod admin;
pub(super) mod block;
pub(super) mod counting;
mod cut;
mod data_digest;
mod read;
pub(super) mod reply;
pub(super) mod respond;
pub(super) mod send_barrier;
pub(super) mod without_data;
pub(super) mod write;
