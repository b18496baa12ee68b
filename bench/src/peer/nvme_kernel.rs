//! The kernel's NVMe target and host, by their files: making, finding and removing a part.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::child;

pub(super) const NVMET: &str = "/sys/kernel/config/nvmet";
const CONTROLLERS: &str = "/sys/class/nvme";

const WRITE_LIMIT: Duration = Duration::from_secs(20);
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(30);
pub(super) const PORTS_MAX: u16 = 1000;

/// The last line of the kernel's log with a word.
pub(super) fn kernel_says(word: &str) -> String {
    let log = child::output_uninterrupted(&mut Command::new("dmesg"), Duration::from_secs(5));
    let log = log.unwrap_or_default();
    let line = log.lines().rev().find(|line| line.contains(word));
    line.unwrap_or("the kernel's log says nothing").to_owned()
}

/// The disk of a subsystem, of all its paths together.
pub(super) fn disk(nqn: &str) -> Option<PathBuf> {
    let disks = fs::read_dir("/sys/block").ok()?.flatten();
    disks
        .filter_map(|disk| Some((disk.file_name().into_string().ok()?, disk.path())))
        .filter(|(name, _)| name.starts_with("nvme"))
        .filter(|(_, path)| word(&path.join("hidden")).as_deref() != Some("1"))
        .filter(|(_, path)| word(&path.join("device/subsysnqn")).as_deref() == Some(nqn))
        .filter(|(_, path)| word(&path.join("size")).is_some_and(|size| size != "0"))
        .map(|(name, _)| Path::new("/dev").join(name))
        .find(|path| path.exists())
}

fn controllers(nqn: &str) -> Vec<PathBuf> {
    let Ok(all) = fs::read_dir(CONTROLLERS) else { return Vec::new() };
    let ours = |path: &PathBuf| word(&path.join("subsysnqn")).as_deref() == Some(nqn);
    all.flatten().map(|controller| controller.path()).filter(ours).collect()
}

/// Deletes all controllers of a subsystem and waits until they are gone.
pub(super) fn disconnect(nqn: &str) -> Result<()> {
    for controller in controllers(nqn) {
        let mut command = Command::new("sh");
        let file = controller.join("delete_controller");
        // A controller may be gone already.
        command.args(["-c", "[ ! -e \"$1\" ] || echo 1 >\"$1\"", "delete"]).arg(file);
        child::output_uninterrupted(&mut command, CONNECT_LIMIT)
            .with_context(|| format!("{} does not go", controller.display()))?;
    }
    match child::until(CONNECT_LIMIT, || controllers(nqn).is_empty().then_some(())) {
        Some(()) => Ok(()),
        None => bail!("a controller of {nqn} is still there after {CONNECT_LIMIT:?}"),
    }
}

/// Removes a port, if it is for that subsystem or for none.
pub(super) fn remove_port(id: u16, nqn: &str) -> Result<()> {
    let dir = port(id);
    if !dir.exists() {
        return Ok(());
    }
    let links = fs::read_dir(dir.join("subsystems")).with_context(|| dir.display().to_string())?;
    let others = links.flatten().any(|link| link.file_name() != *nqn);
    if others {
        // Another subsystem has the number.
        return Ok(());
    }
    let link = dir.join("subsystems").join(nqn);
    within(format!("removing {}", dir.display()), move || {
        ignore_missing(fs::remove_file(&link))?;
        ignore_missing(fs::remove_dir(&dir))
    })
}

pub(super) fn remove_subsystem(nqn: &str) -> Result<()> {
    let dir = subsystem(nqn);
    if !dir.exists() {
        return Ok(());
    }
    within(format!("removing {}", dir.display()), move || {
        let namespace = dir.join("namespaces/1");
        if namespace.exists() {
            ignore_missing(fs::write(namespace.join("enable"), "0"))?;
            ignore_missing(fs::remove_dir(&namespace))?;
        }
        ignore_missing(fs::remove_dir(&dir))
    })
}

pub(super) fn subsystem(nqn: &str) -> PathBuf {
    Path::new(NVMET).join("subsystems").join(nqn)
}

pub(super) fn port(id: u16) -> PathBuf {
    Path::new(NVMET).join("ports").join(id.to_string())
}

pub(super) fn make(dir: &Path) -> Result<()> {
    fs::create_dir(dir).with_context(|| format!("cannot make {}", dir.display()))
}

pub(super) fn set(file: &Path, value: &str) -> Result<()> {
    let (path, text) = (file.to_owned(), value.to_owned());
    within(format!("setting {} to {value}", file.display()), move || {
        // Never made: a name that the kernel does not know is an error.
        use std::io::Write;
        fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
    })
}

fn word(file: &Path) -> Option<String> {
    Some(fs::read_to_string(file).ok()?.trim().to_owned())
}

fn ignore_missing(result: std::io::Result<()>) -> std::io::Result<()> {
    match result {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Runs slow work of the kernel in a thread that is left alone after a deadline.
pub(super) fn within(
    what: String,
    work: impl FnOnce() -> std::io::Result<()> + Send + 'static,
) -> Result<()> {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    let since = Instant::now();
    match ended.recv_timeout(WRITE_LIMIT) {
        Ok(result) => result.with_context(|| format!("{what} ({})", kernel_says("nvmet"))),
        Err(_) => bail!("{what}: not done after {:?}; the kernel still waits", since.elapsed()),
    }
}

#[cfg(test)]
mod tests;
