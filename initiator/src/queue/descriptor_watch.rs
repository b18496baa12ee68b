//! [`DescriptorWatch`]: the sleeper of a queue, as its paths see it: the ring of ublk, or the epoll
//! of a program.

use std::io;
use std::os::fd::BorrowedFd;

/// The caller's name for a watched descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DescriptorToken(pub u32);

/// A sleeper that descriptors wake.
pub(crate) trait DescriptorWatch {
    /// Makes the descriptor wake the sleeper while it is readable. The descriptor stays open until
    /// it was [unwatched](Self::unwatch) and [`Self::submit_removals`] was called.
    ///
    /// # Errors
    /// The system's.
    fn watch(&mut self, fd: BorrowedFd<'_>, token: DescriptorToken) -> io::Result<()>;

    /// Stops the descriptor of that token from waking the sleeper. Unknown tokens are ignored.
    fn unwatch(&mut self, token: DescriptorToken);

    /// Completes the removal: unwatched descriptors may be closed afterwards.
    ///
    /// # Errors
    /// The system's.
    fn submit_removals(&mut self) -> io::Result<()>;
}
