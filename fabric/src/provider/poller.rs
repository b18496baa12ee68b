//! [`Poller`]: a CQ and its QPs, for a data thread.

use crate::data_path::DataPath;
#[cfg(feature = "verbs")]
use crate::error::FabricError;
use crate::error::Result;
use crate::provider::connection::Connection;
use crate::soft;
#[cfg(feature = "verbs")]
use crate::verbs;
use crate::work::QpIndex;

/// One data thread's CQ, to which QPs are attached. [`DataPath`] posts and polls.
pub trait Poller: DataPath {
    /// Takes over a QP that was made for the handle of this poller. On error the QP is destroyed.
    ///
    /// # Errors
    /// [`Mixed`](crate::FabricError::Mixed) for a QP of another poller,
    /// [`Limit`](crate::FabricError::Limit) when there is no room.
    fn attach(&mut self, connection: Connection) -> Result<QpIndex>;

    /// Removes a QP. Drop or [retire](Connection::retire) the result to destroy the QP. Its
    /// outstanding WRs never complete. The room of the QP in the CQ is free when the QP is
    /// destroyed and the CQ was found empty after that. `None` for an index that is not in use.
    fn detach(&mut self, qp: QpIndex) -> Option<Connection>;
}

impl Poller for soft::Poller {
    fn attach(&mut self, connection: Connection) -> Result<QpIndex> {
        match connection {
            Connection::Soft(connection) => self.attach_pair(connection),
            #[cfg(feature = "verbs")]
            Connection::Verbs(_) => Err(FabricError::Mixed("a verbs connection and a soft poller")),
        }
    }

    fn detach(&mut self, qp: QpIndex) -> Option<Connection> {
        self.detach_pair(qp).map(Connection::Soft)
    }
}

#[cfg(feature = "verbs")]
impl Poller for verbs::Poller {
    fn attach(&mut self, connection: Connection) -> Result<QpIndex> {
        match connection {
            Connection::Verbs(connection) => self.attach_qp(connection),
            Connection::Soft(_) => {
                Err(FabricError::Mixed("a connection of another provider was attached"))
            }
        }
    }

    fn detach(&mut self, qp: QpIndex) -> Option<Connection> {
        self.detach_qp(qp).map(Connection::Verbs)
    }
}
