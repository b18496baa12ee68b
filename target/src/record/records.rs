//! [`Records`]: the records of the volumes that a run serves, in memory and on the disk.
//! [`Records::write`] writes the changed ones, and may block; all else only computes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

use anyhow::Context;
use rblk_protocol::{Mutation, Name, WriteVerifier};

use super::keeper::{KeepError, KeeperContent, Keepers, Place, Revision};
use super::{AtRisk, Before, BootId, VolumeRecord};
use crate::record::holders::{HolderRecord, VolumeUuid};
use crate::store::{Attachment, StoreIdentity};
use crate::volume::Volume;

/// Records that are written at a time: each waits for the disk, and disks take several at once.
const WRITERS_MAX: usize = 8;

/// A volume that a run is to serve.
#[derive(Clone, Debug)]
pub struct ServedVolume {
    /// Its identity.
    pub volume: VolumeUuid,
    /// Its name, for people.
    pub name: Name,
    /// The risk of writes to it. `None`: its data does not outlive a run.
    pub risk: Option<AtRisk>,
    /// Hosts may write to it.
    pub is_writable: bool,
    /// The attachment of the disk below its store; `None` if nobody counts it.
    pub attachment: Option<Attachment>,
    /// Whether it begins to be served; or (false) it is served already, and changes.
    pub begins: bool,
}

impl From<&Volume> for ServedVolume {
    fn from(volume: &Volume) -> Self {
        Self {
            volume: volume.uuid,
            name: volume.name,
            risk: AtRisk::by_writes_to(volume),
            is_writable: !volume.read_only,
            attachment: None,
            begins: true,
        }
    }
}

/// A record of this run.
#[derive(Debug)]
struct RecordEntry {
    record: VolumeRecord,
    place: Place,
    revision: Revision,
    // The kept record. `None`: there is none, or it is unknown.
    kept: Option<VolumeRecord>,
    // No record was kept when it was read.
    is_new: bool,
    // This run put writes at risk, so it may declare them safe.
    is_ours: bool,
    // The risk before [`Records::put_at_risk`], since the last load alone.
    before: Option<(AtRisk, BootId, bool)>,
}

/// Entries that one thread writes.
type EntrySlice<'e> = &'e mut [(&'e VolumeUuid, &'e mut RecordEntry)];

/// Makes verifiers that were never used.
pub type Fresh = Box<dyn FnMut() -> WriteVerifier + Send>;

/// See the module.
pub struct Records {
    keepers: Box<dyn Keepers>,
    boot: BootId,
    fresh: Fresh,
    entries: BTreeMap<VolumeUuid, RecordEntry>,
}

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { keepers, boot, fresh: _, entries } = self;
        f.debug_struct("Records")
            .field("keepers", keepers)
            .field("boot", boot)
            .field("entries", entries)
            .finish_non_exhaustive()
    }
}

impl Records {
    /// The records of a run that serves nothing yet, on a machine of that boot.
    #[must_use]
    pub fn new(keepers: Box<dyn Keepers>, boot: BootId, fresh: Fresh) -> Self {
        Self { keepers, boot, fresh, entries: BTreeMap::new() }
    }

    /// The records of a run on this machine, with random verifiers.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn on_this_machine(keepers: Box<dyn Keepers>) -> anyhow::Result<Self> {
        // If random bytes are there once, later calls do not fail (getrandom(2)).
        getrandom::fill(&mut [0; 16])?;
        let fresh = || {
            let mut random = [0; 16];
            getrandom::fill(&mut random).unwrap_or_else(|error| unreachable!("{error}"));
            WriteVerifier(random)
        };
        Ok(Self::new(keepers, BootId::of_now(), Box::new(fresh)))
    }

    /// Reads the record of a volume that this run is about to serve, and derives how the last run
    /// ended for it. Writes nothing: a start may fail after this. A volume that this run served
    /// before goes on with its record. Returns how the last run ended.
    ///
    /// # Errors
    /// The record cannot be read now, so its content is unknown.
    pub fn load(&mut self, served: &ServedVolume) -> anyhow::Result<Before> {
        let volume = served.volume;
        let others_wrote = served.begins && self.keepers.is_shared(&volume);
        let is_known = self.entries.contains_key(&volume) && !others_wrote;
        if !is_known {
            let entry = self.read(served)?;
            self.entries.insert(volume, entry);
        }
        let fresh = (self.fresh)();
        let Some(entry) = self.entries.get_mut(&volume) else { return Ok(Before::Unknown) };
        entry.record.set_name(served.name);
        entry.before = None;
        if is_known && (entry.record.verifier().is_some() || !served.begins) {
            // No process has died since. A renounced verifier stays so while hosts know it.
            return Ok(Before::Saved);
        }
        let before = entry.record.begin(&self.boot.with(served.attachment), fresh);
        if !matches!(entry.place, Place::Ours(_)) {
            // The next run would not know the risk that this run takes.
            entry.record.vouch_anew(fresh);
        }
        if Mutation::RecordOfFailedStart.is_on() {
            entry.record.lower_risk(AtRisk::Nothing);
            let _ = entry.write();
        }
        Ok(before)
    }

    fn read(&self, served: &ServedVolume) -> anyhow::Result<RecordEntry> {
        let volume = served.volume;
        let place = self.keepers.of(&volume);
        if let Some((record, revision)) = self.keepers.left(&volume) {
            return Ok(left(place, record, revision));
        }
        let found = match &place {
            Place::Ours(keeper) | Place::Foreign(keeper) => keeper.read().with_context(|| {
                format!(
                    "cannot read {}, which records the holder of volume `{}` and the writes at risk: let this target \
                     read it, or put the former file back (state_dir); only without it does the volume begin as if no \
                     host had ever held it, and fences every mount that comes back",
                    keeper.place(),
                    served.name
                )
            })?,
            Place::Nothing => KeeperContent::Nothing,
        };
        let is_new = found == KeeperContent::Nothing;
        let former = self.keepers.former(&volume, served.risk);
        let (record, revision, kept) = match found {
            KeeperContent::Record(record, revision) => match former {
                Some(former) => (outdated(&record, &former, served.name), revision, Some(record)),
                None => (record.clone(), revision, Some(record)),
            },
            KeeperContent::Garbage(error) => {
                let (Place::Ours(keeper) | Place::Foreign(keeper)) = &place else {
                    unreachable!("a place without a keeper has nothing")
                };
                tracing::error!(
                    volume = %served.name, place = keeper.place(), error,
                    "cannot understand the record of the volume's holder: a mount that comes back is refused \
                     (fenced), and takes writes that were not flushed for lost"
                );
                (VolumeRecord::new(volume), Revision::NONE, None)
            }
            KeeperContent::Nothing => {
                (former.unwrap_or_else(|| VolumeRecord::new(volume)), Revision::NONE, None)
            }
        };
        Ok(RecordEntry { record, place, revision, kept, is_new, is_ours: false, before: None })
    }

    /// The record of a volume that was [loaded](Self::load).
    #[must_use]
    pub fn record(&self, volume: &VolumeUuid) -> Option<&VolumeRecord> {
        self.entries.get(volume).map(|entry| &entry.record)
    }

    /// Whether no record of a volume is kept yet.
    #[must_use]
    pub fn is_new(&self, volume: &VolumeUuid) -> bool {
        self.entries.get(volume).is_none_or(|entry| entry.is_new)
    }

    /// The records of all volumes that were [loaded](Self::load).
    pub fn iter(&self) -> impl Iterator<Item = &VolumeRecord> {
        self.entries.values().map(|entry| &entry.record)
    }

    /// Notes the risk of writes to a volume, before hosts may write.
    pub fn put_at_risk(&mut self, served: &ServedVolume) {
        let (Some(entry), Some(risk)) = (self.entries.get_mut(&served.volume), served.risk) else {
            return;
        };
        if served.is_writable {
            entry.before = Some((entry.record.at_risk, entry.record.boot.clone(), entry.is_ours));
            entry.record.put_at_risk(risk, &self.boot.with(served.attachment));
            entry.is_ours = true;
            // The record is written in any case. A start that was killed may have left a record
            // that is not durable, and a user may have removed a record.
            entry.kept = None;
        }
    }

    /// A volume was not served after all: takes back the risk that [`Self::put_at_risk`] noted
    /// since the volume was [loaded](Self::load), if any.
    pub fn take_back(&mut self, volume: &VolumeUuid) {
        let Some(entry) = self.entries.get_mut(volume) else { return };
        if let Some(before) = entry.before.take() {
            (entry.record.at_risk, entry.record.boot, entry.is_ours) = before;
        }
    }

    /// Notes that this run made all data durable, except the data at this risk. Does nothing for a
    /// volume that this run did not put at risk.
    pub fn lower_risk(&mut self, volume: &VolumeUuid, risk: AtRisk) {
        let Some(entry) = self.entries.get_mut(volume) else { return };
        if entry.is_ours || Mutation::RecordOfOthers.is_on() {
            entry.record.lower_risk(risk);
        }
        if risk == AtRisk::Machine && Mutation::RecordOfCacheMode.is_on() {
            entry.record.vouch_anew((self.fresh)());
        }
    }

    /// Notes that acknowledged writes of a volume may be lost although the run goes on.
    pub fn lose(&mut self, volume: &VolumeUuid) {
        if let Some(entry) = self.entries.get_mut(volume) {
            entry.record.renounce();
        }
        if Mutation::RecordOfNeighbours.is_on() {
            self.entries.values_mut().for_each(|entry| entry.record.renounce());
        }
    }

    /// Notes the last holder of a volume, which this run need not serve any more. The record of a
    /// volume of a group is written anew, also if nothing changes: that proves that this target is
    /// still the owner of the image.
    pub fn set_holder(&mut self, holder: HolderRecord) {
        let is_shared = self.keepers.is_shared(&holder.volume);
        if let Some(entry) = self.entries.get_mut(&holder.volume) {
            if is_shared {
                entry.kept = None;
            }
            entry.record.set_holder(Some(holder));
        }
    }

    /// Notes the store of a volume.
    pub fn set_store(&mut self, volume: &VolumeUuid, store: Option<StoreIdentity>) {
        if let Some(entry) = self.entries.get_mut(volume) {
            entry.record.set_store(store);
        }
    }

    /// Makes the changed records among these volumes durable. A record without a place to keep it
    /// is no failure. Returns the volumes with failed writes, and the errors. May block.
    pub fn write(&mut self, volumes: &BTreeSet<VolumeUuid>) -> BTreeMap<VolumeUuid, String> {
        let due = self.entries.iter_mut().filter(|(volume, entry)| {
            volumes.contains(*volume) && entry.kept.as_ref() != Some(&entry.record)
        });
        let mut due: Vec<(&VolumeUuid, &mut RecordEntry)> = due.collect();
        let each = due.len().div_ceil(WRITERS_MAX).max(1);
        let write = |some: &mut [(&VolumeUuid, &mut RecordEntry)]| -> Vec<(VolumeUuid, String)> {
            let failed = some.iter_mut().filter_map(|(v, entry)| Some((**v, entry.write().err()?)));
            failed.collect()
        };
        if due.len() <= 1 {
            return write(&mut due).into_iter().collect();
        }
        let parts: Vec<Mutex<EntrySlice<'_>>> = due.chunks_mut(each).map(Mutex::new).collect();
        let write_part = |part: &Mutex<EntrySlice<'_>>| -> Vec<(VolumeUuid, String)> {
            write(&mut part.lock().unwrap_or_else(PoisonError::into_inner))
        };
        std::thread::scope(|scope| {
            let mut failed = BTreeMap::new();
            let begin = |part| Builder::new().spawn_scoped(scope, move || write_part(part)).ok();
            let writers: Vec<_> = parts.iter().map(|part| (part, begin(part))).collect();
            for (part, writer) in writers {
                // Without a thread, and after one that broke, this one writes the rest.
                let done = writer.and_then(|writer| writer.join().ok());
                failed.extend(done.unwrap_or_else(|| write_part(part)));
            }
            failed
        })
    }

    /// Makes the risks that [`Self::put_at_risk`] noted durable, of every loaded volume. A volume
    /// that cannot be written gets a new verifier: the kept record vouches for an older one. Then
    /// converts the files of the version before. Call it when nothing of the start can fail any
    /// more and no volume is served yet. May block.
    pub fn write_all(&mut self) {
        let all = self.entries.keys().copied().collect();
        for (volume, error) in self.write(&all) {
            let Some(entry) = self.entries.get_mut(&volume) else { continue };
            tracing::warn!(
                place = entry.place_shown(),
                error,
                "cannot remember how this run ends (state_dir): initiators will take the next start for a loss of \
                 writes that were not flushed"
            );
            let (risk, boot) = (entry.record.at_risk(), entry.record.boot.clone());
            entry.record.vouch_anew((self.fresh)());
            entry.record.put_at_risk(risk, &boot);
        }
        self.convert_others();
    }

    /// Keeps the records of the version before of volumes that this run does not serve.
    fn convert_others(&mut self) {
        let others = self.keepers.former_volumes();
        for volume in others.iter().filter(|volume| !self.entries.contains_key(*volume)) {
            let Place::Ours(keeper) = self.keepers.of(volume) else { return };
            let converted = match (keeper.read(), self.keepers.former(volume, None)) {
                (Ok(KeeperContent::Nothing), Some(record)) => {
                    keeper.replace(&record, Revision::NONE).map(drop).map_err(|e| e.to_string())
                }
                (Ok(_), _) => Ok(()),
                (Err(error), _) => Err(error.to_string()),
            };
            if let Err(error) = converted {
                tracing::warn!(
                    place = keeper.place(),
                    error,
                    "cannot convert the records of the version before"
                );
                return;
            }
        }
        let is_kept = |entry: &RecordEntry| entry.kept.as_ref() == Some(&entry.record);
        if self.entries.values().all(is_kept) {
            self.keepers.forget_former();
        }
    }

    /// As [`Self::write`], for a volume that lost acknowledged writes ([`Self::lose`]): if the
    /// record cannot be written, it is made to vouch for nothing. Returns whether the next run is
    /// certain to know. May block.
    pub fn write_loss(&mut self, volume: &VolumeUuid) -> bool {
        let Some(error) = self.write(&BTreeSet::from([*volume])).remove(volume) else {
            return true;
        };
        let Some(entry) = self.entries.get_mut(volume) else { return true };
        let Place::Ours(keeper) = &entry.place else { return true };
        let place = keeper.place();
        match keeper.renounce() {
            Ok(()) => {
                tracing::warn!(
                    place,
                    error,
                    "cannot write the note that acknowledged writes may be lost: renamed the record, which says the same"
                );
                true
            }
            Err(renaming) => {
                let remedy = match self.keepers.is_shared(volume) {
                    true => "look at `ceph -s`",
                    false => "state_dir: make the directory writable",
                };
                tracing::error!(
                    place, error, %renaming, remedy,
                    "cannot note that acknowledged writes may be lost: should this target die before it can, initiators \
                     will take lost writes for durable; the target tries again"
                );
                false
            }
        }
    }

    /// The records as texts, for another program in this process.
    pub(crate) fn texts(&self) -> Vec<String> {
        let text = |entry: &RecordEntry| {
            let text = super::text::text_of(&entry.record, entry.revision).ok()?;
            String::from_utf8(text).ok()
        };
        self.entries.values().filter_map(text).collect()
    }

    /// Compares the kept records with those of this run. May block.
    ///
    /// # Errors
    /// The first difference, for people.
    pub fn compare(&self) -> Result<(), String> {
        self.entries.values().try_for_each(RecordEntry::compare)
    }
}

/// The record that the program before this one in this process left. It replaces every kept one:
/// the lock was this process's all the time, and the file may be gone.
fn left(place: Place, record: VolumeRecord, revision: Revision) -> RecordEntry {
    let kept = match &place {
        Place::Ours(keeper) | Place::Foreign(keeper) => keeper.read().ok(),
        Place::Nothing => None,
    };
    let (kept, revision) = match kept {
        Some(KeeperContent::Record(kept, found)) if found == revision => (Some(kept), found),
        // A user put an older one back.
        Some(KeeperContent::Record(_, found)) if found < revision => (None, found),
        _ => (None, revision),
    };
    RecordEntry { record, place, revision, kept, is_new: false, is_ours: false, before: None }
}

/// A record beside files of the version before: that version served the volume since, so the record
/// is old, and the last holder is uncertain. No host that held the volume may resume.
fn outdated(record: &VolumeRecord, former: &VolumeRecord, volume: Name) -> VolumeRecord {
    tracing::error!(
        %volume,
        "the version before served this volume since its record was written: a mount that comes back is refused \
         (fenced), and takes writes that were not flushed for lost"
    );
    let mut record = record.clone();
    record.renounce();
    let holders = record.holder().into_iter().chain(former.holder());
    let last = holders.max_by_key(|holder| holder.generation.0).cloned();
    record.set_holder(last.map(|mut last| {
        last.generation = last.generation.next().unwrap_or(last.generation);
        last.present = false;
        last
    }));
    record
}

impl RecordEntry {
    fn write(&mut self) -> Result<(), String> {
        if self.kept.as_ref() == Some(&self.record) {
            return Ok(());
        }
        if let Place::Ours(keeper) = &self.place {
            let written = keeper.replace(&self.record, self.revision);
            // After a failure the kept record is unknown.
            self.kept = None;
            if let (Err(KeepError::Io(_)), Ok(KeeperContent::Record(record, revision))) =
                (&written, keeper.read())
                && record == self.record
            {
                // The new record is there, but not durable: the next try replaces it.
                self.revision = revision;
            }
            self.revision = written.map_err(|error| error.to_string())?;
        }
        self.kept = Some(self.record.clone());
        Ok(())
    }

    fn place_shown(&self) -> Option<String> {
        match &self.place {
            Place::Ours(keeper) | Place::Foreign(keeper) => Some(keeper.place()),
            Place::Nothing => None,
        }
    }

    fn compare(&self) -> Result<(), String> {
        let (Place::Ours(keeper), Some(kept)) = (&self.place, &self.kept) else { return Ok(()) };
        let place = keeper.place();
        match keeper.read() {
            Ok(KeeperContent::Record(record, revision))
                if record == *kept && revision == self.revision =>
            {
                Ok(())
            }
            Ok(KeeperContent::Record(..)) => {
                Err(format!("{place} (state_dir) has changed: another program wrote to it"))
            }
            Ok(KeeperContent::Nothing) => Err(format!("{place} (state_dir) is gone")),
            Ok(KeeperContent::Garbage(error)) => {
                Err(format!("{place} (state_dir) is damaged: {error}"))
            }
            // Another member of the group serves the volume by now. A `state_dir` that is gone has
            // a number of the system.
            Err(error)
                if error.kind() == io::ErrorKind::NotConnected
                    && error.raw_os_error().is_none() =>
            {
                Ok(())
            }
            Err(error) => Err(format!("cannot read {place} (state_dir): {error}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::super::StateDirectory;
    use super::*;

    const V: VolumeUuid = [1; 16];
    const W: VolumeUuid = [2; 16];

    fn served(volume: VolumeUuid, risk: AtRisk) -> ServedVolume {
        let name = Name::new(&format!("v{}", volume[0])).unwrap();
        ServedVolume {
            volume,
            name,
            risk: Some(risk),
            is_writable: true,
            attachment: None,
            begins: true,
        }
    }

    /// A run on that boot; its verifiers begin with this byte.
    fn run(dir: &Path, boot: &str, first: u8) -> Records {
        let directory = StateDirectory::open(dir, &Name::new("t").unwrap()).unwrap();
        let mut made = 0;
        let fresh = move || {
            made += 1;
            let mut verifier = [first; 16];
            verifier[15] = made;
            WriteVerifier(verifier)
        };
        Records::new(Box::new(directory), BootId::new(boot), Box::new(fresh))
    }

    fn begin(records: &mut Records, volumes: &[ServedVolume]) -> Vec<Before> {
        let before = volumes.iter().map(|volume| records.load(volume).unwrap()).collect();
        volumes.iter().for_each(|volume| records.put_at_risk(volume));
        records.write_all();
        before
    }

    fn end(mut records: Records, saved: &[VolumeUuid]) {
        saved.iter().for_each(|volume| records.lower_risk(volume, AtRisk::Nothing));
        assert!(records.write(&saved.iter().copied().collect()).is_empty());
    }

    #[test]
    fn a_loss_of_one_store_does_not_affect_other_volumes() {
        let dir = tempfile::tempdir().unwrap();
        let both = [served(V, AtRisk::Process), served(W, AtRisk::Process)];
        let mut first = run(dir.path(), "a", 1);
        assert_eq!(begin(&mut first, &both), [Before::Unknown; 2]);
        first.lose(&V);
        assert!(first.write_loss(&V));
        end(first, &[V, W]);
        let mut second = run(dir.path(), "b", 2);
        assert_eq!(begin(&mut second, &both), [Before::Unknown, Before::Saved]);
    }

    #[test]
    fn a_run_vouches_only_for_its_own_risk() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = run(dir.path(), "a", 1);
        begin(&mut first, &[served(V, AtRisk::Machine), served(W, AtRisk::Machine)]);
        // The run dies. The next one reads one volume, and does not serve the other.
        drop(first);
        let mut second = run(dir.path(), "a", 2);
        let reads = ServedVolume { is_writable: false, ..served(V, AtRisk::Machine) };
        assert_eq!(begin(&mut second, &[reads]), [Before::InKernel]);
        end(second, &[V, W]);
        let mut third = run(dir.path(), "b", 3);
        let both = [served(V, AtRisk::Machine), served(W, AtRisk::Machine)];
        assert_eq!(begin(&mut third, &both), [Before::Lost; 2]);
        end(third, &[V, W]);
        let mut fourth = run(dir.path(), "c", 4);
        assert_eq!(begin(&mut fourth, &both), [Before::Saved; 2]);
    }

    #[test]
    fn an_addition_that_puts_nothing_at_risk_takes_nothing_back() {
        let dir = tempfile::tempdir().unwrap();
        let writable = || served(V, AtRisk::Machine);
        let mut first = run(dir.path(), "a", 1);
        begin(&mut first, &[writable()]);
        drop(first);
        let mut second = run(dir.path(), "a", 2);
        assert_eq!(begin(&mut second, &[writable()]), [Before::InKernel]);
        second.lower_risk(&V, AtRisk::Nothing);
        // The volume is removed, and added again for readers alone, which fails.
        let reads = ServedVolume { is_writable: false, ..writable() };
        second.load(&reads).unwrap();
        second.put_at_risk(&reads);
        second.take_back(&V);
        assert!(second.write(&BTreeSet::from([V])).is_empty());
        drop(second);
        let mut third = run(dir.path(), "b", 3);
        assert_eq!(begin(&mut third, &[writable()]), [Before::Saved]);
    }

    #[test]
    fn a_start_writes_nothing_before_it_may_serve() {
        let dir = tempfile::tempdir().unwrap();
        let files = || fs::read_dir(dir.path()).unwrap().count();
        let mut failed = run(dir.path(), "a", 1);
        failed.load(&served(V, AtRisk::Process)).unwrap();
        assert_eq!(files(), 1, "the lock");
        drop(failed);
        let mut good = run(dir.path(), "a", 2);
        begin(&mut good, &[served(V, AtRisk::Process)]);
        assert_eq!((files(), good.compare()), (2, Ok(())));
        fs::remove_file(dir.path().join(format!("t.{}.volume", "01".repeat(16)))).unwrap();
        assert!(good.compare().unwrap_err().contains("is gone"));
    }

    #[test]
    fn an_unwritten_record_gets_a_new_verifier() {
        let dir = tempfile::tempdir().unwrap();
        let volume = [served(V, AtRisk::Machine)];
        let mut first = run(dir.path(), "a", 1);
        begin(&mut first, &volume);
        let known = first.record(&V).unwrap().verifier();
        end(first, &[V]);
        // A directory in the place of the new file, for an error as on a full disk.
        let new = dir.path().join(format!("t.{}.volume.new", "01".repeat(16)));
        fs::create_dir(&new).unwrap();
        let mut second = run(dir.path(), "a", 2);
        assert_eq!(begin(&mut second, &volume), [Before::Saved]);
        let shown = second.record(&V).unwrap().verifier();
        assert_ne!(shown, known, "what is kept vouches for the other one");
        second.lose(&V);
        assert!(second.write_loss(&V), "there is room for another name");
        drop(second);
        fs::remove_dir(&new).unwrap();
        let mut third = run(dir.path(), "a", 3);
        assert_eq!(begin(&mut third, &volume), [Before::Unknown]);
        let next = third.record(&V).unwrap().verifier();
        assert!(next != known && next != shown);
    }
}
