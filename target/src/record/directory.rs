//! [`StateDirectory`]: records in files, one for each volume of a target: `NAME.UUID.volume`.
//!
//! A lock, `NAME.lineage.lock`, is held as long as the target runs. Two targets of one name never
//! write one record, and neither does a target of the version before, which locks the same file.
//!
//! A record that cannot be replaced, for want of space, is renamed to `NAME.UUID.renounced`: that
//! needs none. It still names the last holder, and vouches for no write.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use rblk_protocol::Name;

use super::former::Former;
use super::keeper::{KeepError, Keeper, KeeperContent, Keepers, Place, Revision};
use super::{AtRisk, VolumeRecord, text};
use crate::record::durable;
use crate::record::holders::VolumeUuid;

/// How long to wait for the lock: a target that was killed holds it until its process is gone, like
/// the locks of its stores.
const LOCK_WAIT: Duration = Duration::from_millis(500);
/// Step of that wait.
const LOCK_STEP: Duration = Duration::from_millis(20);
/// The ending of names of locks.
const LOCK: &str = ".lineage.lock";
/// The ending of names of records.
const VOLUME: &str = "volume";
/// The ending of names of records that vouch for nothing.
const RENOUNCED: &str = "renounced";

/// See the module.
#[derive(Debug)]
pub struct StateDirectory {
    path: PathBuf,
    name: String,
    state: DirectoryUse,
    // An earlier run of the target used it.
    was_used: bool,
    former: Option<Former>,
    // The last records of the program before this one in this process.
    left: BTreeMap<VolumeUuid, (VolumeRecord, Revision)>,
}

/// How a run keeps records of its volumes for the next one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Keeping {
    /// The next run will know how this one ended.
    pub is_kept: bool,
    /// The run has no state directory: no volume of its start outlives it.
    pub is_nothing: bool,
    /// Hosts that come back are believed, since no run of this target can have kept a record.
    pub is_forgetful: bool,
    /// An earlier run of the target may have kept records.
    pub was_used: bool,
}

/// The rights of a run in the directory.
#[derive(Debug)]
enum DirectoryUse {
    /// The run reads and writes it.
    Locked {
        // Held as long as the target runs.
        _lock: Flock<File>,
    },
    /// Records may be there, and cannot be written now.
    Unwritable,
    /// Another target of the name runs: read only.
    Foreign,
    /// There is no directory with records, and none can be made.
    Nothing,
}

impl StateDirectory {
    /// The directory of a target, which is made if it does not exist. A failure to use it is only
    /// logged. No file in it changes. May block for a moment.
    ///
    /// # Errors
    /// A file of the version before exists and cannot be read.
    pub fn open(path: &Path, name: &Name) -> anyhow::Result<Self> {
        let mut directory = Self {
            path: path.to_owned(),
            name: name.to_string(),
            state: DirectoryUse::Nothing,
            was_used: false,
            former: None,
            left: BTreeMap::new(),
        };
        let lock_path = path.join(format!("{name}{LOCK}"));
        directory.was_used = lock_path.exists();
        if let (false, Some(other)) = (directory.was_used, other_name(path, name.as_str())) {
            tracing::warn!(
                directory = %path.display(),
                name = %name,
                other,
                "state_dir has the records of a target of another name. If this is the same target (`name` is the host \
                 name unless it is set), its mounts refuse it under the new name: start it with `--name {other}`"
            );
        }
        let locked = durable::directory(path, name.as_str()).and_then(|()| lock(&lock_path));
        directory.former = Former::read(path, name.as_str())?;
        let is_there = directory.was_used || directory.former.is_some();
        directory.state = match locked {
            Ok(lock) => DirectoryUse::Locked { _lock: lock },
            Err(error) => {
                tracing::warn!(
                    directory = %path.display(),
                    %error,
                    "cannot remember how this run ends (state_dir): initiators will take the next start for a loss of \
                     writes that were not flushed"
                );
                match error.kind() {
                    io::ErrorKind::ResourceBusy => DirectoryUse::Foreign,
                    _ if is_there || directory.has_records() => DirectoryUse::Unwritable,
                    _ => DirectoryUse::Nothing,
                }
            }
        };
        Ok(directory)
    }

    /// The directory of a target without records: no volume of it outlives a run.
    #[must_use]
    pub fn nothing() -> Self {
        Self {
            path: PathBuf::new(),
            name: String::new(),
            state: DirectoryUse::Nothing,
            was_used: false,
            former: None,
            left: BTreeMap::new(),
        }
    }

    /// Goes on with the records that the program before this one in this process left, as texts,
    /// even if the files differ by now.
    ///
    /// # Errors
    /// A text is no record.
    pub(crate) fn with_left(mut self, texts: &[String]) -> Result<Self, String> {
        for text in texts {
            let (record, revision) = text::parse(text.as_bytes())
                .map_err(|error| format!("a record that was handed over: {error}"))?;
            self.left.insert(record.volume(), (record, revision));
        }
        Ok(self)
    }

    /// How a run keeps records here.
    #[must_use]
    pub fn keeping(&self) -> Keeping {
        Keeping {
            is_kept: matches!(self.state, DirectoryUse::Locked { .. }),
            is_nothing: self.path.as_os_str().is_empty(),
            is_forgetful: matches!(self.state, DirectoryUse::Nothing),
            was_used: self.was_used || self.former.is_some(),
        }
    }

    /// A file by which a run tests whether it can write records now. `None`: it never writes any.
    #[must_use]
    pub(crate) fn probe(&self) -> Option<PathBuf> {
        match self.state {
            DirectoryUse::Locked { .. } | DirectoryUse::Unwritable => {
                Some(self.path.join(format!("{}.probe.new", self.name)))
            }
            DirectoryUse::Foreign | DirectoryUse::Nothing => None,
        }
    }

    // Any other error leaves open whether there are records.
    fn has_records(&self) -> bool {
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(error) => {
                use io::ErrorKind::{NotADirectory, NotFound};
                return !matches!(error.kind(), NotFound | NotADirectory);
            }
        };
        let prefix = format!("{}.", self.name);
        entries.flatten().any(|entry| {
            let file = entry.file_name();
            let file = file.to_string_lossy();
            file.starts_with(&prefix) && (file.ends_with(VOLUME) || file.ends_with(RENOUNCED))
        })
    }

    fn file(&self, volume: &VolumeUuid) -> RecordFile {
        let path = |extension| {
            let file = format!("{}.{}.{extension}", self.name, text::to_hex(*volume));
            self.path.join(file)
        };
        RecordFile { volume: *volume, path: path(VOLUME), renounced: path(RENOUNCED) }
    }
}

impl Keepers for StateDirectory {
    fn of(&self, volume: &VolumeUuid) -> Place {
        match self.state {
            DirectoryUse::Locked { .. } | DirectoryUse::Unwritable => {
                Place::Ours(Box::new(self.file(volume)))
            }
            DirectoryUse::Foreign => Place::Foreign(Box::new(self.file(volume))),
            DirectoryUse::Nothing => Place::Nothing,
        }
    }

    fn former(&self, volume: &VolumeUuid, risk: Option<AtRisk>) -> Option<VolumeRecord> {
        self.former.as_ref().map(|former| former.record_of(volume, risk))
    }

    fn left(&self, volume: &VolumeUuid) -> Option<(VolumeRecord, Revision)> {
        self.left.get(volume).cloned()
    }

    fn former_volumes(&self) -> BTreeSet<VolumeUuid> {
        self.former.as_ref().map(Former::volumes).unwrap_or_default()
    }

    fn forget_former(&mut self) {
        let Some(former) =
            self.former.take_if(|_| matches!(self.state, DirectoryUse::Locked { .. }))
        else {
            return;
        };
        match former.remove() {
            Ok(()) => tracing::info!("the files of the version before were converted to records"),
            Err(error) => tracing::warn!(
                directory = %self.path.display(), %error,
                "cannot remove the files of the version before (NAME.lineage, NAME.holders): remove them by hand"
            ),
        }
    }
}

/// The name of another target that used the directory, and does not run now.
fn other_name(directory: &Path, name: &str) -> Option<String> {
    let mut others: Vec<String> = fs::read_dir(directory)
        .ok()?
        .flatten()
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(LOCK)?.to_owned()))
        .filter(|other| other != name && !is_held(&directory.join(format!("{other}{LOCK}"))))
        .collect();
    others.sort();
    others.into_iter().next()
}

/// Whether a running target has the lock.
fn is_held(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return true };
    Flock::lock(file, FlockArg::LockSharedNonblock).is_err()
}

fn lock(path: &Path) -> io::Result<Flock<File>> {
    let mut options = fs::OpenOptions::new();
    options.create(true).write(true).truncate(false).mode(durable::FILE_MODE);
    let mut file = options.open(path)?;
    let deadline = Instant::now() + LOCK_WAIT;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((_, Errno::EWOULDBLOCK)) if Instant::now() >= deadline => {
                return Err(io::Error::new(
                    io::ErrorKind::ResourceBusy,
                    "another target of that name runs here",
                ));
            }
            Err((unlocked, Errno::EWOULDBLOCK)) => file = unlocked,
            Err((_, error)) => return Err(error.into()),
        }
        std::thread::sleep(LOCK_STEP);
    }
}

/// The file of one record.
#[derive(Debug)]
struct RecordFile {
    volume: VolumeUuid,
    path: PathBuf,
    renounced: PathBuf,
}

impl RecordFile {
    fn read_one(&self, path: &Path) -> io::Result<KeeperContent> {
        let Some(text) = durable::read(path, text::TEXT_MAX)? else {
            return Ok(KeeperContent::Nothing);
        };
        Ok(match text::parse(&text) {
            Ok((record, _)) if record.volume() != self.volume => {
                KeeperContent::Garbage("it is the record of another volume".to_owned())
            }
            Ok((record, revision)) => KeeperContent::Record(record, revision),
            Err(error) => KeeperContent::Garbage(error),
        })
    }
}

impl Keeper for RecordFile {
    fn read(&self) -> io::Result<KeeperContent> {
        let found = self.read_one(&self.path)?;
        let renounced = self.read_one(&self.renounced)?;
        // A crash may have left both. The last one written is the newer one, and neither vouches
        // for anything.
        Ok(match (found, renounced) {
            (found, KeeperContent::Nothing) => found,
            (KeeperContent::Record(mut record, revision), _)
            | (_, KeeperContent::Record(mut record, revision)) => {
                record.renounce();
                KeeperContent::Record(record, revision)
            }
            (_, garbage) => garbage,
        })
    }

    fn replace(&self, record: &VolumeRecord, expected: Revision) -> Result<Revision, KeepError> {
        if let KeeperContent::Record(_, found) = self.read()?
            && found != expected
        {
            return Err(KeepError::Conflict { found, expected });
        }
        let next = expected.next();
        durable::replace(&self.path, &text::text_of(record, next)?)?;
        if self.renounced.exists() {
            durable::remove(&self.renounced)?;
        }
        Ok(next)
    }

    fn renounce(&self) -> io::Result<()> {
        match fs::rename(&self.path, &self.renounced) {
            // A volume without a record vouches for nothing anyway.
            Err(error) if error.kind() == io::ErrorKind::NotFound && !self.path.exists() => {}
            renamed => renamed?,
        }
        durable::sync_directory(&self.path)
    }

    fn place(&self) -> String {
        self.path.display().to_string()
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::WriteVerifier;

    use super::*;

    const V: VolumeUuid = [7; 16];

    fn name() -> Name {
        Name::new("t").unwrap()
    }

    fn open(path: &Path) -> StateDirectory {
        StateDirectory::open(path, &name()).unwrap()
    }

    fn ours(directory: &StateDirectory) -> Box<dyn Keeper> {
        match directory.of(&V) {
            Place::Ours(keeper) => keeper,
            other => panic!("{other:?}"),
        }
    }

    fn record() -> VolumeRecord {
        let mut record = VolumeRecord::new(V);
        record.vouch_anew(WriteVerifier([1; 16]));
        record.put_at_risk(AtRisk::Machine, &super::super::BootId::new("a"));
        record
    }

    #[test]
    fn a_record_is_replaced_only_by_its_last_writer() {
        let dir = tempfile::tempdir().unwrap();
        let directory = open(dir.path());
        let Keeping { is_kept, was_used, is_forgetful, .. } = directory.keeping();
        assert!(is_kept && !was_used && !is_forgetful);
        let keeper = ours(&directory);
        assert_eq!(keeper.read().unwrap(), KeeperContent::Nothing);
        let first = keeper.replace(&record(), Revision::NONE).unwrap();
        assert_eq!(keeper.read().unwrap(), KeeperContent::Record(record(), first));
        let second = keeper.replace(&record(), first).unwrap();
        assert!(second > first);
        let error = keeper.replace(&record(), first).unwrap_err();
        assert!(matches!(error, KeepError::Conflict { .. }), "{error}");
        // A record that vanished is written again.
        fs::remove_file(keeper.place()).unwrap();
        let third = keeper.replace(&record(), second).unwrap();
        drop((keeper, directory));
        let again = open(dir.path());
        assert!(again.keeping().was_used);
        assert_eq!(ours(&again).read().unwrap(), KeeperContent::Record(record(), third));
    }

    #[test]
    fn a_second_target_of_the_name_only_reads() {
        let dir = tempfile::tempdir().unwrap();
        let first = open(dir.path());
        ours(&first).replace(&record(), Revision::NONE).unwrap();
        let second = open(dir.path());
        assert!(!second.keeping().is_kept);
        let Place::Foreign(keeper) = second.of(&V) else { panic!("{second:?}") };
        assert!(matches!(keeper.read().unwrap(), KeeperContent::Record(..)));
    }

    #[test]
    fn a_record_renounced_without_space_vouches_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let directory = open(dir.path());
        let keeper = ours(&directory);
        let first = keeper.replace(&record(), Revision::NONE).unwrap();
        keeper.renounce().unwrap();
        let renounced = || match keeper.read().unwrap() {
            KeeperContent::Record(record, revision) => (record.verifier(), revision),
            other => panic!("{other:?}"),
        };
        assert_eq!(renounced(), (None, first));
        keeper.renounce().unwrap();
        // A crash between the new record and the removal of the renounced one.
        let old = fs::read(dir.path().join(format!("t.{}.renounced", text::to_hex(V)))).unwrap();
        let second = keeper.replace(&record(), first).unwrap();
        assert_eq!(keeper.read().unwrap(), KeeperContent::Record(record(), second));
        fs::write(dir.path().join(format!("t.{}.renounced", text::to_hex(V))), old).unwrap();
        assert_eq!(renounced(), (None, second));
        let nothing = ours(&open(&dir.path().join("other")));
        nothing.renounce().unwrap();
    }

    #[test]
    fn an_unreadable_record_is_neither_missing_nor_lost() {
        let dir = tempfile::tempdir().unwrap();
        let directory = open(dir.path());
        let keeper = ours(&directory);
        fs::write(keeper.place(), "{").unwrap();
        assert!(matches!(keeper.read().unwrap(), KeeperContent::Garbage(_)));
        let mut other = VolumeRecord::new([8; 16]);
        other.vouch_anew(WriteVerifier([1; 16]));
        fs::write(keeper.place(), text::text_of(&other, Revision(1)).unwrap()).unwrap();
        assert!(matches!(keeper.read().unwrap(), KeeperContent::Garbage(_)));
        fs::remove_file(keeper.place()).unwrap();
        fs::create_dir(keeper.place()).unwrap();
        assert_eq!(keeper.read().unwrap_err().kind(), io::ErrorKind::IsADirectory);
        fs::remove_dir(keeper.place()).unwrap();
        std::os::unix::fs::symlink("nowhere", keeper.place()).unwrap();
        assert!(keeper.read().is_err());
    }

    #[test]
    fn no_place_for_records() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let directory = open(&file);
        let Keeping { is_kept, is_forgetful, is_nothing, .. } = directory.keeping();
        assert!(!is_kept && is_forgetful && !is_nothing);
        assert!(matches!(directory.of(&V), Place::Nothing));
        assert!(StateDirectory::nothing().keeping().is_nothing);
    }
}
