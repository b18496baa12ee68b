//! The data side of the target: `rblk-target serve` becomes this program, the only one that links
//! libibverbs.

use std::io::stderr;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use rblk_config::journal::{JOURNAL_SOCKET, JournalFormat, JournalSocket, stderr_is_journal};
use rblk_config::{Log, LogWriter, ignored_drop_ins, said_once};
use rblk_target::args::{Cli, Command, exit_of};
use rblk_target::events::EVENT_LINES;
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
    let (mut log, writer) = Log::new();
    let started = match journal() {
        Some(journal) => {
            log_to_journal(level, writer);
            log.start(journal)
        }
        None => {
            log_to_stderr(level, writer);
            log.start(stderr())
        }
    };
    if let Err(error) = started {
        eprintln!("rblk-targetd: no thread for the log: {error}");
    }
    if let Some(warning) = args.config.as_deref().and_then(ignored_drop_ins) {
        tracing::warn!("{warning}");
    }
    let has_file = args.config.is_some();
    let served = args.configuration().and_then(|config| {
        rblk_target::serve::serve(&config, has_file, move || args.configuration())
    });
    log.end(LOG_PATIENCE, stderr());
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rblk-target: {}", said_once(error.as_ref()));
            exit_of(&error).into()
        }
    }
}

/// The journal, if it reads the standard error of this process.
fn journal() -> Option<JournalSocket> {
    stderr_is_journal().then(|| JournalSocket::connect(JOURNAL_SOCKET).ok()).flatten()
}

fn filter(level: &str) -> EnvFilter {
    EnvFilter::try_from_env("RBLK_LOG").unwrap_or_else(|_| EnvFilter::new(level))
}

/// Each line becomes a record with fields.
fn log_to_journal(level: &str, writer: LogWriter) {
    tracing_subscriber::fmt()
        .with_env_filter(filter(level))
        .log_internal_errors(false)
        .event_format(JournalFormat { program: "rblk-target" })
        .with_writer(move || writer.clone())
        .init();
}

fn log_to_stderr(level: &str, writer: LogWriter) {
    let filter = match format!("{EVENT_LINES}=off").parse() {
        Ok(quiet) => filter(level).add_directive(quiet),
        Err(_) => filter(level),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || writer.clone())
        .with_target(false)
        // Without this it reports on stderr that writing to stderr failed, and panics: a terminal
        // may close.
        .log_internal_errors(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&stderr()))
        .init();
}
