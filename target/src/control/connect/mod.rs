//! From a connect request to a connection that a poll group serves, and to the end of its QP.

pub(super) mod admission;
pub(super) mod cq_shares;
pub(super) mod destroy;
pub(crate) mod devices;
pub(super) mod file_room;
pub mod grant;
pub(super) mod host_places;
mod making;
pub(super) mod reception;
pub(crate) mod registration;
pub(super) mod tally;
pub(super) mod vectors;
