//! Metrics, health and the live page over HTTP/1.1, for every client that reaches the address.
//! Read-only.
//!
//! Runs in the runtime of control, never on a data thread. Bounded: the number of connections, the
//! size and the time of a request's head, the time to take an answer, the life of a connection, how
//! often control is asked, and how often a document is rendered. Bodies of requests are not read.
//! Clients that are silent, slow or deaf keep no probe from `/healthz` (`clients.rs`).

mod clients;
mod farewell;
mod health;
mod latest;
mod page;
pub mod prometheus;
mod routes;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rblk_operate::exposition;
use rblk_runtime::log_limit::LogLimit;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, mpsc, watch};

use crate::control::ToControl;
use crate::control::observe::past::PastReport;
use crate::control::requests::orders::asked;

use clients::{ClientPhase, ClientRoom, Clients, Timely};
use farewell::Ears;
use latest::{Latest, ShownEvents, ShownStatus};

pub(crate) use farewell::{Ending, Farewell};
pub use health::{Health, health};
pub use page::Page;
pub use routes::{HttpRefusal, Route, is_local_name, route};

/// Time for the head of a request.
const HEAD_TIME: Duration = Duration::from_secs(5);
/// Bytes of the head of a request.
const HEAD_MAX: usize = 16 << 10;
/// Header lines of a request.
const HEADERS_MAX: usize = 64;
/// Life of a connection. A page that stays open connects again.
const CONNECTION_TIME: Duration = Duration::from_secs(120);
/// Time for control to answer.
const CONTROL_TIME: Duration = Duration::from_secs(5);
/// Pause after an error of the listener.
const LISTENER_PAUSE: Duration = Duration::from_millis(100);

/// A bound address.
#[derive(Debug)]
pub(crate) struct Http {
    listener: TcpListener,
    address: SocketAddr,
}

impl Http {
    /// Binds.
    ///
    /// # Errors
    /// The address cannot be used.
    pub(crate) async fn bind(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address })
    }

    /// Goes on with a socket that listens already.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn go_on(listener: std::net::TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let address = listener.local_addr()?;
        Ok(Self { listener, address })
    }

    /// Serves clients, each in a task of its own, until control takes no more requests and pages
    /// that wait for the last word have it. Returns the socket.
    pub(crate) async fn serve(
        self,
        requests: mpsc::Sender<ToControl>,
        word: watch::Receiver<Option<Farewell>>,
    ) -> Option<OwnedFd> {
        let (over, ears) = (requests.clone(), Ears::new(word));
        tokio::select! {
            () = over.closed() => {}
            () = self.accept(requests, ears.clone()) => {}
        }
        ears.have_heard().await;
        self.listener.into_std().ok().map(OwnedFd::from)
    }

    async fn accept(&self, requests: mpsc::Sender<ToControl>, ears: Ears) {
        let server = Arc::new(HttpServer {
            requests,
            ears,
            page: Page::new(),
            is_loopback: self.address.ip().is_loopback(),
            status: Mutex::new(Latest::none()),
            events: Mutex::new(Latest::none()),
            past: Mutex::new(Latest::none()),
        });
        let (mut clients, mut lines) = (Clients::default(), LogLimit::new(1));
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let (server, phase) = (Arc::clone(&server), Arc::<ClientPhase>::default());
                    let is_spare = loop {
                        match clients.make_room(Instant::now()) {
                            ClientRoom::Place => break false,
                            ClientRoom::Spare => break true,
                            ClientRoom::NoneUntil(until) => {
                                tokio::time::sleep_until(until.into()).await
                            }
                        }
                    };
                    let served = server.connection(stream, Arc::clone(&phase), is_spare);
                    // Late or broken: the client has to ask again.
                    let task = tokio::spawn(tokio::time::timeout(CONNECTION_TIME, served));
                    clients.add(Instant::now(), phase, task.abort_handle(), is_spare);
                    // Lets the task see a request that has come already.
                    tokio::task::yield_now().await;
                }
                Err(error) => {
                    // For example too many open files, which clients may cause.
                    if lines.may_write(Instant::now()) {
                        tracing::warn!(%error, "http");
                    }
                    tokio::time::sleep(LISTENER_PAUSE).await;
                }
            }
        }
    }
}

/// The state that all connections share.
#[derive(Debug)]
struct HttpServer {
    requests: mpsc::Sender<ToControl>,
    ears: Ears,
    page: Page,
    is_loopback: bool,
    status: Mutex<Latest<ShownStatus>>,
    events: Mutex<Latest<ShownEvents>>,
    past: Mutex<Latest<PastReport>>,
}

impl HttpServer {
    async fn connection(
        self: Arc<Self>,
        stream: TcpStream,
        phase: Arc<ClientPhase>,
        is_spare: bool,
    ) -> hyper::Result<()> {
        let _ = stream.set_nodelay(true);
        let stream = Timely::new(stream, Arc::clone(&phase));
        let service = service_fn(|request| {
            let (server, phase) = (Arc::clone(&self), Arc::clone(&phase));
            async move {
                // A page that waits for the last word makes room, like one without a request.
                if request.uri().path() != routes::FAREWELL {
                    phase.asked();
                }
                let answer = server.answer(&request, is_spare).await;
                phase.answered();
                Ok::<_, Infallible>(answer)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIME)
            .max_buf_size(HEAD_MAX)
            .max_headers(HEADERS_MAX)
            .serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        tokio::select! {
            result = connection.as_mut() => return result,
            _ = self.ears.last() => connection.as_mut().graceful_shutdown(),
        }
        connection.await
    }

    async fn answer(&self, request: &Request<Incoming>, is_spare: bool) -> Response<Full<Bytes>> {
        let host = request.headers().get(header::HOST).map(HeaderValue::to_str);
        let is_ours = match host {
            Some(Err(_)) => false,
            Some(Ok(host)) => is_local_name(Some(host)),
            None => true,
        };
        if self.is_loopback && !is_ours {
            let text = "use an address of this host, or localhost, as the name\n";
            return plain(StatusCode::MISDIRECTED_REQUEST, text.to_owned());
        }
        match route(request.method(), request.uri().path(), request.uri().query()) {
            Ok(route) if is_spare && route != Route::Health => {
                let text = "too many clients: only /healthz is answered now\n";
                plain(StatusCode::SERVICE_UNAVAILABLE, text.to_owned())
            }
            Ok(route) => self.answer_to(route).await,
            Err(HttpRefusal { status, text }) => {
                let mut response = plain(status, text.to_owned());
                if status == StatusCode::METHOD_NOT_ALLOWED {
                    let allowed = HeaderValue::from_static("GET, HEAD");
                    response.headers_mut().insert(header::ALLOW, allowed);
                }
                response
            }
        }
    }

    async fn answer_to(&self, route: Route) -> Response<Full<Bytes>> {
        let status = match route {
            Route::Page => return self.page(),
            Route::Events { after } => return self.events(after).await,
            Route::Past { after } => return self.past(after).await,
            Route::Farewell => return self.farewell().await,
            Route::Metrics | Route::Health | Route::Status => self.status().await,
        };
        match (route, status) {
            (Route::Health, status) => {
                let Health { serving, text } = health(status.as_deref().map(|shown| &shown.status));
                let code = if serving { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
                plain(code, format!("{text}\n"))
            }
            (Route::Metrics, Some(shown)) => {
                body(StatusCode::OK, exposition::CONTENT_TYPE, shown.metrics())
            }
            (_, Some(shown)) => json(shown.json()),
            (_, None) => stopping(),
        }
    }

    fn page(&self) -> Response<Full<Bytes>> {
        let html = self.page.html.clone();
        let mut response = body(StatusCode::OK, "text/html; charset=utf-8", html);
        if let Ok(policy) = HeaderValue::from_str(&self.page.policy) {
            response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
        }
        response
    }

    async fn events(&self, after: u64) -> Response<Full<Bytes>> {
        match self.shown_events().await {
            Some(shown) => json(shown.after(after)),
            None => stopping(),
        }
    }

    async fn past(&self, after: u64) -> Response<Full<Bytes>> {
        match self.whole_past().await {
            Some(past) => json(past.after(after).into()),
            None => stopping(),
        }
    }

    /// The whole past; `None` if control does not answer.
    async fn whole_past(&self) -> Option<Arc<PastReport>> {
        let mut latest = self.past.lock().await;
        let now = Instant::now();
        if let Some(past) = latest.at(now) {
            return Some(past);
        }
        let past = in_time(asked(&self.requests, ToControl::Past)).await;
        latest.set(now, past)
    }

    /// Waits for the last word, for a while.
    async fn farewell(&self) -> Response<Full<Bytes>> {
        let word = self.ears.hear().await;
        json(serde_json::to_vec(&word).unwrap_or_default().into())
    }

    /// All events that are kept; `None` if control does not answer.
    async fn shown_events(&self) -> Option<Arc<ShownEvents>> {
        let mut latest = self.events.lock().await;
        let now = Instant::now();
        if let Some(shown) = latest.at(now) {
            return Some(shown);
        }
        let report = in_time(asked(&self.requests, |reply| ToControl::Events(0, reply))).await;
        latest.set(now, report.map(ShownEvents::new))
    }

    /// The status; `None` if control does not answer.
    async fn status(&self) -> Option<Arc<ShownStatus>> {
        let mut latest = self.status.lock().await;
        let now = Instant::now();
        if let Some(shown) = latest.at(now) {
            return Some(shown);
        }
        let status = in_time(asked(&self.requests, ToControl::Status)).await;
        latest.set(now, status.map(ShownStatus::new))
    }
}

async fn in_time<T>(answer: impl Future<Output = Option<T>>) -> Option<T> {
    tokio::time::timeout(CONTROL_TIME, answer).await.ok().flatten()
}

fn stopping() -> Response<Full<Bytes>> {
    plain(StatusCode::SERVICE_UNAVAILABLE, "the target is stopping\n".to_owned())
}

fn json(text: Bytes) -> Response<Full<Bytes>> {
    body(StatusCode::OK, "application/json", text)
}

fn plain(status: StatusCode, text: String) -> Response<Full<Bytes>> {
    body(status, "text/plain; charset=utf-8", text.into())
}

fn body(status: StatusCode, content_type: &'static str, bytes: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(bytes));
    *response.status_mut() = status;
    for (name, value) in [
        (header::CONTENT_TYPE, content_type),
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}
