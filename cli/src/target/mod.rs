//! The commands of `rblk-target`.

mod drain;
mod event_lines;
mod host;
mod reload;
mod running;
mod sessions;
mod table;
mod target_top;
mod trace;
mod upgrade;
mod volume_names;
mod volumes;

use std::path::Path;
use std::process::ExitCode;

use rblk_config::Exit;
use rblk_config::key_file::Side;
use rblk_operate::target::ask::{Ask, Response};
use rblk_operate::target::client::ask;
use rblk_operate::target::flags::{Cli, Command, KeyCommand, exit_of_cause};
use rblk_operate::target::left_open;
use rblk_operate::{Output, exit_of};

use crate::program::daemon::{LentDescriptors, become_daemon};
use crate::program::shell_answers::answer_shell;
use crate::program::top::RATES_TIME;
use crate::program::{command_line, key};
use running::status_in;
pub use volume_names::command;

const PROGRAM: &str = "rblk-target";

/// The text below a new key: the steps that follow.
const NEXT: &str = "\
The key above is public. Give it to each host: `rblk-initiator mount ADDRESS VOLUME --target-key KEY`,
or target_keys = [\"KEY\"] in the file of the mount. Then let each host in, by the key that
`rblk-initiator key new` prints there: `rblk-target host add NAME --key KEY --volume VOLUME:rw`";

/// Carries out the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    if let Some(code) = answer_shell(command) {
        return code;
    }
    let parse = || Cli::of_process().map(|cli| (cli.command, cli.output));
    command_line::carry_out(PROGRAM, parse, carry_out, |error| exit_of(error, exit_of_cause))
}

/// Carries out a command. The daemon carries out the commands that serve or open stores.
fn carry_out(command: Command, output: Output) -> anyhow::Result<Exit> {
    match command {
        Command::Serve(args) if !args.dump_config && !left_open::is_there() => {
            Err(become_daemon(PROGRAM, "rblk-targetd", LentDescriptors::Standard))
        }
        Command::Serve(_) | Command::Check { .. } | Command::Doctor(_) | Command::Group(_) => {
            Err(become_daemon(PROGRAM, "rblk-targetd", LentDescriptors::All))
        }
        Command::Key(KeyCommand::New(args)) => key::make(&args.file, NEXT, output),
        Command::Key(KeyCommand::Show(args)) => key::show(&args.file, Side::Target, output),
        Command::Host(command) => host::host(&command, output),
        Command::Volume(command) => volumes::volume(&command, output),
        Command::Session(command) => sessions::session(&command, output),
        Command::Reload { hosts: true, socket, .. } => reload::hosts(&socket.path, output),
        Command::Reload { dry_run, socket, .. } => reload::reload(&socket.path, dry_run, output),
        Command::Dump { socket } => reload::dump(&socket.path, output),
        Command::Events { socket, follow } => event_lines::events(&socket.path, follow, output),
        Command::Status { socket, verbose } => status(&socket.path, output, verbose),
        Command::Top { socket, interval, once } => {
            target_top::top(&socket.path, interval.0, once, output)
        }
        Command::Trace { socket, volume, slower, count } => {
            trace::trace(&socket.path, &volume, slower.0, count, output)
        }
        Command::Upgrade { program, force, timeout, socket } => {
            let what = upgrade::What { program, force, timeout: timeout.0 };
            upgrade::upgrade(&socket.path, what, output)
        }
        Command::Drain { socket, no_wait } => drain::drain(&socket.path, !no_wait, output),
    }
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
