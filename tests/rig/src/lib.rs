//! The rig: a target and its initiators in one thread, without sockets, disks or a clock.
//!
//! The tests use the rig to inject faults and to repeat a run from its seed. `rblk-bench cost` uses
//! the rig to count the costs of one I/O. No program that serves data contains this crate.
//!
//! | module | content |
//! |---|---|
//! | [`inprocess`] | target and initiators in one thread, over the in-memory fabric, by a seed |
//! | [`ram_store`] | a store in memory that is slow, full and failing as its seed decides |
//! | [`crash_store`] | a store in memory that keeps only its promises in a crash |
//! | [`seed`] | random numbers that follow from a seed |
//! | [`allocations`] | an allocator that counts the allocations of each thread |

// Allowed only in the counting allocator.
#![deny(unsafe_code)]

pub mod allocations;
pub mod crash_store;
pub mod inprocess;
pub mod ram_store;
pub mod seed;
