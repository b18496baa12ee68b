//! The values of single keys that hosts, volumes, targets and mounts share.

pub(crate) mod connection_protection;
pub(crate) mod digest_wish;
pub(crate) mod on_loss;
pub(crate) mod paths;
pub(crate) mod rate_limits;
pub(crate) mod spin_key;
pub(crate) mod transport_keys;
