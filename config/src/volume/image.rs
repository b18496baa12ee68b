//! [`contradiction`]: whether the first bytes of an image contradict the block size of its volume.
//! Pure.
//!
//! | the image has | and its volume | so hosts |
//! | --- | --- | --- |
//! | a GPT of one sector size | blocks of another size | find no partition |
//! | an MBR, also one that protects a GPT | larger blocks | see partitions at wrong places |
//! | XFS, FAT, NTFS | blocks larger than its sectors | cannot mount it |
//! | ext2, ext3, ext4 | blocks larger than its blocks (1 KiB) | cannot mount it |
//!
//! An MBR counts in sectors. It is found by partitions that end behind the volume.
//!
//! Formats that work with blocks of any size are left out: ext4 with blocks of 4 KiB, btrfs, LUKS,
//! LVM, swap. So is an image with a GPT for both sizes, as installers have them.
//!
//! An MBR of 4096-byte sectors on blocks of 512 bytes looks like one of a smaller disk, so it is
//! not found. The image may change with the next write: this is for people to read, and decides
//! nothing.

use std::fmt;

use serde::{Serialize, Serializer};

/// How many bytes of an image are looked at.
pub const HEAD_BYTES: usize = 8192;

/// The smallest sector.
const SECTOR: u32 = 512;
/// The other size of a block.
const BLOCK: u32 = 4096;
/// Where the four entries of an MBR begin, and how long each is.
const MBR_ENTRIES: usize = 446;
const MBR_ENTRY_BYTES: usize = 16;
/// The number of sectors of an MBR entry that says nothing: as many as there are.
const UNBOUNDED: u32 = u32::MAX;

/// The part of an image that contradicts the block size of its volume.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Contradiction {
    what: Format,
    /// Bytes of its sectors.
    sector: u32,
    /// Bytes of a block of the volume.
    block_size: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Format {
    Gpt,
    Mbr,
    /// A file system of that name.
    FileSystem(&'static str),
}

impl Contradiction {
    /// The block size that the image goes with.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        if self.sector < BLOCK { SECTOR } else { BLOCK }
    }
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, sector, block_size } = self;
        let (has, harm) = match what {
            Format::Gpt => ("a partition table (GPT)", "hosts find no partition"),
            Format::Mbr => ("a partition table (MBR)", "hosts see partitions at wrong places"),
            Format::FileSystem(name) => (*name, "hosts cannot mount it"),
        };
        let fix = self.block_size();
        write!(
            f,
            "its image has {has} of {sector}-byte sectors, and its blocks have {block_size} bytes: {harm}, and repairing \
             the image there destroys data; serve it with block_size = {fix}"
        )
    }
}

impl Serialize for Contradiction {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The contradiction to the block size of a volume of that many bytes, found in its first
/// [`HEAD_BYTES`]. Fewer bytes show fewer contradictions.
#[must_use]
pub fn contradiction(head: &[u8], size_bytes: u64, block_size: u32) -> Option<Contradiction> {
    let head = ImageHead(head);
    let of = |what, sector| Contradiction { what, sector, block_size };
    match (head.has_gpt(SECTOR), head.has_gpt(BLOCK)) {
        (true, true) => return None,
        (true, false) => return (block_size != SECTOR).then(|| of(Format::Gpt, SECTOR)),
        (false, true) => return (block_size != BLOCK).then(|| of(Format::Gpt, BLOCK)),
        (false, false) => {}
    }
    if let Some((name, sector)) = head.file_system() {
        return (sector < block_size).then(|| of(Format::FileSystem(name), sector));
    }
    let last = head.last_mbr_sector()?;
    let fits = |bytes: u32| last.saturating_mul(bytes.into()) <= size_bytes;
    (block_size > SECTOR && !fits(block_size) && fits(SECTOR)).then(|| of(Format::Mbr, SECTOR))
}

/// The first bytes of an image.
struct ImageHead<'h>(&'h [u8]);

impl ImageHead<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.0.get(at..at.checked_add(N)?)?.try_into().ok()
    }

    fn is_at(&self, at: usize, text: &[u8]) -> bool {
        self.0.get(at..).is_some_and(|rest| rest.starts_with(text))
    }

    /// Whether there is a GPT of sectors of that size: its header is in the second sector, and says
    /// so.
    fn has_gpt(&self, sector: u32) -> bool {
        let at = sector as usize;
        let own_place = self.bytes(at + 24).map(u64::from_le_bytes);
        self.is_at(at, b"EFI PART") && own_place == Some(1)
    }

    /// The file system in which the image begins, and how many bytes its smallest unit has.
    fn file_system(&self) -> Option<(&'static str, u32)> {
        let sane = |sector: &u32| sector.is_power_of_two() && (SECTOR..=65536).contains(sector);
        if self.is_at(0, b"XFSB") {
            let sector = u32::from(u16::from_be_bytes(self.bytes(102)?));
            return sane(&sector).then_some(("an XFS", sector));
        }
        if self.is_at(1024 + 56, &[0x53, 0xef]) {
            let log = u32::from_le_bytes(self.bytes(1024 + 24)?);
            let block = 1024u32.checked_shl(log).filter(|_| log <= 6);
            return block.map(|block| ("an ext2, ext3 or ext4", block));
        }
        let is_ntfs = self.is_at(3, b"NTFS    ");
        let is_fat = self.is_at(54, b"FAT") || self.is_at(82, b"FAT32");
        if (is_ntfs || is_fat) && self.is_at(510, &[0x55, 0xaa]) {
            let sector = u32::from(u16::from_le_bytes(self.bytes(11)?));
            let name = if is_ntfs { "an NTFS" } else { "a FAT" };
            return sane(&sector).then_some((name, sector));
        }
        None
    }

    /// The sector behind the last partition of an MBR. `None`: there is no MBR, or it says nothing.
    fn last_mbr_sector(&self) -> Option<u64> {
        if !self.is_at(510, &[0x55, 0xaa]) {
            return None;
        }
        let mut last = None;
        for at in (0..4).map(|entry| MBR_ENTRIES + entry * MBR_ENTRY_BYTES) {
            let entry: [u8; MBR_ENTRY_BYTES] = self.bytes(at)?;
            if entry.iter().all(|byte| *byte == 0) {
                continue;
            }
            let number = |at: usize| {
                u32::from_le_bytes([entry[at], entry[at + 1], entry[at + 2], entry[at + 3]])
            };
            let (start, count) = (number(8), number(12));
            // Else it is the code of a boot sector.
            if !matches!(entry[0], 0 | 0x80) || entry[4] == 0 || start == 0 || count == 0 {
                return None;
            }
            if count != UNBOUNDED {
                last = last.max(Some(u64::from(start) + u64::from(count)));
            }
        }
        last
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn empty() -> Vec<u8> {
        vec![0; HEAD_BYTES]
    }

    fn put(mut head: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
        head[at..at + bytes.len()].copy_from_slice(bytes);
        head
    }

    /// With an MBR of these entries: type, start, count.
    fn mbr(entries: &[(u8, u32, u32)]) -> Vec<u8> {
        let mut head = put(empty(), 510, &[0x55, 0xaa]);
        for (n, (kind, start, count)) in entries.iter().enumerate() {
            let at = MBR_ENTRIES + n * MBR_ENTRY_BYTES;
            head[at + 4] = *kind;
            head = put(head, at + 8, &start.to_le_bytes());
            head = put(head, at + 12, &count.to_le_bytes());
        }
        head
    }

    fn gpt(head: Vec<u8>, sector: usize) -> Vec<u8> {
        put(put(head, sector, b"EFI PART"), sector + 24, &1u64.to_le_bytes())
    }

    /// The block size that is asked for instead.
    fn fix(head: &[u8], size: u64, block_size: u32) -> Option<u32> {
        contradiction(head, size, block_size).map(|found| found.block_size())
    }

    #[test]
    fn a_gpt_is_of_the_sectors_where_it_is_found() {
        let (small, large) = (gpt(empty(), 512), gpt(empty(), 4096));
        assert_eq!(fix(&small, 64 * MIB, 4096), Some(512));
        assert_eq!(fix(&small, 64 * MIB, 512), None);
        assert_eq!(fix(&large, 64 * MIB, 512), Some(4096));
        assert_eq!(fix(&large, 64 * MIB, 4096), None);
        let both = gpt(small.clone(), 4096);
        assert_eq!((fix(&both, MIB, 512), fix(&both, MIB, 4096)), (None, None));
        // The words alone, as in a file about them.
        let words = put(empty(), 512, b"EFI PART");
        assert_eq!(fix(&words, MIB, 4096), None);
        let text = contradiction(&small, MIB, 4096).unwrap().to_string();
        assert!(text.contains("GPT") && text.ends_with("serve it with block_size = 512"), "{text}");
    }

    #[test]
    fn an_mbr_must_end_within_the_volume() {
        // 20 MiB at 1 MiB, 43 MiB behind it.
        let entries = [(0x83, 2048, 40960), (0x83, 43008, 88064)];
        let table = mbr(&entries);
        assert_eq!(fix(&table, 64 * MIB, 4096), Some(512));
        assert_eq!(fix(&table, 64 * MIB, 512), None);
        assert_eq!(fix(&table, 512 * MIB, 4096), None, "it may be right");
        assert_eq!(fix(&table, MIB, 4096), None, "it is wrong in any case");
        // A protective MBR of a GPT, which ends with the disk; an MBR without partitions.
        assert_eq!(fix(&mbr(&[(0xee, 1, 131_071)]), 64 * MIB, 4096), Some(512));
        assert_eq!(fix(&mbr(&[(0xee, 1, u32::MAX)]), 64 * MIB, 4096), None);
        assert_eq!(fix(&mbr(&[]), MIB, 4096), None, "no partition");
        // Code of a boot sector.
        assert_eq!(fix(&put(table, 446, &[0x7f]), 64 * MIB, 4096), None);
    }

    #[test]
    fn a_file_system_needs_blocks_that_are_no_larger_than_its_own() {
        let xfs = |sector: u16| put(put(empty(), 0, b"XFSB"), 102, &sector.to_be_bytes());
        assert_eq!(fix(&xfs(512), MIB, 4096), Some(512));
        assert_eq!((fix(&xfs(512), MIB, 512), fix(&xfs(4096), MIB, 4096)), (None, None));
        assert_eq!(fix(&xfs(4096), MIB, 512), None);
        let ext = |log: u32| put(put(empty(), 1080, &[0x53, 0xef]), 1048, &log.to_le_bytes());
        assert_eq!(fix(&ext(0), MIB, 4096), Some(512));
        assert_eq!((fix(&ext(2), MIB, 4096), fix(&ext(2), MIB, 512)), (None, None));
        assert_eq!(fix(&ext(77), MIB, 4096), None);
        let fat = put(put(put(empty(), 82, b"FAT32   "), 11, &[0, 2]), 510, &[0x55, 0xaa]);
        assert_eq!((fix(&fat, MIB, 4096), fix(&fat, MIB, 512)), (Some(512), None));
        let text = contradiction(&fat, MIB, 4096).unwrap().to_string();
        assert!(text.contains("a FAT of 512-byte sectors"), "{text}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_judged_and_what_is_advised_is_no_contradiction(
            head in prop::collection::vec(any::<u8>(), 0..HEAD_BYTES + 100),
            size in any::<u64>(),
            entries in prop::collection::vec((any::<u8>(), any::<u32>(), any::<u32>()), 0..4),
            marks in any::<[bool; 5]>(),
        ) {
            let mut image = if marks[0] { mbr(&entries) } else { head };
            image.resize(HEAD_BYTES, 0);
            for (is_one, at, text) in [
                (marks[1], 512, &b"EFI PART"[..]), (marks[2], 4096, b"EFI PART"),
                (marks[3], 0, b"XFSB"), (marks[4], 1080, &[0x53, 0xef]),
            ] {
                image = if is_one { put(image, at, text) } else { image };
            }
            for block_size in [512, 4096] {
                if let Some(found) = contradiction(&image, size, block_size) {
                    prop_assert_ne!(found.block_size(), block_size);
                    prop_assert_eq!(contradiction(&image, size, found.block_size()), None);
                }
            }
        }

        #[test]
        fn a_cut_head_is_no_panic(len in 0..HEAD_BYTES, sector in prop::sample::select(vec![512usize, 4096])) {
            let image = gpt(mbr(&[(0xee, 1, 77)]), sector);
            let _ = contradiction(&image[..len], 64 * MIB, 4096);
        }
    }
}
