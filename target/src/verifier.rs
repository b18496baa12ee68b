//! [`LineageFile`]: what a target remembers from one run to the next, so that initiators learn when
//! writes that it acknowledged may be lost. The [`WriteVerifier`] of a volume is made of it.
//!
//! | the run before this one | process lineage | machine lineage |
//! | --- | --- | --- |
//! | stopped cleanly: everything acknowledged was made durable first | kept | kept |
//! | died, and the machine has not booted since | new | kept |
//! | died, and the machine booted since | new | new |
//! | unknown: no file, or not one of ours | new | new |
//!
//! A volume whose acknowledged writes may be in the process's own memory follows the process
//! lineage. A volume whose writes went to the kernel follows the machine lineage. A volume in
//! memory follows the run.
//!
//! What must stay true: the file says `clean = false`, durably, before anything is served. It says
//! `clean = true` only after everything acknowledged was made durable. The file is locked as long
//! as the target runs. Where that is not possible (no right to write there, or another target of
//! the same name), the lineages are new at every start: initiators then take every restart for a
//! loss, which is the safe mistake.
//!
//! A run that lost acknowledged writes without dying renounces its lineages: it replaces the file
//! by one with fresh lineages, or, where there is no space for that, removes the file. Either way
//! the next run has new lineages.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use rblk_protocol::{InstanceId, Name, WriteVerifier};
use serde::{Deserialize, Serialize};

use crate::durable;
use crate::volume::{CacheMode, Placement, Volume};

/// Form of the file.
const FORM: u32 = 1;
/// Longest file that is read.
const FILE_MAX: u64 = 4096;
/// How long to wait for the lock: a target that was killed holds it until its process is gone, like
/// the locks of its stores.
const LOCK_WAIT: Duration = Duration::from_millis(500);
/// Step of that wait.
const LOCK_STEP: Duration = Duration::from_millis(20);

/// Two names that change when acknowledged writes may have been lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lineage {
    /// Changes when what was in a target's own memory may be lost.
    pub process: [u8; 16],
    /// Changes when what was in the kernel's memory or a disk's cache may be lost.
    pub machine: [u8; 16],
}

impl Lineage {
    /// The verifier of a volume as this run, `instance`, serves it.
    #[must_use]
    pub(crate) fn verifier_for(&self, volume: &Volume, instance: InstanceId) -> WriteVerifier {
        match (&volume.placement, volume.cache) {
            (Placement::Store, CacheMode::WriteBack) => WriteVerifier(self.process),
            // The kernel has what was acknowledged, in its page cache or on the disk.
            (Placement::Store, CacheMode::None | CacheMode::WriteThrough) => {
                WriteVerifier(self.machine)
            }
            (Placement::Memory(_) | Placement::Null, _) => WriteVerifier(instance.0),
        }
    }
}

/// What the file holds.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Remembered {
    version: u32,
    boot_id: String,
    process: String,
    machine: String,
    clean: bool,
}

/// How the run before this one ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    Clean,
    ProcessDied,
    MachineDied,
    Unknown,
}

/// The state of a run that begins after `old`, on a machine whose boot has that id. `fresh` are
/// random.
fn begin(old: Option<&Remembered>, boot_id: &str, fresh: Lineage) -> (Before, Lineage) {
    let Some((old, process, machine)) = old
        .filter(|old| old.version == FORM)
        .and_then(|old| Some((old, from_hex(&old.process)?, from_hex(&old.machine)?)))
    else {
        return (Before::Unknown, fresh);
    };
    if old.clean {
        (Before::Clean, Lineage { process, machine })
    } else if old.boot_id == boot_id && !boot_id.is_empty() {
        (Before::ProcessDied, Lineage { machine, ..fresh })
    } else {
        (Before::MachineDied, fresh)
    }
}

fn to_hex(bytes: [u8; 16]) -> String {
    InstanceId(bytes).to_string()
}

/// 32 hexadecimal digits that are not all zero.
fn from_hex(text: &str) -> Option<[u8; 16]> {
    if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let number = u128::from_str_radix(text, 16).ok()?;
    (number != 0).then_some(number.to_be_bytes())
}

fn fresh() -> Result<Lineage, getrandom::Error> {
    let mut random = [[0; 16]; 2];
    getrandom::fill(random.as_flattened_mut())?;
    let [process, machine] = random;
    Ok(Lineage { process, machine })
}

/// The lineage file of a running target.
#[derive(Debug)]
pub(crate) struct LineageFile {
    lineage: Lineage,
    // `None` when nothing can be remembered.
    kept: Option<Kept>,
    // Where the file would be, and whether another target has it.
    directory: Option<(PathBuf, bool)>,
    // The file was there before.
    inherited: bool,
    renounced: Mutex<Renounced>,
}

/// Whether writes may be lost although this run goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Renounced {
    #[default]
    No,
    /// Writes may be lost, and the file does not say so yet.
    Owed,
    /// Writes may be lost, and the next run will begin new lineages.
    Noted,
}

/// A file that is to be remembered from run to run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Beside {
    /// This run may read and replace it. Replacing it may fail.
    Ours(PathBuf),
    /// Another target has it: this run may read it, not replace it.
    Foreign(PathBuf),
    /// There is none, and none can be made.
    Nothing,
}

#[derive(Debug)]
struct Kept {
    path: PathBuf,
    boot_id: String,
    // Held as long as the target runs. A file of its own, because the other file is replaced.
    _lock: Flock<File>,
}

impl LineageFile {
    /// Takes over what the last run of the target `name` left in `directory`, which is made if it
    /// is not there, and notes that this run has begun. Call it before anything is served. May
    /// block for some seconds.
    ///
    /// # Errors
    /// The system has no random bytes. A directory that cannot be used is only logged.
    pub(crate) fn open(directory: &Path, name: &Name) -> anyhow::Result<Self> {
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self::open_on(directory, name, boot_id.trim())
    }

    /// For a target that has nothing to remember: no volume of it outlives a run.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub(crate) fn forgetful() -> anyhow::Result<Self> {
        Ok(Self {
            lineage: fresh()?,
            kept: None,
            directory: None,
            inherited: false,
            renounced: Mutex::default(),
        })
    }

    /// Whether the next run will know how this one ended.
    pub(crate) fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// Whether it began as [`Self::forgetful`].
    pub(crate) fn is_forgetful(&self) -> bool {
        self.kept.is_none() && self.directory.is_none()
    }

    fn open_on(directory: &Path, name: &Name, boot_id: &str) -> anyhow::Result<Self> {
        let fresh = fresh()?;
        match Self::take_over(directory, name, boot_id, fresh) {
            Ok(file) => Ok(file),
            Err(error) => {
                tracing::warn!(
                    directory = %directory.display(),
                    %error,
                    "cannot remember how this run ends (state_dir): initiators will take the next start for a loss of \
                     writes that were not flushed"
                );
                let foreign = error.kind() == io::ErrorKind::ResourceBusy;
                Ok(Self {
                    lineage: fresh,
                    kept: None,
                    directory: Some((directory.join(format!("{name}.lineage")), foreign)),
                    inherited: false,
                    renounced: Mutex::default(),
                })
            }
        }
    }

    fn take_over(directory: &Path, name: &Name, boot_id: &str, fresh: Lineage) -> io::Result<Self> {
        durable::directory(directory, name.as_str())?;
        let lock = lock(&directory.join(format!("{name}.lineage.lock")))?;
        let path = directory.join(format!("{name}.lineage"));
        let old = read(&path);
        if let Err(error) = &old {
            tracing::warn!(path = %path.display(), %error, "the lineage file is unreadable");
        }
        let inherited = !matches!(old, Ok(None));
        let (before, lineage) = begin(old.ok().flatten().as_ref(), boot_id, fresh);
        let kept = Kept { path, boot_id: boot_id.to_owned(), _lock: lock };
        kept.write(lineage, false)?;
        tracing::info!(?before, "lineage");
        Ok(Self {
            lineage,
            directory: Some((kept.path.clone(), false)),
            inherited,
            kept: Some(kept),
            renounced: Mutex::default(),
        })
    }

    /// This run's lineages.
    #[must_use]
    pub(crate) fn lineage(&self) -> Lineage {
        self.lineage
    }

    /// Whether an earlier run left its lineages, so that the other files it remembered should be
    /// there, too.
    #[must_use]
    pub(crate) fn is_inherited(&self) -> bool {
        self.inherited
    }

    /// Another file that a target remembers from run to run, under the same lock.
    #[must_use]
    pub(crate) fn beside(&self, extension: &str) -> Beside {
        match (&self.directory, &self.kept) {
            (Some((path, _)), Some(_)) => Beside::Ours(path.with_extension(extension)),
            (Some((path, true)), None) => Beside::Foreign(path.with_extension(extension)),
            (Some((path, false)), None) => {
                let path = path.with_extension(extension);
                // Any other error leaves open whether there is a file.
                match fs::symlink_metadata(&path) {
                    Err(error)
                        if matches!(
                            error.kind(),
                            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                        ) =>
                    {
                        Beside::Nothing
                    }
                    _ => Beside::Ours(path),
                }
            }
            (None, _) => Beside::Nothing,
        }
    }

    /// Notes that acknowledged writes may be lost although no process died: the next run begins new
    /// lineages, however this one ends. Returns whether that is certain. If it is not, call it
    /// again later; [`Self::owes_note`] says so. Waits for the disk.
    pub(crate) fn renounce(&self) -> bool {
        // Held while it writes: two at a time would write one file.
        let mut renounced = self.renounced.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(kept) = self.kept.as_ref().filter(|_| *renounced != Renounced::Noted) else {
            *renounced = Renounced::Noted;
            return true;
        };
        *renounced = Renounced::Owed;
        let path = kept.path.display();
        let written = fresh().map_err(io::Error::other).and_then(|new| kept.write(new, false));
        let Err(error) = written else {
            *renounced = Renounced::Noted;
            return true;
        };
        // A full disk still allows a removal.
        match durable::remove(&kept.path) {
            Ok(()) => {
                tracing::warn!(
                    %path, %error,
                    "cannot write the note that acknowledged writes may be lost: removed the file, which says the same"
                );
                *renounced = Renounced::Noted;
            }
            Err(removal) => tracing::error!(
                %path, %error, %removal,
                "cannot note that acknowledged writes may be lost (state_dir): should this target die before it can, \
                 initiators will take lost writes for durable; make the directory writable, the target tries again"
            ),
        }
        *renounced == Renounced::Noted
    }

    /// Whether [`Self::renounce`] was called and has not succeeded.
    #[must_use]
    pub(crate) fn owes_note(&self) -> bool {
        // A thread that holds the lock is writing, and its result will tell.
        self.renounced.try_lock().is_ok_and(|renounced| *renounced == Renounced::Owed)
    }

    /// [`Self::renounce`] once more, if it could not be noted when it was called.
    pub(crate) fn try_again(&self) {
        if self.owes_note() {
            self.renounce();
        }
    }

    /// Notes that this run ended in good order. Call it last, when nothing is served any more and
    /// everything that was acknowledged is durable; otherwise do not call it.
    pub(crate) fn mark_clean(&self) {
        let Some(kept) = &self.kept else { return };
        let renounced = *self.renounced.lock().unwrap_or_else(PoisonError::into_inner);
        if renounced != Renounced::No {
            self.renounce();
            return;
        }
        if let Err(error) = kept.write(self.lineage, true) {
            tracing::warn!(
                path = %kept.path.display(),
                %error,
                "cannot note the clean stop: initiators will take the next start for a loss"
            );
        }
    }
}

impl Kept {
    /// Replaces the file as a whole, durably.
    fn write(&self, lineage: Lineage, clean: bool) -> io::Result<()> {
        let state = Remembered {
            version: FORM,
            boot_id: self.boot_id.clone(),
            process: to_hex(lineage.process),
            machine: to_hex(lineage.machine),
            clean,
        };
        let mut text = serde_json::to_vec(&state)?;
        text.push(b'\n');
        durable::replace(&self.path, &text)
    }
}

/// Whether a run that finds this text begins with the lineages in it.
#[cfg(feature = "fuzzing")]
pub(crate) fn accepts(text: &[u8]) -> bool {
    let fresh = Lineage { process: [0xfe; 16], machine: [0xfd; 16] };
    let old: Option<Remembered> = serde_json::from_slice(text).ok();
    let (before, lineage) = begin(old.as_ref(), "a-boot", fresh);
    assert!(lineage.process != [0; 16] && lineage.machine != [0; 16], "a lineage that is none");
    before == Before::Clean
}

fn read(path: &Path) -> io::Result<Option<Remembered>> {
    use std::io::Read;
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut text = Vec::new();
    file.take(FILE_MAX).read_to_end(&mut text)?;
    serde_json::from_slice(&text).map(Some).map_err(io::Error::other)
}

fn lock(path: &Path) -> io::Result<Flock<File>> {
    let mut options = fs::OpenOptions::new();
    options.create(true).write(true).truncate(false).mode(durable::FILE_MODE);
    let mut file = options.open(path)?;
    let deadline = Instant::now() + LOCK_WAIT;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) if Instant::now() >= deadline => {
                return Err(io::Error::new(
                    io::ErrorKind::ResourceBusy,
                    "another target of that name runs here",
                ));
            }
            Err((unlocked, nix::errno::Errno::EWOULDBLOCK)) => file = unlocked,
            Err((_, error)) => return Err(error.into()),
        }
        std::thread::sleep(LOCK_STEP);
    }
}

#[cfg(test)]
mod tests;
