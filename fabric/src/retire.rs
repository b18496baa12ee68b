//! [`Connection::retire`]: destroying a connection without waiting for it.

use crate::device::Connection;

impl Connection {
    /// Destroys the QP and its CM id, and then drops `rest`, such as the CQ's poller and the
    /// registrations. Where the kernel may take its time for that, some drivers until a silent peer
    /// has timed out, a thread of its own waits, so that whoever serves others does not.
    ///
    /// The QP must be in the error state ([`crate::Poller::fail`]) or never have been accepted. It
    /// may end later: who has to know when gives a `rest` that tells when it is dropped.
    pub fn retire<T: Send + 'static>(self, rest: T) {
        match self {
            Self::Soft(connection) => drop((connection, rest)),
            #[cfg(feature = "verbs")]
            Self::Verbs(connection) => crate::verbs::retire(connection, rest),
        }
    }
}
