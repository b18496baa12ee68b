//! [`die_of_closed_pipes`]: a closed output pipe ends a command.

use nix::sys::signal::{SigHandler, Signal, signal};

/// A reader that goes away (`| head`) ends this program like any other, without a message. Rust
/// ignores SIGPIPE in every program; commands that print take the default again, and daemons do
/// not.
pub fn die_of_closed_pipes() {
    // SAFETY: the default disposition runs no code of ours.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
}
