//! [`Readiness`]: awaits the event descriptors of a poller, for control tasks that use a poller
//! themselves.

use std::future::poll_fn;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::task::{Context, Poll};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Duplicates of event descriptors, registered with the tokio runtime of the caller.
#[derive(Debug)]
pub struct Readiness([Option<AsyncFd<OwnedFd>>; 2]);

impl Readiness {
    /// Watches the descriptors that [`event_fds`](crate::DataPath::event_fds) returns now. Make it
    /// after the QPs are attached.
    ///
    /// # Errors
    /// A descriptor cannot be duplicated or registered.
    pub fn new(fds: [Option<BorrowedFd<'_>>; 2]) -> io::Result<Self> {
        let [first, second] = fds;
        Ok(Self([first.map(watch).transpose()?, second.map(watch).transpose()?]))
    }

    /// Waits until one of them is readable. The caller then clears the event and polls, in this
    /// order.
    ///
    /// # Errors
    /// The runtime is shutting down.
    pub async fn readable(&self) -> io::Result<()> {
        poll_fn(|context| self.poll_readable(context)).await
    }

    fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut ready = false;
        // Both are polled, so that both wake the task and both are cleared.
        for fd in self.0.iter().flatten() {
            if let Poll::Ready(guard) = fd.poll_read_ready(context) {
                guard?.clear_ready();
                ready = true;
            }
        }
        if ready { Poll::Ready(Ok(())) } else { Poll::Pending }
    }
}

fn watch(fd: BorrowedFd<'_>) -> io::Result<AsyncFd<OwnedFd>> {
    let own = fd.try_clone_to_owned()?;
    // SAFETY: `own` is moved in and never taken out, so the descriptor stays open and the same
    // until the registration ends with the AsyncFd.
    let watched = unsafe { AsyncFd::register_with_interest(own, Interest::READABLE) };
    watched.map_err(io::Error::from)
}
