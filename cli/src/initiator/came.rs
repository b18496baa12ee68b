//! [`Came`]: the result of a command for one of several mounts.

use serde::Serialize;

/// The result for one of several mounts, in JSON.
#[derive(Serialize)]
pub(super) struct Came<T> {
    pub(super) name: String,
    /// The new state. Null: it failed.
    pub(super) outcome: Option<T>,
    /// The reason for the failure.
    pub(super) error: Option<String>,
}
