//! SIGHUP does not end a target. A terminal that closes sends it to a target that was started
//! there, and people send it to reload a configuration file.

use std::io;

use tokio::signal::unix::{SignalKind, signal};

/// What the log says of a SIGHUP.
const TEXT: &str = "SIGHUP: nothing was reloaded, and the target goes on serving. Restart the target to apply a \
                      changed configuration file; mounts wait meanwhile. SIGTERM stops the target";

/// From now on SIGHUP does not end this process. Each one is logged.
///
/// # Errors
/// The system does not let this process handle the signal.
pub(crate) fn outlive() -> io::Result<()> {
    let mut hang_ups = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        while hang_ups.recv().await.is_some() {
            tracing::warn!("{TEXT}");
        }
    });
    Ok(())
}
