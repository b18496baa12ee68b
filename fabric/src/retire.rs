//! [`Connection::retire`]: destroying a connection without waiting for it.

use crate::device::Connection;

impl Connection {
    /// Destroys the QP and its CM id, and then drops `rest`, such as the CQ's poller and the registrations. Where the
    /// kernel may take its time for that, some drivers until a silent peer has timed out, a thread of its own waits,
    /// so that whoever serves others does not.
    ///
    /// The QP must be in the error state ([`crate::Poller::fail`]), and nothing may depend on its end: it may come
    /// later. To know when it has ended, drop the connection instead.
    pub fn retire<T: Send + 'static>(self, rest: T) {
        match self {
            Self::Soft(connection) => drop((connection, rest)),
            #[cfg(feature = "verbs")]
            Self::Verbs(connection) => crate::verbs::retire(connection, rest),
        }
    }
}
