//! [`enter`]: the root of the process that serves the disk with this host's root file system.
//!
//! An initramfs starts that process. Its files are deleted before the root file system becomes `/`,
//! and the files of the root file system come from the disk itself: a process that needs one of
//! them to serve a read waits for itself. So the process has a root of its own, a file system in
//! memory with the programs and libraries. Its mount namespace receives no mount of others, so it
//! never holds the root file system.
//!
//! [`must_have`]: an upgrade of that process takes a program of its root.

use std::path::Path;

use anyhow::Context;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use rblk_operate::mount::flags::OF_ROOT_DISK;

/// What the process sees of this host, and whether mounts below are seen, too. The directory is
/// itself below `/run`.
const SEEN: [(&str, bool); 4] = [("dev", true), ("proc", true), ("sys", true), ("run", false)];
const NONE: Option<&str> = None;

/// Makes a directory, which is a mount point, the root of this process, in a mount namespace of its
/// own.
///
/// # Errors
/// The system's.
pub(super) fn enter(dir: &Path) -> anyhow::Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("a mount namespace of our own")?;
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)
        .context("making the mount namespace private")?;
    for (name, below) in SEEN {
        let (here, there) = (Path::new("/").join(name), dir.join(name));
        std::fs::create_dir_all(&there).with_context(|| there.display().to_string())?;
        let recursive = if below { MsFlags::MS_REC } else { MsFlags::empty() };
        mount(Some(&here), &there, NONE, MsFlags::MS_BIND | recursive, NONE)
            .with_context(|| format!("showing {} in {}", here.display(), dir.display()))?;
    }
    std::env::set_current_dir(dir).with_context(|| dir.display().to_string())?;
    mount(Some("."), "/", NONE, MsFlags::MS_MOVE, NONE)
        .with_context(|| format!("moving {} to /; is it a mount point?", dir.display()))?;
    nix::unistd::chroot(".").context("chroot")?;
    std::env::set_current_dir("/").context("the directory /")
}

/// Checks that the process of a mount finds that program under the same path, if it has a root of
/// its own.
///
/// # Errors
/// It finds another one there, or none: the error names the command that copies the program.
pub(super) fn must_have(pid: u32, program: &Path) -> anyhow::Result<()> {
    let process = Path::new("/proc").join(pid.to_string());
    let words = std::fs::read(process.join("cmdline")).unwrap_or_default();
    if !words.starts_with(OF_ROOT_DISK.to_string().as_bytes()) {
        return Ok(());
    }
    let inside = process.join("root").join(program.strip_prefix("/").unwrap_or(program));
    let wanted = std::fs::read(program).with_context(|| program.display().to_string())?;
    if std::fs::read(inside).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    anyhow::bail!(
        "the process of the root disk has its own files, and another {} among them; first copy the new programs: \
         `/usr/lib/rblk/boot-root /run/rblk/root`",
        program.display()
    )
}
