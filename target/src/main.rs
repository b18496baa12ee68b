//! `rblk-target`: the commands of the target. Links no RDMA library: `serve` becomes
//! `rblk-targetd`.

#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use rblk_config::Exit;
use rblk_operate::{Output, said_once};
use rblk_target::args::{Cli, Command, DoctorArgs, exit_of};
use rblk_target::control::socket::{Ask, Response, ask};
use rblk_target::doctor::Seen;
use rblk_target::hand_over::Inherited;

use crate::running::status_in;

mod check;
mod drain;
mod event_lines;
mod host;
mod key;
mod reload;
mod running;
mod sessions;
mod table;
mod top;
mod trace;
mod upgrade;
mod volumes;

/// How long a target measures before it can tell rates.
const RATES_TIME: Duration = Duration::from_millis(1100);

fn main() -> ExitCode {
    die_of_closed_pipes();
    let cli = match Cli::of_process() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let output = cli.output;
    match carry_out(cli.command, output) {
        Ok(exit) => output.end("rblk-target", exit, None),
        Err(error) => output.end("rblk-target", exit_of(&error), Some(&said_once(error.as_ref()))),
    }
}

fn carry_out(command: Command, output: Output) -> anyhow::Result<Exit> {
    match command {
        Command::Serve(args) => {
            let config = args.configuration()?;
            if args.dump_config {
                output.toml(&config.dump()?)?;
                return Ok(Exit::Ok);
            }
            become_daemon()
        }
        Command::Key(command) => key::key(&command, output),
        Command::Host(command) => host::host(&command, output),
        Command::Volume(command) => volumes::volume(&command, output),
        Command::Session(command) => sessions::session(&command, output),
        Command::Reload { hosts: true, socket, .. } => reload::hosts(&socket.path, output),
        Command::Reload { dry_run, socket, .. } => reload::reload(&socket.path, dry_run, output),
        Command::Dump { socket } => reload::dump(&socket.path, output),
        Command::Check { config } => check::check(&config, output),
        Command::Events { socket, follow } => event_lines::events(&socket.path, follow, output),
        Command::Status { socket, verbose } => status(&socket.path, output, verbose),
        Command::Top { socket, interval, once } => top::top(&socket.path, interval.0, once, output),
        Command::Trace { socket, volume, slower, count } => {
            trace::trace(&socket.path, &volume, slower.0, count, output)
        }
        Command::Doctor(args) => doctor(&args, output),
        Command::Upgrade { program, force, timeout, socket } => {
            let what = upgrade::What { program, force, timeout: timeout.0 };
            upgrade::upgrade(&socket.path, what, output)
        }
        Command::Drain { socket, no_wait } => drain::drain(&socket.path, !no_wait, output),
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
    // those that a target left open which became this program.
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

fn doctor(args: &DoctorArgs, output: Output) -> anyhow::Result<Exit> {
    if let (Some(user), Some(config)) = (args.as_user, &args.config) {
        let seen = Seen::as_user(user, config, args.with_stores)?;
        Output::Json.item(&seen, String::new)?;
        return Ok(Exit::Ok);
    }
    let report = rblk_target::doctor::doctor(args.config.as_deref())?;
    output.answer(&report, || report.to_string())?;
    Ok(report.exit())
}

fn status(path: &Path, output: Output, verbose: bool) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut answer = runtime.block_on(ask(path, Ask::Status));
    // The first question begins the measurement of rates. Without a session there are none.
    if output == Output::Table
        && matches!(&answer, Ok(Response::Status(s)) if s.rates.is_none() && !s.sessions.is_empty())
    {
        std::thread::sleep(RATES_TIME);
        answer = runtime.block_on(ask(path, Ask::Status));
    }
    let status = status_in(path, answer)?;
    output.answer(&status, || table::status(&status, verbose))?;
    Ok(Exit::Ok)
}
