//! [`Listener`] and [`Incoming`]: the side that is connected to.

use crate::address::{Address, Scheme};
use crate::connect::ack_timeout::AckTimeout;
use crate::connect::{ConnectionHello, ListenOptions, QpLimits};
use crate::error::{FabricError, Result};
use crate::provider::connection::Connection;
use crate::provider::device::{Device, PollerHandle, ProtectionDomain};
use crate::soft;
#[cfg(feature = "verbs")]
use crate::verbs;

/// Waits for peers on one address.
#[derive(Debug)]
pub enum Listener {
    /// Software provider.
    Soft(soft::Listener),
    /// Verbs.
    #[cfg(feature = "verbs")]
    Verbs(verbs::Listener),
}

impl Listener {
    /// Starts to listen. Port 0 picks a free port, which [`Self::address`] returns.
    ///
    /// # Errors
    /// [`FabricError::Listen`], [`FabricError::NoDevice`], [`FabricError::NoVerbs`].
    pub async fn bind(address: &Address) -> Result<Self> {
        Self::bind_with(address, &ListenOptions::default()).await
    }

    /// As [`Self::bind`], with options.
    ///
    /// # Errors
    /// As there.
    pub async fn bind_with(address: &Address, options: &ListenOptions) -> Result<Self> {
        match address.scheme {
            Scheme::Tcp => soft::Listener::bind(address, options).await.map(Self::Soft),
            #[cfg(feature = "verbs")]
            Scheme::Rdma => verbs::Listener::bind(address, options).await.map(Self::Verbs),
            #[cfg(not(feature = "verbs"))]
            Scheme::Rdma => Err(FabricError::NoVerbs(address.to_string())),
        }
    }

    /// Goes on with a TCP socket that listens at that address already.
    ///
    /// # Errors
    /// [`FabricError::Listen`].
    pub fn go_on(
        socket: std::net::TcpListener,
        address: &Address,
        options: &ListenOptions,
    ) -> Result<Self> {
        soft::Listener::go_on(socket, address, options).map(Self::Soft)
    }

    /// The socket of a listener by TCP, with the peers that wait to be accepted. A listener of
    /// another kind ends, and has none.
    #[must_use]
    pub fn into_socket(self) -> Option<std::net::TcpListener> {
        match self {
            Self::Soft(l) => l.into_socket().ok(),
            #[cfg(feature = "verbs")]
            Self::Verbs(_) => None,
        }
    }

    /// The address it listens on.
    #[must_use]
    pub fn address(&self) -> &Address {
        match self {
            Self::Soft(l) => l.address(),
            #[cfg(feature = "verbs")]
            Self::Verbs(l) => l.address(),
        }
    }

    /// Whether it listens on every device, also on those that are plugged in later.
    #[must_use]
    pub fn is_everywhere(&self) -> bool {
        match self {
            Self::Soft(_) => false,
            #[cfg(feature = "verbs")]
            Self::Verbs(l) => l.is_everywhere(),
        }
    }

    /// The devices that peers can connect through, so that memory can be registered before a peer
    /// comes. Where it listens [everywhere](Self::is_everywhere), devices that no peer can use now
    /// (without an active port, an address or reliable connections) are passed over, with a
    /// warning.
    ///
    /// # Errors
    /// The query of the device of the address failed.
    pub fn devices(&self) -> Result<Vec<Device>> {
        match self {
            Self::Soft(_) => Ok(vec![Device::Soft(soft::Device::tcp())]),
            #[cfg(feature = "verbs")]
            Self::Verbs(l) => Ok(l.devices()?.into_iter().map(Device::Verbs).collect()),
        }
    }

    /// The next peer with a valid request. Peers that send garbage or stall are dropped, with a log
    /// line (rate limited), and never delay others. Cancel safe.
    ///
    /// # Errors
    /// The listener itself is broken.
    pub async fn accept(&mut self) -> Result<Incoming> {
        match self {
            Self::Soft(l) => l.accept().await.map(Incoming::Soft),
            #[cfg(feature = "verbs")]
            Self::Verbs(l) => l.accept().await.map(Incoming::Verbs),
        }
    }
}

/// A peer that asks to connect. Dropping it without an answer rejects it.
#[derive(Debug)]
pub enum Incoming {
    /// Software provider.
    Soft(soft::Incoming),
    /// Verbs.
    #[cfg(feature = "verbs")]
    Verbs(verbs::Incoming),
}

impl Incoming {
    /// The device that the request came in by.
    #[must_use]
    pub fn device(&self) -> Device {
        match self {
            Self::Soft(i) => Device::Soft(i.device()),
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => Device::Verbs(i.device()),
        }
    }

    /// The hello of the peer. The CM may have padded it.
    #[must_use]
    pub fn hello(&self) -> &ConnectionHello {
        match self {
            Self::Soft(i) => i.hello(),
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => i.hello(),
        }
    }

    /// The address of the peer, for logs.
    #[must_use]
    pub fn peer(&self) -> String {
        match self {
            Self::Soft(i) => i.peer(),
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => i.peer(),
        }
    }

    /// (READs that the peer serves, READs that it wants to have outstanding).
    #[must_use]
    pub fn peer_reads(&self) -> (u8, u8) {
        match self {
            Self::Soft(i) => i.peer_reads(),
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => i.peer_reads(),
        }
    }

    /// Sets the reply for a peer whose [`Incoming`], or [`Connection`] made of it, is dropped
    /// without an answer. Cut to [`ConnectionHello::REPLY_MAX`] bytes. Empty unless it is set.
    pub fn refuse_with(&mut self, mut hello: ConnectionHello) {
        hello.0.truncate(ConnectionHello::REPLY_MAX);
        match self {
            Self::Soft(i) => i.refuse_with(hello),
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => i.refuse_with(hello),
        }
    }

    /// Sets how long the device waits for an acknowledgement of the peer. Call it before
    /// [`Self::prepare`].
    pub fn set_ack_timeout(&self, timeout: AckTimeout) {
        match self {
            Self::Soft(_) => {}
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => i.set_ack_timeout(timeout),
        }
        let _ = timeout;
    }

    /// Makes the QP. The data thread accepts the peer, after it has posted RECVs:
    /// [`attach`](crate::Poller::attach), [`post_recv`](crate::DataPath::post_recv),
    /// [`accept`](crate::DataPath::accept).
    ///
    /// # Errors
    /// [`FabricError::Mixed`], [`FabricError::Limit`], or a failed call; the peer is then rejected.
    pub fn prepare(
        self,
        pd: &ProtectionDomain,
        poller: &PollerHandle,
        limits: QpLimits,
    ) -> Result<Connection> {
        match (self, pd, poller) {
            (Self::Soft(i), ProtectionDomain::Soft(pd), PollerHandle::Soft(p)) => {
                i.prepare(pd, p, limits).map(Connection::Soft)
            }
            #[cfg(feature = "verbs")]
            (Self::Verbs(i), ProtectionDomain::Verbs(pd), PollerHandle::Verbs(p)) => {
                i.prepare(pd, p, limits).map(Connection::Verbs)
            }
            #[cfg(feature = "verbs")]
            _ => Err(FabricError::Mixed("incoming connection, protection domain and poller")),
        }
    }

    /// Refuses the peer. A reason longer than [`ConnectionHello::REPLY_MAX`] bytes is cut off.
    pub fn reject(self, hello: &ConnectionHello) {
        match self {
            Self::Soft(i) => i.reject(hello),
            #[cfg(feature = "verbs")]
            Self::Verbs(i) => i.reject(hello),
        }
    }
}
