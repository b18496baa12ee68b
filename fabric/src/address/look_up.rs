//! Resolving the name in an [`Address`].

use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::timeout;

use crate::address::Address;
use crate::error::{FabricError, Result};

impl Address {
    /// The IP addresses of the host, with the port. At least one. It has no deadline of its own.
    ///
    /// # Errors
    /// [`FabricError::Unreachable`] when the name cannot be resolved.
    pub(crate) async fn look_up(&self) -> Result<Vec<SocketAddr>> {
        let unreachable = |reason| FabricError::Unreachable { address: self.to_string(), reason };
        let found = tokio::net::lookup_host((self.host.as_str(), self.port))
            .await
            .map_err(|e| unreachable(format!("the name cannot be resolved: {e}")))?;
        let found: Vec<_> = found.collect();
        if found.is_empty() {
            return Err(unreachable("the name has no address".to_owned()));
        }
        Ok(found)
    }

    /// As [`Self::look_up`], within a time.
    ///
    /// # Errors
    /// As there; and [`FabricError::TimedOut`].
    pub(crate) async fn look_up_within(&self, limit: Duration) -> Result<Vec<SocketAddr>> {
        timeout(limit, self.look_up()).await.map_err(|_| FabricError::TimedOut {
            what: format!("name resolution of {}", self.host),
            after: limit,
            port: None,
        })?
    }
}
