//! [`carry_out`]: the command line of a process, from its flags to its exit code.

use std::process::ExitCode;

use rblk_config::Exit;
use rblk_operate::{Output, said_once};
use rblk_runtime::die_of_closed_pipes;

/// Parses the command line of this process and carries its command out. `exit_of` returns the exit
/// code of an error.
pub(crate) fn carry_out<C>(
    program: &'static str,
    parse: impl FnOnce() -> Result<(C, Output), ExitCode>,
    command: impl FnOnce(C, Output) -> anyhow::Result<Exit>,
    exit_of: impl FnOnce(&anyhow::Error) -> Exit,
) -> ExitCode {
    die_of_closed_pipes();
    let (parsed, output) = match parse() {
        Ok(parsed) => parsed,
        Err(code) => return code,
    };
    match command(parsed, output) {
        Ok(exit) => output.end(program, exit, None),
        Err(error) => output.end(program, exit_of(&error), Some(&said_once(error.as_ref()))),
    }
}
