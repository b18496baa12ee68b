//! The target that a command is for: its control socket, and its responses.

use std::io;
use std::path::{Path, PathBuf};

use rblk_config::{Exit, TargetConfig};
use rblk_operate::target::ask::{Ask, Response};
use rblk_operate::target::client::ask;
use rblk_operate::target::flags::{CONTROL_SOCKET, RunningArgs};
use rblk_operate::target::lost_socket::server_without_socket;
use rblk_operate::target::refusal::Refusal;
use rblk_operate::target::status::TargetStatus;

/// The control socket of a target: named, or that of its configuration.
pub(crate) fn socket_of(running: &RunningArgs) -> anyhow::Result<PathBuf> {
    if let Some(socket) = &running.control_socket {
        return Ok(socket.clone());
    }
    match running.config.exists() {
        true => Ok(TargetConfig::load(&running.config)?.control_socket),
        false => Ok(CONTROL_SOCKET.into()),
    }
}

/// Sends a command to the target at a socket.
///
/// # Errors
/// No target answers there, or it refuses.
pub(crate) fn asked(path: &Path, question: Ask) -> anyhow::Result<Response> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    answered(path, runtime.block_on(ask(path, question)))
}

/// The response of a target.
///
/// # Errors
/// No target answers there, or it refuses.
pub(crate) fn answered(path: &Path, answer: io::Result<Response>) -> anyhow::Result<Response> {
    match answer {
        Ok(Response::Error(refusal)) => Err(refusal.into()),
        Ok(response) => Ok(response),
        Err(error) => Err(no_answer(path, &error).into()),
    }
}

/// The status in a response.
///
/// # Errors
/// No target answers there, or it refuses.
pub(crate) fn status_in(path: &Path, answer: io::Result<Response>) -> anyhow::Result<TargetStatus> {
    match answered(path, answer)? {
        Response::Status(status) => Ok(*status),
        _ => Err(not_understood()),
    }
}

/// The state of the target at a socket.
///
/// # Errors
/// No target answers there, or it refuses.
pub(crate) fn status_of(path: &Path) -> anyhow::Result<TargetStatus> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    status_in(path, runtime.block_on(ask(path, Ask::Status)))
}

pub(crate) fn not_understood() -> anyhow::Error {
    anyhow::anyhow!("the target did not understand the request: it is of another version")
}

/// Why there is no answer at a control socket.
pub(crate) fn no_answer(path: &Path, error: &io::Error) -> Refusal {
    let deaf = server_without_socket(path);
    let path = path.display();
    if let Some(pid) = deaf {
        let text = format!(
            "process {pid} serves, and its control socket {path} was removed, so no command can reach it. \
             `systemctl restart rblk-target`, or `kill {pid}` (which drains and ends it) and start it again"
        );
        // Not the code for "no target": scripts, such as those of the packages, would go on.
        return Refusal::new(Exit::Failure, text);
    }
    if error.kind() == io::ErrorKind::PermissionDenied {
        let text = format!(
            "the control socket {path} is for root and the user of the target: this needs root, run it with sudo"
        );
        return Refusal::new(Exit::NotPermitted, text);
    }
    if error.kind() == io::ErrorKind::InvalidData {
        let text = format!(
            "the target at {path} is of another version, and its answer cannot be read: {error}. Use the `rblk-target` \
             beside its program"
        );
        return Refusal::new(Exit::Failure, text);
    }
    let text = format!(
        "no target answers at {path}: {error}. Start one with `rblk-target serve`, or name its socket with \
         --control-socket"
    );
    Refusal::new(Exit::NotConnected, text)
}
