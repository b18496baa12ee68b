//! [`lingering`]: a descriptor with a close that waits, for tests.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;

use nix::sys::socket::{setsockopt, sockopt};

/// A TCP socket that waits 60 s in its close for the peer, which reads nothing; and the peer.
pub(super) fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 4096]).is_ok() {}
    // With the flag, the close would not wait.
    socket.set_nonblocking(false).unwrap();
    setsockopt(&socket, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 60 }).unwrap();
    (socket.into(), peer)
}
