//! [`DiskNames`]: the names of a disk for udev, from the note of its mount. udev makes the links in
//! `/dev/disk/by-id` and `/dev/rblk` of them (`packaging/udev/60-rblk.rules`).
//!
//! The note names a new disk before the kernel tells udev of it, and outlives the process of the
//! mount. So nothing here waits: the process of the mount, which may be starting the disk just
//! then, is not asked. A mount that leaves no trace but its note may have had the number that a
//! disk of another program has now. The kernel numbers every disk of a run once (its sequence), so
//! a note that has the sequence of its disk names no other disk. A note without it belongs to a
//! mount that is starting its disk, or to an older program, and counts while a process holds the
//! name of the mount.

use std::fmt;
use std::io::Read;
use std::path::Path;

use rblk_protocol::Name;
use serde::Deserialize;

use super::lock::MountLock;
use super::run_dir::{self, RUN_DIR};

/// Limit of the length of a note, as in the program that writes it.
const NOTE_MAX: u64 = 64 << 10;
/// The beginning of a disk's name in the kernel.
const DISK: &str = "ublkb";

/// The facts of a note that name its disk. The rest of the note is for the next process.
#[derive(Deserialize)]
struct NotedDisk {
    device_id: u32,
    #[serde(default)]
    disk_sequence: Option<u64>,
    target_name: String,
    config: NotedConfig,
    volume: NotedVolume,
}

#[derive(Deserialize)]
struct NotedConfig {
    volume: String,
}

#[derive(Deserialize)]
struct NotedVolume {
    uuid: String,
}

/// The names of the disk of a mount. All of them consist of characters that are safe in a path and
/// in a rule of udev. [`fmt::Display`] writes them as properties of udev.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskNames {
    mount: Name,
    target: Name,
    volume: Name,
    uuid: u128,
}

impl DiskNames {
    /// The names of a disk, by its name in the kernel and the kernel's sequence number of it, which
    /// an event of udev carries. `None` for a disk that no mount of rblk has.
    #[must_use]
    pub fn find(disk: &str, sequence: Option<u64>) -> Option<Self> {
        let notes = run_dir::names();
        notes.iter().find_map(|mount| {
            Self::find_in(Path::new(RUN_DIR), mount, disk, sequence, MountLock::is_held)
        })
    }

    fn find_in(
        dir: &Path,
        mount: &str,
        disk: &str,
        sequence: Option<u64>,
        is_held: impl Fn(&str) -> bool,
    ) -> Option<Self> {
        let number: u32 = disk.strip_prefix(DISK)?.parse().ok()?;
        let file = std::fs::File::open(dir.join(format!("{mount}.json"))).ok()?;
        let mut text = Vec::new();
        file.take(NOTE_MAX).read_to_end(&mut text).ok()?;
        let note: NotedDisk = serde_json::from_slice(&text).ok()?;
        let is_of_disk = match (note.disk_sequence, sequence) {
            (Some(noted), Some(sequence)) => noted == sequence,
            _ => is_held(mount),
        };
        if note.device_id != number || !is_of_disk {
            return None;
        }
        let digits = &note.volume.uuid;
        let is_uuid = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        Some(Self {
            mount: Name::new(mount).ok()?,
            target: Name::new(&note.target_name).ok()?,
            volume: Name::new(&note.config.volume).ok()?,
            uuid: u128::from_str_radix(digits, 16).ok().filter(|_| is_uuid)?,
        })
    }

    /// For the tests of the note: the names in the text of a note, as those of its disk.
    ///
    /// # Errors
    /// The system's, where the text cannot be written to a file of `dir`.
    #[doc(hidden)]
    pub fn of_note(
        dir: &Path,
        mount: &str,
        text: &[u8],
        disk: &str,
    ) -> std::io::Result<Option<Self>> {
        std::fs::write(dir.join(format!("{mount}.json")), text)?;
        Ok(Self::find_in(dir, mount, disk, None, |_| true))
    }
}

impl fmt::Display for DiskNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mount, target, volume, uuid } = self;
        let uuid = Uuid(*uuid);
        // `lsblk` and udisks show the first three.
        writeln!(f, "ID_VENDOR=rblk")?;
        writeln!(f, "ID_MODEL={volume}")?;
        writeln!(f, "ID_SERIAL={uuid}")?;
        writeln!(f, "ID_RBLK_UUID={uuid}")?;
        writeln!(f, "ID_RBLK_TARGET={target}")?;
        writeln!(f, "ID_RBLK_VOLUME={volume}")?;
        write!(f, "ID_RBLK_MOUNT={mount}")
    }
}

/// A number in the form of UUIDs.
struct Uuid(u128);

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = format!("{:032x}", self.0);
        let [a, b, c, d, e] = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &digits[part]);
        write!(f, "{a}-{b}-{c}-{d}-{e}")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const SEQUENCE: u64 = 17;

    fn note() -> Value {
        json!({
            "form": 2,
            "name": "data",
            "device_id": 3,
            "disk_sequence": SEQUENCE,
            "target_name": "store1",
            "config": { "volume": "vol0", "target": ["tcp://192.0.2.1"] },
            "volume": { "uuid": "0123456789abcdef0123456789abcdef", "blocks": 8 },
        })
    }

    fn found(note: &Value, disk: &str, sequence: Option<u64>, held: bool) -> Option<String> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("data.json"), note.to_string()).unwrap();
        let names = DiskNames::find_in(dir.path(), "data", disk, sequence, |_| held);
        names.map(|names| names.to_string())
    }

    #[test]
    fn the_properties_for_udev_are_those_of_the_rules() {
        let text = found(&note(), "ublkb3", Some(SEQUENCE), false).unwrap();
        assert_eq!(
            text,
            "ID_VENDOR=rblk\n\
             ID_MODEL=vol0\n\
             ID_SERIAL=01234567-89ab-cdef-0123-456789abcdef\n\
             ID_RBLK_UUID=01234567-89ab-cdef-0123-456789abcdef\n\
             ID_RBLK_TARGET=store1\n\
             ID_RBLK_VOLUME=vol0\n\
             ID_RBLK_MOUNT=data"
        );
        let rules = include_str!("../../../packaging/udev/60-rblk.rules");
        for line in text.lines() {
            let (property, _) = line.split_once('=').unwrap();
            let again = format!("IMPORT{{db}}=\"{property}\"");
            assert!(rules.contains(&again), "the rules do not keep {property}");
        }
    }

    #[test]
    fn only_the_disk_of_the_note_has_its_names() {
        for other in ["ublkb4", "ublkb", "ublkb3p1", "sda", "ublkb-3", ""] {
            assert_eq!(found(&note(), other, Some(SEQUENCE), true), None, "{other}");
        }
        // Another program has the number now, whether or not the mount still has a process.
        for held in [true, false] {
            assert_eq!(found(&note(), "ublkb3", Some(SEQUENCE + 1), held), None);
        }
    }

    #[test]
    fn a_note_without_a_sequence_counts_while_its_name_is_held() {
        let mut starting = note();
        starting.as_object_mut().unwrap().remove("disk_sequence");
        assert!(found(&starting, "ublkb3", Some(SEQUENCE), true).is_some());
        assert_eq!(found(&starting, "ublkb3", Some(SEQUENCE), false), None);
        // A kernel whose events have no sequence.
        assert!(found(&note(), "ublkb3", None, true).is_some());
        assert_eq!(found(&note(), "ublkb3", None, false), None);
    }

    #[test]
    fn no_text_of_a_note_becomes_a_property_or_a_path() {
        let cases = [
            ("/target_name", json!("../../etc")),
            ("/target_name", json!("a b")),
            ("/config/volume", json!("x\nDEVLINKS=/dev/sda")),
            ("/config/volume", json!("")),
            ("/config/volume", json!("a/b")),
            ("/volume/uuid", json!("1")),
            ("/volume/uuid", json!("+123456789abcdef0123456789abcdef")),
            ("/volume/uuid", json!("ü".repeat(16))),
            ("/device_id", json!("3")),
        ];
        for (path, value) in cases {
            let mut bad = note();
            *bad.pointer_mut(path).unwrap() = value.clone();
            assert_eq!(found(&bad, "ublkb3", Some(SEQUENCE), true), None, "{path} = {value}");
        }
    }
}
