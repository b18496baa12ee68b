//! Measures rblk; never asserts correctness.
//!
//! | module | what is in it |
//! |---|---|
//! | [`inprocess`] | a target and its initiators in one thread over the in-memory fabric, decided by a seed |
//! | [`ram_store`] | a store in memory that is slow, full and failing as its seed says |
//! | [`crash_store`] | a store in memory that keeps after a crash only what it promised |
//! | [`cost`] | what one I/O costs in messages, completions, doorbells and copied bytes |

#![forbid(unsafe_code)]

pub mod cost;
pub mod crash_store;
pub mod inprocess;
pub mod ram_store;
pub mod seed;
