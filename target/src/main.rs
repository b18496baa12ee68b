//! `rblk-target`: the commands of the target. Links no RDMA library: `serve` becomes
//! `rblk-targetd`.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use rblk_config::{Auth, Exit, TargetConfig, ignored_drop_ins, said_once};
use rblk_target::args::{Cli, Command, DoctorArgs, Output, exit_of};
use rblk_target::control::socket::{Ask, Response, ask};
use rblk_target::control::status::TargetStatus;
use rblk_target::doctor::Seen;
use rblk_target::lost_socket::server_without_socket;
use rblk_target::review::{Reviewed, review};
use rblk_target::serve::{NO_HOST, NO_VOLUME};

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

/// How long a target measures before it can tell rates.
const RATES_TIME: Duration = Duration::from_millis(1100);
mod volumes;

fn main() -> ExitCode {
    die_of_closed_pipes();
    let result = match Cli::parse().command {
        Command::Serve(args) => args.configuration().and_then(|config| {
            if args.dump_config {
                print!("{}", config.dump()?);
                return Ok(Exit::Ok);
            }
            become_daemon()
        }),
        Command::Key(command) => key::key(&command),
        Command::Host(command) => host::host(&command),
        Command::Volume(command) => volumes::volume(&command),
        Command::Session(command) => sessions::session(&command),
        Command::Reload { hosts: true, socket, output, .. } => reload::hosts(&socket.path, output),
        Command::Reload { dry_run, socket, output, .. } => {
            reload::reload(&socket.path, dry_run, output)
        }
        Command::Dump { socket } => reload::dump(&socket.path),
        Command::Check { config } => check(&config),
        Command::Events { socket, follow, output } => {
            event_lines::events(&socket.path, follow, output)
        }
        Command::Status { socket, verbose, output } => status(&socket.path, output, verbose),
        Command::Top { socket, interval, once, output } => {
            top::top(&socket.path, interval.0, once, output)
        }
        Command::Trace { socket, volume, slower, count, output } => {
            trace::trace(&socket.path, &volume, slower.0, count, output)
        }
        Command::Doctor(args) => doctor(&args),
        Command::Upgrade { program, force, timeout, socket, output } => {
            let what = upgrade::What { program, force, timeout: timeout.0 };
            upgrade::upgrade(&socket.path, what, output)
        }
        Command::Drain { socket, no_wait, output } => drain::drain(&socket.path, !no_wait, output),
    };
    match result {
        Ok(exit) => exit.into(),
        Err(error) => {
            eprintln!("rblk-target: {}", said_once(error.as_ref()));
            match error.is::<host::Senseless>() {
                true => Exit::Usage.into(),
                false => exit_of(&error).into(),
            }
        }
    }
}

/// A reader that goes away (`| head`) ends this program like any other, instead of a panic in
/// `println!`.
fn die_of_closed_pipes() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: the default disposition runs no code of ours.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
}

/// Replaces this process by `rblk-targetd`, in the same directory, with the same arguments.
fn become_daemon() -> anyhow::Result<Exit> {
    let daemon = std::env::current_exe()?.with_file_name("rblk-targetd");
    // The daemon keeps no descriptor of the script or the terminal that starts it.
    rblk_fabric::return_lent().context("closing what this process inherited (close_range)")?;
    let (variable, value) = rblk_fabric::ENVIRONMENT;
    let error = std::process::Command::new(&daemon)
        .args(std::env::args_os().skip(1))
        .env(variable, value)
        .exec();
    Err(error).with_context(|| format!("cannot run {}: is rblk installed whole?", daemon.display()))
}

fn doctor(args: &DoctorArgs) -> anyhow::Result<Exit> {
    if let (Some(user), Some(config)) = (args.as_user, &args.config) {
        let seen = Seen::as_user(user, config, args.with_stores)?;
        println!("{}", serde_json::to_string(&seen)?);
        return Ok(Exit::Ok);
    }
    let report = rblk_target::doctor::doctor(args.config.as_deref())?;
    match args.output {
        Output::Table => print!("{report}"),
        Output::Json => println!("{}", serde_json::to_string_pretty(&report)?),
    }
    Ok(report.exit())
}

/// The target that answers at a control socket.
fn running(socket: &Path) -> anyhow::Result<Option<TargetStatus>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match runtime.block_on(ask(socket, Ask::Status)) {
        Ok(Response::Status(status)) => Ok(Some(*status)),
        _ => Ok(None),
    }
}

fn check(path: &Path) -> anyhow::Result<Exit> {
    let mut config = TargetConfig::load(path)?;
    rblk_target::listen::fill_in(&mut config);
    let running = running(&config.control_socket)?;
    let found = review(&config, running.as_ref())?;
    if config.authentication() == Auth::Required && config.hosts.is_empty() {
        eprintln!("rblk-target: {NO_HOST}");
    }
    if config.volumes.is_empty() {
        eprintln!("rblk-target: {NO_VOLUME}");
    }
    for warning in ignored_drop_ins(path).iter().chain(&found.warnings) {
        eprintln!("rblk-target: warning: {warning}");
    }
    let mut exit = Exit::Ok;
    for (name, volume) in found.volumes {
        match volume {
            Ok(Reviewed { blocks, block_bytes, served_by }) => {
                let by =
                    served_by.map(|pid| format!("; the running target (process {pid}) serves it"));
                let by = by.unwrap_or_default();
                println!("{name}: ok, {blocks} blocks of {block_bytes} bytes{by}");
            }
            Err(error) => {
                eprintln!("rblk-target: {}", said_once(error.as_ref()));
                exit = if exit == Exit::Ok { exit_of(&error) } else { exit };
            }
        }
    }
    Ok(exit)
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
    match answer {
        Ok(Response::Status(status)) if output == Output::Json => {
            println!("{}", serde_json::to_string_pretty(&status)?);
        }
        Ok(Response::Status(status)) => print!("{}", table::status(&status, verbose)),
        Ok(Response::Error(error)) => anyhow::bail!(error),
        Ok(_) => anyhow::bail!("the target did not understand the question"),
        Err(error) => return Ok(no_answer(path, &error)),
    }
    Ok(Exit::Ok)
}

/// Asks the target at a socket. The error is how it answered, or that none does.
fn asked(path: &Path, question: Ask) -> anyhow::Result<Result<Response, Exit>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match runtime.block_on(ask(path, question)) {
        Ok(Response::Error(error)) => anyhow::bail!(error),
        Ok(response) => Ok(Ok(response)),
        Err(error) => Ok(Err(no_answer(path, &error))),
    }
}

fn not_understood() -> anyhow::Error {
    anyhow::anyhow!("the target did not understand the request: it is of another version")
}

fn no_answer(path: &Path, error: &std::io::Error) -> Exit {
    let deaf = server_without_socket(path);
    let path = path.display();
    if let Some(pid) = deaf {
        eprintln!(
            "rblk-target: process {pid} serves, and its control socket {path} was removed, so no command can reach it. \
             `systemctl restart rblk-target`, or `kill {pid}` (which drains and ends it) and start it again"
        );
        return Exit::NotConnected;
    }
    if error.kind() == std::io::ErrorKind::PermissionDenied {
        eprintln!(
            "rblk-target: the control socket {path} is for root and the user of the target: this needs root, run it with sudo"
        );
        return Exit::NotPermitted;
    }
    eprintln!(
        "rblk-target: no target answers at {path}: {error}. Start one with `rblk-target serve`, or name its socket with --control-socket"
    );
    Exit::NotConnected
}
