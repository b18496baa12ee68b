//! [`bind`]: a Unix socket that only its owner may use, at no moment anybody else.
//!
//! The mode is set before the file exists: Linux gives the file of a socket the mode that the
//! socket has at bind(2), less the umask. A chmod after bind(2) would come too late: another user
//! could connect in between.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind as bind_to, listen, socket,
};

/// Binds a socket to a path and listens. It does not block, and its file has the mode 0600.
///
/// # Errors
/// The path is too long or taken, or its directory cannot be written.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let file = File::from(socket(AddressFamily::Unix, SockType::Stream, flags, None)?);
    file.set_permissions(Permissions::from_mode(0o600))?;
    let listening = OwnedFd::from(file);
    bind_to(std::os::fd::AsRawFd::as_raw_fd(&listening), &UnixAddr::new(path)?)?;
    listen(&listening, Backlog::MAXCONN)?;
    Ok(listening.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use nix::sys::stat::{Mode, umask};

    use super::*;

    #[test]
    fn its_file_is_private_from_the_first_moment() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.sock");
        // A program that was started with it hides nothing by itself.
        let before = umask(Mode::empty());
        let bound = bind(&path);
        umask(before);
        let listener = bound.unwrap();
        // Nothing but bind() has made it so: there is no chmod of the path.
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{mode:o}");
        UnixStream::connect(&path).unwrap();
        listener.accept().expect("it listens");
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }
}
