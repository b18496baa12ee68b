//! The data threads: a poll group serves the commands of its connections.

pub mod connection;
pub mod group_stats;
mod parts;
pub mod poll_group;
pub mod read_ahead;
mod request;
