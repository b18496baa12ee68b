//! [`HoldersFile`]: the records of the holders in the state directory, and the thread that writes
//! them, so that a slow disk delays one OPEN and nothing else.
//!
//! The file is replaced as a whole and durably, in the order of the changes. Several changes that
//! wait are one write. The lock of the lineage file covers this file, too.
//!
//! A file that cannot be understood is not used: generations then begin far above any that was
//! given, so every holder that comes back is refused, which is the safe mistake. A file that cannot
//! be read may still be valid, so the target does not start.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use rblk_protocol::{AccessMode, Generation, HostId, Name};
use serde::{Deserialize, Serialize};

use super::{HolderRecord, Holders, VolumeUuid};
use crate::durable;
use crate::store::StoreIdentity;

/// Form of the file.
const FORM: u32 = 2;
/// The form before it, which had no stores.
const FORM_WITHOUT_STORES: u32 = 1;
/// Longest file that is read: all the volumes a target can have, several times.
const FILE_MAX: u64 = 64 << 20;

/// Called with the number of a change, and whether it is durable or why it is not.
pub(crate) type Confirm = Box<dyn Fn(u64, Result<(), String>) + Send>;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Remembered {
    version: u32,
    volumes: Vec<RememberedHolder>,
    #[serde(default)]
    stores: Vec<RememberedStore>,
}

/// What a volume was served from.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RememberedStore {
    uuid: String,
    identity: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RememberedHolder {
    uuid: String,
    generation: u64,
    mode: Mode,
    host: String,
    host_name: String,
    present: bool,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    Exclusive,
    Shared,
}

/// The file that remembers the holders, with the thread that writes it.
#[derive(Debug)]
pub(crate) struct HoldersFile {
    changes: Option<Sender<Change>>,
    thread: Option<JoinHandle<()>>,
}

impl HoldersFile {
    /// Reads what earlier runs remembered at `path`; `None` if there is no file.
    ///
    /// # Errors
    /// The file cannot be read now: what it says is not known, and must be neither ignored nor
    /// replaced.
    /// A file that cannot be understood is no error. What it remembered is lost permanently.
    pub(crate) fn read(path: &Path) -> io::Result<Option<Holders>> {
        let Some(text) = read(path)? else { return Ok(None) };
        Ok(Some(match parse(&text) {
            Ok(holders) => holders,
            Err(error) => {
                tracing::error!(
                    path = %path.display(),
                    %error,
                    "cannot understand who held the volumes: mounts that were lost before now are refused when they \
                     come back (fenced)"
                );
                Holders::lost(base_of_now())
            }
        }))
    }

    /// For a target that remembers nothing.
    #[must_use]
    pub(crate) fn nothing() -> Holders {
        Holders::forgetful(base_of_now())
    }

    /// The holders where a file should be and is missing: generations begin far above any that was
    /// given.
    #[must_use]
    pub(crate) fn missing() -> Holders {
        Holders::lost(base_of_now())
    }

    /// Keeps `holders` and their changes at `path`. The file exists from now on, so that a later
    /// run notices when it is gone. The thread calls `confirm` for each change, in order. `changed`
    /// says that `holders` differ from the file; then they are written before the first change.
    ///
    /// # Errors
    /// The system has no thread left.
    pub(crate) fn keep(
        path: PathBuf,
        holders: &Holders,
        changed: bool,
        confirm: Confirm,
    ) -> io::Result<Self> {
        let mut known = holders.clone();
        let (changes, from_control) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("holders".to_owned())
            .spawn(move || run(&path, &mut known, changed, &from_control, &confirm))?;
        Ok(Self { changes: Some(changes), thread: Some(thread) })
    }

    /// Writes a change, soon. False if the thread is gone.
    #[must_use]
    pub(crate) fn write(&self, number: u64, record: HolderRecord) -> bool {
        self.send(Change::Record(number, record))
    }

    /// Remembers, soon, from which store this run serves a volume.
    pub(crate) fn serve(&self, volume: VolumeUuid, store: Option<StoreIdentity>) {
        // Without the thread no holder is let in, so nobody has to be fenced later.
        let _ = self.send(Change::Store(volume, store));
    }

    fn send(&self, change: Change) -> bool {
        self.changes.as_ref().is_some_and(|changes| changes.send(change).is_ok())
    }
}

impl Drop for HoldersFile {
    /// Waits until every change is written.
    fn drop(&mut self) {
        self.changes = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What is to be remembered.
#[derive(Debug)]
enum Change {
    /// A record, with the number to confirm.
    Record(u64, HolderRecord),
    /// What a volume is served from.
    Store(VolumeUuid, Option<StoreIdentity>),
}

fn run(
    path: &Path,
    known: &mut Holders,
    changed: bool,
    from_control: &Receiver<Change>,
    confirm: &Confirm,
) {
    if changed || !path.exists() {
        // A failure is logged. Each change that should go there is refused then.
        let _ = remember(path, known);
    }
    while let Ok(change) = from_control.recv() {
        let mut numbers = Vec::new();
        for change in std::iter::once(change).chain(from_control.try_iter()) {
            match change {
                Change::Record(number, record) => {
                    numbers.push(number);
                    known.put(record);
                }
                Change::Store(volume, store) => {
                    known.serve(volume, store.as_ref());
                }
            }
        }
        let result = remember(path, known).map_err(|error| error.to_string());
        numbers.into_iter().for_each(|number| confirm(number, result.clone()));
    }
}

fn remember(path: &Path, known: &Holders) -> io::Result<()> {
    write(path, known).inspect_err(|error| {
        tracing::error!(path = %path.display(), %error, "cannot remember who holds the volumes (state_dir)");
    })
}

/// Above all generations given before now, unless a million holders came every second.
fn base_of_now() -> Generation {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Generation(u64::try_from(since.as_micros()).unwrap_or(0))
}

/// Replaces the file as a whole, durably.
fn write(path: &Path, holders: &Holders) -> io::Result<()> {
    durable::replace(path, &text_of(holders)?)
}

/// What a file of these holders holds.
pub(crate) fn text_of(holders: &Holders) -> io::Result<Vec<u8>> {
    let volumes = holders
        .records()
        .map(|record| RememberedHolder {
            uuid: HostId(record.volume).to_string(),
            generation: record.generation.0,
            mode: match record.mode {
                AccessMode::Shared => Mode::Shared,
                AccessMode::Exclusive | AccessMode::ReadOnly => Mode::Exclusive,
            },
            host: record.host.to_string(),
            host_name: record.host_name.to_string(),
            present: record.present,
        })
        .collect();
    let stores = holders
        .stores()
        .map(|(uuid, store)| RememberedStore {
            uuid: HostId(*uuid).to_string(),
            identity: store.to_string(),
        })
        .collect();
    let mut text = serde_json::to_vec(&Remembered { version: FORM, volumes, stores })?;
    text.push(b'\n');
    Ok(text)
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut text = Vec::new();
    file.take(FILE_MAX).read_to_end(&mut text)?;
    Ok(Some(text))
}

/// The holders that a file with this text remembers.
pub(crate) fn parse(text: &[u8]) -> io::Result<Holders> {
    let remembered: Remembered = serde_json::from_slice(text)?;
    if ![FORM_WITHOUT_STORES, FORM].contains(&remembered.version) {
        return Err(io::Error::other(format!("of form {}", remembered.version)));
    }
    let record = |holder: &RememberedHolder| {
        Some(HolderRecord {
            volume: from_hex(&holder.uuid)?,
            generation: Generation(holder.generation),
            mode: match holder.mode {
                Mode::Exclusive => AccessMode::Exclusive,
                Mode::Shared => AccessMode::Shared,
            },
            host: HostId(from_hex(&holder.host)?),
            host_name: Name::new(&holder.host_name).ok()?,
            present: holder.present,
        })
    };
    let store = |store: &RememberedStore| {
        Some((from_hex(&store.uuid)?, StoreIdentity::parse(&store.identity)?))
    };
    let records: Option<Vec<_>> = remembered.volumes.iter().map(record).collect();
    let stores: Option<Vec<_>> = remembered.stores.iter().map(store).collect();
    let known = records.zip(stores);
    let known = known.map(|(records, stores)| Holders::durable(records).with_stores(stores));
    known.ok_or_else(|| io::Error::other("a field has a bad value"))
}

fn from_hex(text: &str) -> Option<VolumeUuid> {
    let digits = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
    u128::from_str_radix(text, 16).ok().filter(|_| digits).map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::{Claimant, Served};
    use super::*;

    fn claimant(mode: AccessMode) -> Claimant {
        Claimant { mode, host: HostId([9; 16]), host_name: Name::new("host-1").unwrap() }
    }

    fn remembered(path: &Path) -> Holders {
        HoldersFile::read(path).unwrap().unwrap()
    }

    #[test]
    fn a_file_is_there_from_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.holders");
        let keep = |holders: &Holders| {
            drop(HoldersFile::keep(path.clone(), holders, false, Box::new(|_, _| ())).unwrap());
        };
        keep(&Holders::durable([]));
        assert_eq!(remembered(&path).records().next(), None);
        // What is there is replaced by changes only.
        fs::write(&path, "{").unwrap();
        keep(&Holders::lost(Generation(7)));
        assert_eq!(fs::read_to_string(&path).unwrap(), "{");
    }

    #[test]
    fn what_cannot_be_read_is_neither_missing_nor_lost() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.holders");
        fs::create_dir(&path).unwrap();
        assert_eq!(HoldersFile::read(&path).unwrap_err().kind(), io::ErrorKind::IsADirectory);
        fs::remove_dir(&path).unwrap();
        std::os::unix::fs::symlink("t.holders", &path).unwrap();
        assert!(HoldersFile::read(&path).is_err());
    }

    #[test]
    fn the_next_run_knows_what_was_confirmed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.holders");
        assert!(HoldersFile::read(&path).unwrap().is_none());
        let mut holders = Holders::durable([]);
        let (confirmed, results) = mpsc::channel();
        let confirm: Confirm = Box::new(move |number, result| {
            confirmed.send((number, result)).unwrap();
        });
        let file = HoldersFile::keep(path.clone(), &holders, false, confirm).unwrap();
        let changes = [([1; 16], AccessMode::Exclusive), ([2; 16], AccessMode::Shared)];
        for (number, (volume, mode)) in (0..).zip(changes) {
            let record = holders.begin(&volume, &claimant(mode)).unwrap().unwrap();
            assert!(file.write(number, record));
            assert_eq!(results.recv().unwrap(), (number, Ok(())));
            let read: Vec<_> = remembered(&path).records().cloned().collect();
            assert_eq!(read, holders.records().cloned().collect::<Vec<_>>());
        }
        assert!(file.write(7, holders.leave(&[1; 16]).unwrap()));
        drop(file);
        assert_eq!(results.recv().unwrap(), (7, Ok(())));
        let next = remembered(&path);
        assert!(!next.record(&[1; 16]).unwrap().present);
        assert!(next.is_last(&[1; 16], &claimant(AccessMode::Exclusive), Generation(1)));
        let left: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["t.holders"]);
    }

    #[test]
    fn the_next_run_knows_what_a_volume_was_served_from() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.holders");
        let store = StoreIdentity::parse("inode:1:2").unwrap();
        let mut holders = Holders::durable([]);
        assert_eq!(holders.serve([1; 16], Some(&store)), Served::First);
        let keep = |holders: &Holders, changed| {
            HoldersFile::keep(path.clone(), holders, changed, Box::new(|_, _| ())).unwrap()
        };
        drop(keep(&Holders::durable([]), false));
        drop(keep(&holders, true));
        assert_eq!(remembered(&path).serve([1; 16], Some(&store)), Served::AsBefore);
        // What is changed later keeps it.
        let file = keep(&holders, false);
        assert!(
            file.write(0, holders.begin(&[2; 16], &claimant(AccessMode::Shared)).unwrap().unwrap())
        );
        drop(file);
        assert_eq!(remembered(&path).serve([1; 16], Some(&store)), Served::AsBefore);
    }

    #[test]
    fn what_cannot_be_written_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("missing").join("t.holders");
        let mut holders = Holders::durable([]);
        let (confirmed, results) = mpsc::channel();
        let confirm: Confirm = Box::new(move |number, result| {
            confirmed.send((number, result)).unwrap();
        });
        let file = HoldersFile::keep(path, &holders, false, confirm).unwrap();
        let record = holders.begin(&[1; 16], &claimant(AccessMode::Exclusive)).unwrap().unwrap();
        assert!(file.write(1, record));
        let (number, result) = results.recv().unwrap();
        assert_eq!(number, 1);
        assert!(result.unwrap_err().contains("No such file"));
    }

    #[test]
    fn a_file_that_is_not_ours_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.holders");
        let good = r#"{"version":1,"volumes":[{"uuid":"07070707070707070707070707070707","generation":3,
            "mode":"exclusive","host":"09090909090909090909090909090909","host_name":"h","present":true}]}"#;
        fs::write(&path, good).unwrap();
        assert_eq!(remembered(&path).generation(&[7; 16]), Generation(3));
        let stores = r#"present":true}],"stores":[{"uuid":"07070707070707070707070707070707","identity":"inode:1:2"}]}"#;
        let newer = good.replace(r#"present":true}]}"#, stores).replace("n\":1", "n\":2");
        fs::write(&path, &newer).unwrap();
        assert_eq!(remembered(&path).generation(&[7; 16]), Generation(3));
        assert_eq!(remembered(&path).stores().count(), 1);
        let bads = [
            "",
            "{}",
            &good.replace(r#""version":1"#, r#""version":3"#),
            &good.replace("0707", "07g7"),
            &good.replace(r#""h""#, r#""a b""#),
            &good.replace("exclusive", "read-only"),
            &newer.replace("inode:1:2", ""),
            &good[..good.len() - 1],
        ];
        for bad in bads {
            fs::write(&path, bad).unwrap();
            let mut holders = remembered(&path);
            assert!(
                !holders.is_last(&[7; 16], &claimant(AccessMode::Exclusive), Generation(3)),
                "{bad}"
            );
            let begun = holders.begin(&[7; 16], &claimant(AccessMode::Exclusive)).unwrap().unwrap();
            assert!(begun.generation.0 > 1 << 40, "{bad}");
        }
    }
}
