//! `rblk-initiator`: the commands of the initiator. Links no RDMA library: `rblk-initiatord`, in
//! the same directory, does `mount` and `discover`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

fn main() -> ExitCode {
    die_of_closed_pipes();
    rblk_initiator::commands::main()
}

/// A closed output pipe (`| head`) ends this program as usual, without a message.
fn die_of_closed_pipes() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: the default disposition runs no code of ours.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
}
