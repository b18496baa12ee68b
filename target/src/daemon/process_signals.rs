//! The signals that a target obeys: SIGTERM and SIGINT stop it, SIGHUP reloads its configuration.
//!
//! Every thread blocks these signals from the start, and the target reads them from a descriptor.
//! So none of them ends the process by itself, and an unread one stays pending: also while another
//! program takes the place of this one, which then reads it.
//!
//! A program that this one runs beside itself must not inherit the blocked signals
//! ([`ask_program`](crate::control::hand_over::ask_program)).

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rblk_fabric::Readiness;

/// The signals that stop a target.
pub(crate) const STOPS: [Signal; 2] = [Signal::SIGTERM, Signal::SIGINT];
/// The signal that reloads the configuration.
pub(crate) const RELOADS: [Signal; 1] = [Signal::SIGHUP];

/// Blocks the signals that a target obeys until they are read. A write beyond the largest file that
/// this process may have (`ulimit -f`) then only fails, and its signal does not end the process.
/// Call it before there is a second thread: the others inherit it.
///
/// # Errors
/// The system does not let this process block them.
pub fn hold() -> io::Result<()> {
    let held = STOPS.into_iter().chain(RELOADS).chain([Signal::SIGXFSZ]);
    Ok(held.collect::<SigSet>().thread_block()?)
}

/// Blocked signals, to be read.
#[derive(Debug)]
pub(crate) struct Signals {
    held: SignalFd,
    readiness: Readiness,
}

impl Signals {
    /// The reader of these signals, which are blocked. It also reads those that came before.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub(crate) fn of(signals: &[Signal]) -> io::Result<Self> {
        let flags = SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC;
        let held = SignalFd::with_flags(&signals.iter().copied().collect(), flags)?;
        let readiness = Readiness::new([Some(held.as_fd()), None])?;
        Ok(Self { held, readiness })
    }

    /// Waits for a signal.
    ///
    /// # Errors
    /// The descriptor cannot be read.
    pub(crate) async fn next(&self) -> io::Result<()> {
        // Several may wait, and the readiness reports them once.
        while self.held.read_signal()?.is_none() {
            self.readiness.readable().await?;
        }
        Ok(())
    }

    /// Whether a signal has come. Reads it.
    fn has_come(&self) -> bool {
        self.held.read_signal().is_ok_and(|read| read.is_some())
    }
}

/// Whether a signal that stops the target was read.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopOrdered(Arc<AtomicBool>);

impl StopOrdered {
    /// Whether such a signal was read.
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    fn set(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The signals that stop the target. A signal is noted before the caller gets it.
#[derive(Debug)]
pub(crate) struct Stops {
    signals: Signals,
    ordered: StopOrdered,
}

impl Stops {
    /// The stop signals of this process, noted in `ordered`.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub(crate) fn noted_in(ordered: StopOrdered) -> io::Result<Self> {
        Ok(Self { signals: Signals::of(&STOPS)?, ordered })
    }

    /// Waits for a signal.
    ///
    /// # Errors
    /// The descriptor cannot be read.
    pub(crate) async fn next(&self) -> io::Result<()> {
        self.signals.next().await?;
        self.ordered.set();
        Ok(())
    }

    /// Whether a signal was read, or has come.
    pub(crate) fn has_come(&self) -> bool {
        if self.signals.has_come() {
            self.ordered.set();
        }
        self.ordered.is_set()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nix::sys::signal::raise;

    use super::*;

    /// To this thread alone: the other threads of the test program do not block it.
    fn send(signal: Signal) {
        raise(signal).unwrap();
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn a_signal_waits_until_it_is_read() {
        hold().unwrap();
        // No reader yet, as before the start and after the end of a run.
        send(Signal::SIGTERM);
        send(Signal::SIGHUP);
        let (first, second) = (StopOrdered::default(), StopOrdered::default());
        runtime().block_on(async {
            let stops = Stops::noted_in(first.clone()).unwrap();
            stops.next().await.unwrap();
            assert!(first.is_set());
            // The signal was read once, and the other kind is still pending.
            assert!(!Stops::noted_in(second.clone()).unwrap().has_come());
            Signals::of(&RELOADS).unwrap().next().await.unwrap();
        });
        // The reader is gone.
        send(Signal::SIGINT);
        runtime().block_on(async { assert!(Stops::noted_in(second).unwrap().has_come()) });
    }

    #[test]
    fn a_waiting_reader_gets_a_signal() {
        hold().unwrap();
        runtime().block_on(async {
            let stops = Stops::noted_in(StopOrdered::default()).unwrap();
            let later = async {
                tokio::task::yield_now().await;
                send(Signal::SIGTERM);
            };
            let heard = async { tokio::join!(stops.next(), later).0 };
            tokio::time::timeout(Duration::from_secs(20), heard).await.unwrap().unwrap();
            assert!(stops.has_come(), "it stays noted");
        });
    }
}
