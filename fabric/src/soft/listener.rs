//! Accepting over TCP.
//!
//! Every handshake is a task of its own with a deadline. Their number is bounded: when one more
//! comes, the oldest unfinished one goes, so that peers that stall crowd out each other and not
//! those that speak.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::device::Device;
use super::domain::ProtectionDomain;
use super::handshake::{self, Failure, Request, Verdict};
use super::link::TcpLink;
use super::poller::PollerHandle;
use super::queue_pair::{Connection, QueuePair, State};
use super::route::look_up;
use crate::address::Address;
use crate::device::{ConnectionHello, QpLimits};
use crate::error::{FabricError, Result};

/// Handshakes under way at once.
const PENDING: usize = 256;
/// How long a peer may take to say its request.
const DEADLINE: Duration = Duration::from_secs(5);
/// Pause when the system has no descriptor or memory for one more connection.
const PAUSE: Duration = Duration::from_millis(50);
/// Between two log lines about bad peers.
const LOG_EVERY: Duration = Duration::from_secs(1);

type Outcome = std::result::Result<Incoming, (SocketAddr, String)>;

/// A listening TCP socket.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    address: Address,
    handshakes: JoinSet<Outcome>,
    // Those maybe unfinished, oldest first.
    pending: VecDeque<AbortHandle>,
    last_log: Option<Instant>,
    unlogged: u64,
}

impl Listener {
    /// Starts listening; port 0 picks a free one.
    ///
    /// # Errors
    /// [`FabricError::Listen`], [`FabricError::Unreachable`] when the name cannot be resolved.
    pub async fn bind(address: &Address) -> Result<Self> {
        let fail = |source| FabricError::Listen { address: address.to_string(), source };
        let candidates = look_up(address, DEADLINE).await?;
        let socket = TcpListener::bind(candidates.as_slice()).await.map_err(fail)?;
        let port = socket.local_addr().map_err(fail)?.port();
        Ok(Self {
            socket,
            address: Address { port, ..address.clone() },
            handshakes: JoinSet::new(),
            pending: VecDeque::with_capacity(PENDING),
            last_log: None,
            unlogged: 0,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The next peer that asked properly. Cancel safe: handshakes live in the listener.
    ///
    /// # Errors
    /// The socket itself is broken.
    pub async fn accept(&mut self) -> Result<Incoming> {
        loop {
            tokio::select! {
                Some(done) = self.handshakes.join_next() => match done {
                    Ok(Ok(incoming)) => return Ok(incoming),
                    Ok(Err((peer, reason))) => self.log(&peer.to_string(), &reason),
                    Err(_aborted) => {}
                },
                accepted = self.socket.accept() => match accepted {
                    Ok((stream, peer)) => self.begin(stream, peer),
                    Err(source) if is_broken(&source) => {
                        return Err(FabricError::Call { call: "accept", source });
                    }
                    Err(error) => {
                        self.log("accept", &error.to_string());
                        sleep(PAUSE).await;
                    }
                },
            }
        }
    }

    fn begin(&mut self, stream: TcpStream, peer: SocketAddr) {
        self.pending.retain(|handshake| !handshake.is_finished());
        if self.pending.len() >= PENDING
            && let Some(oldest) = self.pending.pop_front()
        {
            oldest.abort();
            self.log("accept", "too many peers that say nothing: the oldest was dropped");
        }
        self.pending.push_back(self.handshakes.spawn(handshake(stream, peer)));
    }

    fn log(&mut self, peer: &str, reason: &str) {
        let now = Instant::now();
        if self.last_log.is_some_and(|last| now.duration_since(last) < LOG_EVERY) {
            self.unlogged += 1;
            return;
        }
        tracing::warn!(listener = %self.address, peer, reason, unlogged = self.unlogged, "dropped a peer");
        self.last_log = Some(now);
        self.unlogged = 0;
    }
}

/// Whether no further accept can work.
fn is_broken(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP)
    )
}

async fn handshake(mut stream: TcpStream, peer: SocketAddr) -> Outcome {
    let request = match timeout(DEADLINE, handshake::read_request(&mut stream)).await {
        Err(_) => return Err((peer, format!("no request within {DEADLINE:?}"))),
        Ok(Err(Failure::Silence(error))) => return Err((peer, format!("said nothing: {error}"))),
        Ok(Err(Failure::Foreign(reason))) => return Err((peer, reason)),
        Ok(Ok(request)) => request,
    };
    handshake::tune(&stream, request.detect).map_err(|e| (peer, e.to_string()))?;
    let stream = stream.into_std().map_err(|e| (peer, e.to_string()))?;
    Ok(Incoming { stream: Some(stream), request, peer, refusal: ConnectionHello::default() })
}

/// A TCP peer that asks to connect.
#[derive(Debug)]
pub struct Incoming {
    // Taken when answered.
    stream: Option<std::net::TcpStream>,
    request: Request,
    peer: SocketAddr,
    refusal: ConnectionHello,
}

impl Incoming {
    /// The TCP device.
    #[must_use]
    pub fn device(&self) -> Device {
        Device::tcp()
    }

    /// What it said.
    #[must_use]
    pub fn hello(&self) -> &ConnectionHello {
        &self.request.hello
    }

    /// Who it is.
    #[must_use]
    pub fn peer(&self) -> String {
        handshake::peer_name(self.peer)
    }

    /// (READs the peer serves, READs the peer wants to have outstanding).
    #[must_use]
    pub fn peer_reads(&self) -> (u8, u8) {
        (self.request.reads_in, self.request.reads_out)
    }

    /// What to say when it is dropped, in this form or as a prepared [`Connection`].
    pub fn refuse_with(&mut self, hello: ConnectionHello) {
        self.refusal = hello;
    }

    /// Makes the QP; the data thread answers the peer.
    ///
    /// # Errors
    /// [`FabricError::Mixed`], [`FabricError::Limit`]; the peer is then rejected.
    pub fn prepare(
        mut self,
        pd: &ProtectionDomain,
        poller: &PollerHandle,
        limits: QpLimits,
    ) -> Result<Connection> {
        pd.check(poller, &limits)?;
        if !pd.device().same_as(&Device::tcp()) {
            return Err(FabricError::Mixed("a TCP peer and another device's protection domain"));
        }
        let stream = self.stream.take().ok_or(FabricError::Mixed("an answered peer"))?;
        let state = State::Prepared {
            peer_reads_in: self.request.reads_in,
            peer_reads_out: self.request.reads_out,
        };
        let link = Box::new(TcpLink::new(stream));
        let mut pair = QueuePair::new(link, state, limits, poller.id(), 0);
        pair.refusal = std::mem::take(&mut self.refusal);
        Ok(Connection(pair))
    }

    /// Refuses; a reason longer than a reply may be is cut.
    pub fn reject(mut self, hello: &ConnectionHello) {
        self.answer(hello);
    }

    fn answer(&mut self, hello: &ConnectionHello) {
        let Some(mut stream) = self.stream.take() else { return };
        let most = hello.0.len().min(ConnectionHello::REPLY_MAX);
        let hello = ConnectionHello(hello.0[..most].to_vec());
        if let Some(reply) = handshake::encode_reply(Verdict::Rejected, 0, 0, &hello) {
            // The buffer of a fresh socket has room for it; if the peer is gone, nobody cares.
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
