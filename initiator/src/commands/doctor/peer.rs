//! [`Peer`]: a target as this host sees it before it connects: the name and the route.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Duration;

use rblk_fabric::Address;
use rblk_operate::doctor::PeerRoute;

/// A target as this host sees it.
#[derive(Debug)]
pub(super) struct Peer {
    pub address: Address,
    /// The IP addresses, or the reason why there are none.
    pub resolved: Result<Vec<SocketAddr>, String>,
    /// The route to the first of them.
    pub route: Option<PeerRoute>,
}

impl Peer {
    /// Resolves the name within `limit`, and asks for the route.
    pub(super) fn look_up(address: &Address, limit: Duration) -> Self {
        let (sender, receiver) = mpsc::channel();
        let (host, port) = (address.host.clone(), address.port);
        // The resolver of the system has no deadline. The thread ends with the process.
        std::thread::spawn(move || {
            let found = (host.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
            let _ = sender.send(found);
        });
        let resolved = match receiver.recv_timeout(limit) {
            Ok(Ok(found)) if found.is_empty() => Err("the name has no address".to_owned()),
            Ok(Ok(found)) => Ok(found),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("the resolver did not answer within {limit:?}")),
        };
        let first = resolved.as_ref().ok().and_then(|found| found.first());
        let route = first.map(|peer| PeerRoute::ask(*peer));
        Self { address: address.clone(), resolved, route }
    }

    /// Whether the address has a host name to look up.
    pub(super) fn has_name(&self) -> bool {
        let host = self.address.host.split('%').next().unwrap_or_default();
        host.parse::<std::net::IpAddr>().is_err()
    }
}
