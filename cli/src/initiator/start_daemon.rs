//! `rblk-initiator mount`, `vhost` and `recover`: start the daemon of a mount, and wait until it
//! reports.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command as Process, Stdio};
use std::time::Duration;

use anyhow::Context;
use rblk_config::{Exit, MountConfig};
use rblk_operate::mount::flags::{
    MountArgs, OF_ROOT_DISK, RecoverArgs, Report, StartFailed, VhostArgs,
};
use rblk_operate::mount::left::{self, LeftMount, Remains};
use rblk_operate::mount::lock::MountLock;
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::mount::not_there::{NotInBackground, NotRoot};
use rblk_operate::mount::run_dir::{make_private, names};
use rblk_operate::mount::{child, image, log_file};
use rblk_operate::{Output, said_once, ublk_faults};

use super::came::Came;
use super::exit_code::exit_of;
use super::initiatord::{become_daemon, initiatord};
use super::known::must_be_known;
use super::root_disk;
use crate::program::daemon::{ENVIRONMENT, LentDescriptors};

/// Time for a daemon that has reported its failure to end.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// Closes the descriptors of the calling script or terminal, so that the daemon does not inherit
/// them.
fn close_lent_on_exec() -> anyhow::Result<()> {
    rblk_runtime::close_lent_on_exec().context("closing what this process inherited (close_range)")
}

pub(super) fn mount(args: &MountArgs, output: Output) -> anyhow::Result<Exit> {
    let config = args.configuration()?;
    if args.dump_config {
        output.toml(&config.dump()?)?;
        return Ok(Exit::Ok);
    }
    if !nix::unistd::geteuid().is_root() {
        return Err(NotRoot.into());
    }
    let exit = start(args, &config, output)?;
    if output == Output::Table {
        // A certain one was allowed (--any-kernel), or the mount would not be there.
        for fault in ublk_faults::of_this_process() {
            output.aside(format_args!("rblk-initiator: WARN {fault}"));
        }
    }
    Ok(exit)
}

/// Serves in this process, or starts the process that serves.
fn start(args: &MountArgs, config: &MountConfig, output: Output) -> anyhow::Result<Exit> {
    if args.foreground {
        return Err(become_daemon(LentDescriptors::Standard));
    }
    let name = args.mount_name(config)?;
    let place = args.root_disk.as_deref().map_or(Place::Here, Place::RootOfItsOwn);
    let status = start_daemon(&name, std::env::args_os().skip(1), place)?;
    output.answer(&status, || status.device.clone())?;
    if output == Output::Table {
        for warning in args.config.as_deref().map(MountConfig::warnings).unwrap_or_default() {
            output.aside(format_args!("rblk-initiator: WARN {warning}"));
        }
        if let Some(line) = status.fallback_line() {
            output.aside(format_args!("rblk-initiator: WARN {name}: {line}"));
        }
        if let Some(found) = image::elsewhere(&status) {
            output.aside(format_args!("{}: WARNING: {found}", status.name));
        }
    }
    Ok(Exit::Ok)
}

pub(super) fn vhost(args: &VhostArgs, output: Output) -> anyhow::Result<Exit> {
    let config = args.configuration()?;
    if args.mount.dump_config {
        output.toml(&config.dump()?)?;
        return Ok(Exit::Ok);
    }
    if !args.mount.foreground && !nix::unistd::geteuid().is_root() {
        return Err(NotInBackground.into());
    }
    start(&args.mount, &config, output)
}

/// The files of a daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place<'a> {
    /// Those of this process.
    Here,
    /// Those of a directory, for the disk with the root file system.
    RootOfItsOwn(&'a Path),
}

/// Starts a daemon for the mount of a name, in the background, and waits until it reports success
/// or failure.
fn start_daemon(
    name: &str,
    args: impl IntoIterator<Item = impl AsRef<OsStr>>,
    place: Place<'_>,
) -> anyhow::Result<Box<MountStatus>> {
    let path = initiatord()?;
    let log = log_file::path_of(name);
    let was_there = log.exists();
    if let Some(dir) = log.parent() {
        make_private(dir).with_context(|| format!("making {}", dir.display()))?;
    }
    let known = names();
    log_file::remove_old(|other| other == name || known.iter().any(|known| known == other));
    let log_file =
        log_file::open(&log).with_context(|| format!("opening the log {}", log.display()))?;
    close_lent_on_exec()?;
    let mut daemon = Process::new(&path);
    if let Place::RootOfItsOwn(dir) = place {
        root_disk::enter(dir)?;
        daemon.arg0(format!("{OF_ROOT_DISK}rblk-initiatord"));
    }
    // The daemon is started by exec, not only by fork: RDMA objects do not survive a fork.
    let (variable, value) = ENVIRONMENT;
    let mut child = daemon
        .args(args)
        .env(variable, value)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log_file)
        .spawn()
        .with_context(|| format!("cannot run {}: is rblk installed whole?", path.display()))?;
    let mut line = String::new();
    if let Some(out) = child.stdout.take() {
        BufReader::new(out).read_line(&mut line)?;
    }
    match serde_json::from_str(&line) {
        Ok(Report::Mounted(status)) => Ok(status),
        Ok(Report::Failed { error, exit }) => {
            // The kernel may keep the process, if a command to the driver never returns.
            let ended = child::ended(child, END_PATIENCE)?.is_some();
            if !was_there && ended {
                // The process ended in good order: its log adds nothing to the report here.
                let _ = std::fs::remove_file(&log);
            }
            let exit = Exit::of_code(exit).unwrap_or(Exit::Failure);
            Err(StartFailed { error, exit }.into())
        }
        Err(_) => {
            anyhow::bail!("rblk-initiatord ended without a word; its log is {}", log.display())
        }
    }
}

/// Recovers mounts after their processes died. With several mounts, each is tried; the exit code is
/// that of the first failure.
pub(super) fn recover(args: &RecoverArgs, output: Output) -> anyhow::Result<Exit> {
    if let Some(name) = &args.which.name {
        must_be_known(name)?;
    }
    if !nix::unistd::geteuid().is_root() {
        return Err(NotRoot.into());
    }
    if args.foreground || args.check {
        return Err(become_daemon(LentDescriptors::Standard));
    }
    let verbose = std::iter::repeat_n("-v", args.verbose.into());
    if let Some(name) = &args.which.name {
        let status = start_daemon(name, ["recover", name].into_iter().chain(verbose), Place::Here)?;
        output.answer(&status, || status.device.clone())?;
        return Ok(Exit::Ok);
    }
    let (mut exit, mut came) = (Exit::Ok, Vec::new());
    for name in names() {
        if MountLock::is_held(&name) {
            continue;
        }
        if !has_note(&name)? {
            continue;
        }
        let flags = ["recover", &name].into_iter().chain(verbose.clone());
        match start_daemon(&name, flags, Place::Here) {
            Ok(status) => {
                output.text(&status.device)?;
                came.push(Came { name, outcome: Some(status), error: None });
            }
            Err(error) => {
                let text = said_once(error.as_ref());
                output.aside(match error.is::<StartFailed>() {
                    true => format!("rblk-initiator: {text}"),
                    false => format!("rblk-initiator: {name}: {text}"),
                });
                let failed = exit_of(&error);
                // A recovery clears the leftovers of a mount after a restart of the machine, or of
                // a mount without a device. That is no failure.
                if exit == Exit::Ok && failed != Exit::NotConnected {
                    exit = failed;
                }
                came.push(Came { name, outcome: None, error: Some(text) });
            }
        }
    }
    output.answer(&came, String::new)?;
    Ok(exit)
}

/// Whether a mount without a live process has a note, usable or not.
fn has_note(name: &str) -> anyhow::Result<bool> {
    let left = left::look(&initiatord()?, &[name.to_owned()])?;
    let Some(LeftMount { found, .. }) = left.mounts.into_iter().next() else { return Ok(false) };
    let Remains { note, note_fault, .. } = found?;
    Ok(note.is_some() || note_fault.is_some())
}
