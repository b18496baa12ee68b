//! [`Readiness`]: awaiting a poller's event descriptor, for control tasks that drive a poller themselves.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A duplicate of an event descriptor, registered with the tokio runtime of the caller.
#[derive(Debug)]
pub struct Readiness(AsyncFd<OwnedFd>);

impl Readiness {
    /// Watches a [`crate::Poller::event_fd`].
    ///
    /// # Errors
    /// The descriptor cannot be duplicated or registered.
    pub fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let own = fd.try_clone_to_owned()?;
        // SAFETY: `own` is moved in and handed out by nobody, so the descriptor stays open and the same
        // until the registration ends with the AsyncFd.
        let watched = unsafe { AsyncFd::register_with_interest(own, Interest::READABLE) };
        Ok(Self(watched.map_err(io::Error::from)?))
    }

    /// Waits until the descriptor is readable. The caller then clears the event and looks, in this order.
    ///
    /// # Errors
    /// The runtime is shutting down.
    pub async fn readable(&self) -> io::Result<()> {
        self.0.readable().await?.clear_ready();
        Ok(())
    }
}
