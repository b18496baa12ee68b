//! The route of a request, and whether it is allowed. Pure.

use std::net::{Ipv4Addr, Ipv6Addr};

use hyper::{Method, StatusCode};

/// The path of [`Route::Farewell`].
pub(super) const FAREWELL: &str = "/farewell";

/// A resource.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Route {
    /// `/`: the live page.
    Page,
    /// `/metrics`.
    Metrics,
    /// `/healthz`.
    Health,
    /// `/status.json`.
    Status,
    /// `/events`: the events after the event of this number.
    Events {
        /// 0: all that are kept.
        after: u64,
    },
    /// `/past`: the work of volumes in the moments after the moment of this number.
    Past {
        /// 0: all that are kept.
        after: u64,
    },
    /// `/farewell`: the last word of the target, when it ends.
    Farewell,
}

/// Why a request is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HttpRefusal {
    /// The status of HTTP.
    pub status: StatusCode,
    /// The reason in words.
    pub text: &'static str,
}

const fn refusal(status: StatusCode, text: &'static str) -> HttpRefusal {
    HttpRefusal { status, text }
}

const EVENTS: &str = "write /events?after=NUMBER\n";
const PAST: &str = "write /past?after=NUMBER\n";

/// The route of a request.
///
/// # Errors
/// There is no such path, or it takes no such method or query.
pub fn route(method: &Method, path: &str, query: Option<&str>) -> Result<Route, HttpRefusal> {
    let route = match path {
        "/" => Route::Page,
        "/metrics" => Route::Metrics,
        "/healthz" => Route::Health,
        "/status.json" => Route::Status,
        "/events" => Route::Events { after: after(query, EVENTS)? },
        "/past" => Route::Past { after: after(query, PAST)? },
        FAREWELL => Route::Farewell,
        _ => {
            let known =
                "there are /, /metrics, /healthz, /status.json, /events, /past and /farewell\n";
            return Err(refusal(StatusCode::NOT_FOUND, known));
        }
    };
    match *method {
        Method::GET | Method::HEAD => Ok(route),
        _ => Err(refusal(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n")),
    }
}

fn after(query: Option<&str>, form: &'static str) -> Result<u64, HttpRefusal> {
    let Some(query) = query else { return Ok(0) };
    let number = query.strip_prefix("after=").and_then(|text| text.parse().ok());
    number.ok_or(refusal(StatusCode::BAD_REQUEST, form))
}

/// Whether a request that reached a loopback address names this host.
///
/// A foreign page, open in a browser on this host, may make its own name resolve to the loopback
/// address, and would then read these documents. So the name must be an address or `localhost`.
#[must_use]
pub fn is_local_name(host: Option<&str>) -> bool {
    // HTTP/1.0 names no host. No browser speaks that.
    let Some(host) = host else { return true };
    let Some(bracketed) = host.strip_prefix('[') else {
        let (name, port) = host.rsplit_once(':').unwrap_or((host, ""));
        let is_name = name.eq_ignore_ascii_case("localhost") || name.parse::<Ipv4Addr>().is_ok();
        return is_name && is_port(port);
    };
    let Some((address, rest)) = bracketed.split_once(']') else { return false };
    let is_end = rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port);
    address.parse::<Ipv6Addr>().is_ok() && is_end
}

fn is_port(port: &str) -> bool {
    port.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes() {
        let get = |path, query| route(&Method::GET, path, query);
        assert_eq!(get("/", None), Ok(Route::Page));
        assert_eq!(get("/metrics", Some("x=1")), Ok(Route::Metrics));
        assert_eq!(get("/events", None), Ok(Route::Events { after: 0 }));
        assert_eq!(get("/events", Some("after=17")), Ok(Route::Events { after: 17 }));
        assert_eq!(get("/past", Some("after=17")), Ok(Route::Past { after: 17 }));
        assert_eq!(get("/farewell", None), Ok(Route::Farewell));
        let status = |result: Result<Route, HttpRefusal>| result.unwrap_err().status.as_u16();
        for bad in ["after=", "after=-1", "after=18446744073709551616", "before=1", "after=1&x"] {
            assert_eq!(status(get("/events", Some(bad))), 400, "{bad}");
        }
        assert_eq!(status(get("/metrics/", None)), 404);
        assert_eq!(status(get("//", None)), 404);
        assert_eq!(route(&Method::HEAD, "/healthz", None), Ok(Route::Health));
        assert_eq!(status(route(&Method::POST, "/metrics", None)), 405);
        assert_eq!(status(route(&Method::DELETE, "/x", None)), 404);
    }

    #[test]
    fn names_of_others_are_not_local() {
        for good in [
            None,
            Some("localhost"),
            Some("LocalHost:9720"),
            Some("127.0.0.1:9720"),
            Some("127.0.0.1"),
            Some("[::1]:9720"),
            Some("[::1]"),
            Some("[::1]:"),
            Some("localhost:"),
        ] {
            assert!(is_local_name(good), "{good:?}");
        }
        for bad in [
            "evil.example",
            "evil.example:9720",
            "localhost.evil:1",
            "",
            "[evil]",
            "1.2.3.4.evil",
            "[::1].evil.example",
            "[::1].evil.example:9720",
            "[::1]:9720.evil.example",
            "[::1",
            "[127.0.0.1]",
            "::1",
            "localhost:9720.evil.example",
            "127.0.0.1:evil",
        ] {
            assert!(!is_local_name(Some(bad)), "{bad}");
        }
    }
}
