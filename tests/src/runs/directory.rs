//! [`Directory`]: the place of records. It survives processes, and power cuts as far as it was
//! synced. A model in memory, or real files.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::errno::Errno;
use rblk_protocol::{InstanceId, Name};
use rblk_rig::seed::Random;
use rblk_target::record::{
    KeepError, Keeper, KeeperContent, Keepers, Place, Revision, StateDirectory, VolumeRecord,
};
use tempfile::TempDir;

use super::{VOLUMES, uuid};

/// Where records are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// In memory.
    Memory,
    /// In files, by [`StateDirectory`].
    Files,
}

/// The operations that the directory refuses now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// None.
    None,
    /// No space: names can change, but no file can be written.
    Full,
    /// A sync of names fails, so a power cut may take changes back. In memory alone.
    Late,
    /// Nothing can be changed. In memory alone.
    Unwritable,
    /// Nothing can be read. In memory alone.
    Unreadable,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Content {
    Record(Box<VolumeRecord>, Revision),
    Bytes(Vec<u8>),
}

/// The files of one volume, by the end of their names.
type Files = BTreeMap<String, Content>;
/// All files, by volume.
type Image = BTreeMap<String, Files>;

/// The contents before an operation that is interrupted.
#[derive(Debug)]
pub struct Before {
    visible: Image,
    durable: Image,
}

#[derive(Debug)]
struct Memory {
    visible: Image,
    durable: Image,
    fault: Fault,
}

/// See the module.
#[derive(Debug)]
pub struct Directory {
    memory: Arc<Mutex<Memory>>,
    // With files, `visible` is on the disk.
    files: Option<TempDir>,
}

const NAME: &str = "t";
const RECORD: &str = "record";
const NEW: &str = "volume.new";
const OLD_NAME: &str = "renounced";

fn locked(memory: &Mutex<Memory>) -> MutexGuard<'_, Memory> {
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

fn key(volume: &[u8; 16]) -> String {
    InstanceId(*volume).to_string()
}

impl Directory {
    /// An empty directory.
    ///
    /// # Panics
    /// No directory for files can be made.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        let fault = Fault::None;
        let memory = Memory { visible: Image::new(), durable: Image::new(), fault };
        // Every write is synced. In memory a sync is fast.
        let place = Some(Path::new("/dev/shm")).filter(|place| place.is_dir());
        let place = place.map_or_else(std::env::temp_dir, Path::to_owned);
        let files = || tempfile::tempdir_in(place).expect("a directory");
        let files = (kind == Kind::Files).then(files);
        Self { memory: Arc::new(Mutex::new(memory)), files }
    }

    /// The places of a run that begins.
    ///
    /// # Panics
    /// The directory is unreadable.
    #[must_use]
    pub fn keepers(&self) -> Box<dyn Keepers> {
        let name = Name::new(NAME).expect("a name");
        match &self.files {
            Some(files) => Box::new(StateDirectory::open(files.path(), &name).expect("readable")),
            None => Box::new(InMemory(Arc::clone(&self.memory))),
        }
    }

    /// The present fault.
    #[must_use]
    pub fn fault(&self) -> Fault {
        locked(&self.memory).fault
    }

    /// Sets the fault. With files every fault acts as a lack of space.
    ///
    /// # Panics
    /// Files cannot be made or removed.
    pub fn set_fault(&self, fault: Fault) {
        let Some(files) = &self.files else {
            locked(&self.memory).fault = fault;
            return;
        };
        let fault = if fault == Fault::None { fault } else { Fault::Full };
        let was = std::mem::replace(&mut locked(&self.memory).fault, fault);
        for volume in 0..VOLUMES {
            // A directory at the new file's name, so that the file cannot be made.
            let path = files.path().join(format!("{NAME}.{}.{NEW}", key(&uuid(volume))));
            match (was, fault) {
                (Fault::None, Fault::Full) => {
                    let _ = fs::remove_file(&path);
                    fs::create_dir(&path).expect("a directory");
                }
                (Fault::Full, Fault::None) => fs::remove_dir(&path).expect("it was made"),
                _ => {}
            }
        }
    }

    fn visible(&self) -> Image {
        let Some(files) = &self.files else { return locked(&self.memory).visible.clone() };
        let mut image = Image::new();
        for entry in fs::read_dir(files.path()).expect("readable").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let mut parts = name.splitn(3, '.').skip(1);
            let (Some(volume), Some(end)) = (parts.next(), parts.next()) else { continue };
            if volume.len() == 32 && entry.path().is_file() {
                let bytes = fs::read(entry.path()).expect("readable");
                let files: &mut Files = image.entry(volume.to_owned()).or_default();
                files.insert(end.to_owned(), Content::Bytes(bytes));
            }
        }
        image
    }

    fn show(&self, volume: &str, now: &Files) {
        let Some(files) = &self.files else {
            locked(&self.memory).visible.insert(volume.to_owned(), now.clone());
            return;
        };
        let path = |end: &str| files.path().join(format!("{NAME}.{volume}.{end}"));
        for end in ["volume", OLD_NAME, NEW].into_iter().filter(|end| path(end).is_file()) {
            fs::remove_file(path(end)).expect("removable");
        }
        for (end, content) in now {
            let Content::Bytes(bytes) = content else { continue };
            if !path(end).is_dir() {
                fs::write(path(end), bytes).expect("writable");
            }
        }
    }

    /// The contents before an operation that is to be interrupted.
    #[must_use]
    pub fn before(&self) -> Before {
        Before { visible: self.visible(), durable: locked(&self.memory).durable.clone() }
    }

    /// Makes all files durable.
    pub fn synced(&self) {
        if self.files.is_some() {
            let visible = self.visible();
            locked(&self.memory).durable = visible;
        }
    }

    /// Keeps only a random part of the changes since `before`, for each volume alone.
    pub fn interrupted(&self, before: &Before, random: &mut Random) {
        let (after, nothing) = (self.visible(), Files::new());
        for (volume, new) in &after {
            let old = before.visible.get(volume).unwrap_or(&nothing);
            if old == new {
                continue;
            }
            let old_durable = before.durable.get(volume).unwrap_or(&nothing);
            let (visible, durable) = match random.index(4) {
                0 => (old.clone(), old_durable.clone()),
                1 => (new.clone(), old_durable.clone()),
                2 if self.files.is_some() => {
                    // A new record beside the old one that was not removed; or half a new file.
                    let mut both = if random.chance(500) { new.clone() } else { old.clone() };
                    let old_name = old.get(OLD_NAME).map(|old| (OLD_NAME.to_owned(), old.clone()));
                    both.extend(old_name);
                    both.insert(NEW.to_owned(), Content::Bytes(b"{".to_vec()));
                    (both.clone(), both)
                }
                _ => (new.clone(), new.clone()),
            };
            self.show(volume, &visible);
            locked(&self.memory).durable.insert(volume.clone(), durable);
        }
    }

    /// Cuts the power: chance decides which unsynced changes survive.
    pub fn cut(&self, random: &mut Random) {
        let (visible, durable) = (self.visible(), locked(&self.memory).durable.clone());
        for (volume, shown) in &visible {
            let kept = durable.get(volume).cloned().unwrap_or_default();
            if *shown == kept {
                continue;
            }
            let left = if random.chance(500) { shown.clone() } else { kept };
            self.show(volume, &left);
            locked(&self.memory).durable.insert(volume.clone(), left);
        }
    }

    /// Removes the record of a volume for good.
    pub fn vanish(&self, volume: usize) {
        let volume = key(&uuid(volume));
        self.show(&volume, &Files::new());
        locked(&self.memory).durable.remove(&volume);
    }
}

#[derive(Debug)]
struct InMemory(Arc<Mutex<Memory>>);

impl Keepers for InMemory {
    fn of(&self, volume: &[u8; 16]) -> Place {
        Place::Ours(Box::new(Kept { memory: Arc::clone(&self.0), volume: key(volume) }))
    }
}

/// The place of one record in memory.
#[derive(Debug)]
struct Kept {
    memory: Arc<Mutex<Memory>>,
    volume: String,
}

impl Memory {
    fn keep(&mut self, volume: &str, record: VolumeRecord, revision: Revision) -> io::Result<()> {
        let files = Files::from([(RECORD.to_owned(), Content::Record(Box::new(record), revision))]);
        self.visible.insert(volume.to_owned(), files.clone());
        if self.fault == Fault::Late {
            return Err(Errno::EIO.into());
        }
        self.durable.insert(volume.to_owned(), files);
        Ok(())
    }

    fn found(&self, volume: &str) -> KeeperContent {
        match self.visible.get(volume).and_then(|files| files.get(RECORD)) {
            Some(Content::Record(record, revision)) => {
                KeeperContent::Record((**record).clone(), *revision)
            }
            _ => KeeperContent::Nothing,
        }
    }
}

impl Keeper for Kept {
    fn read(&self) -> io::Result<KeeperContent> {
        let memory = locked(&self.memory);
        match memory.fault {
            Fault::Unreadable => Err(Errno::EIO.into()),
            _ => Ok(memory.found(&self.volume)),
        }
    }

    fn replace(&self, record: &VolumeRecord, expected: Revision) -> Result<Revision, KeepError> {
        let mut memory = locked(&self.memory);
        if !matches!(memory.fault, Fault::None | Fault::Late) {
            return Err(io::Error::from(Errno::ENOSPC).into());
        }
        match memory.found(&self.volume) {
            KeeperContent::Record(_, found) if found != expected => {
                return Err(KeepError::Conflict { found, expected });
            }
            _ => {}
        }
        let next = expected.next();
        memory.keep(&self.volume, record.clone(), next)?;
        Ok(next)
    }

    fn renounce(&self) -> io::Result<()> {
        let mut memory = locked(&self.memory);
        if matches!(memory.fault, Fault::Unwritable | Fault::Unreadable) {
            return Err(Errno::EROFS.into());
        }
        let KeeperContent::Record(mut record, revision) = memory.found(&self.volume) else {
            return Ok(());
        };
        record.renounce();
        memory.keep(&self.volume, record, revision)
    }

    fn place(&self) -> String {
        self.volume.clone()
    }
}
