//! [`Connection`]: a QP that no poller has.

use crate::connect::cipher_keys::CipherKeys;
use crate::diagnosis::QpFacts;
#[cfg(feature = "verbs")]
use crate::error::FabricError;
use crate::error::Result;
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
    /// Encrypts the connection with these keys: everything behind the handshake, both ways. Call it
    /// once, before the connection is attached to a poller.
    ///
    /// On the accepting side, call it on the result of [`prepare`](crate::Incoming::prepare). The
    /// reply goes out in plain, and everything behind the reply is encrypted. On the side that
    /// connects, see [`Established::secure`]. The other end must do the same, with the keys
    /// swapped. An end with another key, or with none, finds a bad record and ends the connection
    /// ([`bad_records`](crate::PollerCounters::bad_records)).
    ///
    /// # Errors
    /// [`Encrypt`](crate::FabricError::Encrypt): not over TCP, or the kernel cannot
    /// ([`encrypts`](crate::Device::encrypts)). The connection is of no use then; drop it. A
    /// peer that waits for the reply is refused.
    pub fn secure(&mut self, keys: CipherKeys) -> Result<()> {
        match self {
            Self::Soft(connection) => connection.secure(keys),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => {
                drop(keys);
                let reason = "only tcp:// connections can be encrypted".to_owned();
                Err(FabricError::Encrypt { peer: "an RDMA peer".to_owned(), reason })
            }
        }
    }

    /// The facts that the provider reports about the QP. `None` for the software provider.
    ///
    /// # Errors
    /// The errno of the verbs call.
    pub fn facts(&self) -> Result<Option<QpFacts>> {
        match self {
            Self::Soft(_) => Ok(None),
            #[cfg(feature = "verbs")]
            Self::Verbs(connection) => verbs::facts_of_qp(connection).map(Some),
        }
    }

    /// Destroys the QP and its CM id, and then drops `rest`, such as the poller of the CQ and the
    /// registrations. Some drivers wait in the destroy until a silent peer has timed out. There a
    /// thread of its own waits, so that the caller can serve others.
    ///
    /// The QP must be in the error state ([`crate::DataPath::fail`]), or it was never accepted. The
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
pub type Established = crate::connect::Established<Connection>;

impl Established {
    /// Encrypts the connection: [`Connection::secure`]. The keys may depend on the reply
    /// ([`Self::hello`]). Nothing behind the reply was read, and nothing behind the request was
    /// sent.
    ///
    /// # Errors
    /// As [`Connection::secure`].
    pub fn secure(&mut self, keys: CipherKeys) -> Result<()> {
        self.connection.secure(keys)
    }
}
