//! The front ends of a volume: who its requests come from.

pub(crate) mod disk;
pub mod program;
#[allow(unsafe_code)] // the driver's memory and io_uring commands
pub mod ublk;
#[allow(unsafe_code)] // the memory of guests, and descriptors of their front ends
pub(crate) mod vhost;
