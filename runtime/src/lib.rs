//! The data thread, without a device: its loop, its mail, its clock and its counters.
//!
//! | file | holds |
//! | --- | --- |
//! | [`data_thread`] | the loop: turn, look again, arm, sleep |
//! | [`spin`], `wake_cost` | how long a thread polls before it sleeps; the cost of a wake-up |
//! | `yields` | when a thread that polls yields its CPU |
//! | `moment` | the time of a turn |
//! | [`mailbox`] | bounded mail to a data thread |
//! | `counter`, `latency_histogram`, [`log_linear`] | counters and histograms with one writer |
//! | [`rates`] | work per second |
//! | [`log_limit`] | log lines per second that a peer can cause |
//! | [`clock`], `lent`, `pipes` | the clock of the host; inherited descriptors; a closed pipe |
#![deny(unsafe_code)]

#[allow(unsafe_code)] // adjtimex has no safe call
pub mod clock;
mod counter;
pub mod data_thread;
mod latency_histogram;
#[allow(unsafe_code)] // close_range has no safe call
mod lent;
pub mod log_limit;
pub mod log_linear;
pub mod mailbox;
mod moment;
#[allow(unsafe_code)] // a signal's disposition
mod pipes;
pub mod rates;
pub mod spin;
mod wake_cost;
mod yields;

pub use counter::{Counter, CounterDescription, CounterKind, CounterUnit, Described};
pub use latency_histogram::{BinnedUs, Latency, LatencyCounts};
pub use lent::close_lent_on_exec;
pub use moment::{Micros, Moment, MomentClock};
pub use pipes::die_of_closed_pipes;
