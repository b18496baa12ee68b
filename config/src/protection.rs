//! What protects the connections: [`Auth`] and [`Encrypt`], and which addresses need no
//! protection.

use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::rule::Rule;

/// Who may connect to a target.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Auth {
    /// Everybody who reaches an address of the target.
    None,
    /// The hosts of the `[[host]]` tables. Each proves its key, and the target proves its own.
    Required,
}

/// Whether the data of `tcp://` connections is encrypted. Has no effect on `rdma://`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encrypt {
    /// If both ends prove their keys and both kernels can.
    #[default]
    Auto,
    /// Always. A connection without encryption is refused.
    Required,
    /// Never.
    Off,
}

impl Auth {
    pub(crate) const WORDS: &'static [&'static str] = &["none", "required"];

    /// The word in a file.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Required => "required",
        }
    }
}

impl Encrypt {
    pub(crate) const WORDS: &'static [&'static str] = &["auto", "required", "off"];
}

impl FromStr for Auth {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self::None),
            "required" => Ok(Self::Required),
            _ => Err(Rule::Word(Self::WORDS).fix()),
        }
    }
}

impl FromStr for Encrypt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "required" => Ok(Self::Required),
            "off" => Ok(Self::Off),
            _ => Err(Rule::Word(Self::WORDS).fix()),
        }
    }
}

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
