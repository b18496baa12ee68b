//! The values of single keys that hosts, volumes, targets and mounts share.

pub(crate) mod digest_wish;
pub(crate) mod limits;
pub(crate) mod on_loss;
pub(crate) mod protection;
pub(crate) mod spin;
