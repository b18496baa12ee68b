//! [`Diary`]: the writes of one writer to a disk, the answers of the disk, and the contents that
//! the disk must have.
//!
//! Every write is a block of [`BLOCK`] bytes that names its round, writer, number and place, so the
//! block identifies the write. Only one writer writes a block. Pure: no clock, no I/O.

use std::collections::BTreeMap;
use std::fmt;

use rblk_rig::seed::Random;

/// Bytes of a write.
pub const BLOCK: usize = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"rblkdiry");
const WORDS: usize = 5;

/// The write that a block belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stamp {
    /// The round.
    pub round: u64,
    /// The writer.
    pub writer: u64,
    /// The number of the write, from 1.
    pub number: u64,
    /// The block.
    pub block: u64,
}

impl Stamp {
    /// The bytes of the write.
    #[must_use]
    pub fn bytes(self) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK];
        let words = [MAGIC, self.round, self.writer, self.number, self.block];
        let seed = words.into_iter().fold(0, |seed, word| Random::new(seed ^ word).bits());
        Random::new(seed).fill(&mut bytes);
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The write that produced exactly these bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Option<Self> {
        let mut words = [0; WORDS];
        for (word, place) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(place.try_into().ok()?);
        }
        let [_, round, writer, number, block] = words;
        let stamp = Self { round, writer, number, block };
        (stamp.bytes() == bytes).then_some(stamp)
    }
}

/// One write.
#[derive(Clone, Copy, Debug)]
struct Note {
    block: u64,
    acknowledged: bool,
    covered: bool,
}

/// The writes of one writer in one round.
#[derive(Clone, Debug)]
pub struct Diary {
    round: u64,
    writer: u64,
    notes: Vec<Note>,
    /// Syncs that succeeded.
    pub synced: u64,
    /// The errno of each sync and each write that failed, with the word for which it was.
    pub failed: Vec<(&'static str, i32)>,
}

/// A write that a sync covered, and that is not on the disk.
#[derive(Clone, Debug)]
pub struct Lie {
    writer: u64,
    block: u64,
    covered: u64,
    found: String,
}

impl fmt::Display for Lie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { writer, block, covered, found } = self;
        write!(
            f,
            "writer {writer}: a sync that said OK covered write {covered} of block {block}; "
        )?;
        write!(f, "the disk has {found}")
    }
}

impl Diary {
    /// An empty diary.
    #[must_use]
    pub fn new(round: u64, writer: u64) -> Self {
        Self { round, writer, notes: Vec::new(), synced: 0, failed: Vec::new() }
    }

    /// The writer's number.
    #[must_use]
    pub fn writer(&self) -> u64 {
        self.writer
    }

    /// How many writes were begun.
    #[must_use]
    pub fn begun(&self) -> u64 {
        self.notes.len() as u64
    }

    /// Notes a write that is about to be made, and gives its bytes.
    #[must_use]
    pub fn begin(&mut self, block: u64) -> Vec<u8> {
        self.notes.push(Note { block, acknowledged: false, covered: false });
        let number = self.notes.len() as u64;
        Stamp { round: self.round, writer: self.writer, number, block }.bytes()
    }

    /// The last write was acknowledged.
    pub fn acknowledge(&mut self) {
        if let Some(note) = self.notes.last_mut() {
            note.acknowledged = true;
        }
    }

    /// The last write was acknowledged as durable.
    pub fn cover_last(&mut self) {
        self.acknowledge();
        self.synced += 1;
        if let Some(note) = self.notes.last_mut() {
            note.covered = true;
        }
    }

    /// A sync covered all acknowledged writes.
    pub fn cover_all(&mut self) {
        self.synced += 1;
        self.notes.iter_mut().for_each(|note| note.covered = note.acknowledged);
    }

    /// Writes that were acknowledged.
    #[must_use]
    pub fn acknowledged(&self) -> usize {
        self.notes.iter().filter(|note| note.acknowledged).count()
    }

    /// Compares the diary with the disk, which `read` reads block by block. Returns the covered
    /// writes that are missing, and the number of blocks that lack an acknowledged write.
    pub fn judge<'d>(&self, read: impl Fn(u64) -> &'d [u8]) -> (Vec<Lie>, usize) {
        let (mut covered, mut acknowledged) = (BTreeMap::new(), BTreeMap::new());
        for (number, note) in (1u64..).zip(&self.notes) {
            if note.covered {
                covered.insert(note.block, number);
            }
            if note.acknowledged {
                acknowledged.insert(note.block, number);
            }
        }
        let number_of = |block: u64| self.number(block, read(block));
        let lie = |(&block, &covered): (&u64, &u64)| {
            (number_of(block) < covered).then(|| Lie {
                writer: self.writer,
                block,
                covered,
                found: self.words(block, read(block)),
            })
        };
        let lies = covered.iter().filter_map(lie).collect();
        let lost = |(block, number): &(&u64, &u64)| number_of(**block) < **number;
        (lies, acknowledged.iter().filter(lost).count())
    }

    /// The number of the write that a block belongs to; 0 if no write to that block produced it.
    fn number(&self, block: u64, bytes: &[u8]) -> u64 {
        let own = |stamp: &Stamp| {
            (stamp.round, stamp.writer, stamp.block) == (self.round, self.writer, block)
        };
        Stamp::of(bytes).filter(own).map_or(0, |stamp| stamp.number)
    }

    /// Describes the contents of a block, for messages.
    fn words(&self, block: u64, bytes: &[u8]) -> String {
        match (Stamp::of(bytes), self.number(block, bytes)) {
            (Some(stamp), 0) => format!("{stamp:?}"),
            (Some(_), number) => format!("write {number}"),
            (None, _) if bytes.iter().all(|byte| *byte == 0) => "zeros".to_owned(),
            (None, _) => format!("bytes of no write, which begin with {:02x?}", &bytes[..16]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diary(writes: &[(u64, bool)]) -> (Diary, Vec<Vec<u8>>) {
        let mut diary = Diary::new(7, 1);
        let mut bytes = Vec::new();
        for (block, sync) in writes {
            bytes.push(diary.begin(*block));
            diary.acknowledge();
            if *sync {
                diary.cover_all();
            }
        }
        (diary, bytes)
    }

    #[test]
    fn a_covered_write_must_be_there() {
        let (diary, bytes) = diary(&[(0, false), (0, true)]);
        assert_eq!(diary.judge(|_| &bytes[1]).1, 0);
        assert!(diary.judge(|_| &bytes[1]).0.is_empty());
        let (lies, lost) = diary.judge(|_| &bytes[0]);
        assert_eq!((lies.len(), lost), (1, 1), "an older write of the block");
        let (lies, _) = diary.judge(|_| &[0; BLOCK]);
        assert!(
            lies[0].to_string().ends_with("write 2 of block 0; the disk has zeros"),
            "{lies:?}"
        );
    }

    #[test]
    fn a_newer_write_of_the_block_will_do() {
        let (diary, bytes) = diary(&[(0, true), (0, false)]);
        assert!(diary.judge(|_| &bytes[1]).0.is_empty());
        let (lies, lost) = diary.judge(|_| &bytes[0]);
        assert_eq!((lies.len(), lost), (0, 1), "no sync covered the newer one");
    }

    #[test]
    fn a_write_that_is_durable_alone_covers_no_other() {
        let mut diary = Diary::new(7, 1);
        let _ = diary.begin(0);
        diary.acknowledge();
        let second = diary.begin(1);
        diary.cover_last();
        let (lies, lost) = diary.judge(|block| if block == 1 { &second } else { &[0; BLOCK] });
        assert_eq!((lies.len(), lost), (0, 1));
        assert_eq!(diary.judge(|_| &[0; BLOCK]).0.len(), 1);
    }

    #[test]
    fn a_failed_write_need_not_be_there() {
        let mut diary = Diary::new(7, 1);
        let _ = diary.begin(0);
        diary.cover_all();
        let (lies, lost) = diary.judge(|_| &[0; BLOCK]);
        assert_eq!((lies.len(), lost), (0, 0));
    }

    #[test]
    fn torn_and_misplaced_blocks_belong_to_no_write() {
        let (diary, mut bytes) = diary(&[(0, true), (1, true)]);
        assert_eq!(diary.judge(|_| &bytes[0]).0.len(), 1, "block 1 has the bytes of block 0");
        bytes[0][BLOCK - 1] ^= 1;
        let (lies, _) = diary.judge(|block| &bytes[usize::from(block == 1)]);
        assert!(lies[0].to_string().contains("bytes of no write"), "{lies:?}");
    }
}
