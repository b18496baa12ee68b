//! `rblk-initiator umount`: removes a disk that is not in use. This command may see every process
//! of the host, and the process that serves the disk may not, so the command looks for users of the
//! disk. A mount without a note is reached through the driver and by a signal.

use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use crate::front::ublk::{DeviceInfo, UblkError, disk_path};
use crate::mount::device::file_systems::mounts_on;
use crate::mount::device::holder::Use;
use crate::mount::device::server::{ServedBy, Server};
use crate::mount::device::write_back::user_of;
use crate::mount::note::Note;
use crate::mount::note::leftovers::{self, Purpose};
use anyhow::Context;
use nix::sys::signal::Signal;
use rblk_config::Exit;
use rblk_operate::mount::mount_ask::{Ask, Response, ask, lock_unless_served, socket_path};
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::mount::not_there::NotMounted;
use rblk_operate::mount::run_dir::{must_be_readable, names};
use rblk_operate::{Output, said_once};
use serde::Serialize;
use tokio::runtime::Runtime;

/// Time for the answer of a mount.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// That time with `--force`.
const FORCED_TIME: Duration = Duration::from_secs(5);
/// Time for umount(8) of one file system.
const FILE_SYSTEM_TIME: Duration = Duration::from_secs(60);
/// Time for a process to end after a signal: a little more than its write-back may take.
const SIGNAL_TIME: Duration = Duration::from_secs(90);
/// Limit of the file systems that one command unmounts.
const MOUNTS_MAX: u32 = 256;
/// Interval of polls.
const LOOK: Duration = Duration::from_millis(20);

/// The result of an unmount, in JSON.
#[derive(Serialize)]
struct Unmounted<'n> {
    name: &'n str,
    /// No process served the mount any more, so only its leftovers were removed.
    was_dead: bool,
}

/// Unmounts the mount of a name or a device.
///
/// # Errors
/// The disk is in use, or the unmount fails.
pub fn umount(what: &str, file_systems: bool, force: bool, output: Output) -> anyhow::Result<Exit> {
    must_be_readable()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let Some(name) = find_mount(what, &runtime) else {
        return umount_without_note(what, file_systems, force, output);
    };
    let lock = runtime.block_on(lock_unless_served(&name));
    if let Some(lock) = lock.context("the lock of the mount")? {
        // No process serves the mount, so this command clears its leftovers.
        leftovers::claim(&lock, |_| Purpose::Unmount { force })?;
        output.aside(format_args!("{name}: its process had died; removed what it left"));
        output.answer(&Unmounted { name: &name, was_dead: true }, String::new)?;
        return Ok(Exit::Ok);
    }
    if !force && let Some(mount) = runtime.block_on(status(&name)) {
        if file_systems && requests_wait(&mount.state) && !mounts_on(&mount.device).is_empty() {
            anyhow::bail!(
                "{}: its target is not connected, and requests wait for it, so no file system on it can be unmounted",
                mount.device
            );
        }
        if let Some(why) = refusal(&mount.device, file_systems) {
            anyhow::bail!(why);
        }
    }
    let path = socket_path(&name);
    let time = if force { FORCED_TIME } else { ANSWER_TIME };
    match runtime.block_on(ask(&path, Ask::Unmount { force }, time)) {
        Ok(Response::Done) => {
            output.answer(&Unmounted { name: &name, was_dead: false }, String::new)?;
            Ok(Exit::Ok)
        }
        Ok(Response::Busy(text) | Response::Error(text)) => anyhow::bail!(text),
        Ok(Response::Status(_) | Response::Reloaded(_)) => {
            anyhow::bail!("the mount answered something else")
        }
        Err(error) => Err(error).with_context(|| format!("asking the mount at {}", path.display())),
    }
}

/// Time for a mount to report its state.
const STATUS_TIME: Duration = Duration::from_secs(2);

async fn status(name: &str) -> Option<MountStatus> {
    match ask(&socket_path(name), Ask::Status, STATUS_TIME).await {
        Ok(Response::Status(status)) => Some(*status),
        _ => None,
    }
}

/// The name of the mount with that name or device.
fn find_mount(what: &str, runtime: &Runtime) -> Option<String> {
    names().into_iter().find(|name| {
        let device = || match runtime.block_on(status(name)) {
            Some(status) => Some(status.device),
            None => Note::read(name).ok().flatten().map(|note| note.disk()),
        };
        name == what || what.starts_with("/dev/") && device().is_some_and(|device| device == what)
    })
}

/// The reason why a disk cannot be removed. With `file_systems`, its file systems are unmounted
/// first.
fn refusal(device: &str, file_systems: bool) -> Option<String> {
    if file_systems && let Err(error) = unmount_each(|| mounts_on(device), unmount_file_system) {
        return Some(said_once(error.as_ref()));
    }
    let used = Use::find_before_unmount(device);
    used.map(|used| format!("{device} is in use: {}", used.refusal(device)))
}

/// Whether requests to a disk wait in this state of its mount: umount(8) would wait, too. In other
/// states they are served, or fail at once.
fn requests_wait(state: &str) -> bool {
    matches!(state, "reconnecting" | "waiting")
}

/// Unmounts file systems, one after another. Where mounts propagate, one takes others along, so the
/// list is read again after each.
fn unmount_each(
    mounts: impl Fn() -> Vec<String>,
    unmount: impl Fn(&str) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for _ in 0..MOUNTS_MAX {
        let Some(at) = mounts().into_iter().next() else { return Ok(()) };
        if let Err(error) = unmount(&at)
            && mounts().contains(&at)
        {
            return Err(error.context(at));
        }
    }
    anyhow::bail!(
        "a file system is mounted again after {MOUNTS_MAX} unmounts; first stop its .automount unit, or the program \
         that mounts it"
    )
}

/// Runs umount(8), which knows the helpers of file systems. umount(8) reports its own errors.
fn unmount_file_system(at: &str) -> anyhow::Result<()> {
    let mut process = Command::new("umount").arg("--").arg(at).spawn().context("umount(8)")?;
    let until = Instant::now() + FILE_SYSTEM_TIME;
    let status: ExitStatus = loop {
        if let Some(status) = process.try_wait()? {
            break status;
        }
        if Instant::now() >= until {
            // The killed process may wait for the disk, and end later.
            let _ = process.kill();
            anyhow::bail!("umount takes longer than {FILE_SYSTEM_TIME:?}");
        }
        std::thread::sleep(LOOK);
    };
    anyhow::ensure!(status.success(), "umount ended with {status}");
    Ok(())
}

/// Removes a device without a note.
fn umount_without_note(
    what: &str,
    file_systems: bool,
    force: bool,
    output: Output,
) -> anyhow::Result<Exit> {
    let is_it = |info: &DeviceInfo| disk_path(info.id).to_str() == Some(what);
    let found = match what.starts_with("/dev/") {
        true => match leftovers::without_note() {
            // Without a driver there is no device.
            Err(UblkError::NoDriver { .. } | UblkError::NotPermitted { .. }) => None,
            found => found?.into_iter().find(is_it),
        },
        false => None,
    };
    let Some(info) = found else { return Err(NotMounted { what: what.to_owned() }.into()) };
    if let Some(server) = Server::of(&info) {
        let pid = server.pid();
        end_server(what, &info, &server, file_systems, force)?;
        output.aside(format_args!(
            "{what}: its note was gone; process {pid}, which served it, has ended"
        ));
        output.answer(&Unmounted { name: what, was_dead: false }, String::new)?;
        return Ok(Exit::Ok);
    }
    if ServedBy::of(&info) == ServedBy::Elsewhere {
        anyhow::bail!(
            "{what} is served elsewhere (in another PID namespace or container), and its note is not here; unmount it \
             there"
        );
    }
    if !force {
        anyhow::bail!(
            "the process of {what} died, its note is gone, and requests to it wait; --force fails them"
        );
    }
    leftovers::remove_without_note(&info)?;
    output.aside(format_args!("{what}: its process had died; removed it"));
    output.answer(&Unmounted { name: what, was_dead: true }, String::new)?;
    Ok(Exit::Ok)
}

/// Ends a living server by a signal: no command can ask it.
fn end_server(
    device: &str,
    info: &DeviceInfo,
    server: &Server,
    file_systems: bool,
    force: bool,
) -> anyhow::Result<()> {
    let pid = server.pid();
    if !force {
        if let Some(why) = refusal(device, file_systems) {
            anyhow::bail!(why);
        }
        let used = user_of(device).with_context(|| format!("looking for the users of {device}"))?;
        if let Some(user) = used {
            anyhow::bail!("{device} is in use: {user}");
        }
    }
    let (signals, time) = match force {
        // The second signal ends a process that waits for its write-back.
        true => (&[Signal::SIGTERM, Signal::SIGINT][..], FORCED_TIME),
        false => (&[Signal::SIGTERM][..], SIGNAL_TIME),
    };
    for signal in signals {
        server
            .signal(*signal)
            .with_context(|| format!("{signal} to process {pid}, which serves {device}"))?;
    }
    let until = Instant::now() + time;
    while !server.has_ended() || leftovers::is_there(info)? || Path::new(device).exists() {
        anyhow::ensure!(
            Instant::now() < until,
            "process {pid} was told to end, and serves {device} after {time:?}"
        );
        std::thread::sleep(LOOK);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn requests_wait_where_the_target_may_be_back() {
        for (state, waits) in [
            ("connected", false),
            ("waiting", true),
            ("reconnecting", true),
            ("failing", false),
            ("volume removed", false),
            ("fenced", false),
            ("volume lost", false),
        ] {
            assert_eq!(requests_wait(state), waits, "{state}");
        }
    }

    #[test]
    fn an_unmount_that_takes_others_along_is_no_failure() {
        let mounts =
            RefCell::new(vec!["/b/data".to_owned(), "/a/data".to_owned(), "/c".to_owned()]);
        let unmounted = RefCell::new(Vec::new());
        let unmount = |at: &str| {
            unmounted.borrow_mut().push(at.to_owned());
            anyhow::ensure!(mounts.borrow().iter().any(|other| other == at), "not mounted");
            // The peer of a shared mount is unmounted, too.
            mounts.borrow_mut().retain(|other| other != at && !other.ends_with("/data"));
            Ok(())
        };
        unmount_each(|| mounts.borrow().clone(), unmount).unwrap();
        assert_eq!(*unmounted.borrow(), ["/b/data", "/c"]);
    }

    #[test]
    fn a_mount_that_another_process_unmounts_is_no_failure() {
        let mounts = RefCell::new(vec!["/a".to_owned()]);
        let unmount = |_: &str| {
            mounts.borrow_mut().clear();
            anyhow::bail!("not mounted")
        };
        unmount_each(|| mounts.borrow().clone(), unmount).unwrap();
        let busy = |_: &str| anyhow::bail!("target is busy");
        let error = unmount_each(|| vec!["/a".to_owned()], busy).unwrap_err();
        assert_eq!(said_once(error.as_ref()), "/a: target is busy");
    }

    #[test]
    fn a_mount_that_keeps_coming_back_ends_the_command() {
        let count = RefCell::new(0);
        let unmount = |_: &str| {
            *count.borrow_mut() += 1;
            Ok(())
        };
        let error = unmount_each(|| vec!["/a".to_owned()], unmount).unwrap_err();
        assert!(error.to_string().contains(".automount"), "{error}");
        assert_eq!(*count.borrow(), MOUNTS_MAX);
    }
}
