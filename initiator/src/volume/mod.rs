//! An open volume: the session with its target, its queues, and the course of both when the target
//! is lost and comes back.

pub mod admin;
pub mod configured;
pub mod course;
pub mod error;
mod history;
pub mod identity;
pub(crate) mod link;
mod link_lines;
pub(crate) mod queues;
pub(crate) mod reconnect;
pub mod replay;
pub mod session;
pub mod settle;
pub(crate) mod setup;
pub(crate) mod shared_memory;
pub mod status;
mod stuck_data;
pub(crate) mod target_keys;
pub(crate) mod task;

/// Errno for a request that failed.
pub(crate) const EIO: i32 = 5;
/// Errno for a request whose volume was removed.
const ENODEV: i32 = 19;
