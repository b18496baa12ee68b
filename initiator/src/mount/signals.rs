//! [`Signals`]: being told to end by SIGTERM or SIGINT, heard from the beginning of a mount on. A
//! process that begins to serve a device and dies of one leaves a disk whose users wait, though
//! nothing failed. So SIGHUP ends no mount: a terminal that closes sends it to
//! `mount --foreground`, and people send it to have a configuration file read again.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// What the log says of a SIGHUP.
const HUNG_UP: &str = "SIGHUP: nothing was reloaded, and the mount goes on. `rblk-initiator upgrade NAME` starts the \
                       program anew while the disk is in use; to apply a changed configuration file, unmount and mount";

/// What tells this process to end.
#[derive(Debug)]
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    // One was heard where nothing could be done about it.
    kept: bool,
}

impl Signals {
    /// From now on they do not end the process by themselves. One that came before
    /// [`next`](Self::next) is asked for is not lost. SIGHUP is told in the log, and is all over
    /// with that.
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

    /// Waits for the next. Cancel safe.
    pub(super) async fn next(&mut self) {
        if std::mem::take(&mut self.kept) {
            return;
        }
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// What [`next`](Self::next) told is for somebody later.
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
    fn a_signal_waits_for_whoever_can_do_something_about_it() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut signals = Signals::listen().unwrap();
            // Nobody looks: the process does not die of it.
            raise(Number::SIGHUP).unwrap();
            raise(Number::SIGTERM).unwrap();
            let patience = Duration::from_secs(60);
            tokio::time::timeout(patience, signals.next()).await.unwrap();
            signals.keep();
            tokio::time::timeout(patience, signals.next()).await.unwrap();
            assert!(!signals.kept);
            raise(Number::SIGHUP).unwrap();
            let short = Duration::from_millis(50);
            let told = tokio::time::timeout(short, signals.next()).await;
            assert!(told.is_err(), "SIGHUP tells nobody to end");
        });
    }
}
