//! [`Access`]: the way of fio, or of another load, to a system.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// By the kernel: a block device, with `ioengine=io_uring` and `direct=1`.
    Disk(PathBuf),
    /// By an engine of fio's that speaks to a server itself: its options.
    Engine(Vec<String>),
    /// Not by fio: a LUN for `iscsi-perf`.
    Iscsi(String),
    /// By nothing: a connection of an address to itself.
    Socket(IpAddr),
}

impl Access {
    /// By the engine of rblk at `library`: the volume at `url`, a file of a mount for the rest.
    pub(crate) fn rblk(library: &Path, url: &str, volume: &str, config: &Path) -> Self {
        // fio splits names of files at colons.
        let name = format!("{url}/{volume}").replace(':', "\\:");
        Self::Engine(vec![
            format!("--ioengine=external:{}", library.display()),
            "--thread=1".to_owned(),
            format!("--filename={name}"),
            format!("--rblk_config={}", config.display()),
        ])
    }

    pub(crate) fn nbd_tcp(at: SocketAddr) -> Self {
        Self::nbd(&format!("nbd://{at}/"))
    }

    pub(crate) fn nbd_unix(socket: &Path) -> Self {
        Self::nbd(&format!("nbd+unix:///?socket={}", socket.display()))
    }

    fn nbd(uri: &str) -> Self {
        Self::Engine(vec!["--ioengine=nbd".to_owned(), format!("--uri={uri}")])
    }

    /// The options of fio; none for another load.
    pub(crate) fn words(&self) -> Vec<String> {
        match self {
            Self::Disk(disk) => {
                let disk = format!("--filename={}", disk.display());
                vec![disk, "--ioengine=io_uring".to_owned(), "--direct=1".to_owned()]
            }
            Self::Engine(words) => words.clone(),
            Self::Iscsi(_) | Self::Socket(_) => Vec::new(),
        }
    }

    pub(crate) fn disk(&self) -> Option<&Path> {
        match self {
            Self::Disk(disk) => Some(disk),
            Self::Engine(_) | Self::Iscsi(_) | Self::Socket(_) => None,
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(disk) => write!(f, "{}", disk.display()),
            Self::Engine(words) => f.write_str(words.first().map_or("", String::as_str)),
            Self::Iscsi(url) => f.write_str(url),
            Self::Socket(ip) => write!(f, "a socket of {ip}"),
        }
    }
}

#[cfg(test)]
mod tests;
