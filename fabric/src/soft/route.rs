//! [`Route`]: connecting over TCP.

use std::io;
use std::net::SocketAddr;

use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use super::device::Device;
use super::domain::{PollerHandle, ProtectionDomain};
use super::queue_pair::Connection;
use super::wire::tcp_handshake::{self, Acceptance, ConnectRequest, HandshakeFailure};
use super::wire::tcp_link::TcpLink;
use crate::address::Address;
use crate::connect::Established;
use crate::connect::{ConnectOptions, ConnectionHello, QpLimits};
use crate::error::{FabricError, FirewallPort, Result};

/// A resolved route to a TCP peer.
#[derive(Debug)]
pub struct Route {
    address: Address,
    options: ConnectOptions,
    candidates: Vec<SocketAddr>,
}

impl Route {
    /// Resolves the name.
    ///
    /// # Errors
    /// [`FabricError::Unreachable`], [`FabricError::TimedOut`].
    pub(crate) async fn resolve(address: &Address, options: &ConnectOptions) -> Result<Self> {
        let mut candidates = address.look_up_within(options.timeout).await?;
        if let Some(bind) = options.bind {
            candidates.retain(|c| c.is_ipv4() == bind.is_ipv4());
            if candidates.is_empty() {
                let reason = format!(
                    "it has no address of the same family as the local address {}",
                    bind.ip()
                );
                return Err(FabricError::Unreachable { address: address.to_string(), reason });
            }
        }
        Ok(Self { address: address.clone(), options: options.clone(), candidates })
    }

    /// The TCP device.
    #[must_use]
    pub(crate) fn device(&self) -> Device {
        Device::tcp()
    }

    /// Connects, and waits until the data thread of the acceptor has answered.
    ///
    /// # Errors
    /// [`FabricError::Rejected`], [`FabricError::TimedOut`], [`FabricError::NotRblk`],
    /// [`FabricError::Unreachable`], [`FabricError::Limit`], [`FabricError::Mixed`].
    pub(crate) async fn connect(
        self,
        pd: &ProtectionDomain,
        poller: &PollerHandle,
        limits: QpLimits,
        hello: &ConnectionHello,
    ) -> Result<Established<Connection>> {
        pd.check(poller, &limits)?;
        if !pd.device().same_as(&Device::tcp()) {
            return Err(FabricError::Mixed("a TCP route and another device's protection domain"));
        }
        if hello.0.len() > ConnectionHello::REQUEST_MAX {
            return Err(tcp_handshake::hello_too_long(hello));
        }
        let mut stream = self.open().await?;
        let request = ConnectRequest {
            reads_in: limits.reads_in,
            reads_out: limits.reads_out,
            detect: self.options.detect,
            hello: hello.clone(),
        };
        let limit = self.options.timeout;
        let reply = timeout(limit, async {
            tcp_handshake::write_request(&mut stream, &request).await?;
            tcp_handshake::read_reply(&mut stream).await.map_err(|failure| self.failed(failure))
        })
        .await
        .map_err(|_| self.timed_out())??;
        if reply.verdict == Acceptance::Rejected && reply.hello.0.is_empty() {
            return Err(FabricError::Busy { address: self.address.to_string() });
        }
        if reply.verdict == Acceptance::Rejected {
            return Err(FabricError::Rejected {
                address: self.address.to_string(),
                hello: reply.hello.0,
            });
        }
        let reads_out = limits.reads_out.min(reply.reads_in);
        let reads_in = limits.reads_in.min(reply.reads_out);
        let stream =
            stream.into_std().map_err(|source| FabricError::Call { call: "deregister", source })?;
        let connection =
            Connection::established(Box::new(TcpLink::new(stream)), pd, poller, &limits, reads_in)?;
        Ok(Established { connection, hello: reply.hello, reads_out, reads_in })
    }

    /// A connected socket to the first candidate that answers.
    async fn open(&self) -> Result<TcpStream> {
        let mut last = None;
        for candidate in &self.candidates {
            match timeout(self.options.timeout, self.open_one(*candidate)).await {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(error)) => last = Some(self.unreachable(&error)),
                Err(_) => last = Some(self.timed_out()),
            }
        }
        Err(last.unwrap_or_else(|| self.timed_out()))
    }

    async fn open_one(&self, to: SocketAddr) -> io::Result<TcpStream> {
        let socket = if to.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        tcp_handshake::set_tos(&socket, self.options.tos);
        if let Some(bind) = self.options.bind_for(to) {
            socket.bind(bind)?;
        }
        let stream = socket.connect(to).await?;
        tcp_handshake::tune(&stream, self.options.detect)?;
        Ok(stream)
    }

    fn unreachable(&self, error: &io::Error) -> FabricError {
        let reason = match error.raw_os_error() {
            Some(libc::ECONNREFUSED) => {
                "connection refused, so the host is up but nothing listens on that port: start rblk-target there with a tcp:// listener, or check the port".to_owned()
            }
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH) => {
                format!("{error}: check the route with `ip route get {}`", self.address.host)
            }
            Some(libc::EADDRNOTAVAIL) => {
                format!("{error}: the local address to bind to is not of this host")
            }
            _ => error.to_string(),
        };
        FabricError::Unreachable { address: self.address.to_string(), reason }
    }

    fn timed_out(&self) -> FabricError {
        FabricError::TimedOut {
            what: self.address.to_string(),
            after: self.options.timeout,
            port: Some(FirewallPort::Tcp(self.address.port)),
        }
    }

    fn failed(&self, failure: HandshakeFailure) -> FabricError {
        match failure {
            // A target that is stopping looks like this too, so it does not prove that the service
            // is a foreign one.
            HandshakeFailure::Silence(error) => FabricError::Unreachable {
                address: self.address.to_string(),
                reason: format!(
                    "it accepted and then closed the connection ({error}): the target may be restarting, or something else listens there"
                ),
            },
            HandshakeFailure::Foreign(reason) => {
                FabricError::NotRblk { peer: self.address.to_string(), reason }
            }
        }
    }
}
