//! [`Listener`] and [`Incoming`]: the passive side.

use std::ptr::NonNull;

use tokio::sync::mpsc;

use super::cm_id::CmId;
use super::completion_queue::PollerHandle;
use super::device::Device;
use super::event_channel::{EventChannel, Role};
use super::protection_domain::ProtectionDomain;
use super::queue_pair::Connection;
use super::route::look_up;
use crate::address::Address;
use crate::device::{ConnectionHello, QpLimits};
use crate::error::{FabricError, Result};

/// Peers that wait to be accepted. More are rejected at once, which they may retry.
const BACKLOG: u16 = 128;

/// Waits for peers on one address. Dropping it rejects those that still wait; connections stay.
#[derive(Debug)]
pub struct Listener {
    address: Address,
    requests: mpsc::Receiver<Result<Incoming>>,
    // Last: once it is gone nothing new comes.
    id: CmId,
}

impl Listener {
    /// Starts listening. An unspecified address listens on every RDMA device, those plugged in
    /// later too.
    ///
    /// # Errors
    /// [`FabricError::NoDevice`], [`FabricError::Listen`] or, for an unknown name,
    /// [`FabricError::Unreachable`].
    pub async fn bind(address: &Address) -> Result<Self> {
        let mut last = None;
        for to in look_up(address).await? {
            let (sender, requests) = mpsc::channel(usize::from(BACKLOG));
            let mut id = EventChannel::open(Role::Listening(sender))?;
            match id.bind(to).and_then(|()| id.listen(i32::from(BACKLOG))) {
                Ok(()) => {
                    let address = Address { port: id.local_port(), ..address.clone() };
                    return Ok(Self { address, requests, id });
                }
                Err(source) => last = Some(source),
            }
        }
        let source = last.unwrap_or_else(|| std::io::ErrorKind::AddrNotAvailable.into());
        Err(FabricError::Listen { address: address.to_string(), source })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The device of the address, or every device where the address is unspecified.
    ///
    /// # Errors
    /// A device cannot be queried.
    pub fn devices(&self) -> Result<Vec<Device>> {
        match NonNull::new(self.id.verbs()) {
            Some(context) => Device::of_context(context, self.id.port()).map(|device| vec![device]),
            None => Device::all(),
        }
    }

    /// The next peer. Cancel safe.
    ///
    /// # Errors
    /// The device is gone or the event channel broke.
    pub async fn accept(&mut self) -> Result<Incoming> {
        self.requests.recv().await.unwrap_or_else(|| {
            // The sender lives in the channel's table as long as `id`.
            Err(FabricError::Call {
                call: "rdma_listen",
                source: std::io::ErrorKind::NotConnected.into(),
            })
        })
    }
}

/// A peer that asks to connect. Dropping it rejects it.
#[derive(Debug)]
pub struct Incoming {
    // None once it was answered or handed on.
    id: Option<CmId>,
    device: Device,
    hello: ConnectionHello,
    peer: String,
    reads: (u8, u8),
    refusal: ConnectionHello,
}

impl Incoming {
    /// Of a CONNECT_REQUEST. `reads` is (what the peer serves, what it wants to have outstanding).
    pub(super) fn new(
        id: CmId,
        hello: ConnectionHello,
        peer: String,
        reads: (u8, u8),
    ) -> Result<Self> {
        let device = match NonNull::new(id.verbs()) {
            Some(context) => Device::of_context(context, id.port()),
            None => Err(FabricError::NoDevice),
        };
        match device {
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

    /// The device it came in by.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device.clone()
    }

    /// What it said, maybe padded.
    #[must_use]
    pub fn hello(&self) -> &ConnectionHello {
        &self.hello
    }

    /// Who it is, for logs.
    #[must_use]
    pub fn peer(&self) -> String {
        self.peer.clone()
    }

    /// (READs the peer serves, READs it wants to have outstanding).
    #[must_use]
    pub fn peer_reads(&self) -> (u8, u8) {
        self.reads
    }

    /// What to say when it is dropped, in this form or as a prepared [`Connection`].
    pub fn refuse_with(&mut self, hello: ConnectionHello) {
        self.refusal = hello;
    }

    /// Makes the QP, for [`super::Poller`] to accept.
    ///
    /// # Errors
    /// [`FabricError::Mixed`], [`FabricError::Limit`] or a failed call; the peer is then rejected.
    pub fn prepare(
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
            Ok(connection) => Ok(connection.incoming(self.reads.0, refusal)),
            Err((id, error)) => {
                id.reject(&refusal.0);
                Err(error)
            }
        }
    }

    /// Refuses, with at most [`ConnectionHello::REPLY_MAX`] bytes of reason (what is more is cut
    /// off).
    pub fn reject(mut self, hello: &ConnectionHello) {
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
