//! [`Clients`]: the connections of HTTP clients, and who makes room for the next one.
//!
//! When all places are taken, a newcomer ends the oldest client that has no answer under way. Where
//! all have, and for as long as their answers may take, it has one of a few places more, from which
//! only `/healthz` is answered. So clients that are silent, send half a head or take no answer keep
//! no probe away. A client that came just now is not ended: the newcomer waits in the socket.

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

/// Clients at a time that may ask for anything.
const PLACES: usize = 48;
/// Clients beyond these, which may ask for `/healthz`.
const SPARE_PLACES: usize = 8;
/// Time that every client has to ask for something.
const GRACE: Duration = Duration::from_millis(50);
/// Time for a client to take an answer.
const ANSWER_TIME: Duration = Duration::from_secs(5);

/// It has not sent the whole head of a request.
const WAITS: u8 = 0;
/// It has asked.
const ASKED: u8 = 1;
/// The answer is there, and not all of it is sent.
const ANSWERED: u8 = 2;

/// How far a client is.
#[derive(Debug, Default)]
pub(super) struct ClientPhase(AtomicU8);

impl ClientPhase {
    /// The head of a request is complete.
    pub(super) fn asked(&self) {
        self.0.store(ASKED, Ordering::Relaxed);
    }

    /// The answer is there.
    pub(super) fn answered(&self) {
        self.0.store(ANSWERED, Ordering::Relaxed);
    }

    // All that there was to send is sent.
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

/// Where there is room for a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ClientRoom {
    /// It may ask for anything.
    Place,
    /// It may ask for `/healthz` alone.
    Spare,
    /// Nowhere: all others came just now. Try again at this time.
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

/// The stream of a client, which has so long to take an answer.
#[derive(Debug)]
pub(super) struct Timely {
    stream: TcpStream,
    phase: Arc<ClientPhase>,
    // Since when something waits to be sent.
    late: Option<Pin<Box<Sleep>>>,
}

impl Timely {
    /// Of a client.
    pub(super) fn new(stream: TcpStream, phase: Arc<ClientPhase>) -> Self {
        Self { stream, phase, late: None }
    }

    // Until all is sent, the time runs, however little is taken meanwhile.
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
        // It is called when all was written.
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
