//! [`lingering`]: a descriptor whose close waits, for tests.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;

use nix::sys::socket::{setsockopt, sockopt};

/// A TCP socket whose close waits 60 s for its peer, which takes nothing; and the peer.
pub(super) fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    while socket.write(&[0; 4096]).is_ok() {}
    // The flag would let the close go at once.
    socket.set_nonblocking(false).unwrap();
    setsockopt(&socket, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 60 }).unwrap();
    (socket.into(), peer)
}
