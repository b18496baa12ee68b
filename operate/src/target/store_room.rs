//! [`StoreRoom`]: the part of a file without space yet, and the free space of its file system. A
//! thin file takes space as hosts write to it, so its writes fail when the file system is full,
//! long before the volume is.
//!
//! Extents that files share (reflinks, snapshots of the file system) need space when they are
//! overwritten. This code does not know about them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use crate::figures;
use nix::sys::stat::{major, minor};
use nix::sys::statvfs::fstatvfs;
use serde::{Deserialize, Serialize};

/// Percentage of free space in a file system below which a shortage is reported.
const LITTLE_PERCENT: u64 = 10;
/// Free space below this counts as none: file systems reserve a few blocks.
const NONE_BYTES: u64 = 256 << 10;

/// The space of a file, and that of its file system.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreRoom {
    /// The device of the file system, as `lsblk` names it: `8:1`.
    pub file_system: String,
    /// Bytes of the file system.
    pub total_bytes: u64,
    /// Bytes of the file system that are free for this process.
    pub free_bytes: u64,
    /// Bytes of the file that have no space yet.
    pub unallocated_bytes: u64,
}

impl StoreRoom {
    /// The space of an open file. May block as long as its file system does.
    ///
    /// # Errors
    /// The system's.
    pub fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let system = fstatvfs(file)?;
        let fragment = system.fragment_size();
        // Root may use the reserved blocks of a file system.
        let free = match nix::unistd::geteuid().is_root() {
            true => system.blocks_free(),
            false => system.blocks_available(),
        };
        // st_blocks counts units of 512 bytes in every file system.
        let allocated = metadata.blocks().saturating_mul(512);
        Ok(Self {
            file_system: format!("{}:{}", major(metadata.dev()), minor(metadata.dev())),
            total_bytes: system.blocks().saturating_mul(fragment),
            free_bytes: free.saturating_mul(fragment),
            unallocated_bytes: metadata.len().saturating_sub(allocated),
        })
    }

    /// Whether the next write to new space of the file fails.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.unallocated_bytes > 0 && self.free_bytes < NONE_BYTES
    }
}

/// A thin file: its volume, its path, and its space.
pub type ThinFile<'a> = (&'a str, &'a str, &'a StoreRoom);

/// The warnings about file systems that are short of space and have less than their thin files may
/// still take.
#[must_use]
pub fn shortages<'a>(files: impl IntoIterator<Item = ThinFile<'a>>) -> Vec<String> {
    let mut systems: BTreeMap<&str, Vec<ThinFile<'a>>> = BTreeMap::new();
    for file in files.into_iter().filter(|(.., room)| room.unallocated_bytes > 0) {
        systems.entry(&file.2.file_system).or_default().push(file);
    }
    systems.values().filter_map(|files| shortage(files)).collect()
}

fn shortage(files: &[ThinFile<'_>]) -> Option<String> {
    let (_, path, StoreRoom { total_bytes, free_bytes, .. }) = files.first()?;
    let wanted =
        files.iter().fold(0_u64, |sum, (.., room)| sum.saturating_add(room.unallocated_bytes));
    let is_little = *free_bytes < total_bytes / 100 * LITTLE_PERCENT;
    if !is_little || *free_bytes >= wanted {
        return None;
    }
    let names: Vec<&str> = files.iter().map(|(name, ..)| *name).collect();
    let percent = free_bytes.saturating_mul(100) / (*total_bytes).max(1);
    Some(format!(
        "the file system of {path} has {} of {} left ({percent} %), and its thin files may still take {} ({}): their \
         writes fail when it is full; make room, or enlarge it",
        figures::size(*free_bytes),
        figures::size(*total_bytes),
        figures::size(wanted),
        names.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn room(file_system: &str, free: u64, unallocated: u64) -> StoreRoom {
        StoreRoom {
            file_system: file_system.to_owned(),
            total_bytes: 100 * GIB,
            free_bytes: free,
            unallocated_bytes: unallocated,
        }
    }

    fn said(rooms: &[StoreRoom]) -> Vec<String> {
        let names = ["a", "b", "c"];
        let files = names.iter().zip(rooms);
        shortages(files.map(|(name, room)| (*name, "/srv/a.img", room)))
    }

    #[test]
    fn a_shortage_is_reported_when_thin_files_may_take_more() {
        assert_eq!(said(&[room("8:1", 10 * GIB, 64 * GIB)]), [""; 0], "a tenth is left");
        assert_eq!(said(&[room("8:1", 5 * GIB, 5 * GIB)]), [""; 0], "it suffices");
        assert_eq!(said(&[room("8:1", 0, 0)]), [""; 0], "the file has its space");
        assert_eq!(
            said(&[room("8:1", 5 * GIB, 5 * GIB + 1)]),
            [
                "the file system of /srv/a.img has 5GiB of 100GiB left (5 %), and its thin files may still take 5GiB (a): \
              their writes fail when it is full; make room, or enlarge it"
            ]
        );
        let two = said(&[room("8:1", 5 * GIB, 4 * GIB), room("8:1", 5 * GIB, 3 * GIB)]);
        assert!(two[0].contains("may still take 7GiB (a, b)"), "together they need more: {two:?}");
        let apart = said(&[room("8:1", 5 * GIB, 4 * GIB), room("8:2", 5 * GIB, 3 * GIB)]);
        assert_eq!(apart, [""; 0], "they are of two file systems");
    }

    #[test]
    fn unwritten_parts_of_a_file_are_not_allocated() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 << 20).unwrap();
        let empty = StoreRoom::of(&file).unwrap();
        assert_eq!(empty.unallocated_bytes, 8 << 20);
        assert!(empty.free_bytes <= empty.total_bytes && empty.total_bytes > 0, "{empty:?}");
        file.write_all_at(&vec![1; 1 << 20], 0).unwrap();
        file.sync_all().unwrap();
        assert_eq!(StoreRoom::of(&file).unwrap().unallocated_bytes, 7 << 20);
        assert!(!empty.is_full());
        assert!(StoreRoom { free_bytes: 0, ..empty.clone() }.is_full());
        assert!(!StoreRoom { free_bytes: 0, unallocated_bytes: 0, ..empty }.is_full());
    }
}
