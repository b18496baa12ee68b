//! [`Incoming`]: a TCP peer that asks to connect.

use std::io::Write;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::device::Device;
use super::domain::{PollerHandle, ProtectionDomain};
use super::queue_pair::Connection;
use super::wire::tcp_handshake::{self, Acceptance, ConnectRequest, HandshakeFailure};
use super::wire::tcp_link::TcpLink;
use crate::address::end_name;
use crate::connect::{ACCEPTED_DETECT_MAX, ConnectionHello, QpLimits};
use crate::error::{FabricError, Result};

/// The result of a handshake: a peer, or the peer's address and the reason for the drop.
pub(super) type Outcome = std::result::Result<Incoming, (SocketAddr, String)>;

/// Reads the request of a peer, within `limit`.
pub(super) async fn read_request(
    mut stream: TcpStream,
    peer: SocketAddr,
    limit: Duration,
) -> Outcome {
    let request = match timeout(limit, tcp_handshake::read_request(&mut stream)).await {
        Err(_) => return Err((peer, format!("no request within {limit:?}"))),
        Ok(Err(HandshakeFailure::Silence(error))) => {
            return Err((peer, format!("said nothing: {error}")));
        }
        Ok(Err(HandshakeFailure::Foreign(reason))) => return Err((peer, reason)),
        Ok(Ok(request)) => request,
    };
    // A peer that keeps its window closed keeps the memory lent to its connection.
    let detect = request.detect.min(ACCEPTED_DETECT_MAX);
    tcp_handshake::tune(&stream, detect).map_err(|e| (peer, e.to_string()))?;
    let stream = stream.into_std().map_err(|e| (peer, e.to_string()))?;
    Ok(Incoming { stream: Some(stream), request, peer, refusal: ConnectionHello::default() })
}

/// A TCP peer that asks to connect.
#[derive(Debug)]
pub struct Incoming {
    // Taken when the peer is answered.
    stream: Option<std::net::TcpStream>,
    request: ConnectRequest,
    peer: SocketAddr,
    refusal: ConnectionHello,
}

impl Incoming {
    /// The TCP device.
    #[must_use]
    pub(crate) fn device(&self) -> Device {
        Device::tcp()
    }

    /// The hello of the peer.
    #[must_use]
    pub(crate) fn hello(&self) -> &ConnectionHello {
        &self.request.hello
    }

    /// The address of the peer.
    #[must_use]
    pub(crate) fn peer(&self) -> String {
        end_name(self.peer)
    }

    /// (READs that the peer serves, READs that it wants to have outstanding).
    #[must_use]
    pub(crate) fn peer_reads(&self) -> (u8, u8) {
        (self.request.reads_in, self.request.reads_out)
    }

    /// The reply to the peer if this value, or the [`Connection`] made of it, is dropped without an
    /// answer.
    pub(crate) fn refuse_with(&mut self, hello: ConnectionHello) {
        self.refusal = hello;
    }

    /// Makes the QP; the data thread answers the peer.
    ///
    /// # Errors
    /// [`FabricError::Mixed`], [`FabricError::Limit`]; the peer is then rejected.
    pub(crate) fn prepare(
        mut self,
        pd: &ProtectionDomain,
        poller: &PollerHandle,
        limits: QpLimits,
    ) -> Result<Connection> {
        let keys = pd.check(poller, &limits)?;
        if !pd.device().same_as(&Device::tcp()) {
            return Err(FabricError::Mixed("a TCP peer and another device's protection domain"));
        }
        let stream = self.stream.take().ok_or(FabricError::Mixed("an answered peer"))?;
        Ok(Connection::prepared(
            Box::new(TcpLink::new(stream)),
            poller,
            &limits,
            keys,
            (self.request.reads_in, self.request.reads_out),
            std::mem::take(&mut self.refusal),
        ))
    }

    /// Refuses the peer. A reason longer than [`ConnectionHello::REPLY_MAX`] bytes is cut off.
    pub(crate) fn reject(mut self, hello: &ConnectionHello) {
        self.answer(hello);
    }

    fn answer(&mut self, hello: &ConnectionHello) {
        let Some(mut stream) = self.stream.take() else { return };
        let most = hello.0.len().min(ConnectionHello::REPLY_MAX);
        let hello = ConnectionHello(hello.0[..most].to_vec());
        if let Some(reply) = tcp_handshake::encode_reply(Acceptance::Rejected, 0, 0, &hello) {
            // The buffer of a new socket has room for it. If the peer is gone, the
            // reply is not needed.
            let _ = stream.write_all(&reply);
        }
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let refusal = std::mem::take(&mut self.refusal);
        self.answer(&refusal);
    }
}
