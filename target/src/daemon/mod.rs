//! The daemon `rblk-targetd`: builds a target, serves it, and takes it apart.

mod accept;
pub mod addresses;
mod hang_up;
pub mod http;
pub mod process_signals;
pub mod serve;
pub mod targetd_exit;

/// Whether this program also serves over RDMA.
pub const CAN_RDMA: bool = cfg!(feature = "verbs");
