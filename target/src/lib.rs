//! The target: owns volumes and a registered memory arena, and serves them to initiators.
//!
//! ```text
//! commands            daemon (serve, http)
//!    |                   |
//!    |                control (tokio): requests -> Control -> connect, core -> peers
//!    |                   |                    | mailbox          ^ channel
//!    |                   |                    |                  |
//!    |                data (threads): poll_group::group_thread -> PollGroup -> connection, request
//!    |                   |                       |-> cache -> store (io_uring)    |-> fabric (QPs)
//!    '--------------> record, pool -> store -> volume, memory
//! ```
//!
//! Calls go down, results come back as values: the loop in [`data::poll_group`] routes everything.

#![deny(unsafe_code)]

pub mod cache;
pub mod commands;
pub mod control;
pub mod daemon;
pub mod data;
pub mod memory;
pub mod pool;
pub mod record;
#[allow(unsafe_code)] // io_uring takes pointers
pub mod store;
pub mod volume;
