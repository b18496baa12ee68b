//! The commands of `rblk-target`.

#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod args;
mod check;
pub mod doctor;
mod drain;
mod event_lines;
mod host;
mod key;
pub mod listen;
pub mod lost_socket;
mod reload;
pub mod review;
mod running;
mod sessions;
mod table;
mod top;
mod trace;
mod upgrade;
mod volumes;

use std::path::Path;
use std::time::Duration;

use rblk_config::Exit;
use rblk_operate::Output;

use crate::operate::ask::{Ask, Response};
use crate::operate::client::ask;
use args::{Command, DoctorArgs};
use doctor::Seen;
use running::status_in;

/// How long a target measures before it can tell rates.
const RATES_TIME: Duration = Duration::from_millis(1100);

/// Carries a command out. `become_daemon` replaces this process by the daemon, for `serve`.
///
/// # Errors
/// What the command could not do.
pub fn carry_out(
    command: Command,
    output: Output,
    become_daemon: impl FnOnce() -> anyhow::Result<Exit>,
) -> anyhow::Result<Exit> {
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

fn doctor(args: &DoctorArgs, output: Output) -> anyhow::Result<Exit> {
    if let (Some(user), Some(config)) = (args.as_user, &args.config) {
        let seen = Seen::as_user(user, config, args.with_stores)?;
        Output::Json.item(&seen, String::new)?;
        return Ok(Exit::Ok);
    }
    let report = doctor::doctor(args.config.as_deref())?;
    output.answer(&report, || report.to_string())?;
    Ok(report.exit())
}

fn status(path: &Path, output: Output, verbose: bool) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut answer = runtime.block_on(ask(path, Ask::Status));
    // The first command begins the measurement of rates. Without a session there are none.
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
