//! [`Route`]: the side that connects.

use crate::address::{Address, Scheme};
use crate::connect::{ConnectOptions, ConnectionHello, QpLimits};
use crate::error::{FabricError, Result};
use crate::provider::connection::{Connection, Established};
use crate::provider::device::{Device, PollerHandle, ProtectionDomain};
use crate::soft;
#[cfg(feature = "verbs")]
use crate::verbs;

/// A route to a peer. The device is known; nothing is connected yet.
#[derive(Debug)]
pub enum Route {
    /// Software provider.
    Soft(soft::Route),
    /// Verbs.
    #[cfg(feature = "verbs")]
    Verbs(verbs::Route),
}

impl Route {
    /// Resolves name, route and device.
    ///
    /// # Errors
    /// [`FabricError::Unreachable`], [`FabricError::NoDevice`], [`FabricError::NoVerbs`],
    /// [`FabricError::TimedOut`].
    pub async fn resolve(address: &Address, options: &ConnectOptions) -> Result<Self> {
        match address.scheme {
            Scheme::Tcp => soft::Route::resolve(address, options).await.map(Self::Soft),
            #[cfg(feature = "verbs")]
            Scheme::Rdma => verbs::Route::resolve(address, options).await.map(Self::Verbs),
            #[cfg(not(feature = "verbs"))]
            Scheme::Rdma => Err(FabricError::NoVerbs(address.to_string())),
        }
    }

    /// The device the route leaves by.
    #[must_use]
    pub fn device(&self) -> Device {
        match self {
            Self::Soft(r) => Device::Soft(r.device()),
            #[cfg(feature = "verbs")]
            Self::Verbs(r) => Device::Verbs(r.device()),
        }
    }

    /// Makes a QP and connects it, with `hello` in the request (at most
    /// [`ConnectionHello::REQUEST_MAX`] bytes).
    ///
    /// # Errors
    /// [`FabricError::Rejected`] with the peer's reply, [`FabricError::TimedOut`],
    /// [`FabricError::NotRblk`], or a failed call.
    pub async fn connect(
        self,
        pd: &ProtectionDomain,
        poller: &PollerHandle,
        limits: QpLimits,
        hello: &ConnectionHello,
    ) -> Result<Established> {
        match (self, pd, poller) {
            (Self::Soft(r), ProtectionDomain::Soft(pd), PollerHandle::Soft(p)) => {
                Ok(r.connect(pd, p, limits, hello).await?.map(Connection::Soft))
            }
            #[cfg(feature = "verbs")]
            (Self::Verbs(r), ProtectionDomain::Verbs(pd), PollerHandle::Verbs(p)) => {
                Ok(r.connect(pd, p, limits, hello).await?.map(Connection::Verbs))
            }
            #[cfg(feature = "verbs")]
            _ => Err(FabricError::Mixed("route, protection domain and poller")),
        }
    }
}
