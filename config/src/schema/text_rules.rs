//! The rules of texts: names, addresses and paths.

use std::net::{Ipv6Addr, SocketAddr};

use crate::key_file::CREDENTIAL;
use crate::schema::rule::Rule;
use rblk_protocol::limits::NAME_BYTES;

/// A name of a volume, host, target or mount, as the protocol allows it: safe in paths and on
/// command lines.
pub(crate) const NAME: Rule = Rule::Text {
    noun: "name",
    form: "1 to 64 letters, digits, \".\", \"_\" or \"-\", not starting with \".\" or \"-\"",
    check: check_name,
};

/// An address of a target.
pub(crate) const ADDRESS: Rule = Rule::Text {
    noun: "address",
    form: "an address such as \"rdma://192.0.2.1:7720\" or \"tcp://[2001:db8::1]:7721\"",
    check: check_address,
};

/// An absolute path.
pub(crate) const PATH: Rule = Rule::Text {
    noun: "path",
    form: "an absolute path such as \"/srv/rblk/a.img\"",
    check: check_path,
};

/// An absolute path of a directory.
pub(crate) const DIRECTORY: Rule = Rule::Text {
    noun: "path",
    form: "an absolute path such as \"/var/lib/rblk\"",
    check: check_path,
};

/// An absolute path that fits a socket address.
pub(crate) const SOCKET: Rule = Rule::Text {
    noun: "path",
    form: "an absolute path of at most 107 bytes such as \"/run/rblk/target/control.sock\"",
    check: check_socket,
};

/// An address of this host in numbers, and a port.
pub(crate) const SOCKET_ADDRESS: Rule = Rule::Text {
    noun: "address:port",
    form: "an address and a port such as \"127.0.0.1:9720\" or \"[::1]:9720\"",
    check: check_socket_address,
};

/// A key file.
pub(crate) const KEY_FILE: Rule = Rule::Text {
    noun: "path",
    form: "an absolute path such as \"/etc/rblk/target.key\", or \"credential:NAME\" for a credential of systemd",
    check: check_key_file,
};

/// Memory that programs share.
pub(crate) const MEMORY_FILE: Rule = Rule::Text {
    noun: "path",
    form: "an absolute path of a file of tmpfs or hugetlbfs, such as \"/dev/shm/database\"",
    check: check_path,
};

pub(crate) fn check_name(text: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if text.is_empty() {
        return Err("empty".to_owned());
    }
    if let Some(bad) = text.chars().find(|c| !allowed(*c)) {
        return Err(format!("{bad:?} is not allowed in a name"));
    }
    if text.starts_with(['.', '-']) {
        return Err(format!("starts with {:?}", &text[..1]));
    }
    if text.len() > NAME_BYTES {
        return Err(format!("{} characters, the limit is {NAME_BYTES}", text.len()));
    }
    Ok(())
}

fn check_socket_address(text: &str) -> Result<(), String> {
    match text.parse::<SocketAddr>() {
        Ok(address) if address.port() == 0 => Err("no port".to_owned()),
        Ok(_) => Ok(()),
        Err(_) => Err("not an address in numbers with a port".to_owned()),
    }
}

/// Checks only the rules that hold for every provider. The provider checks the rest.
fn check_address(text: &str) -> Result<(), String> {
    let (scheme, host) = text.split_once("://").unwrap_or(("rdma", text));
    if text.is_empty() {
        return Err("empty".to_owned());
    }
    let lower = scheme.to_ascii_lowercase();
    if lower != scheme && matches!(lower.as_str(), "rdma" | "tcp") {
        return Err(format!("the scheme {scheme:?} is in upper case, schemes are in lower case"));
    }
    if !matches!(scheme, "rdma" | "tcp") {
        return Err(format!("unknown scheme {scheme:?}, the schemes are rdma and tcp"));
    }
    if host.ends_with('/') {
        return Err("a `/` follows, remove it".to_owned());
    }
    if host.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/') {
        return Err("the host is not a name or an IP address".to_owned());
    }
    if host.is_empty() || host == "[]" || (host.starts_with(':') && !host.starts_with("::")) {
        return Err("no host".to_owned());
    }
    let ip = host.strip_prefix('[').and_then(|inner| inner.split(']').next()).unwrap_or(host);
    if ip.parse::<Ipv6Addr>().is_ok_and(|ip| ip.is_unicast_link_local()) {
        return Err(format!("a link-local address needs its interface, such as \"[{ip}%eth0]\""));
    }
    let port = match host.strip_prefix('[') {
        Some(inner) => match inner.split_once(']') {
            None => return Err("`[` without `]`".to_owned()),
            Some((_, "")) => None,
            Some((_, after)) => Some(after.strip_prefix(':').ok_or("text after `]`")?),
        },
        // More than one colon: an IPv6 address without a port.
        None if host.matches(':').count() > 1 => None,
        None => host.split_once(':').map(|(_, port)| port),
    };
    match port.map(str::parse::<u16>) {
        None | Some(Ok(1..)) => Ok(()),
        _ => Err("the port is not a number from 1 to 65535".to_owned()),
    }
}

fn check_path(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Err("empty".to_owned());
    }
    if text.contains('\0') {
        return Err("contains a NUL character".to_owned());
    }
    if !text.starts_with('/') {
        return Err("not absolute".to_owned());
    }
    Ok(())
}

fn check_key_file(text: &str) -> Result<(), String> {
    match text.strip_prefix(CREDENTIAL) {
        Some(name) => check_name(name),
        None => check_path(text),
    }
}

fn check_socket(text: &str) -> Result<(), String> {
    check_path(text)?;
    match text.len() {
        0..=107 => Ok(()),
        len => Err(format!("{len} bytes, a socket address holds 107")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for good in [
            "rdma://0.0.0.0:7720",
            "tcp://[::]:7721",
            "rdma://fd00::7",
            "rdma://::1",
            "store1",
            "store1:9000",
            "tcp://[fe80::1%eth0]:99",
        ] {
            assert_eq!(check_address(good), Ok(()), "{good}");
        }
        for bad in
            ["", "rdma://", "tcp://:7721", "http://x", "a b", "rdma://a/b", "rdma://[]", "://x"]
                .into_iter()
                .chain(["x:0", "tcp://x:65536", "x:", "x:y", "[::1", "[::1]9", "tcp://[::1]:y"])
        {
            assert!(check_address(bad).is_err(), "{bad}");
        }
        for (slip, named) in [
            ("TCP://store1", "the scheme \"TCP\" is in upper case"),
            ("tcp://store1:7721/", "a `/` follows, remove it"),
            ("tcp://[fe80::1]:7721", "needs its interface, such as \"[fe80::1%eth0]\""),
            ("fe80::1", "needs its interface"),
        ] {
            let said = check_address(slip).unwrap_err();
            assert!(said.contains(named), "{slip}: {said}");
        }
    }
}
