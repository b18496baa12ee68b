//! What a target and the programs of its host say to each other: status, events, orders, and the
//! client of the control socket. Plain data, and sentences for people.

pub mod ask;
pub mod client;
pub mod condition;
pub mod defaults;
pub mod delays;
pub mod events;
pub mod flags;
pub mod group_counts;
pub mod left_open;
pub mod listen;
pub mod lost_socket;
pub mod refusal;
pub mod status;
pub mod store_fault;
pub mod store_room;
pub mod trace_line;
pub mod traffic;
pub mod volume_counts;
pub mod volume_notes;
pub mod warnings;
