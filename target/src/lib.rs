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

mod accept;
mod account;
pub mod arena;
pub mod args;
pub mod cache;
pub mod condition;
pub mod connection;
pub mod control;
pub mod demand;
pub mod doctor;
mod durable;
pub mod events;
pub mod exports;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
pub mod hand_over;
mod hang_up;
pub mod holders;
pub mod http;
pub mod identity;
pub mod limits;
pub mod listen;
pub mod lost_socket;
mod outages;
mod part;
pub mod past;
pub mod poll_group;
pub mod read_ahead;
pub mod record;
mod request;
pub mod review;
pub mod serve;
pub mod session;
pub mod signals;
pub mod stats;
#[allow(unsafe_code)] // io_uring takes pointers
pub mod store;
pub mod terms;
mod timing;
pub mod traffic;
pub mod volume;
pub mod volume_stats;
pub mod warnings;
