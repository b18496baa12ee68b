//! Writes a disk's page cache back, and finds the users of the disk: in a process of its own.
//!
//! A thread that waits for a write-back cannot be killed, and the write-back of a disk waits for
//! the process that serves it. If both were one process, killing it would not end it: its waiting
//! thread keeps the disk's node open, so the driver does not see the process die, and does not give
//! the requests to the next one.
//!
//! The file systems on the disk are synced first, if the disk is in use and must be removed all the
//! same: their unwritten data is in no page of the disk. The pages of the disk are written next,
//! and a FLUSH follows. The result names the step that failed: after a loss every FLUSH fails
//! (`on_loss`), and users recover from that by an unmount.

use std::fs::File;
use std::io;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::file_systems::sync;
use super::holder::{find_holder, what_is_left};
use crate::front::ublk::write_pages;
use rblk_operate::mount::child::ended;

/// Exit code of the process when the disk is in use; it prints the user. The numbers of the
/// system's errors are below.
const IN_USE: u8 = 200;
/// Exit code of the process when the pages are written and the following FLUSH failed; it prints
/// the errno.
const UNFLUSHED: u8 = 201;
/// Time to look for users of a disk: nothing is written, but the look may read from the target.
const LOOK_TIME: Duration = Duration::from_secs(10);

/// The action on a disk that is in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IfUsed {
    /// Nothing.
    Refuse,
    /// Nothing, also to an unused disk: it is only checked.
    OnlyLook,
    /// The disk is written back like any other, after its file systems.
    Sync,
}

/// The result of a write-back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum WrittenBack {
    /// The target has every page of the disk, and a FLUSH came after.
    Done(Left),
    /// Nothing was done: the disk is in use. Names the user, in words.
    InUse(String),
    /// The target has every page. The FLUSH after them failed with this errno.
    Unflushed(i32),
}

/// The leftovers of a disk that is removed while it is in use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Left {
    /// Its last user, in words.
    pub(crate) used: Option<String>,
    /// The first thing on it that could not be synced, in words: its data may be lost.
    pub(crate) unsynced: Option<String>,
}

impl Left {
    /// A line for each; empty for `None`.
    fn printed(&self) -> String {
        let line = |text: &Option<String>| text.clone().unwrap_or_default().replace('\n', " ");
        format!("{}\n{}", line(&self.used), line(&self.unsynced))
    }

    fn from_printed(text: &str) -> Self {
        let mut lines = text.lines().map(|line| (!line.is_empty()).then(|| line.to_owned()));
        Self { used: lines.next().flatten(), unsynced: lines.next().flatten() }
    }
}

/// The user of a disk, in words. Another process looks, which also opens the disk. Blocks.
///
/// # Errors
/// The process could not look, or the disk does not answer.
pub fn user_of(disk: &str) -> anyhow::Result<Option<String>> {
    match elsewhere(disk, IfUsed::OnlyLook, LOOK_TIME)? {
        WrittenBack::InUse(user) => Ok(Some(user)),
        WrittenBack::Done(_) | WrittenBack::Unflushed(_) => Ok(None),
    }
}

/// Writes the disk back in another process, and waits for it. Blocks.
///
/// # Errors
/// The write-back failed, or takes longer than `within`.
pub(crate) fn elsewhere(
    disk: &str,
    if_used: IfUsed,
    within: Duration,
) -> anyhow::Result<WrittenBack> {
    let mut process = Command::new("/proc/self/exe");
    process.args(["write-back", disk]).stdin(Stdio::null()).stdout(Stdio::piped());
    match if_used {
        IfUsed::Refuse => process.arg("--unless-used"),
        IfUsed::OnlyLook => process.args(["--unless-used", "--only-look"]),
        IfUsed::Sync => &mut process,
    };
    let Some((status, printed)) = ended(process.spawn()?, within)? else {
        anyhow::bail!("it takes longer than {within:?}");
    };
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    match code {
        Some(0) => Ok(WrittenBack::Done(Left::from_printed(&printed))),
        Some(IN_USE) => Ok(WrittenBack::InUse(printed)),
        Some(UNFLUSHED) => {
            let errno = printed.lines().last().and_then(|line| line.parse().ok());
            Ok(WrittenBack::Unflushed(errno.unwrap_or(libc::EIO)))
        }
        Some(errno) => Err(io::Error::from_raw_os_error(errno.into()).into()),
        None => Err(anyhow::anyhow!("its process was killed")),
    }
}

/// Writes the disk back in this process, which serves no disk. Returns its exit code.
#[must_use]
pub fn here(disk: &str, if_used: IfUsed) -> u8 {
    if if_used == IfUsed::Sync {
        let used = what_is_left(disk);
        println!("{}", Left { used, unsynced: sync(disk) }.printed());
    } else if let Some(user) = find_holder(disk) {
        println!("{user}");
        return IN_USE;
    }
    if if_used == IfUsed::OnlyLook {
        return 0;
    }
    // A read-only disk cannot be opened for writing, and a sync needs no write access.
    let errno = |error: io::Error| error.raw_os_error().unwrap_or(libc::EIO);
    let written = File::open(disk).and_then(|disk| write_pages(&disk).map(|()| disk));
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
    fn leftovers_survive_the_way_between_two_processes() {
        let text = |text: &str| Some(text.to_owned());
        for (used, unsynced) in [
            (None, None),
            (text("ext4 at /mnt was still mounted"), None),
            (None, text("/dev/dm-0: no")),
            (text("dm-0 still stood on it"), text("/dev/dm-0: no")),
        ] {
            let left = Left { used, unsynced };
            // The reader trims the end of the last line.
            assert_eq!(Left::from_printed(left.printed().trim_end()), left);
        }
        let odd = Left { used: text("ext4 at /a\nb"), unsynced: None };
        assert_eq!(Left::from_printed(&odd.printed()).unsynced, None);
    }

    #[test]
    fn the_exit_code_is_the_systems_number() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        assert_eq!(i32::from(here(&at("none"), IfUsed::Sync)), libc::ENOENT);
        std::fs::write(at("disk"), "data").unwrap();
        assert_eq!(here(&at("disk"), IfUsed::Sync), 0);
        // A file is not a disk, so it is not in use.
        assert_eq!(here(&at("disk"), IfUsed::Refuse), 0);
        // A device without pages fails.
        assert_eq!(i32::from(here("/dev/null", IfUsed::Sync)), libc::ESPIPE);
    }
}
