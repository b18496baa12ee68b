//! `rblk-target`: the commands of the target. Links no RDMA library: `serve` becomes
//! `rblk-targetd`.

#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use anyhow::Context;
use rblk_config::Exit;
use rblk_operate::{Output, said_once};
use rblk_target::commands;
use rblk_target::commands::args::{Cli, exit_of};
use rblk_target::control::hand_over::Inherited;

fn main() -> ExitCode {
    die_of_closed_pipes();
    let cli = match Cli::of_process() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let output = cli.output;
    match commands::carry_out(cli.command, output, become_daemon) {
        Ok(exit) => output.end("rblk-target", exit, None),
        Err(error) => output.end("rblk-target", exit_of(&error), Some(&said_once(error.as_ref()))),
    }
}

/// A reader that goes away (`| head`) ends this program like any other, without a message.
fn die_of_closed_pipes() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: the default disposition runs no code of ours.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
}

/// Replaces this process by `rblk-targetd`, in the same directory, with the same arguments.
fn become_daemon() -> anyhow::Result<Exit> {
    let daemon = std::env::current_exe()?.with_file_name("rblk-targetd");
    // The daemon keeps no descriptor of the script or the terminal that starts it. But it needs
    // those that a target left open before it became this program.
    if !Inherited::is_there()
        && let Err(error) = rblk_runtime::close_lent_on_exec()
    {
        Output::Table.aside(format_args!(
            "rblk-target: WARN cannot close what this process inherited (close_range): {error}"
        ));
    }
    let (variable, value) = rblk_fabric::ENVIRONMENT;
    let error = std::process::Command::new(&daemon)
        .args(std::env::args_os().skip(1))
        .env(variable, value)
        .exec();
    Err(error).with_context(|| format!("cannot run {}: is rblk installed whole?", daemon.display()))
}
