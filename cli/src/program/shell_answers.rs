//! [`answer_shell`]: the completions of both programs. A shell runs the program itself with the
//! words so far, so that the completions know the names of mounts and volumes of this host.
//!
//! The packages have the few lines that make a shell do this: `rblk-pages` writes them.

use std::process::ExitCode;

use clap::{Arg, Command};
use clap_complete::CompleteEnv;
use clap_complete::engine::{ArgValueCandidates, ArgValueCompleter, CompletionCandidate};

/// The variable of the environment by which a shell asks. Not `COMPLETE`, the usual one: the units
/// and scripts of a host may set a variable of so common a name.
pub const COMPLETION_VARIABLE: &str = "RBLK_COMPLETE";

/// The source of the values of an argument.
pub(crate) type Names = fn() -> Vec<String>;

/// Answers a shell that asks for completions. `None`: no shell asks.
pub(crate) fn answer_shell(command: impl Fn() -> Command) -> Option<ExitCode> {
    let words = std::env::args_os();
    let directory = std::env::current_dir().ok();
    let environment = CompleteEnv::with_factory(command).var(COMPLETION_VARIABLE);
    match environment.try_complete(words, directory.as_deref()) {
        Ok(false) => None,
        Ok(true) => Some(ExitCode::SUCCESS),
        // The shell shows nothing then, as where no value fits.
        Err(_) => Some(ExitCode::FAILURE),
    }
}

/// The command with values for an argument of a command below it. `path`: the words of that one.
pub(crate) fn with_names(command: Command, path: &[&str], argument: &str, names: Names) -> Command {
    let candidates = move || names().into_iter().map(CompletionCandidate::new).collect::<Vec<_>>();
    at(command, path, argument, move |arg| arg.add(ArgValueCandidates::new(candidates)))
}

/// As [`with_names`], with an argument whose values follow from its first characters.
pub(crate) fn with_completer(
    command: Command,
    path: &[&str],
    argument: &str,
    completer: ArgValueCompleter,
) -> Command {
    at(command, path, argument, |arg| arg.add(completer))
}

fn at(command: Command, path: &[&str], argument: &str, change: impl FnOnce(Arg) -> Arg) -> Command {
    let Some((first, rest)) = path.split_first() else {
        debug_assert!(command.get_arguments().any(|arg| arg.get_id() == argument), "{argument}");
        // Not `mut_arg`, which makes the argument the last one.
        let mut change = Some(change);
        return command.mut_args(|arg| match change.take_if(|_| arg.get_id() == argument) {
            Some(change) => change(arg),
            None => arg,
        });
    };
    command.mut_subcommand(*first, |below| at(below, rest, argument, change))
}
