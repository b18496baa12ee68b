//! [`EndSignals`]: SIGTERM and SIGINT, which end this process. They are handled from the start of a
//! mount on: a process killed by one while it starts to serve a device would leave the users of its
//! disk waiting, although nothing failed. SIGHUP ends no mount: a terminal that closes sends it to
//! `mount --foreground`, and people send it to reload a configuration file.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The log line for a SIGHUP.
const HUNG_UP: &str = "SIGHUP: nothing was reloaded, and the mount goes on. `rblk-initiator reload NAME` reads its keys \
                       again, and `rblk-initiator upgrade NAME` starts the program anew, both while the disk is in \
                       use; to apply other changes of a configuration file, unmount and mount";

/// The signals that end this process.
#[derive(Debug)]
pub(super) struct EndSignals {
    terminate: Signal,
    interrupt: Signal,
    // A signal was received where it could not be handled yet.
    kept: bool,
}

impl EndSignals {
    /// Takes over the handling of the signals. A signal that arrives before [`next`](Self::next) is
    /// called is not lost. SIGHUP is only logged.
    pub(super) fn listen() -> io::Result<Self> {
        let mut hang_ups = signal(SignalKind::hangup())?;
        tokio::spawn(async move {
            while hang_ups.recv().await.is_some() {
                tracing::warn!("{HUNG_UP}");
            }
        });
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            kept: false,
        })
    }

    /// Waits for the next signal. Cancel safe.
    pub(super) async fn next(&mut self) {
        if std::mem::take(&mut self.kept) {
            return;
        }
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Makes the next call of [`next`](Self::next) return this signal again.
    pub(super) fn keep(&mut self) {
        self.kept = true;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nix::sys::signal::{Signal as Number, raise};

    use super::*;

    #[test]
    fn a_signal_waits_until_it_is_handled() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut signals = EndSignals::listen().unwrap();
            // No task waits for the signal: the process survives it.
            raise(Number::SIGHUP).unwrap();
            raise(Number::SIGTERM).unwrap();
            let limit = Duration::from_secs(60);
            tokio::time::timeout(limit, signals.next()).await.unwrap();
            signals.keep();
            tokio::time::timeout(limit, signals.next()).await.unwrap();
            assert!(!signals.kept);
            raise(Number::SIGHUP).unwrap();
            let short = Duration::from_millis(50);
            let told = tokio::time::timeout(short, signals.next()).await;
            assert!(told.is_err(), "SIGHUP does not end a mount");
        });
    }
}
