//! Limits of volumes and hosts: the commands and bytes that may start per second.
//!
//! | file | holds |
//! |---|---|
//! | `bucket.rs` | one rate with its burst, of all poll groups together |
//! | `limiter.rs` | [`Limiter`]: the commands and the bytes of one volume or host |
//! | `waiting.rs` | [`Waiting`]: the waiting commands of one poll group, and their order |
//!
//! All of it is pure: time is an argument, in [`Ticks`].
//!
//! A command that finds its bucket empty books the next free time in it and waits until then. Of
//! the commands of one session for one volume, in one poll group, only the first has a time; the
//! others wait behind it. So each session has one booking per volume, and sessions that share a
//! limit take turns, however many commands each of them has.

pub(crate) mod bucket;
pub(crate) mod limiter;
pub(crate) mod waiting;

pub(crate) use bucket::Ticks;
pub use limiter::Limiter;
pub use rblk_config::Limits;
pub(crate) use waiting::{Head, LineName, Waiting};
