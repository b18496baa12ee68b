//! SIGHUP reloads the configuration of a target, and never ends it: a terminal that closes sends
//! SIGHUP to a target that was started there.

use std::io;
use std::sync::Arc;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use crate::control::Request;
use crate::control::reload::{Reread, everything};

/// The SIGHUPs of this process.
#[derive(Debug)]
pub(crate) struct HangUps(Signal);

/// From now on SIGHUP does not end this process. One that comes before [`HangUps::reload`] is kept.
///
/// # Errors
/// The system does not let this process handle the signal.
pub(crate) fn outlive() -> io::Result<HangUps> {
    Ok(HangUps(signal(SignalKind::hangup())?))
}

impl HangUps {
    /// Reloads the configuration at each SIGHUP. The log says what became of it.
    pub(crate) async fn reload(mut self, requests: mpsc::Sender<Request>, reread: Arc<Reread>) {
        while self.0.recv().await.is_some() {
            if !reread.has_file() {
                tracing::warn!(
                    "SIGHUP: the target was started without a configuration file, so nothing was reloaded; it \
                     goes on serving. SIGTERM stops it"
                );
                continue;
            }
            match everything(&requests, &reread, false).await {
                Ok(report) => {
                    let changes: Vec<String> =
                        report.difference.volumes.iter().map(ToString::to_string).collect();
                    let needs_restart: Vec<&str> =
                        report.difference.restart.iter().map(|key| key.key.as_str()).collect();
                    let hosts = report.difference.hosts;
                    tracing::warn!(?changes, ?hosts, ?needs_restart, "SIGHUP: reloaded");
                }
                Err(error) => {
                    tracing::error!("SIGHUP: {error}. The target goes on serving as before");
                }
            }
        }
    }
}
