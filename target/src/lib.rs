//! The target: owns volumes and a registered memory arena, and serves them to initiators.
//!
//! ```text
//! for people        http, control::socket -> control::status, events
//! control (tokio)   serve -> control::Control -> admission, devices, core -> session, holders
//!                                 | mailbox          ^ channel
//! data threads      poll_group::thread -> PollGroup -> connection, request, volume
//!                                              |-> cache -> store (io_uring)   |-> fabric (QPs)
//! ```
//!
//! Calls go down, results come back as values: the loop in [`poll_group`] routes everything.

#![deny(unsafe_code)]

pub mod cache;
pub mod commands;
pub mod control;
pub mod daemon;
pub mod data;
pub mod memory;
pub mod operate;
pub mod pool;
pub mod record;
#[allow(unsafe_code)] // io_uring takes pointers
pub mod store;
pub mod volume;
