//! [`is_there`]: whether the program before this one left its descriptors open for this process.

use serde::Deserialize;

/// The environment variable with the note of the program before.
pub const VARIABLE: &str = "RBLK_HAND_OVER";

/// Whether a note names this process. A child of that process inherits the variable, but not the
/// descriptors.
#[must_use]
pub fn is_there() -> bool {
    #[derive(Deserialize)]
    struct NoteHead {
        pid: u32,
    }
    let text = std::env::var(VARIABLE).unwrap_or_default();
    serde_json::from_str::<NoteHead>(&text).is_ok_and(|head| head.pid == std::process::id())
}
