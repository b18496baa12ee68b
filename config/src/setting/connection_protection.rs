//! The protection of connections: [`Auth`] and [`Encrypt`], and the addresses that need none.

use std::net::IpAddr;

use crate::schema::word::words;

/// The hosts that may connect to a target.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Auth {
    /// Every host that reaches an address of the target.
    None,
    /// The hosts of the `[[host]]` tables. Each proves its key, and the target proves its own.
    Required,
}

/// Whether the data of `tcp://` connections is encrypted. Has no effect on `rdma://`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Encrypt {
    /// If both ends prove their keys and both kernels can.
    #[default]
    Auto,
    /// Always. A connection without encryption is refused.
    Required,
    /// Never.
    Off,
}

words!(Auth, { None = "none", Required = "required" });

words!(Encrypt, { Auto = "auto", Required = "required", Off = "off" });

/// Whether only programs of this host reach an address. Of names, only `localhost` counts: any
/// other name may lead elsewhere tomorrow.
pub(crate) fn is_loopback(address: &str) -> bool {
    let host = address.split_once("://").map_or(address, |(_, host)| host);
    let host = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((inner, _)) => inner,
        // More than one colon, and no brackets: an IPv6 address without a port.
        None if host.matches(':').count() > 1 => host,
        None => host.split_once(':').map_or(host, |(name, _)| name),
    };
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host == "localhost",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_what_only_this_host_reaches() {
        for inside in [
            "tcp://127.0.0.1",
            "tcp://127.0.0.1:7721",
            "tcp://127.3.2.1:1",
            "rdma://[::1]:7720",
            "rdma://::1",
            "tcp://localhost:7721",
            "localhost",
            "127.0.0.1:7",
            "tcp://[::ffff:127.0.0.1]:1",
        ] {
            assert!(is_loopback(inside), "{inside}");
        }
        for outside in [
            "tcp://0.0.0.0",
            "tcp://[::]:7721",
            "rdma://192.0.2.1:7720",
            "tcp://localhost.example.org",
            "tcp://127.0.0.1.example.org",
            "store1",
            "tcp://[2001:db8::1]:7721",
            "::",
        ] {
            assert!(!is_loopback(outside), "{outside}");
        }
    }
}
