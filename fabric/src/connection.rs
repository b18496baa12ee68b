//! [`Connection`]: a QP that no poller has.

use crate::connect::ConnectionHello;
use crate::soft;
#[cfg(feature = "verbs")]
use crate::verbs;

/// A QP that moves between control and a data thread. Dropping it destroys the QP and its CM id.
/// The drop may block for a short time, so a data thread gives the connection back to control.
#[derive(Debug)]
pub enum Connection {
    /// Software provider.
    Soft(soft::Connection),
    /// Verbs.
    #[cfg(feature = "verbs")]
    Verbs(verbs::Connection),
}

impl Connection {
    /// Destroys the QP and its CM id, and then drops `rest`, such as the poller of the CQ and the
    /// registrations. Some drivers wait in the destroy until a silent peer has timed out. There a
    /// thread of its own waits, so that the caller can serve others.
    ///
    /// The QP must be in the error state ([`crate::Poller::fail`]), or it was never accepted. The
    /// QP may be destroyed later than this call returns. A caller that must know when passes a
    /// `rest` whose drop tells.
    pub fn retire<T: Send + 'static>(self, rest: T) {
        match self {
            Self::Soft(connection) => drop((connection, rest)),
            #[cfg(feature = "verbs")]
            Self::Verbs(connection) => verbs::retire(connection, rest),
        }
    }
}

/// An established connection, on the side that connected.
#[derive(Debug)]
pub struct Established {
    /// The QP, for [`crate::Poller::attach`].
    pub connection: Connection,
    /// The peer's reply. The CM may have padded it.
    pub hello: ConnectionHello,
    /// READs that this side may have outstanding.
    pub reads_out: u8,
    /// READs of the peer that this side serves at once.
    pub reads_in: u8,
}
