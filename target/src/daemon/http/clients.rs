//! [`Clients`]: the connections of HTTP clients, and the choice of the one that makes room for the
//! next.
//!
//! When all places are taken, a newcomer ends the oldest client without an answer under way. If all
//! have an answer under way, the newcomer gets one of a few more places for as long as those may
//! take; there only `/healthz` is answered. So clients that are silent, send half a head or take no
//! answer keep no probe away. A client that came just now is not ended: the newcomer waits in the
//! socket.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;
use tokio::time::{Sleep, sleep};

/// Clients at a time with any request.
const PLACES: usize = 48;
/// Clients beyond these, which may ask for `/healthz`.
const SPARE_PLACES: usize = 8;
/// Time that every client has to ask for something.
const GRACE: Duration = Duration::from_millis(50);
/// Time for a client to take an answer.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// The client has not sent the whole head of a request.
const WAITS: u8 = 0;
/// The request is complete.
const ASKED: u8 = 1;
/// The answer is made, and not all of it is sent.
const ANSWERED: u8 = 2;

/// The progress of a client.
#[derive(Debug, Default)]
pub(super) struct ClientPhase(AtomicU8);

impl ClientPhase {
    /// The head of a request is complete.
    pub(super) fn asked(&self) {
        self.0.store(ASKED, Ordering::Relaxed);
    }

    /// The answer is made.
    pub(super) fn answered(&self) {
        self.0.store(ANSWERED, Ordering::Relaxed);
    }

    // The whole answer is sent.
    fn sent(&self) {
        let _ = self.0.compare_exchange(ANSWERED, WAITS, Ordering::Relaxed, Ordering::Relaxed);
    }

    fn waits(&self) -> bool {
        self.0.load(Ordering::Relaxed) == WAITS
    }
}

#[derive(Debug)]
struct Client {
    since: Instant,
    phase: Arc<ClientPhase>,
    task: AbortHandle,
    is_spare: bool,
}

/// The room for a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ClientRoom {
    /// The client may ask for anything.
    Place,
    /// The client may ask for `/healthz` alone.
    Spare,
    /// No room: all others came just now. Try again at this time.
    NoneUntil(Instant),
}

/// See the module. The oldest is first.
#[derive(Debug, Default)]
pub(super) struct Clients(VecDeque<Client>);

impl Clients {
    /// Makes room for another client.
    pub(super) fn make_room(&mut self, now: Instant) -> ClientRoom {
        self.0.retain(|client| !client.task.is_finished());
        if self.0.iter().filter(|client| !client.is_spare).count() < PLACES {
            return ClientRoom::Place;
        }
        let waits = |client: &Client| !client.is_spare && client.phase.waits();
        if let Some(at) = self.0.iter().position(waits) {
            return self.replace(at, ClientRoom::Place, now);
        }
        let is_spare = |client: &Client| client.is_spare;
        if self.0.iter().filter(|client| is_spare(client)).count() < SPARE_PLACES {
            return ClientRoom::Spare;
        }
        let at = self.0.iter().position(is_spare).unwrap_or(0);
        self.replace(at, ClientRoom::Spare, now)
    }

    fn replace(&mut self, at: usize, room: ClientRoom, now: Instant) -> ClientRoom {
        match self.0.get(at).map(|client| client.since + GRACE) {
            Some(until) if until > now => ClientRoom::NoneUntil(until),
            _ => {
                self.end(at);
                room
            }
        }
    }

    fn end(&mut self, at: usize) {
        if let Some(client) = self.0.remove(at) {
            client.task.abort();
        }
    }

    /// Notes the task that serves a client which came at `since`.
    pub(super) fn add(
        &mut self,
        since: Instant,
        phase: Arc<ClientPhase>,
        task: AbortHandle,
        is_spare: bool,
    ) {
        self.0.push_back(Client { since, phase, task, is_spare });
    }
}

/// The stream of a client, with a limit on the time to take an answer.
#[derive(Debug)]
pub(super) struct Timely {
    stream: TcpStream,
    phase: Arc<ClientPhase>,
    // When the wait of unsent bytes began.
    late: Option<Pin<Box<Sleep>>>,
}

impl Timely {
    /// The stream of a client.
    pub(super) fn new(stream: TcpStream, phase: Arc<ClientPhase>) -> Self {
        Self { stream, phase, late: None }
    }

    // The time runs until all is sent, however little the client takes meanwhile.
    fn watch(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let late = self.late.get_or_insert_with(|| Box::pin(sleep(ANSWER_TIME)));
        if written.is_pending() {
            ready!(late.as_mut().poll(context));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        written
    }
}

impl AsyncRead for Timely {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Timely {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.watch(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The caller flushes after all bytes are written.
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        if flushed.is_ready() {
            self.late = None;
            self.phase.sent();
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
