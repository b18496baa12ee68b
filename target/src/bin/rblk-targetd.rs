//! The data side of the target: `rblk-target serve` becomes this program, the only one that links
//! libibverbs.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::io::stderr;
use std::process::ExitCode;
use std::time::Duration;

use rblk_config::{Exit, TargetConfig, ignored_drop_ins};
use rblk_operate::journal::{JOURNAL_SOCKET, JournalFormat, JournalSocket, stderr_is_journal};
use rblk_operate::target::events::EVENT_LINES;
use rblk_operate::target::flags::{Cli, Command, DoctorArgs, GroupCommand, ServeArgs};
use rblk_operate::{Log, LogWriter, Output, precautions, said_once, wants_colour};
use rblk_runtime::die_of_closed_pipes;
use rblk_target::commands::check::check;
use rblk_target::commands::doctor::{self, Seen};
use rblk_target::commands::group_status::group_status;
use rblk_target::control::hand_over::{Inherited, Successor};
use rblk_target::daemon::serve::serve;
use rblk_target::daemon::targetd_exit::exit_of;
use rblk_target::daemon::{CAN_RDMA, process_signals};
use tracing_subscriber::EnvFilter;

/// All hosts wait while the target is dead. The unit sets this score, too.
const OOM_SCORE: i16 = -900;
/// How long the last lines of the log may take.
const LOG_PATIENCE: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    // Before any descriptor is opened.
    let inherited = Inherited::take();
    let (output, args) = match Cli::of_process() {
        Ok(Cli { output, command: Command::Serve(args) }) => (output, args),
        Ok(Cli { output, command }) => return carry_out(command, output),
        Err(code) => return code,
    };
    if args.check_take_over {
        return check_take_over(&args);
    }
    // Before the first line of the log. A program that takes over has the configuration of the
    // program before it.
    if (args.dump_config || matches!(inherited, Ok(None)))
        && let Some(code) = look_at_configuration(&args, output)
    {
        return code;
    }
    precautions::take(OOM_SCORE);
    // Before there is a second thread.
    if let Err(error) = process_signals::hold() {
        let text = format!("cannot hold signals: {error}");
        return output.end("rblk-targetd", Exit::Failure, Some(&text));
    }
    let level = level(args.verbose);
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
        output.aside(format_args!("rblk-targetd: no thread for the log: {error}"));
    }
    if let Some(warning) = args.config.as_deref().and_then(ignored_drop_ins) {
        tracing::warn!("{warning}");
    }
    let has_file = args.config.is_some();
    let mut inherited = inherited.unwrap_or_else(|error| {
        tracing::error!(error, "cannot take over from the program before: starting anew");
        None
    });
    let served = configuration(&args, inherited.as_ref()).and_then(|config| {
        serve(&config, has_file, &mut inherited, move || args.configuration(CAN_RDMA))
    });
    let end = end_of(served, inherited);
    log.end(LOG_PATIENCE, stderr());
    match end {
        ProgramEnd::Exit(code) => code,
        ProgramEnd::Fails(error) => {
            output.end("rblk-target", exit_of(&error), Some(&said_once(error.as_ref())))
        }
        ProgramEnd::Becomes(program) => {
            let text = format!("cannot hand over: {}", program());
            output.end("rblk-target", Exit::Failure, Some(&text))
        }
    }
}

/// Carries out a command of `rblk-target` that opens stores, and refuses all others.
fn carry_out(command: Command, output: Output) -> ExitCode {
    match command {
        Command::Check { config } => {
            die_of_closed_pipes();
            answered(check(&config, output), output)
        }
        Command::Doctor(args) => {
            die_of_closed_pipes();
            answered(doctor(&args, output), output)
        }
        Command::Group(GroupCommand::Status { config }) => {
            die_of_closed_pipes();
            answered(group_status(&config, output), output)
        }
        _ => {
            let text = "only `serve`; use rblk-target for everything else";
            output.end("rblk-targetd", Exit::Usage, Some(text))
        }
    }
}

/// The end of a command of `rblk-target` that this program carried out.
fn answered(result: anyhow::Result<Exit>, output: Output) -> ExitCode {
    match result {
        Ok(exit) => output.end("rblk-target", exit, None),
        Err(error) => output.end("rblk-target", exit_of(&error), Some(&said_once(error.as_ref()))),
    }
}

fn level(verbose: u8) -> &'static str {
    match verbose {
        0 => "info",
        1 => "debug",
        _ => "trace",
    }
}

/// Checks the configuration. `None`: it is valid, and the target shall serve it.
fn look_at_configuration(args: &ServeArgs, output: Output) -> Option<ExitCode> {
    match args.configuration(CAN_RDMA) {
        Ok(config) if args.dump_config => Some(answered(dump(&config, output), output)),
        Ok(_) => None,
        Err(error) => Some(answered(Err(error), output)),
    }
}

/// Prints the configuration that flags and files result in.
fn dump(config: &TargetConfig, output: Output) -> anyhow::Result<Exit> {
    output.toml(&config.dump()?)?;
    Ok(Exit::Ok)
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

/// The configuration to start with: the one that the program before left, or that of files and
/// flags.
fn configuration(args: &ServeArgs, inherited: Option<&Inherited>) -> anyhow::Result<TargetConfig> {
    match inherited.map(Inherited::configuration).transpose()?.flatten() {
        Some(left) => Ok(left),
        None => args.configuration(CAN_RDMA),
    }
}

/// The end of this process.
enum ProgramEnd {
    /// Exit with this code.
    Exit(ExitCode),
    /// Exit because of this error.
    Fails(anyhow::Error),
    /// Become another program. Returns only an error.
    Becomes(Box<dyn FnOnce() -> std::io::Error>),
}

/// The end after serving: another program may take over, and one that could not start makes room
/// for the one before it.
fn end_of(served: anyhow::Result<Option<Successor>>, inherited: Option<Inherited>) -> ProgramEnd {
    match (served, inherited.filter(Inherited::can_go_back)) {
        (Ok(Some(successor)), _) => ProgramEnd::Becomes(Box::new(|| successor.take_over())),
        (Ok(None), _) => ProgramEnd::Exit(ExitCode::SUCCESS),
        (Err(error), Some(inherited)) => {
            let why = said_once(error.as_ref());
            tracing::error!(error = why, "cannot start: the program before goes on");
            ProgramEnd::Becomes(Box::new(move || inherited.go_back(&why)))
        }
        (Err(error), None) => ProgramEnd::Fails(error),
    }
}

/// Reports whether this program could take over.
fn check_take_over(args: &ServeArgs) -> ExitCode {
    let said = args.configuration(CAN_RDMA).and_then(|config| {
        Ok(serde_json::to_string(&rblk_target::daemon::serve::check_take_over(&config)?)?)
    });
    let output = Output::Table;
    match said.and_then(|said| Ok(output.text(said)?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => output.end("rblk-target", exit_of(&error), Some(&said_once(error.as_ref()))),
    }
}

/// The journal, if it reads the standard error of this process.
fn journal() -> Option<JournalSocket> {
    stderr_is_journal().then(|| JournalSocket::connect(JOURNAL_SOCKET).ok()).flatten()
}

fn filter(level: &str) -> EnvFilter {
    EnvFilter::try_from_env("RBLK_LOG").unwrap_or_else(|_| EnvFilter::new(level))
}

/// Writes each line to the journal as a record with fields.
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
        // Otherwise a failed write to stderr, as of a closed terminal, would be reported on stderr,
        // and panic.
        .log_internal_errors(false)
        .with_ansi(wants_colour(&stderr()))
        .init();
}
