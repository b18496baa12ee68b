//! From a connect request to a connection that a poll group serves, and to the end of its QP.

pub(super) mod admission;
pub(super) mod destroy;
pub(crate) mod devices;
pub(super) mod file_room;
pub(super) mod host_places;
pub(super) mod making;
pub(crate) mod registering;
pub(super) mod shares;
pub(super) mod tally;
pub mod terms;
pub(super) mod vectors;
