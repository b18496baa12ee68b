//! The data side of the target: `rblk-target serve` becomes this program, the only one that links
//! libibverbs.

use std::io::stderr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use rblk_config::{Log, ignored_drop_ins, said_once};
use rblk_target::args::{Cli, Command, exit_of};
use tracing_subscriber::EnvFilter;

/// How long the last lines of the log may take.
const LOG_PATIENCE: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let Command::Serve(args) = Cli::parse().command else {
        eprintln!("rblk-targetd: only `serve`; use rblk-target for everything else");
        return rblk_config::Exit::Usage.into();
    };
    let level = match args.verbose {
        0 => "info",
        1 => "debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_env("RBLK_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let (mut log, writer) = Log::new();
    if let Err(error) = log.start(stderr()) {
        eprintln!("rblk-targetd: no thread for the log: {error}");
    }
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || writer.clone())
        .with_target(false)
        // Without this it reports on stderr that writing to stderr failed, and panics: a terminal
        // may close.
        .log_internal_errors(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&stderr()))
        .init();
    if let Some(warning) = args.config.as_deref().and_then(ignored_drop_ins) {
        tracing::warn!("{warning}");
    }
    let served = args
        .configuration()
        .and_then(|config| rblk_target::serve::serve(&config, move || args.configuration()));
    log.end(LOG_PATIENCE, stderr());
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rblk-target: {}", said_once(error.as_ref()));
            exit_of(&error).into()
        }
    }
}
