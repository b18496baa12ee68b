//! What people and programs ask of a target by its control socket, and how it is carried out.

pub(crate) mod orders;
pub(super) mod predecessor;
pub(crate) mod reload;
pub(super) mod remembered;
pub(crate) mod reread;
pub(super) mod snapshot;
pub mod socket;
pub(super) mod trace;
pub(crate) mod upgrade;
