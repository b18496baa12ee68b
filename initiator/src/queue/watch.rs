//! [`Watch`]: what a queue sleeps in, as its paths see it: the ring of ublk, or the epoll of a
//! program.

use std::io;
use std::os::fd::BorrowedFd;

/// The caller's name for a watched descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct WatchToken(pub u32);

/// What a queue sleeps in.
pub(crate) trait Watch {
    /// Every sleep ends when the descriptor is readable. It is open until it was
    /// [unwatched](Self::unwatch) and [`Self::settle`] was called.
    ///
    /// # Errors
    /// The system's.
    fn watch(&mut self, fd: BorrowedFd<'_>, token: WatchToken) -> io::Result<()>;

    /// The descriptor of that token wakes nobody any more. Unknown tokens are ignored.
    fn unwatch(&mut self, token: WatchToken);

    /// What was unwatched may be closed afterwards.
    ///
    /// # Errors
    /// The system's.
    fn settle(&mut self) -> io::Result<()>;
}
