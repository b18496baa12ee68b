//! A [`VolumeRecord`] as text: one JSON object, with the number of its revision.

use std::io;

use rblk_protocol::{AccessMode, Generation, HostId, InstanceId, Name, WriteVerifier};
use serde::{Deserialize, Serialize};

use super::keeper::Revision;
use super::{AtRisk, BootId, VolumeRecord};
use crate::record::holders::{HolderRecord, VolumeUuid};
use crate::store::StoreIdentity;

/// Form of the text.
const FORM: u32 = 1;
/// Longest text that is read, in bytes.
pub(crate) const TEXT_MAX: u64 = 16 << 10;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordText {
    version: u32,
    revision: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    uuid: String,
    #[serde(default)]
    verifier: Option<String>,
    at_risk: AtRisk,
    boot_id: BootId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    store: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    holder: Option<HolderText>,
}

/// The last holder, in a record and in the file of the version before.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HolderText {
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

impl HolderText {
    fn of(record: &HolderRecord) -> Self {
        Self {
            generation: record.generation.0,
            mode: match record.mode {
                AccessMode::Shared => Mode::Shared,
                // Openers that only read leave no record.
                AccessMode::Exclusive | AccessMode::ReadOnly => Mode::Exclusive,
            },
            host: record.host.to_string(),
            host_name: record.host_name.to_string(),
            present: record.present,
        }
    }

    pub(super) fn holder_of(&self, volume: VolumeUuid) -> Option<HolderRecord> {
        Some(HolderRecord {
            volume,
            generation: Generation(self.generation),
            mode: match self.mode {
                Mode::Exclusive => AccessMode::Exclusive,
                Mode::Shared => AccessMode::Shared,
            },
            host: HostId(from_hex(&self.host)?),
            host_name: Name::new(&self.host_name).ok()?,
            present: self.present,
        })
    }
}

/// The text of a record.
///
/// # Errors
/// The record cannot be put into words; that is a bug.
pub(crate) fn text_of(record: &VolumeRecord, revision: Revision) -> io::Result<Vec<u8>> {
    let text = RecordText {
        version: FORM,
        revision: revision.0,
        name: record.name.map(|name| name.to_string()),
        uuid: to_hex(record.volume),
        verifier: record.verifier.map(|verifier| to_hex(verifier.0)),
        at_risk: record.at_risk,
        boot_id: record.boot.clone(),
        store: record.store.as_ref().map(ToString::to_string),
        holder: record.holder.as_ref().map(HolderText::of),
    };
    let mut text = serde_json::to_vec(&text)?;
    text.push(b'\n');
    Ok(text)
}

/// The record in a text, and its revision.
///
/// # Errors
/// Why the text is no record, for people.
pub(crate) fn parse(text: &[u8]) -> Result<(VolumeRecord, Revision), String> {
    let text: RecordText = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if text.version != FORM {
        return Err(format!("it has form {}, and this version reads form {FORM}", text.version));
    }
    let bad = |key: &str| format!("`{key}` has a value that cannot be");
    let volume = from_hex(&text.uuid).ok_or_else(|| bad("uuid"))?;
    let verifier = match &text.verifier {
        Some(verifier) => Some(lineage(verifier).ok_or_else(|| bad("verifier"))?),
        None => None,
    };
    let store = match &text.store {
        Some(store) => Some(StoreIdentity::parse(store).ok_or_else(|| bad("store"))?),
        None => None,
    };
    let holder = match &text.holder {
        Some(holder) => Some(holder.holder_of(volume).ok_or_else(|| bad("holder"))?),
        None => None,
    };
    let name = match &text.name {
        Some(name) => Some(Name::new(name).map_err(|_| bad("name"))?),
        None => None,
    };
    let record = VolumeRecord {
        volume,
        name,
        verifier,
        at_risk: text.at_risk,
        boot: BootId::new(&text.boot_id.0),
        store,
        holder,
    };
    Ok((record, Revision(text.revision)))
}

/// 32 hexadecimal digits.
pub(crate) fn to_hex(bytes: [u8; 16]) -> String {
    InstanceId(bytes).to_string()
}

pub(super) fn from_hex(text: &str) -> Option<[u8; 16]> {
    let digits = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
    u128::from_str_radix(text, 16).ok().filter(|_| digits).map(u128::to_be_bytes)
}

/// A verifier, which is not all zero.
pub(super) fn lineage(text: &str) -> Option<WriteVerifier> {
    from_hex(text).filter(|bytes| *bytes != [0; 16]).map(WriteVerifier)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> VolumeRecord {
        let volume = [7; 16];
        let mut record = VolumeRecord::new(volume);
        record.set_name(Name::new("v").unwrap());
        record.vouch_anew(WriteVerifier([3; 16]));
        record.put_at_risk(AtRisk::Machine, &BootId::new("a-boot"));
        record.set_store(StoreIdentity::parse("inode:1:2"));
        record.set_holder(Some(HolderRecord {
            volume,
            generation: Generation(5),
            mode: AccessMode::Shared,
            host: HostId([9; 16]),
            host_name: Name::new("h").unwrap(),
            present: true,
        }));
        record
    }

    #[test]
    fn a_record_comes_back_as_it_was() {
        let mut renounced = record();
        renounced.renounce();
        for record in [record(), renounced, VolumeRecord::new([1; 16])] {
            let text = text_of(&record, Revision(9)).unwrap();
            assert_eq!(parse(&text), Ok((record, Revision(9))));
        }
    }

    #[test]
    fn a_text_that_is_no_record_is_refused() {
        let good = String::from_utf8(text_of(&record(), Revision(1)).unwrap()).unwrap();
        let zero = to_hex([0; 16]);
        for (bad, why) in [
            (String::new(), "EOF"),
            ("{}".to_owned(), "version"),
            (good.replace("\"version\":1", "\"version\":2"), "form 2"),
            (good.replace("0707", "07g7"), "uuid"),
            (good.replace(&to_hex([3; 16]), &zero), "verifier"),
            (good.replace("inode:1:2", ""), "store"),
            (good.replace("\"h\"", "\"a b\""), "holder"),
            (good.replace("\"shared\"", "\"read-only\""), "read-only"),
            (good.replace("\"machine\"", "\"moon\""), "moon"),
            (good.replace("\"revision\"", "\"more\":1,\"revision\""), "more"),
            (good[..good.len() - 2].to_owned(), "EOF"),
        ] {
            let error = parse(bad.as_bytes()).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }
}
