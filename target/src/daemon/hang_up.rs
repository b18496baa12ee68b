//! SIGHUP reloads the configuration of a target, and never ends it: a terminal that closes sends
//! SIGHUP to a target that was started there.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::control::ToControl;
use crate::control::requests::reconfigure::everything;
use crate::control::requests::reread::Reread;
use crate::daemon::process_signals::Signals;

/// Reloads the configuration at each SIGHUP. The log has the outcome.
pub(crate) async fn reload(
    hang_ups: Signals,
    requests: mpsc::Sender<ToControl>,
    reread: Arc<Reread>,
) {
    while hang_ups.next().await.is_ok() {
        if !reread.has_file() {
            tracing::warn!(
                "SIGHUP: the target was started without a configuration file, so nothing was reloaded; it goes on \
                 serving. SIGTERM stops it"
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
