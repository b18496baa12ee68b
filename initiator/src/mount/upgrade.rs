//! Hands a device over to another program in this process, while the device is in use: its users
//! notice a pause.
//!
//! The queues hold new requests, wait for the answers to sent ones, and leave the device, which
//! then waits for its next server with the unsent requests
//! ([`Mount::leave`](super::mounted::Mount::leave)). Acknowledged writes are flushed, because the
//! next program has no copies of them. The session is kept: the next program resumes it in a higher
//! epoch. Then the program takes this process over by exec, so that the service manager and the log
//! notice nothing. Where that fails, this program resumes the mount in the same way.
//!
//! The hand-over is like an orderly crash: after any failure on the way,
//! [`recover`](super::recover) brings the mount back.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::unistd::execv;

use super::mounted::Mount;
use rblk_operate::mount::flags::OF_ROOT_DISK;
use rblk_operate::mount::lock::MountLock;
use rblk_operate::mount::mount_ask::Response;

/// The reason why a device cannot be handed over to a program, if this process can see one.
pub(super) fn refusal(mount: &Mount, program: &Path) -> Option<Response> {
    if let Some(response) = mount.refuses_hand_over() {
        return Some(response);
    }
    let refuse = |why: &str| Some(Response::Error(format!("{}: {why}", program.display())));
    if !program.is_absolute() {
        return refuse("not an absolute path");
    }
    match program.metadata() {
        Err(error) => refuse(&error.to_string()),
        Ok(meta) if !meta.is_file() || meta.permissions().mode() & 0o111 == 0 => {
            refuse("not a program")
        }
        Ok(_) => None,
    }
}

/// Replaces this program; the new one keeps the lock. Returns only after a failure; this process
/// has the lock then as before.
pub(super) fn become_program(program: &Path, lock: &MountLock) -> std::io::Error {
    let error = exec(program, lock);
    // Child processes of this one must not hold the name.
    if let Err(error) = lock.close_on_exec() {
        tracing::warn!(%error, "the lock of the mount");
    }
    error
}

fn exec(program: &Path, lock: &MountLock) -> std::io::Error {
    // An earlier program may have kept its inherited descriptors.
    if let Err(error) = rblk_runtime::close_lent_on_exec().and_then(|()| lock.keep_over_exec()) {
        return error;
    }
    let name = own_name();
    let words = [&*name, "recover", lock.name(), "--foreground", "--lock-on-stdin"];
    let program = CString::new(program.as_os_str().as_bytes());
    let words: Result<Vec<CString>, _> = words.into_iter().map(CString::new).collect();
    match (program, words) {
        // Not through a shell: it would take a damaged program for a script.
        (Ok(program), Ok(words)) => match execv(&program, &words) {
            Err(error) => error.into(),
            Ok(never) => match never {},
        },
        _ => std::io::ErrorKind::InvalidInput.into(),
    }
}

/// The name of this process, for the program that takes it over: that of the disk with the root
/// file system keeps its mark.
fn own_name() -> String {
    let first = std::env::args_os().next().unwrap_or_default();
    let mark = first.to_string_lossy().chars().next().filter(|first| *first == OF_ROOT_DISK);
    mark.into_iter().collect::<String>() + "rblk-initiatord"
}
