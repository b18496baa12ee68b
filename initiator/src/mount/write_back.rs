//! Writing a disk's page cache back, and asking who uses it: in a process of its own.
//!
//! Whoever waits for a write-back cannot be killed, and the write-back of a disk waits for the
//! process that serves it. Were that the same process, killing it would leave both for ever: its
//! waiting thread keeps the disk's node open, so the driver never sees it die, and never gives the
//! requests to the next one.
//!
//! The pages are written first, and a FLUSH follows. Which of the two failed matters: after a loss
//! every FLUSH fails (`on_loss`), and the way out of that is an unmount.

use std::io::{self, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::device::find_holder;
use crate::ublk::write_pages;

/// Exit code of the process when somebody uses the disk; who, it prints. Errors are the system's
/// numbers, below.
const IN_USE: u8 = 200;
/// Exit code of the process when the pages are written and the FLUSH behind them failed; its errno,
/// it prints.
const UNFLUSHED: u8 = 201;
/// How often the process is looked after.
const STEP: Duration = Duration::from_millis(5);

/// How it went.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum WrittenBack {
    /// All is with the target.
    Done,
    /// Nothing was done: the disk is used, in words.
    InUse(String),
    /// Every page is with the target. The FLUSH behind them failed with this errno.
    Unflushed(i32),
}

/// Has another process do it, and waits for that. With `unless_used`, a disk that somebody uses is
/// left alone. Blocks.
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
            // It may wait for the target, and end later.
            let _ = process.kill();
            anyhow::bail!("it takes longer than {within:?}");
        }
        std::thread::sleep(STEP);
    };
    match status.code().and_then(|code| u8::try_from(code).ok()) {
        Some(0) => Ok(WrittenBack::Done),
        Some(IN_USE) => Ok(WrittenBack::InUse(said(&mut process)?)),
        Some(UNFLUSHED) => {
            Ok(WrittenBack::Unflushed(said(&mut process)?.parse().unwrap_or(libc::EIO)))
        }
        Some(errno) => Err(io::Error::from_raw_os_error(errno.into()).into()),
        None => Err(anyhow::anyhow!("its process was killed")),
    }
}

/// What the process printed.
fn said(process: &mut Child) -> io::Result<String> {
    let mut text = String::new();
    if let Some(out) = process.stdout.take() {
        out.take(4096).read_to_string(&mut text)?;
    }
    Ok(text.trim().to_owned())
}

/// Does it in this process, which serves nothing, and returns its exit code.
#[must_use]
pub fn here(disk: &str, unless_used: bool) -> u8 {
    if unless_used && let Some(who) = find_holder(disk) {
        println!("{who}");
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
        // A file is nobody's disk.
        assert_eq!(here(&at("disk"), true), 0);
        // What has no pages says so.
        assert_eq!(i32::from(here("/dev/null", false)), libc::ESPIPE);
    }
}
