//! What a target and the programs of its host say to each other: status, events, orders, and the
//! client of the control socket. Plain data, and sentences for people.

pub mod ask;
pub mod client;
pub mod condition;
pub mod defaults;
pub mod events;
pub mod refusal;
pub mod status;
pub mod trace_line;
pub mod warnings;
