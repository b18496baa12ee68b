//! [`LineageFile`]: what a target remembers from one run to the next, so that initiators learn when writes that
//! it acknowledged may be lost. The [`WriteVerifier`] of a volume is made of it.
//!
//! | the run before this one | process lineage | machine lineage |
//! | --- | --- | --- |
//! | stopped cleanly: everything acknowledged was made durable first | kept | kept |
//! | died, and the machine has not booted since | new | kept |
//! | died, and the machine booted since | new | new |
//! | unknown: no file, or not one of ours | new | new |
//!
//! A volume whose acknowledged writes may be in the process's own memory follows the process lineage, one whose
//! writes went to the kernel follows the machine lineage, and one that lives in memory follows the run.
//!
//! What must stay true: the file says `clean = false`, durably, before anything is served, and says `clean = true`
//! only after everything acknowledged was made durable. It is locked as long as the target runs. Where that cannot
//! be had (no right to write there, or another target of the same name), the lineages are new at every start:
//! initiators then take every restart for a loss, which is the safe mistake.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use rblk_protocol::{InstanceId, Name, WriteVerifier};
use serde::{Deserialize, Serialize};

use crate::volume::{CacheMode, Placement, Volume};

/// Form of the file.
const FORM: u32 = 1;
/// Longest file that is read.
const FILE_MAX: u64 = 4096;
/// How long to wait for the lock: a killed predecessor holds it until it is gone, as it did those of its stores.
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
    pub fn verifier_for(&self, volume: &Volume, instance: InstanceId) -> WriteVerifier {
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

/// The state of a run that begins after `old`, on a machine whose boot has that id. `fresh` are random.
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
pub struct LineageFile {
    lineage: Lineage,
    // `None` when nothing can be remembered.
    kept: Option<Kept>,
    // Where it would be, and whether another target has it.
    directory: Option<(PathBuf, bool)>,
    // It was there before.
    inherited: bool,
    // Writes may be lost; and the file says so.
    renounced: AtomicBool,
    noted: AtomicBool,
}

/// A file that is to be remembered from run to run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Beside {
    /// It is this run's to read and to replace. Replacing it may fail.
    Ours(PathBuf),
    /// Another target has it: to be read, not to be replaced.
    Foreign(PathBuf),
    /// There is none, and none can be made.
    Nothing,
}

#[derive(Debug)]
struct Kept {
    path: PathBuf,
    boot_id: String,
    // Held for life. A file of its own, since the other one is replaced.
    _lock: Flock<File>,
}

impl LineageFile {
    /// Takes over what the last run of the target `name` left in `directory`, which is made if it is not there, and
    /// notes that this run has begun. Call it before anything is served. May block for some seconds.
    ///
    /// # Errors
    /// The system has no random bytes. That nothing can be remembered is only logged.
    pub fn open(directory: &Path, name: &Name) -> anyhow::Result<Self> {
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Self::open_on(directory, name, boot_id.trim())
    }

    /// For a target that has nothing to remember: no volume of it outlives a run.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn forgetful() -> anyhow::Result<Self> {
        Ok(Self {
            lineage: fresh()?,
            kept: None,
            directory: None,
            inherited: false,
            renounced: AtomicBool::new(false),
            noted: AtomicBool::new(false),
        })
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
                    renounced: AtomicBool::new(false),
                    noted: AtomicBool::new(false),
                })
            }
        }
    }

    fn take_over(directory: &Path, name: &Name, boot_id: &str, fresh: Lineage) -> io::Result<Self> {
        fs::create_dir_all(directory)?;
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
            renounced: AtomicBool::new(false),
            noted: AtomicBool::new(false),
        })
    }

    /// This run's lineages.
    #[must_use]
    pub fn lineage(&self) -> Lineage {
        self.lineage
    }

    /// Whether an earlier run left its lineages, so that what it remembered beside them should be there too.
    #[must_use]
    pub fn is_inherited(&self) -> bool {
        self.inherited
    }

    /// Where something else that a target remembers from run to run is, under the same lock.
    #[must_use]
    pub fn beside(&self, extension: &str) -> Beside {
        match (&self.directory, &self.kept) {
            (Some((path, _)), Some(_)) => Beside::Ours(path.with_extension(extension)),
            (Some((path, true)), None) => Beside::Foreign(path.with_extension(extension)),
            (Some((path, false)), None) => {
                let path = path.with_extension(extension);
                // Only what is surely not there was never remembered.
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

    /// Notes that acknowledged writes may be lost although nobody died: the next run begins new lineages, however
    /// this one ends. Where that cannot be noted now, it is tried again at the next call and at the end.
    pub fn renounce(&self) {
        self.renounced.store(true, Ordering::Relaxed);
        let Some(kept) = self.kept.as_ref().filter(|_| !self.noted.load(Ordering::Relaxed)) else {
            return;
        };
        match fresh().map_err(io::Error::other).and_then(|new| kept.write(new, false)) {
            Ok(()) => self.noted.store(true, Ordering::Relaxed),
            Err(error) => {
                let path = kept.path.display();
                tracing::error!(%path, %error, "cannot note that writes may be lost");
            }
        }
    }

    /// [`Self::renounce`] once more, if it could not be noted when it was called.
    pub fn try_again(&self) {
        if self.renounced.load(Ordering::Relaxed) {
            self.renounce();
        }
    }

    /// Notes that this run ended in good order. Call it last, when nothing is served any more and everything that
    /// was acknowledged is durable; otherwise do not call it.
    pub fn mark_clean(&self) {
        let Some(kept) = &self.kept else { return };
        if self.renounced.load(Ordering::Relaxed) {
            return self.renounce();
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
        let new = self.path.with_extension("lineage.new");
        let mut file = File::create(&new)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        File::open(directory)?.sync_all()
    }
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
    let mut file = fs::OpenOptions::new().create(true).write(true).truncate(false).open(path)?;
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
mod tests {
    use super::*;
    use crate::store::VolumeIndex;
    use rblk_fabric::{PageKind, Region};
    use rblk_protocol::{BlockCount, BlockSize};

    const FRESH: Lineage = Lineage { process: [1; 16], machine: [2; 16] };

    fn remembered(clean: bool) -> Remembered {
        Remembered {
            version: FORM,
            boot_id: "b".to_owned(),
            process: to_hex([3; 16]),
            machine: to_hex([4; 16]),
            clean,
        }
    }

    #[test]
    fn each_end_of_the_run_before() {
        let kept = Lineage { process: [3; 16], machine: [4; 16] };
        let after = |old: &Remembered, boot| begin(Some(old), boot, FRESH);
        assert_eq!(after(&remembered(true), "b"), (Before::Clean, kept));
        assert_eq!(after(&remembered(true), "other"), (Before::Clean, kept));
        assert_eq!(
            after(&remembered(false), "b"),
            (Before::ProcessDied, Lineage { process: [1; 16], machine: [4; 16] })
        );
        assert_eq!(after(&remembered(false), "other"), (Before::MachineDied, FRESH));
        assert_eq!(begin(None, "b", FRESH), (Before::Unknown, FRESH));
    }

    #[test]
    fn what_is_not_ours_is_unknown() {
        let damage: [fn(&mut Remembered); 6] = [
            |r| r.version = 2,
            |r| r.process.clear(),
            |r| r.machine.truncate(31),
            |r| r.machine = "0".repeat(32),
            |r| r.process = format!("+{}", "0".repeat(31)),
            |r| r.process = "ü".repeat(16),
        ];
        for (at, damage) in damage.iter().enumerate() {
            let mut old = remembered(true);
            damage(&mut old);
            assert_eq!(begin(Some(&old), "b", FRESH), (Before::Unknown, FRESH), "{at}");
        }
        // A boot without id is no boot we know.
        let mut old = remembered(false);
        old.boot_id.clear();
        assert_eq!(begin(Some(&old), "", FRESH).0, Before::MachineDied);
    }

    #[test]
    fn runs_of_a_target() {
        let directory = tempfile::tempdir().unwrap();
        let state = directory.path().join("made/on/the/way");
        let name = Name::new("store1").unwrap();
        let run = |boot: &str| LineageFile::open_on(&state, &name, boot).unwrap();

        let first = run("b1");
        assert!(!read(&state.join("store1.lineage")).unwrap().unwrap().clean, "before it serves");
        assert!(!first.is_inherited());
        first.mark_clean();
        let before = first.lineage();
        drop(first);

        let after_stop = run("b2");
        assert_eq!(after_stop.lineage(), before);
        assert!(after_stop.is_inherited());
        drop(after_stop);

        let after_kill = run("b2");
        assert_ne!(after_kill.lineage().process, before.process);
        assert_eq!(after_kill.lineage().machine, before.machine);
        let killed = after_kill.lineage();
        drop(after_kill);

        let after_crash = run("b3");
        assert_ne!(after_crash.lineage().process, killed.process);
        assert_ne!(after_crash.lineage().machine, killed.machine);
        after_crash.mark_clean();
        let crashed = after_crash.lineage();
        drop(after_crash);

        fs::write(state.join("store1.lineage"), "{\"clean\":true}").unwrap();
        assert_ne!(run("b3").lineage().machine, crashed.machine, "unreadable");
    }

    #[test]
    fn a_renounced_run_has_no_heir_however_it_ends() {
        for (mark, boot) in [(true, "b1"), (false, "b1"), (true, "b2"), (false, "b2")] {
            let directory = tempfile::tempdir().unwrap();
            let name = Name::new("store1").unwrap();
            let run = |boot: &str| LineageFile::open_on(directory.path(), &name, boot).unwrap();
            let first = run("b1");
            let before = first.lineage();
            first.renounce();
            let noted = read(&directory.path().join("store1.lineage")).unwrap().unwrap();
            assert!(!noted.clean);
            // Once is enough: what was noted stays.
            first.renounce();
            assert_eq!(read(&directory.path().join("store1.lineage")).unwrap(), Some(noted));
            assert_eq!(first.lineage(), before, "this run goes on as it is");
            if mark {
                first.mark_clean();
            }
            drop(first);
            let second = run(boot);
            assert_ne!(second.lineage().process, before.process, "{mark}, {boot}");
            assert_ne!(second.lineage().machine, before.machine, "{mark}, {boot}");
            // And that one is a run as any other.
            let after = second.lineage();
            second.mark_clean();
            drop(second);
            assert_eq!(run(boot).lineage(), after);
        }
    }

    #[test]
    fn what_is_not_remembered_can_be_renounced() {
        LineageFile::forgetful().unwrap().renounce();
        let directory = tempfile::tempdir().unwrap();
        let name = Name::new("store1").unwrap();
        let run = || LineageFile::open_on(directory.path(), &name, "b").unwrap();
        let first = run();
        // Nothing can be written there: at least the end is not clean.
        let blocked = directory.path().join("store1.lineage.new");
        fs::create_dir(&blocked).unwrap();
        first.renounce();
        fs::remove_dir(&blocked).unwrap();
        first.mark_clean();
        let before = first.lineage();
        drop(first);
        assert_ne!(run().lineage().process, before.process);
    }

    #[test]
    fn a_second_target_of_the_name_remembers_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let name = Name::new("store1").unwrap();
        let first = LineageFile::open_on(directory.path(), &name, "b").unwrap();
        let second = LineageFile::open_on(directory.path(), &name, "b").unwrap();
        assert_ne!(second.lineage().machine, first.lineage().machine);
        let holders = directory.path().join("store1.holders");
        assert_eq!(first.beside("holders"), Beside::Ours(holders.clone()));
        assert_eq!(second.beside("holders"), Beside::Foreign(holders));
        second.mark_clean();
        drop(second);
        let text = read(&directory.path().join("store1.lineage")).unwrap().unwrap();
        assert_eq!((text.clean, text.machine), (false, to_hex(first.lineage().machine)));
    }

    #[test]
    fn what_is_there_is_read_where_nothing_can_be_written() {
        let directory = tempfile::tempdir().unwrap();
        let name = Name::new("store1").unwrap();
        fs::create_dir(directory.path().join("store1.lineage.new")).unwrap();
        let file = LineageFile::open_on(directory.path(), &name, "b").unwrap();
        assert_eq!(file.beside("holders"), Beside::Nothing);
        let holders = directory.path().join("store1.holders");
        fs::write(&holders, "").unwrap();
        assert_eq!(file.beside("holders"), Beside::Ours(holders));
        assert_eq!(LineageFile::forgetful().unwrap().beside("holders"), Beside::Nothing);
    }

    #[test]
    fn no_place_to_remember() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let name = Name::new("store1").unwrap();
        let one = LineageFile::open_on(&file, &name, "b").unwrap();
        one.mark_clean();
        let two = LineageFile::open_on(&file, &name, "b").unwrap();
        assert_ne!(one.lineage(), two.lineage());
    }

    #[test]
    fn volumes_follow_what_holds_their_writes() {
        let volume = |placement, cache| Volume {
            index: VolumeIndex(0),
            name: Name::new("v").unwrap(),
            uuid: [0; 16],
            block_size: BlockSize::new(512).unwrap(),
            blocks: BlockCount(1),
            read_only: false,
            placement,
            cache,
            read_ahead_bytes: 0,
            discard: true,
            discard_granularity_bytes: 512,
        };
        let instance = InstanceId([9; 16]);
        let of = |placement, cache| FRESH.verifier_for(&volume(placement, cache), instance);
        let machine = WriteVerifier(FRESH.machine);
        assert_eq!(of(Placement::Store, CacheMode::None), machine);
        assert_eq!(of(Placement::Store, CacheMode::WriteThrough), machine);
        assert_eq!(of(Placement::Store, CacheMode::WriteBack), WriteVerifier(FRESH.process));
        assert_eq!(of(Placement::Null, CacheMode::None), WriteVerifier(instance.0));
        let memory = Region::allocate(512, PageKind::Normal).unwrap();
        assert_eq!(of(Placement::Memory(memory), CacheMode::None), WriteVerifier(instance.0));
    }
}
