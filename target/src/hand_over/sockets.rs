//! [`Inherited`]: what the program before this one left open, and its note.
//!
//! The descriptors stay open and inheritable until this program is ready ([`Inherited`] is
//! dropped): until then it may have to go back to the program before. What it uses meanwhile are
//! copies, which do not outlive an exec.

use std::fs;
use std::net::TcpListener;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::socket::{getsockopt, sockopt};

use super::{HandOver, VARIABLE};

/// Set when the note was taken: its descriptors have an owner from then on.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// What the program before this one left.
#[derive(Debug)]
pub struct Inherited {
    note: HandOver,
    sockets: Vec<(String, OwnedFd)>,
    back: Option<OwnedFd>,
}

impl Inherited {
    /// What the program left that became this one; `None` if this process began with this program.
    /// Only the first call gets it. Call it before anything opens a descriptor.
    ///
    /// # Errors
    /// The note cannot be understood: this program starts as if there were none.
    pub fn take() -> Result<Option<Self>, String> {
        let Ok(text) = std::env::var(VARIABLE) else { return Ok(None) };
        let note = HandOver::from_text(&text, std::process::id());
        let note = note.map_err(|error| format!("{VARIABLE} in the environment: {error}"))?;
        Ok(note.filter(|_| !TAKEN.swap(true, Ordering::Relaxed)).map(Self::of))
    }

    fn of(note: HandOver) -> Self {
        let taken = |socket: &super::Listening| {
            Some((socket.address.clone(), take_open(socket.descriptor, "socket:")?))
        };
        let sockets = note.sockets.iter().filter_map(taken).collect();
        let back = note.back.and_then(|number| take_open(number, "/"));
        Self { note, sockets, back }
    }

    /// What the program before this one tells.
    #[must_use]
    pub fn note(&self) -> &HandOver {
        &self.note
    }

    /// A copy of the socket that listens at an address, if there is one that still listens.
    #[must_use]
    pub(crate) fn listener(&self, address: &str) -> Option<TcpListener> {
        let (_, socket) = self.sockets.iter().find(|(its, _)| its == address)?;
        let listens = getsockopt(socket, sockopt::AcceptConn).unwrap_or(false);
        let copy = socket.try_clone().ok().filter(|_| listens)?;
        Some(TcpListener::from(copy))
    }

    /// The file of the program to go back to.
    pub(super) fn back(&self) -> Option<&OwnedFd> {
        self.back.as_ref()
    }

    /// Whether there is a program to go back to.
    #[must_use]
    pub fn can_go_back(&self) -> bool {
        self.back.is_some()
    }
}

/// A descriptor that the program before left open under this number, if it is of the right kind.
#[allow(unsafe_code)]
fn take_open(number: i32, kind: &str) -> Option<OwnedFd> {
    let what = fs::read_link(Path::new("/proc/self/fd").join(number.to_string())).ok()?;
    if number <= 2 || !what.to_string_lossy().starts_with(kind) {
        // A listener is made anew then.
        return None;
    }
    // SAFETY: the descriptor is open. The note names its number once and is taken once, before this
    // program opens anything: so it was open when this program began, and nothing else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd;

    use super::*;
    use crate::hand_over::Listening;

    fn note(descriptor: i32) -> HandOver {
        let sockets = vec![Listening { address: "tcp://x:1".to_owned(), descriptor }];
        HandOver { sockets, ..HandOver::default() }
    }

    #[test]
    fn a_socket_that_listens_is_taken_over() {
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = socket.local_addr().unwrap();
        let inherited = Inherited::of(note(socket.into_raw_fd()));
        assert!(inherited.listener("tcp://y:1").is_none());
        let copy = inherited.listener("tcp://x:1").expect("it listens");
        assert_eq!(copy.local_addr().unwrap(), port);
        drop(copy);
        assert!(std::net::TcpStream::connect(port).is_ok(), "only a copy was closed");
        drop(inherited);
        assert!(std::net::TcpStream::connect(port).is_err());
    }

    #[test]
    fn what_does_not_listen_is_not_taken() {
        let socket = nix::sys::socket::socket(
            nix::sys::socket::AddressFamily::Inet,
            nix::sys::socket::SockType::Stream,
            nix::sys::socket::SockFlag::empty(),
            None,
        )
        .unwrap();
        let inherited = Inherited::of(note(socket.into_raw_fd()));
        assert!(inherited.listener("tcp://x:1").is_none(), "it only is a socket");
        let file = fs::File::open("/dev/null").unwrap().into_raw_fd();
        assert!(Inherited::of(note(file)).sockets.is_empty(), "it is a file");
        assert!(Inherited::of(note(1 << 20)).sockets.is_empty(), "it is not open");
    }
}
