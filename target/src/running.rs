//! Where the target listens that a command is for.

use std::path::PathBuf;

use rblk_config::TargetConfig;
use rblk_target::args::{CONTROL_SOCKET, RunningArgs};

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
