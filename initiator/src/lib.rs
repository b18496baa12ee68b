//! The initiator: turns a remote volume into a local block device.
//!
//! ```text
//! control (tokio)     mount::run -> session (admin connection, login, open, I/O connections)
//!                        | mailbox          ^ channel
//! data threads        queue -> ublk::queue (requests)   one per hardware queue
//!                          \-> engine -> inflight, durability (retain), path -> fabric (QP)
//! ```
//!
//! One process per mount: a fault of one volume does not touch the others.

#![deny(unsafe_code)]

pub mod commands;
pub mod daemon;
pub mod engine;
pub mod front;
pub mod mount;
pub mod queue;
pub mod volume;

#[cfg(feature = "fuzzing")]
pub use front::vhost::FuzzedDisk;
