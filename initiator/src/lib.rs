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

pub mod admin;
mod alarm;
pub mod args;
pub mod client;
pub mod doctor;
pub mod durability;
pub mod engine;
pub mod error;
mod examples;
pub mod identity;
pub mod inflight;
pub mod io;
pub mod journal;
pub mod log_file;
pub mod mount;
pub mod path;
pub mod path_change;
#[allow(unsafe_code)] // capabilities have no safe call
pub mod privileges;
mod pulse;
pub mod queue;
pub mod replay;
pub mod retain;
pub mod session;
#[allow(unsafe_code)] // the driver's memory and io_uring commands
pub mod ublk;
pub mod undestroyed;
#[allow(unsafe_code)] // the memory of guests, and descriptors of their front ends
mod vhost;

#[cfg(feature = "fuzzing")]
pub use vhost::FuzzedDisk;
