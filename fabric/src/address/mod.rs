//! [`Address`]: where a target is, `rdma://HOST:PORT` or `tcp://HOST:PORT`.

pub(crate) mod look_up;
pub(crate) mod source;

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

/// Which provider an address asks for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scheme {
    /// Verbs through rdma_cm: InfiniBand, RoCE or iWARP, as the device of the route has it.
    Rdma,
    /// The software provider over a TCP socket.
    Tcp,
}

impl Scheme {
    /// Port of an address that names none. The ports of the schemes differ, because a Soft-RoCE or
    /// iWARP device may share its port space with TCP.
    #[must_use]
    pub(crate) fn default_port(self) -> u16 {
        match self {
            Self::Rdma => 4420 + 3300,
            Self::Tcp => 4420 + 3301,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }
}

/// A parsed address. The host is resolved when the address is used.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Address {
    /// Provider.
    pub scheme: Scheme,
    /// Name or IP address; IPv6 without brackets.
    pub host: String,
    /// Port number.
    pub port: u16,
}

/// Why a text is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not an address: {reason}. Write rdma://HOST[:PORT], tcp://HOST[:PORT] or HOST[:PORT]"
)]
pub struct AddressError {
    text: String,
    reason: &'static str,
}

const LINK_LOCAL: &str =
    "a link-local address needs its interface, such as `%eth0` in tcp://[fe80::1%eth0]";

impl FromStr for Address {
    type Err = AddressError;

    /// `HOST` alone means `rdma://HOST`. IPv6 addresses go in brackets when a port follows.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let fail = |reason| AddressError { text: text.to_owned(), reason };
        let (scheme, rest) = match text.split_once("://") {
            None => (Scheme::Rdma, text),
            Some(("rdma", rest)) => (Scheme::Rdma, rest),
            Some(("tcp", rest)) => (Scheme::Tcp, rest),
            Some((other, _)) if ["rdma", "tcp"].contains(&other.to_ascii_lowercase().as_str()) => {
                return Err(fail("the scheme is in upper case; schemes are in lower case"));
            }
            Some(_) => return Err(fail("unknown scheme")),
        };
        if rest.ends_with('/') {
            return Err(fail("a `/` follows; remove it"));
        }
        let (host, port) = if let Some(inner) = rest.strip_prefix('[') {
            let (host, after) = inner.split_once(']').ok_or_else(|| fail("`[` without `]`"))?;
            match after {
                "" => (host, None),
                _ => (host, Some(after.strip_prefix(':').ok_or_else(|| fail("text after `]`"))?)),
            }
        } else if rest.matches(':').count() > 1 {
            (rest, None)
        } else {
            match rest.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (rest, None),
            }
        };
        if host.is_empty() {
            return Err(fail("no host"));
        }
        if host.len() > 253
            || host.contains(|c: char| c.is_whitespace() || c == '/' || c.is_control())
        {
            return Err(fail("the host is not a name or an IP address"));
        }
        if host.parse::<Ipv6Addr>().is_ok_and(|ip| ip.is_unicast_link_local()) {
            return Err(fail(LINK_LOCAL));
        }
        let port = match port {
            None => scheme.default_port(),
            Some(port) => port
                .parse::<u16>()
                .ok()
                .filter(|p| *p != 0)
                .ok_or_else(|| fail("the port is not a number from 1 to 65535"))?,
        };
        Ok(Self { scheme, host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = self.scheme.as_str();
        if self.host.contains(':') {
            write!(f, "{scheme}://[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{scheme}://{}:{}", self.host, self.port)
        }
    }
}

/// The IP address and port of an end as people write them, for both schemes: a listener of `[::]`
/// sees a peer of IPv4 as one of IPv6 (`::ffff:192.0.2.1`).
pub(crate) fn end_name(end: SocketAddr) -> String {
    match end.ip().to_canonical() {
        IpAddr::V4(ip) => SocketAddr::from((ip, end.port())).to_string(),
        // With its interface, where it is of one.
        IpAddr::V6(_) => end.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_of_ipv4_is_shown_as_one() {
        for (end, shown) in [
            ("192.0.2.1:5", "192.0.2.1:5"),
            ("[::ffff:192.0.2.1]:5", "192.0.2.1:5"),
            ("[2001:db8::1]:5", "[2001:db8::1]:5"),
            ("[fe80::1%2]:5", "[fe80::1%2]:5"),
        ] {
            assert_eq!(end_name(end.parse().unwrap()), shown);
        }
    }

    #[test]
    fn parses_what_users_write() {
        for (text, scheme, host, port) in [
            ("10.0.0.1", Scheme::Rdma, "10.0.0.1", 7720),
            ("store1:9000", Scheme::Rdma, "store1", 9000),
            ("tcp://store1", Scheme::Tcp, "store1", 7721),
            ("tcp://[fe80::1%eth0]:99", Scheme::Tcp, "fe80::1%eth0", 99),
            ("rdma://fd00::7", Scheme::Rdma, "fd00::7", 7720),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(
                (address.scheme, address.host.as_str(), address.port),
                (scheme, host, port),
                "{text}"
            );
            let again: Address = address.to_string().parse().unwrap();
            assert_eq!(again, address);
        }
    }

    #[test]
    fn refuses_the_rest() {
        for text in
            ["", "rdma://", "http://x", "x:0", "x:70000", "x:y", "[::1", "[::1]9", "a b", "a/b"]
        {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_slip_is_named() {
        let said = |text: &str| text.parse::<Address>().unwrap_err().to_string();
        assert!(said("TCP://store1").contains("the scheme is in upper case"));
        assert!(said("tcp://store1:7721/").contains("a `/` follows; remove it"));
        assert!(said("tcp://[fe80::1]:7721").contains("needs its interface, such as `%eth0`"));
        assert!(said("fe80::1").contains("needs its interface"));
    }
}
