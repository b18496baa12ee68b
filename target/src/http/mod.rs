//! Metrics, health and the live page over HTTP/1.1, for everybody who reaches the address. Nothing
//! can be changed by it.
//!
//! It runs in the runtime of control, never on a data thread. Bounded: the number of connections,
//! the size and the time of a request's head, the life of a connection, and how often control is
//! asked. Bodies of requests are not read.

mod health;
pub mod metrics;
mod page;
mod route;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use rblk_fabric::exposition;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Semaphore, mpsc};

use crate::control::Request as Question;
use crate::control::socket::asked;
use crate::control::status::TargetStatus;

pub use health::{Health, health};
pub use page::Page;
pub use route::{Refusal, Route, is_local_name, route};

/// Connections at a time.
const CONNECTIONS_MAX: usize = 32;
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
/// How old a status may be: however many ask, control is asked no more often.
const STATUS_AGE: Duration = Duration::from_millis(200);
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

    /// Serves clients, each in a task of its own.
    pub(crate) async fn serve(self, requests: mpsc::Sender<Question>) {
        let server = Arc::new(Server {
            requests,
            page: Page::new(),
            is_loopback: self.address.ip().is_loopback(),
            latest: Mutex::new(None),
        });
        let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        loop {
            // The kernel lets those wait for whom there is no place.
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let server = Arc::clone(&server);
                    tokio::spawn(async move {
                        // Late or broken: the client asks again.
                        let _ =
                            tokio::time::timeout(CONNECTION_TIME, server.connection(stream)).await;
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "http");
                    tokio::time::sleep(LISTENER_PAUSE).await;
                }
            }
        }
    }
}

/// What all connections share.
#[derive(Debug)]
struct Server {
    requests: mpsc::Sender<Question>,
    page: Page,
    is_loopback: bool,
    // The last status, and when it was asked for.
    latest: Mutex<Option<(Instant, Arc<TargetStatus>)>>,
}

impl Server {
    async fn connection(self: Arc<Self>, stream: TcpStream) -> hyper::Result<()> {
        let _ = stream.set_nodelay(true);
        let service = service_fn(|request| {
            let server = Arc::clone(&self);
            async move { Ok::<_, Infallible>(server.answer(&request).await) }
        });
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIME)
            .max_buf_size(HEAD_MAX)
            .max_headers(HEADERS_MAX)
            .serve_connection(TokioIo::new(stream), service)
            .await
    }

    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
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
            Ok(route) => self.answer_to(route).await,
            Err(Refusal { status, text }) => {
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
            Route::Metrics | Route::Health | Route::Status => self.status().await,
        };
        match (route, status) {
            (Route::Health, status) => {
                let Health { serving, text } = health(status.as_deref());
                let code = if serving { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
                plain(code, format!("{text}\n"))
            }
            (Route::Metrics, Some(status)) => {
                let text = metrics::metrics(&status);
                body(StatusCode::OK, exposition::CONTENT_TYPE, text.into())
            }
            (_, Some(status)) => json(&*status),
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
        let report = asked(&self.requests, |reply| Question::Events(after, reply));
        match in_time(report).await {
            Some(report) => json(&report),
            None => stopping(),
        }
    }

    /// The status, at most [`STATUS_AGE`] old; `None` if control does not answer.
    async fn status(&self) -> Option<Arc<TargetStatus>> {
        let mut latest = self.latest.lock().await;
        if let Some((at, status)) = &*latest
            && at.elapsed() < STATUS_AGE
        {
            return Some(Arc::clone(status));
        }
        *latest = None;
        let at = Instant::now();
        let status = Arc::new(in_time(asked(&self.requests, Question::Status)).await?);
        *latest = Some((at, Arc::clone(&status)));
        Some(status)
    }
}

async fn in_time<T>(answer: impl Future<Output = Option<T>>) -> Option<T> {
    tokio::time::timeout(CONTROL_TIME, answer).await.ok().flatten()
}

fn stopping() -> Response<Full<Bytes>> {
    plain(StatusCode::SERVICE_UNAVAILABLE, "the target is stopping\n".to_owned())
}

fn json(value: &impl serde::Serialize) -> Response<Full<Bytes>> {
    match serde_json::to_vec(value) {
        Ok(text) => body(StatusCode::OK, "application/json", text.into()),
        Err(error) => plain(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
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
