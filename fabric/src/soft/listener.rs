//! [`Listener`]: accepting over TCP.
//!
//! Every handshake is a task of its own with a deadline. Their number is limited. When it is
//! reached, a new peer makes the listener drop an unfinished handshake ([`PendingHandshakes`]). So
//! peers that stall are dropped, and peers that speak are not.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;

use super::incoming::{self, Incoming, Outcome};
use super::wire::pending_handshakes::PendingHandshakes;
use super::wire::tcp_handshake::set_tos;
use crate::address::{Address, end_name};
use crate::connect::ListenOptions;
use crate::error::{FabricError, Result};

/// Handshakes at once, at most.
const PENDING_MAX: usize = 256;
/// How long a peer may take to send its request. Also for resolving the name to listen on.
const DEADLINE: Duration = Duration::from_secs(5);
/// Pause when the system has no descriptor or no memory for one more connection.
const PAUSE: Duration = Duration::from_millis(50);
/// Log lines about bad peers come at most this often.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// A listening TCP socket.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    address: Address,
    handshakes: JoinSet<Outcome>,
    // Handshakes that may be unfinished.
    pending: PendingHandshakes<AbortHandle>,
    last_log: Option<Instant>,
    unlogged: u64,
}

impl Listener {
    /// Starts to listen. Port 0 picks a free port.
    ///
    /// # Errors
    /// [`FabricError::Listen`], [`FabricError::Unreachable`] when the name cannot be resolved.
    pub(crate) async fn bind(address: &Address, options: &ListenOptions) -> Result<Self> {
        let fail = |error| FabricError::Listen { address: address.to_string(), error };
        let candidates = address.look_up_within(DEADLINE).await?;
        let socket = TcpListener::bind(candidates.as_slice()).await.map_err(fail)?;
        let port = socket.local_addr().map_err(fail)?.port();
        set_tos(&socket, options.tos);
        Ok(Self::over(socket, Address { port, ..address.clone() }))
    }

    fn over(socket: TcpListener, address: Address) -> Self {
        Self {
            socket,
            address,
            handshakes: JoinSet::new(),
            pending: PendingHandshakes::new(PENDING_MAX),
            last_log: None,
            unlogged: 0,
        }
    }

    /// Goes on with a socket that listens at that address already.
    ///
    /// # Errors
    /// [`FabricError::Listen`].
    pub(crate) fn go_on(
        socket: std::net::TcpListener,
        address: &Address,
        options: &ListenOptions,
    ) -> Result<Self> {
        let fail = |error| FabricError::Listen { address: address.to_string(), error };
        socket.set_nonblocking(true).map_err(fail)?;
        set_tos(&socket, options.tos);
        Ok(Self::over(TcpListener::from_std(socket).map_err(fail)?, address.clone()))
    }

    /// The socket. Unfinished handshakes end; finished ones keep waiting for an accept.
    pub(crate) fn into_socket(self) -> io::Result<std::net::TcpListener> {
        self.socket.into_std()
    }

    /// The address it listens on.
    #[must_use]
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// The next peer with a valid request. Cancel safe: the handshakes belong to the listener.
    ///
    /// # Errors
    /// The socket itself is broken.
    pub(crate) async fn accept(&mut self) -> Result<Incoming> {
        loop {
            tokio::select! {
                Some(done) = self.handshakes.join_next() => match done {
                    Ok(Ok(incoming)) => return Ok(incoming),
                    Ok(Err((peer, reason))) => self.log(&end_name(peer), &reason),
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
        self.pending.forget(AbortHandle::is_finished);
        if let Some(oldest) = self.pending.make_room() {
            oldest.abort();
            self.log("accept", "too many peers send no request: an old one was dropped");
        }
        let handshake = self.handshakes.spawn(incoming::read_request(stream, peer, DEADLINE));
        self.pending.add(peer, handshake);
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

/// Whether no later accept can work.
fn is_broken(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP)
    )
}
