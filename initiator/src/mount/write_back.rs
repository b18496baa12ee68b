//! Writes a disk's page cache back, and finds out what uses the disk: in a process of its own.
//!
//! A thread that waits for a write-back cannot be killed, and the write-back of a disk waits for
//! the process that serves it. If both were one process, killing it would not end it: its waiting
//! thread keeps the disk's node open, so the driver does not see the process die, and does not give
//! the requests to the next one.
//!
//! The pages are written first, and a FLUSH follows. It matters which of the two failed: after a
//! loss every FLUSH fails (`on_loss`), and users recover from that by an unmount.

use std::io::{self, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::holder::find_holder;
use crate::ublk::write_pages;

/// Exit code of the process when the disk is in use; it prints by what. The numbers of the system's
/// errors are below.
const IN_USE: u8 = 200;
/// Exit code of the process when the pages are written and the FLUSH after them failed; it prints
/// the errno.
const UNFLUSHED: u8 = 201;
/// How often to check whether the process has ended.
const STEP: Duration = Duration::from_millis(5);

/// How it went.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum WrittenBack {
    /// The target has everything.
    Done,
    /// Nothing was done: the disk is used, in words.
    InUse(String),
    /// The target has every page. The FLUSH after them failed with this errno.
    Unflushed(i32),
}

/// Writes the disk back in another process, and waits for it. With `unless_used`, does nothing to a
/// disk that is in use. Blocks.
///
/// # Errors
/// The write-back failed, or takes longer than `within`.
pub(super) fn elsewhere(
    disk: &str,
    unless_used: bool,
    within: Duration,
) -> anyhow::Result<WrittenBack> {
    let mut process = Command::new("/proc/self/exe");
    process.args(["write-back", disk]).stdin(Stdio::null()).stdout(Stdio::piped());
    if unless_used {
        process.arg("--unless-used");
    }
    let begun = Instant::now();
    let mut process = process.spawn()?;
    let status = loop {
        if let Some(status) = process.try_wait()? {
            break status;
        }
        if begun.elapsed() >= within {
            // The process may wait for the target, and end later.
            let _ = process.kill();
            anyhow::bail!("it takes longer than {within:?}");
        }
        std::thread::sleep(STEP);
    };
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(0) => Ok(WrittenBack::Done),
        Some(IN_USE) => Ok(WrittenBack::InUse(printed(&mut process)?)),
        Some(UNFLUSHED) => {
            Ok(WrittenBack::Unflushed(printed(&mut process)?.parse().unwrap_or(libc::EIO)))
        }
        Some(errno) => Err(io::Error::from_raw_os_error(errno.into()).into()),
        None => Err(anyhow::anyhow!("its process was killed")),
    }
}

/// What the process printed.
fn printed(process: &mut Child) -> io::Result<String> {
    let mut text = String::new();
    if let Some(out) = process.stdout.take() {
        out.take(4096).read_to_string(&mut text)?;
    }
    Ok(text.trim().to_owned())
}

/// Writes the disk back in this process, which serves nothing. Returns its exit code.
#[must_use]
pub fn here(disk: &str, unless_used: bool) -> u8 {
    if unless_used && let Some(user) = find_holder(disk) {
        println!("{user}");
        return IN_USE;
    }
    // A disk that is read-only cannot be opened for writing, and this does not need it.
    let errno = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
    let written = std::fs::File::open(disk).and_then(|disk| write_pages(&disk).map(|()| disk));
    match written.map(|disk| disk.sync_all()) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            println!("{}", errno(error));
            UNFLUSHED
        }
        Err(error) => u8::try_from(errno(error)).ok().filter(|errno| *errno < IN_USE).unwrap_or(5),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_the_systems_number() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        assert_eq!(i32::from(here(&at("none"), false)), libc::ENOENT);
        std::fs::write(at("disk"), "data").unwrap();
        assert_eq!(here(&at("disk"), false), 0);
        // A file is not a disk, so it is not in use.
        assert_eq!(here(&at("disk"), true), 0);
        // What has no pages says so.
        assert_eq!(i32::from(here("/dev/null", false)), libc::ESPIPE);
    }
}
