//! The data threads: a poll group serves the commands of its connections.

pub mod connection;
mod part;
pub mod poll_group;
pub mod read_ahead;
mod request;
pub mod stats;
