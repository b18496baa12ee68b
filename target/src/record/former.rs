//! [`Former`]: the files that the version before left in the state directory: one with the holders
//! of all volumes (`NAME.holders`), and one with the end of the last run (`NAME.lineage`). They are
//! read once and become records; then they are removed.
//!
//! A lineage was two verifiers for the whole target: one for data in the memory of the process,
//! that is of write-back volumes, and one for data in the kernel, that is of all others. For a
//! volume that is served, its mode tells which of them its hosts know. Any other volume begins with
//! a new verifier.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use rblk_protocol::WriteVerifier;
use serde::Deserialize;

use super::text::{HolderText, from_hex, lineage};
use super::{AtRisk, BootId, VolumeRecord};
use crate::record::durable;
use crate::record::holders::{HolderRecord, VolumeUuid};
use crate::store::StoreIdentity;

/// Longest file of holders that is read: all the volumes a target can have, several times.
const HOLDERS_MAX: u64 = 64 << 20;
/// Longest lineage that is read.
const LINEAGE_MAX: u64 = 4096;
/// The forms of the file of the holders: without stores, and with them.
const HOLDERS_FORMS: [u32; 2] = [1, 2];
/// The form of the lineage.
const LINEAGE_FORM: u32 = 1;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Former {
    paths: Vec<PathBuf>,
    lineage: Option<Lineage>,
    holders: FormerHolders,
}

/// The holders of all volumes, and the stores of the volumes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct FormerHolders {
    records: BTreeMap<VolumeUuid, HolderRecord>,
    stores: BTreeMap<VolumeUuid, StoreIdentity>,
}

/// The end of the last run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Lineage {
    process: WriteVerifier,
    machine: WriteVerifier,
    boot: BootId,
    clean: bool,
}

impl Former {
    /// Reads the files of the version before. `None`: there are none.
    ///
    /// # Errors
    /// A file exists and cannot be read now, so its content is unknown. A file that cannot be
    /// understood is no error: it is lost permanently.
    pub(super) fn read(directory: &Path, name: &str) -> anyhow::Result<Option<Self>> {
        let mut former = Self::default();
        let mut read = |extension: &str, most| {
            let path = directory.join(format!("{name}.{extension}"));
            let text = match durable::read(&path, most) {
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(None),
                text => text,
            };
            let text = text.with_context(|| {
                format!(
                    "cannot read {}, in which the version before recorded the holders of the volumes: let this target \
                     read it, or put the former file back (state_dir)",
                    path.display()
                )
            })?;
            if text.is_some() {
                former.paths.push(path);
            }
            anyhow::Ok(text)
        };
        let (holders, lineage) = (read("holders", HOLDERS_MAX)?, read("lineage", LINEAGE_MAX)?);
        if former.paths.is_empty() {
            return Ok(None);
        }
        if let Some(text) = holders {
            former.holders = holders_in(&text).unwrap_or_else(|error| {
                tracing::error!(
                    error,
                    "cannot understand the record of the volumes' holders (NAME.holders in state_dir): mounts that \
                     come back are refused (fenced)"
                );
                FormerHolders::default()
            });
        }
        former.lineage = lineage.and_then(|text| lineage_in(&text));
        Ok(Some(former))
    }

    /// Every volume that it knows.
    pub(super) fn volumes(&self) -> BTreeSet<VolumeUuid> {
        self.holders.records.keys().chain(self.holders.stores.keys()).copied().collect()
    }

    /// The record of a volume. `risk`: the risk of writes to it, if it is served.
    pub(super) fn record_of(&self, volume: &VolumeUuid, risk: Option<AtRisk>) -> VolumeRecord {
        let mut record = VolumeRecord::new(*volume);
        record.set_holder(self.holders.records.get(volume).cloned());
        record.set_store(self.holders.stores.get(volume).cloned());
        let (Some(lineage), Some(risk)) = (&self.lineage, risk) else { return record };
        record.vouch_anew(match risk {
            AtRisk::Process => lineage.process,
            AtRisk::Machine | AtRisk::Nothing => lineage.machine,
        });
        if !lineage.clean {
            record.put_at_risk(risk, &lineage.boot);
        }
        record
    }

    /// Removes the files.
    pub(super) fn remove(&self) -> io::Result<()> {
        self.paths.iter().try_for_each(|path| durable::remove(path))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HoldersText {
    version: u32,
    volumes: Vec<VolumeText>,
    #[serde(default)]
    stores: Vec<StoreText>,
}

// `deny_unknown_fields` and `flatten` exclude each other: the fields of the holder deny them.
#[derive(Deserialize)]
struct VolumeText {
    uuid: String,
    #[serde(flatten)]
    holder: HolderText,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StoreText {
    uuid: String,
    identity: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LineageText {
    version: u32,
    boot_id: String,
    process: String,
    machine: String,
    clean: bool,
}

/// The holders in a file of the version before.
///
/// # Errors
/// Why the text is no such file, for people.
pub(crate) fn holders_in(text: &[u8]) -> Result<FormerHolders, String> {
    let text: HoldersText = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if !HOLDERS_FORMS.contains(&text.version) {
        return Err(format!("it has form {}", text.version));
    }
    let record = |volume: &VolumeText| {
        let uuid = from_hex(&volume.uuid)?;
        Some((uuid, volume.holder.holder_of(uuid)?))
    };
    let store =
        |store: &StoreText| Some((from_hex(&store.uuid)?, StoreIdentity::parse(&store.identity)?));
    let records = text.volumes.iter().map(record).collect::<Option<_>>();
    let stores = text.stores.iter().map(store).collect::<Option<_>>();
    let holders = records.zip(stores).map(|(records, stores)| FormerHolders { records, stores });
    holders.ok_or_else(|| "a field has a bad value".to_owned())
}

/// The lineage in a file of the version before, if it is one.
pub(crate) fn lineage_in(text: &[u8]) -> Option<Lineage> {
    let text: LineageText = serde_json::from_slice(text).ok()?;
    (text.version == LINEAGE_FORM).then_some(())?;
    Some(Lineage {
        process: lineage(&text.process)?,
        machine: lineage(&text.machine)?,
        boot: BootId::new(&text.boot_id),
        clean: text.clean,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::Before;
    use super::*;

    const V: VolumeUuid = [7; 16];
    const HOLDERS: &str = r#"{"version":2,"volumes":[{"uuid":"07070707070707070707070707070707",
        "generation":3,"mode":"exclusive","host":"09090909090909090909090909090909","host_name":"h",
        "present":true}],"stores":[{"uuid":"07070707070707070707070707070707","identity":"inode:1"}]}"#;
    const LINEAGE: &str = r#"{"version":1,"boot_id":"a","process":"01010101010101010101010101010101",
        "machine":"02020202020202020202020202020202","clean":false}"#;

    /// Files that the programs of 27 November 2026 (5f24c81f) left when they were killed.
    const LEFT_HOLDERS: &str = include_str!("../../../tests/former/store1.holders");
    const LEFT_LINEAGE: &str = include_str!("../../../tests/former/store1.lineage");

    fn former(holders: &str, lineage: &str) -> (tempfile::TempDir, Former) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("t.holders"), holders).unwrap();
        fs::write(dir.path().join("t.lineage"), lineage).unwrap();
        let former = Former::read(dir.path(), "t").unwrap().unwrap();
        (dir, former)
    }

    #[test]
    fn hosts_know_the_lineage_of_the_cache_mode() {
        let (dir, former) = former(HOLDERS, LINEAGE);
        assert_eq!(former.volumes(), BTreeSet::from([V]));
        let fresh = WriteVerifier([5; 16]);
        for (risk, boot, before, verifier) in [
            (AtRisk::Process, "a", Before::Lost, fresh),
            (AtRisk::Machine, "a", Before::InKernel, WriteVerifier([2; 16])),
            (AtRisk::Machine, "b", Before::Lost, fresh),
        ] {
            let mut record = former.record_of(&V, Some(risk));
            assert_eq!(record.begin(&BootId::new(boot), fresh), before);
            assert_eq!(record.verifier(), Some(verifier));
            assert_eq!(record.holder().unwrap().generation.0, 3);
            assert!(record.store().is_some());
        }
        let mut absent = former.record_of(&V, None);
        assert_eq!(absent.begin(&BootId::new("a"), fresh), Before::Unknown);
        former.remove().unwrap();
        assert!(Former::read(dir.path(), "t").unwrap().is_none());
    }

    #[test]
    fn a_clean_stop_of_the_version_before_counts_as_clean() {
        let (_dir, former) = former(HOLDERS, &LINEAGE.replace("false", "true"));
        for (risk, verifier) in [(AtRisk::Process, 1), (AtRisk::Machine, 2)] {
            let mut record = former.record_of(&V, Some(risk));
            let fresh = WriteVerifier([5; 16]);
            assert_eq!(record.begin(&BootId::new("b"), fresh), Before::Saved);
            assert_eq!(record.verifier(), Some(WriteVerifier([verifier; 16])));
        }
    }

    #[test]
    fn files_that_the_version_before_left_are_understood() {
        let (_dir, former) = former(LEFT_HOLDERS, LEFT_LINEAGE);
        assert_eq!(former.volumes().len(), 4);
        let id = |text| from_hex(text).unwrap();
        let holder = id("4bbe1e8417496a5171bbd3d26fefba43");
        let boot = BootId::new("08297010-4783-4cf3-a761-4b61a8868874");
        let machine = Some(WriteVerifier(id("be70e1dbab6d8a1b10910a94d967b29c")));
        let fresh = WriteVerifier([5; 16]);
        // A volume in write-back and a shared one with a mount each, and one that was unmounted.
        for (uuid, mode, present, risk, before) in [
            ("e496c34b528a6213b529334e55c45779", "Exclusive", true, AtRisk::Process, Before::Lost),
            ("ba1706a008b936326ab91f0ab5a6f713", "Shared", true, AtRisk::Machine, Before::InKernel),
            (
                "e26a6f3852304d6abbb628f276551091",
                "Exclusive",
                false,
                AtRisk::Machine,
                Before::InKernel,
            ),
        ] {
            let mut record = former.record_of(&id(uuid), Some(risk));
            assert_eq!(record.begin(&boot, fresh), before, "{uuid}");
            let verifier = if before == Before::Lost { Some(fresh) } else { machine };
            assert_eq!(record.verifier(), verifier, "{uuid}");
            let found = record.holder().unwrap();
            assert_eq!((format!("{:?}", found.mode).as_str(), found.present), (mode, present));
            assert_eq!((found.host.0, found.host_name.as_str()), (holder, "client1"));
            assert!(record.store().is_some());
        }
    }

    #[test]
    fn bad_files_of_the_version_before_are_refused() {
        for bad in [
            "",
            "{}",
            &HOLDERS.replace("\"version\":2", "\"version\":3"),
            &HOLDERS.replace("0707", "07g7"),
            &HOLDERS.replace("\"h\"", "\"a b\""),
            &HOLDERS.replace("exclusive", "read-only"),
            &HOLDERS.replace("inode:1", ""),
        ] {
            assert!(holders_in(bad.as_bytes()).is_err(), "{bad}");
            let (_dir, former) = former(bad, "{");
            assert!(former.volumes().is_empty() && former.lineage.is_none());
        }
        for bad in [LINEAGE.replace("01", "00"), LINEAGE.replace("\"version\":1", "\"version\":2")]
        {
            assert_eq!(lineage_in(bad.as_bytes()), None, "{bad}");
        }
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("t.holders")).unwrap();
        let error = format!("{:#}", Former::read(dir.path(), "t").unwrap_err());
        for words in ["t.holders", "Is a directory", "state_dir"] {
            assert!(error.contains(words), "{error}");
        }
    }
}
