//! [`Incoming`]: a peer that asks to connect.

use super::cm::cm_id::CmId;
use super::completion_queue::PollerHandle;
use super::device::Device;
use super::protection_domain::ProtectionDomain;
use super::queue_pair::Connection;
use crate::connect::ack_timeout::AckTimeout;
use crate::connect::{ConnectionHello, QpLimits};
use crate::error::{FabricError, Result};

/// A peer that asks to connect. Dropping it rejects it.
#[derive(Debug)]
pub struct Incoming {
    // `None` once the peer was answered, or became a `Connection`.
    id: Option<CmId>,
    device: Device,
    hello: ConnectionHello,
    peer: String,
    reads: (u8, u8),
    refusal: ConnectionHello,
}

impl Incoming {
    /// The peer of a CONNECT_REQUEST. `reads` is (READs that the peer serves, READs that it wants
    /// to have outstanding).
    pub(super) fn new(
        id: CmId,
        hello: ConnectionHello,
        peer: String,
        reads: (u8, u8),
    ) -> Result<Self> {
        match Device::of_id(&id) {
            Ok(device) => {
                let refusal = ConnectionHello::default();
                Ok(Self { id: Some(id), device, hello, peer, reads, refusal })
            }
            Err(error) => {
                id.reject(&[]);
                Err(error)
            }
        }
    }

    /// The device that the request came in by.
    #[must_use]
    pub(crate) fn device(&self) -> Device {
        self.device.clone()
    }

    /// The hello of the peer. The CM may have padded it.
    #[must_use]
    pub(crate) fn hello(&self) -> &ConnectionHello {
        &self.hello
    }

    /// The address of the peer, for logs.
    #[must_use]
    pub(crate) fn peer(&self) -> String {
        self.peer.clone()
    }

    /// (READs that the peer serves, READs that it wants to have outstanding).
    #[must_use]
    pub(crate) fn peer_reads(&self) -> (u8, u8) {
        self.reads
    }

    /// The reply to the peer if this value, or the [`Connection`] made of it, is dropped without an
    /// answer.
    pub(crate) fn refuse_with(&mut self, hello: ConnectionHello) {
        self.refusal = hello;
    }

    /// How long the device waits for an acknowledgement of the peer.
    pub(crate) fn set_ack_timeout(&self, timeout: AckTimeout) {
        if let Some(id) = &self.id {
            id.set_ack_timeout(timeout);
        }
    }

    /// Makes the QP. [`super::Poller`] accepts it.
    ///
    /// # Errors
    /// [`FabricError::Mixed`], [`FabricError::Limit`] or a failed call; the peer is then rejected.
    pub(crate) fn prepare(
        mut self,
        pd: &ProtectionDomain,
        poller: &PollerHandle,
        limits: QpLimits,
    ) -> Result<Connection> {
        let Some(id) = self.id.take() else {
            return Err(FabricError::Mixed("an incoming connection was used twice"));
        };
        let refusal = std::mem::take(&mut self.refusal);
        match Connection::create(id, pd, poller, limits) {
            Ok(connection) => Ok(connection.unanswered(self.reads.0, refusal)),
            Err((id, error)) => {
                id.reject(&refusal.0);
                Err(error)
            }
        }
    }

    /// Refuses the peer. A reason longer than [`ConnectionHello::REPLY_MAX`] bytes is cut off.
    pub(crate) fn reject(mut self, hello: &ConnectionHello) {
        if let Some(id) = self.id.take() {
            id.reject(&hello.0[..hello.0.len().min(ConnectionHello::REPLY_MAX)]);
        }
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if let Some(id) = &self.id {
            id.reject(&self.refusal.0);
        }
    }
}
