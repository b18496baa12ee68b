//! What control observes of the target that runs, and how it shows it.

pub(super) mod event_log;
pub(crate) mod outages;
pub mod past;
pub(super) mod place_watch;
mod ports;
pub(super) mod sampling;
pub(super) mod status_report;
pub(super) mod summary;
mod usage;
pub(super) mod volume_rates;
