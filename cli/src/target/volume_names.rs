//! [`command`]: the command line of `rblk-target` with the names of volumes, hosts and sessions,
//! for the completions of shells.

use std::path::Path;
use std::time::Duration;

use clap::{Command, CommandFactory};
use rblk_config::TargetConfig;
use rblk_operate::target::ask::{Ask, Response};
use rblk_operate::target::client::ask;
use rblk_operate::target::flags::{CONFIG, CONTROL_SOCKET, Cli};
use rblk_operate::target::status::TargetStatus;

use crate::program::shell_answers::{Names, with_names};

/// Time for the target to answer: a person waits at a prompt.
const PATIENCE: Duration = Duration::from_secs(1);

/// The arguments that name a volume, a host or a session.
const NAMED: [(&[&str], &str, Names); 12] = [
    (&["volume", "move"], "name", volumes),
    (&["volume", "remove"], "name", volumes),
    (&["volume", "resize"], "name", volumes),
    (&["volume", "set"], "name", volumes),
    (&["volume", "snapshot"], "name", volumes),
    (&["trace"], "volume", volumes),
    (&["host", "add"], "volume", rights),
    (&["host", "remove"], "volume", volumes),
    (&["host", "add"], "name", hosts),
    (&["host", "set"], "name", hosts),
    (&["host", "remove"], "name", hosts),
    (&["session", "kick"], "session", sessions),
];

/// The command line of the program.
#[must_use]
pub fn command() -> Command {
    NAMED.into_iter().fold(Cli::command(), |command, (path, argument, names)| {
        with_names(command, path, argument, names)
    })
}

/// The configuration of the target of this host. `None` where there is none, or not for this user.
fn configuration() -> Option<TargetConfig> {
    TargetConfig::load(Path::new(CONFIG)).ok()
}

/// The state of the running target. Root and the user of the target may ask for it.
fn running() -> Option<TargetStatus> {
    let socket = configuration().map_or(CONTROL_SOCKET.into(), |config| config.control_socket);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let answer = async { tokio::time::timeout(PATIENCE, ask(&socket, Ask::Status)).await };
    match runtime.block_on(answer).ok()?.ok()? {
        Response::Status(status) => Some(*status),
        _ => None,
    }
}

/// The volumes of the running target, or those of the configuration.
fn volumes() -> Vec<String> {
    match running() {
        Some(status) => status.volumes.into_iter().map(|volume| volume.name).collect(),
        None => {
            let configured = configuration().map(|config| config.volumes).unwrap_or_default();
            configured.into_iter().map(|volume| volume.name).collect()
        }
    }
}

/// The rights to these volumes.
fn rights() -> Vec<String> {
    let both = |name: String| [format!("{name}:rw"), format!("{name}:ro")];
    volumes().into_iter().chain(["*".to_owned()]).flat_map(both).collect()
}

fn hosts() -> Vec<String> {
    let configured = configuration().map(|config| config.hosts).unwrap_or_default();
    configured.into_iter().map(|host| host.name).collect()
}

fn sessions() -> Vec<String> {
    let mut hosts: Vec<String> =
        running().map(|s| s.sessions).unwrap_or_default().into_iter().map(|s| s.host).collect();
    hosts.sort();
    hosts.dedup();
    hosts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_argument_that_is_named_exists() {
        command().debug_assert();
    }
}
