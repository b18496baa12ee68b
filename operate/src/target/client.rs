//! [`ask`]: the client of a target's control socket.

use std::io;
use std::path::Path;

use serde::Deserialize;

use super::ask::{Ask, Response};
use super::refusal::Refusal;
use super::status::{DrainStatus, UpgradeStatus};
use crate::socket::exchange::exchange;

/// The longest response: the times of many volumes, in every bucket.
const ANSWER_MAX: u64 = 64 << 20;

/// Sends a command to a running target.
///
/// # Errors
/// No target answers there, or not in time. [`InvalidData`](io::ErrorKind::InvalidData): a target
/// of another version, which this program does not understand.
pub async fn ask(path: &Path, ask: Ask) -> io::Result<Response> {
    exchange(path, &ask, ANSWER_MAX, ask.patience()).await
}

/// The part of a target's state that an upgrade needs. Every version has this part: an upgrade asks
/// the program of another version.
#[derive(Clone, Debug, Deserialize)]
pub struct ServingTarget {
    /// Process.
    pub pid: u32,
    /// This run, in hexadecimal.
    pub instance: String,
    /// Version of the program.
    pub version: String,
    /// The upgrade by which this program came to serve.
    #[serde(default)]
    pub upgrade: Option<UpgradeStatus>,
    /// A drain under way.
    #[serde(default)]
    pub drain: Option<DrainStatus>,
}

/// The answer of a target of any version that was asked for its state.
#[derive(Clone, Debug, Deserialize)]
pub struct AnyVersionAnswer {
    /// The state.
    #[serde(default)]
    pub status: Option<ServingTarget>,
    /// Why it refuses to tell.
    #[serde(default)]
    pub error: Option<Refusal>,
}

/// Asks a target of any version for its state.
///
/// # Errors
/// As [`ask`].
pub async fn ask_any_version(path: &Path) -> io::Result<AnyVersionAnswer> {
    exchange(path, &Ask::Status, ANSWER_MAX, Ask::Status.patience()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upgrade_understands_a_target_of_a_later_version() {
        let text = r#"{"pid":7,"instance":"a","version":"9.0.0","volumes":[{"cache":"of tomorrow"}],
            "upgrade":{"from_version":"0.1.0","pause_ms":9,"new":[1]}}"#;
        let target: ServingTarget = serde_json::from_str(text).expect("the part that it needs");
        let upgrade = target.upgrade.expect("the upgrade");
        assert_eq!((target.pid, upgrade.pause_ms, upgrade.mounts), (7, Some(9), 0));
    }
}
