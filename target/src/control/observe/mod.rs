//! What control observes of the target that runs, and how it shows it.

pub(super) mod happened;
pub(crate) mod outages;
pub mod past;
mod ports;
pub(super) mod rates;
pub(super) mod report;
pub(super) mod sampling;
pub(super) mod summary;
mod usage;
pub(super) mod watch;
