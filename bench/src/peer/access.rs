//! [`Access`]: how fio, or what measures instead of fio, reaches a system.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// How a system is reached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Access {
    /// By the kernel: a block device, with `ioengine=io_uring` and `direct=1`.
    Disk(PathBuf),
    /// By an engine of fio's that speaks to a server itself: its options.
    Engine(Vec<String>),
    /// Not by fio: a LUN for `iscsi-perf`.
    Iscsi(String),
}

impl Access {
    /// By the engine of rblk at `library`: the volume at `url`, a file of a mount for the rest.
    #[must_use]
    pub fn rblk(library: &Path, url: &str, volume: &str, config: &Path) -> Self {
        // fio takes a colon in a file's name for the end of it.
        let name = format!("{url}/{volume}").replace(':', "\\:");
        Self::Engine(vec![
            format!("--ioengine=external:{}", library.display()),
            "--thread=1".to_owned(),
            format!("--filename={name}"),
            format!("--rblk_config={}", config.display()),
        ])
    }

    /// By fio's engine `nbd`, over TCP.
    #[must_use]
    pub fn nbd_tcp(at: SocketAddr) -> Self {
        Self::nbd(&format!("nbd://{at}/"))
    }

    /// By fio's engine `nbd`, over a Unix socket.
    #[must_use]
    pub fn nbd_unix(socket: &Path) -> Self {
        Self::nbd(&format!("nbd+unix:///?socket={}", socket.display()))
    }

    fn nbd(uri: &str) -> Self {
        Self::Engine(vec!["--ioengine=nbd".to_owned(), format!("--uri={uri}")])
    }

    /// The options of fio that say so; none if it is not fio that measures.
    #[must_use]
    pub fn words(&self) -> Vec<String> {
        match self {
            Self::Disk(disk) => {
                let disk = format!("--filename={}", disk.display());
                vec![disk, "--ioengine=io_uring".to_owned(), "--direct=1".to_owned()]
            }
            Self::Engine(words) => words.clone(),
            Self::Iscsi(_) => Vec::new(),
        }
    }

    /// The block device, if there is one.
    #[must_use]
    pub fn disk(&self) -> Option<&Path> {
        match self {
            Self::Disk(disk) => Some(disk),
            Self::Engine(_) | Self::Iscsi(_) => None,
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(disk) => write!(f, "{}", disk.display()),
            Self::Engine(words) => f.write_str(words.first().map_or("", String::as_str)),
            Self::Iscsi(url) => f.write_str(url),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_is_told_the_way() {
        let disk = Access::Disk("/dev/ublkb0".into());
        assert_eq!(disk.words()[0], "--filename=/dev/ublkb0");
        assert!(disk.words().contains(&"--direct=1".to_owned()));
        assert_eq!(disk.disk(), Some(Path::new("/dev/ublkb0")));
        let url = "tcp://127.0.0.1:7730";
        let engine = Access::rblk(Path::new("/x/e.so"), url, "bench", Path::new("/x/m.toml"));
        let words = engine.words();
        assert_eq!(words[0], "--ioengine=external:/x/e.so");
        assert_eq!(words[2], r"--filename=tcp\://127.0.0.1\:7730/bench");
        assert_eq!((engine.disk(), engine.to_string()), (None, words[0].clone()));
        let nbd = Access::nbd_unix(Path::new("/x/s"));
        assert_eq!(nbd.words()[1], "--uri=nbd+unix:///?socket=/x/s");
    }
}
