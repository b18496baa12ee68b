//! `rblk-target`: the commands of the target. Links no RDMA library: `serve` becomes `rblk-targetd`.

use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use rblk_config::{Exit, TargetConfig};
use rblk_target::args::{Cli, Command, Output, exit_of};
use rblk_target::control::socket::{Ask, Response, ask};

mod table;

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
        Command::Check { config } => check(&config),
        Command::Status { socket, output } => talk(&socket.path, Ask::Status, output),
        Command::Drain { socket } => talk(&socket.path, Ask::Drain, Output::Table),
    };
    match result {
        Ok(exit) => exit.into(),
        Err(error) => {
            eprintln!("rblk-target: {error:#}");
            exit_of(&error).into()
        }
    }
}

/// A reader that goes away (`| head`) ends this program like any other, instead of a panic in `println!`.
fn die_of_closed_pipes() {
    use nix::sys::signal::{SigHandler, Signal, signal};
    // SAFETY: the default disposition runs no code of ours.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
}

/// Replaces this process by `rblk-targetd` with the same arguments; it stands beside this program.
fn become_daemon() -> anyhow::Result<Exit> {
    let daemon = std::env::current_exe()?.with_file_name("rblk-targetd");
    let error = std::process::Command::new(&daemon).args(std::env::args_os().skip(1)).exec();
    Err(error).with_context(|| format!("cannot run {}: is rblk installed whole?", daemon.display()))
}

fn check(path: &std::path::Path) -> anyhow::Result<Exit> {
    let config = TargetConfig::load(path)?;
    for opened in rblk_target::serve::check(&config)? {
        let volume = &opened.volume;
        println!(
            "{}: ok, {} blocks of {} bytes",
            volume.name,
            volume.blocks.0,
            volume.block_size.bytes()
        );
    }
    Ok(Exit::Ok)
}

fn talk(path: &std::path::Path, question: Ask, output: Output) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = match runtime.block_on(ask(path, question)) {
        Ok(answer) => answer,
        Err(error) => {
            eprintln!(
                "rblk-target: no target answers at {}: {error}. Start one with `rblk-target serve`, or name its socket with --control-socket",
                path.display()
            );
            return Ok(Exit::NotConnected);
        }
    };
    match answer {
        Response::Status(status) if output == Output::Json => {
            println!("{}", serde_json::to_string_pretty(&status)?)
        }
        Response::Status(status) => print!("{}", table::status(&status)),
        Response::Done => println!("draining"),
        Response::Error(error) => anyhow::bail!(error),
    }
    Ok(Exit::Ok)
}
