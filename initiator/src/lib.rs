//! The initiator: turns a remote volume into a local block device.
//!
//! ```text
//! commands, daemon   umount, doctor; what rblk-initiatord has around its mount
//! mount              a volume with a device, a note, a name and a control socket
//! front              disk (on ublk), program, vhost: they make the requests
//! volume             an open volume: session, link, course, queues as control sees them (tokio)
//! queue              an engine and its mail: one data thread each
//! engine             requests by tag -> inflight, durability, path -> fabric (QP)
//! ```
//!
//! A module imports only from those below it in this list.
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
