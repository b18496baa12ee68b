//! [`die_of_closed_pipes`]: a closed output pipe ends a command.

/// A reader that goes away (`| head`) ends this program like any other, without a message.
pub(crate) fn die_of_closed_pipes() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: the default disposition runs no code of ours.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
}
