//! Running daemons of rblk: their status, and the end of a mount.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use rblk_operate::mount::mount_ask as mount_socket;
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::target::ask as target_ask;
use rblk_operate::target::status::TargetStatus;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::child;

const UMOUNT_LIMIT: Duration = Duration::from_secs(10);
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
const ANSWER_MAX: u64 = 4 << 20;

/// Removes a mount: in good order, else by force, else by ending its process.
pub(super) fn unmount(program: &Path, name: &str, tag: &str) -> Result<()> {
    let is_there = || rblk_operate::mount::run_dir::names().iter().any(|known| known == name);
    let umount = |force: bool| {
        let mut command = Command::new(program);
        command.args(["umount", name]).args(force.then_some("--force"));
        child::output_uninterrupted(&mut command, UMOUNT_LIMIT)
    };
    let mut tried = Ok(String::new());
    if is_there() {
        tried = umount(false).or_else(|_| umount(true));
    }
    // The command that makes a mount may still run.
    child::end_tagged(tag, Duration::ZERO)?;
    if is_there() {
        tried = umount(true);
    }
    if is_there() {
        let error = tried.err().map_or(String::new(), |error| format!(": {error:#}"));
        bail!("the mount {name} is still there{error}");
    }
    let _ = std::fs::remove_file(format!("/run/rblk/log/{name}.log"));
    Ok(())
}

/// The status of a mount; `None` without an answer in time.
pub(crate) fn mount_status(name: &str) -> Option<MountStatus> {
    match ask(&mount_socket::socket_path(name), &mount_socket::Ask::Status).ok()? {
        mount_socket::Response::Status(status) => Some(*status),
        _ => None,
    }
}

pub(crate) fn target_status(socket: &Path) -> Option<TargetStatus> {
    match ask(socket, &target_ask::Ask::Status).ok()? {
        target_ask::Response::Status(status) => Some(*status),
        _ => None,
    }
}

pub(crate) fn mount_of(device: &Path) -> Option<MountStatus> {
    let mounts =
        rblk_operate::mount::run_dir::names().into_iter().filter_map(|name| mount_status(&name));
    mounts.into_iter().find(|status| Path::new(&status.device) == device)
}

/// One request and its answer, a line of JSON each.
fn ask<A: DeserializeOwned>(socket: &Path, request: &impl Serialize) -> Result<A> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    stream.set_write_timeout(Some(ANSWER_LIMIT))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = Vec::new();
    stream.take(ANSWER_MAX).read_to_end(&mut answer)?;
    Ok(serde_json::from_slice(&answer)?)
}

#[cfg(test)]
mod tests;
