//! [`exit_of`]: the exit code for an error.

use std::error::Error;

use rblk_config::Exit;

/// The exit code for an error. `of_cause` knows the causes of a program; the first known cause
/// counts.
#[must_use]
pub fn exit_of(
    error: &anyhow::Error,
    of_cause: impl Fn(&(dyn Error + 'static)) -> Option<Exit>,
) -> Exit {
    error.chain().find_map(of_cause).unwrap_or(Exit::Failure)
}
