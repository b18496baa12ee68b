//! [`Oracle`]: what a volume may hold, when requests overlap and machines crash. Pure.
//!
//! A block is a register. Every change of it takes effect whole, once, at a moment between its submission
//! and its end; a read returns what was there at a moment between its own. So a read may return any of the
//! values that concurrent writes give the block, but none that was overwritten before it began, nothing that
//! an earlier read has shown to be overwritten, and no mixture. What is known of a change's moment is kept as
//! bounds, which reads make tighter.
//!
//! After a crash each sector has the value of the last durable change or of one that may have come later.
//! Durable is a change when it was acknowledged with FUA, or before a flush was submitted that succeeded.
//!
//! Every write has a number and fills each of its sectors with a stamp of that number and the sector's
//! ([`Oracle::fill`]), so that a value tells where it is from. Zeroes do not: what could be any of several
//! changes is taken for the one that is allowed.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// What a device writes whole or not at all, in bytes.
pub const SECTOR: usize = 512;

/// Observations kept of a block. Fewer make the oracle more lenient, never wrong.
const OBSERVATIONS: usize = 8;

/// After the end of time: a change that may still take effect.
const NEVER: u64 = u64::MAX;

/// Names a change.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ChangeId(u64);

/// When a read or flush was submitted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Begin(u64);

/// What a crash leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Survives {
    /// What was made durable.
    Durable,
    /// What was acknowledged.
    Acknowledged,
}

/// What a check of a volume after a crash has seen.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CrashCount {
    /// Sectors that could have had more than one value.
    pub open: u64,
    /// Those of them that do not have the newest.
    pub older: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Source {
    // As the volume was when this life began.
    Base,
    Zeroes(ChangeId),
    Stamp(ChangeId),
}

// What can be told from a block's bytes alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    Base,
    Zeroes,
    Stamp(ChangeId),
}

#[derive(Clone, Copy, Debug)]
struct Version {
    source: Source,
    // The change took effect within these.
    earliest: u64,
    latest: u64,
    // It did take effect: it was acknowledged, or was read.
    certain: bool,
    acknowledged: bool,
    durable: bool,
}

#[derive(Clone, Copy, Debug)]
struct Observation {
    content: Content,
    begin: u64,
    end: u64,
}

#[derive(Clone, Debug)]
struct Block {
    versions: Vec<Version>,
    observations: Vec<Observation>,
}

impl Block {
    fn new() -> Self {
        let base = Version {
            source: Source::Base,
            earliest: 0,
            latest: 0,
            certain: true,
            acknowledged: true,
            durable: true,
        };
        Self { versions: vec![base], observations: Vec::new() }
    }

    fn version(&mut self, id: ChangeId) -> Option<&mut Version> {
        self.versions.iter_mut().find(|v| v.source.id() == Some(id))
    }

    /// Bounds of a version's effect if a read between `begin` and `end` returned it; none if it cannot have.
    fn bounds(&self, at: usize, content: Content, begin: u64, end: u64) -> Option<(u64, u64)> {
        let version = &self.versions[at];
        let mut earliest = version.earliest;
        for (other, overwriter) in self.versions.iter().enumerate() {
            // What was there for certain when the read began has been overwritten by this version since.
            if other != at && overwriter.certain && overwriter.latest < begin {
                earliest = earliest.max(overwriter.earliest);
            }
        }
        for seen in &self.observations {
            if seen.content != content && seen.end < begin {
                earliest = earliest.max(seen.begin);
            }
        }
        let latest = version.latest.min(end);
        (earliest <= latest).then_some((earliest, latest))
    }

    /// Whether a later change that counts is sure to have overwritten the version.
    fn is_lost(&self, version: &Version, counts: impl Fn(&Version) -> bool) -> bool {
        self.versions
            .iter()
            .any(|w| w.source != version.source && counts(w) && version.latest < w.earliest)
    }

    /// Forgets versions that no read submitted at `horizon` or later may return and no crash bring back.
    fn prune(&mut self, horizon: u64) {
        if self.versions.len() > 1 {
            let all = self.clone();
            self.versions
                .retain(|v| !all.is_lost(v, |w| w.durable && w.certain && w.latest < horizon));
        }
    }
}

impl Source {
    fn id(self) -> Option<ChangeId> {
        match self {
            Self::Base => None,
            Self::Zeroes(id) | Self::Stamp(id) => Some(id),
        }
    }
}

/// The changes and reads of one volume. See the module.
#[derive(Debug)]
pub struct Oracle {
    block_bytes: usize,
    base: Vec<u8>,
    blocks: Vec<Block>,
    // Counts everything that is submitted and everything that ends.
    clock: u64,
    changes: u64,
    // Blocks of changes outstanding.
    outstanding: HashMap<ChangeId, Range<usize>>,
    // Acknowledged changes that are not durable: when they ended.
    volatile: Vec<(u64, ChangeId, Range<usize>)>,
    // Reads outstanding by when they began.
    reads: BTreeMap<u64, ()>,
}

impl Oracle {
    /// Of a volume that holds `image`, in blocks of `block_bytes`.
    ///
    /// # Panics
    /// Blocks are not whole sectors, or the volume is not whole blocks.
    #[must_use]
    pub fn new(image: Vec<u8>, block_bytes: usize) -> Self {
        assert!(block_bytes.is_multiple_of(SECTOR) && image.len().is_multiple_of(block_bytes));
        let blocks = vec![Block::new(); image.len() / block_bytes];
        Self {
            block_bytes,
            base: image,
            blocks,
            clock: 0,
            changes: 0,
            outstanding: HashMap::new(),
            volatile: Vec::new(),
            reads: BTreeMap::new(),
        }
    }

    /// Capacity in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.base.len()
    }

    /// Whether the volume has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.base.is_empty()
    }

    /// Bytes of a block.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// A change of a range in bytes is submitted: a write of what [`Self::fill`] makes, or `zeroes`.
    pub fn begin_change(&mut self, range: &Range<usize>, zeroes: bool) -> ChangeId {
        let now = self.tick();
        self.changes += 1;
        let id = ChangeId(self.changes);
        let source = if zeroes { Source::Zeroes(id) } else { Source::Stamp(id) };
        let version = Version {
            source,
            earliest: now,
            latest: NEVER,
            certain: false,
            acknowledged: false,
            durable: false,
        };
        let horizon = self.reads.keys().next().copied().unwrap_or(now);
        let blocks = range.start / self.block_bytes..range.end / self.block_bytes;
        for block in &mut self.blocks[blocks.clone()] {
            block.prune(horizon);
            block.versions.push(version);
        }
        self.outstanding.insert(id, blocks);
        id
    }

    /// The data of a write at a byte offset.
    pub fn fill(id: ChangeId, offset: usize, data: &mut [u8]) {
        for (at, sector) in data.chunks_mut(SECTOR).enumerate() {
            stamp(id, offset / SECTOR + at, sector);
        }
    }

    /// A change has ended. `durable`: it was a write with FUA. One that is not `ok` may have taken effect or
    /// not, but does so no more.
    ///
    /// # Panics
    /// It is not outstanding.
    pub fn end_change(&mut self, id: ChangeId, ok: bool, durable: bool) {
        let now = self.tick();
        let blocks = self.outstanding.remove(&id).expect("an outstanding change");
        for block in &mut self.blocks[blocks.clone()] {
            if let Some(version) = block.version(id) {
                version.latest = version.latest.min(now);
                version.certain |= ok;
                version.acknowledged = ok;
                version.durable = ok && durable;
            }
        }
        if ok && !durable {
            self.volatile.push((now, id, blocks));
        }
    }

    /// A flush is submitted.
    pub fn begin_flush(&mut self) -> Begin {
        Begin(self.tick())
    }

    /// A flush has succeeded. One that failed promises nothing and need not be told of.
    pub fn end_flush(&mut self, begin: Begin) {
        let blocks = &mut self.blocks;
        self.volatile.retain(|(ended, id, range)| {
            let covered = *ended < begin.0;
            if covered {
                for block in &mut blocks[range.clone()] {
                    if let Some(version) = block.version(*id) {
                        version.durable = true;
                    }
                }
            }
            !covered
        });
    }

    /// A read is submitted.
    pub fn begin_read(&mut self) -> Begin {
        let now = self.tick();
        self.reads.insert(now, ());
        Begin(now)
    }

    /// A read has failed.
    pub fn drop_read(&mut self, begin: Begin) {
        self.reads.remove(&begin.0);
    }

    /// A read has returned these bytes of the volume from a byte offset on.
    ///
    /// # Errors
    /// It cannot have, in words.
    pub fn end_read(&mut self, begin: Begin, offset: usize, data: &[u8]) -> Result<(), String> {
        let end = self.tick();
        self.reads.remove(&begin.0);
        for (at, bytes) in data.chunks(self.block_bytes).enumerate() {
            let block = offset / self.block_bytes + at;
            self.observe(block, bytes, begin.0, end)?;
        }
        Ok(())
    }

    fn observe(&mut self, at: usize, bytes: &[u8], begin: u64, end: u64) -> Result<(), String> {
        let first = at * self.block_bytes;
        let base = &self.base[first..first + self.block_bytes];
        let block = &self.blocks[at];
        let content = content(bytes, first / SECTOR, base, block);
        let Some(content) = content else {
            return Err(format!(
                "block {at} has a value that nobody gave it, or several:\n{}",
                self.describe(at, bytes)
            ));
        };
        let base_is_zero = is_zero(base);
        let matches = |source: Source| match (source, content) {
            (Source::Base, Content::Base) | (Source::Zeroes(_), Content::Zeroes) => true,
            (Source::Base, Content::Zeroes) => base_is_zero,
            (Source::Stamp(a), Content::Stamp(b)) => a == b,
            _ => false,
        };
        let mut candidates = 0;
        let mut only = None;
        for (index, version) in block.versions.iter().enumerate() {
            if matches(version.source)
                && let Some(bounds) = block.bounds(index, content, begin, end)
            {
                candidates += 1;
                only = Some((index, bounds));
            }
        }
        if candidates == 0 {
            return Err(format!(
                "block {at} was read at {begin}..{end} with a value that was overwritten:\n{}",
                self.describe(at, bytes)
            ));
        }
        let block = &mut self.blocks[at];
        if let (1, Some((index, (earliest, latest)))) = (candidates, only) {
            let version = &mut block.versions[index];
            (version.earliest, version.latest, version.certain) = (earliest, latest, true);
        }
        if block.observations.len() == OBSERVATIONS {
            block.observations.remove(0);
        }
        block.observations.push(Observation { content, begin, end });
        Ok(())
    }

    /// The volume was found with these bytes after a crash, which ended everything outstanding. They are what
    /// it holds from now on.
    ///
    /// # Errors
    /// Something is lost that had to survive, or is there that nobody wrote; in words.
    ///
    /// # Panics
    /// The image has not the volume's size.
    pub fn crash(&mut self, image: Vec<u8>, survives: Survives) -> Result<CrashCount, String> {
        assert_eq!(image.len(), self.base.len(), "the volume's size");
        let mut count = CrashCount::default();
        for (number, bytes) in image.chunks(SECTOR).enumerate() {
            let at = number * SECTOR / self.block_bytes;
            let block = &self.blocks[at];
            let base = &self.base[number * SECTOR..(number + 1) * SECTOR];
            let is = |version: &Version| match version.source {
                Source::Base => bytes == base,
                Source::Zeroes(_) => is_zero(bytes),
                Source::Stamp(id) => is_stamp(bytes, id, number),
            };
            let counts = |w: &Version| match survives {
                Survives::Durable => w.durable,
                Survives::Acknowledged => w.acknowledged,
            };
            let mut allowed = block.versions.iter().filter(|v| !block.is_lost(v, counts));
            if !allowed.clone().any(is) {
                return Err(format!(
                    "sector {number} (of block {at}) after the crash, {survives:?}:\n{}",
                    self.describe(at, &image[at * self.block_bytes..(at + 1) * self.block_bytes])
                ));
            }
            count.open += u64::from(allowed.clone().count() > 1);
            count.older += u64::from(!allowed.next_back().is_some_and(is));
        }
        self.blocks.fill(Block::new());
        self.base = image;
        self.outstanding.clear();
        self.volatile.clear();
        self.reads.clear();
        Ok(count)
    }

    /// What a block was found to hold, and what is known of it.
    fn describe(&self, at: usize, bytes: &[u8]) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        let first = at * self.block_bytes / SECTOR;
        for (number, sector) in bytes.chunks(SECTOR).enumerate() {
            let number = first + number;
            let (id, place) = (word(sector, 0), word(sector, 1));
            let what = if is_zero(sector) {
                "zeroes".to_owned()
            } else if is_stamp(sector, ChangeId(id), number) {
                format!("change {id}")
            } else if usize::try_from(place)
                .is_ok_and(|place| is_stamp(sector, ChangeId(id), place))
            {
                format!("change {id} of sector {place}")
            } else {
                format!("{:02x?}..", &sector[..8])
            };
            let base = self.base.get(number * SECTOR..(number + 1) * SECTOR);
            let base = if base == Some(sector) { " (as at the start)" } else { "" };
            let _ = writeln!(text, "  sector {number}: {what}{base}");
        }
        for version in &self.blocks[at].versions {
            let _ = writeln!(text, "  {version:?}");
        }
        for seen in &self.blocks[at].observations {
            let _ = writeln!(text, "  {seen:?}");
        }
        text
    }
}

fn content(bytes: &[u8], first: usize, base: &[u8], block: &Block) -> Option<Content> {
    if is_zero(bytes) {
        return Some(Content::Zeroes);
    }
    let id = ChangeId(word(bytes, 0));
    let known = block.versions.iter().any(|v| v.source == Source::Stamp(id));
    let whole =
        || bytes.chunks(SECTOR).enumerate().all(|(at, sector)| is_stamp(sector, id, first + at));
    if known && whole() {
        return Some(Content::Stamp(id));
    }
    let has_base = block.versions.iter().any(|v| v.source == Source::Base);
    (has_base && bytes == base).then_some(Content::Base)
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at * 8..at * 8 + 8]);
    u64::from_le_bytes(word)
}

fn stamp_words(id: ChangeId, sector: usize) -> impl Iterator<Item = u64> {
    let sector = sector as u64;
    let salt = (id.0 << 32 ^ sector).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..SECTOR as u64 / 8).map(move |at| match at {
        0 => id.0,
        1 => sector,
        _ => salt.wrapping_mul(2 * at + 1),
    })
}

fn stamp(id: ChangeId, sector: usize, bytes: &mut [u8]) {
    for (word, into) in stamp_words(id, sector).zip(bytes.chunks_exact_mut(8)) {
        into.copy_from_slice(&word.to_le_bytes());
    }
}

fn is_stamp(bytes: &[u8], id: ChangeId, sector: usize) -> bool {
    id.0 != 0
        && bytes.len() == SECTOR
        && stamp_words(id, sector)
            .zip(bytes.chunks_exact(8))
            .all(|(word, is)| is == word.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Range<usize> = 0..1024;

    fn oracle() -> Oracle {
        Oracle::new(vec![0; 1024], 1024)
    }

    fn data(id: ChangeId) -> Vec<u8> {
        let mut data = vec![0; 1024];
        Oracle::fill(id, 0, &mut data);
        data
    }

    fn written(oracle: &mut Oracle, fua: bool) -> ChangeId {
        let id = oracle.begin_change(&ALL, false);
        oracle.end_change(id, true, fua);
        id
    }

    fn read(oracle: &mut Oracle, bytes: &[u8]) -> Result<(), String> {
        let begin = oracle.begin_read();
        oracle.end_read(begin, 0, bytes)
    }

    fn flush(oracle: &mut Oracle) {
        let begin = oracle.begin_flush();
        oracle.end_flush(begin);
    }

    #[test]
    fn a_read_sees_the_last_write() {
        let mut oracle = oracle();
        read(&mut oracle, &[0; 1024]).unwrap();
        let a = written(&mut oracle, false);
        read(&mut oracle, &data(a)).unwrap();
        assert!(read(&mut oracle, &[0; 1024]).is_err(), "older than what was acknowledged");
        let b = written(&mut oracle, false);
        assert!(read(&mut oracle, &data(a)).is_err());
        read(&mut oracle, &data(b)).unwrap();
        let mut torn = data(b);
        torn[512..].copy_from_slice(&data(a)[512..]);
        assert!(read(&mut oracle, &torn).is_err(), "torn");
        torn[512..].fill(0xdb);
        assert!(read(&mut oracle, &torn).is_err(), "foreign");
        let zeroes = oracle.begin_change(&ALL, true);
        oracle.end_change(zeroes, true, false);
        assert!(read(&mut oracle, &data(b)).is_err());
        read(&mut oracle, &[0; 1024]).unwrap();
    }

    #[test]
    fn a_concurrent_read_sees_either() {
        for new in [false, true] {
            let mut oracle = oracle();
            let a = written(&mut oracle, false);
            let begin = oracle.begin_read();
            let b = written(&mut oracle, false);
            oracle.end_read(begin, 0, &data(if new { b } else { a })).unwrap();
            assert!(read(&mut oracle, &data(a)).is_err());
        }
    }

    #[test]
    fn nothing_goes_back() {
        let mut oracle = oracle();
        let a = oracle.begin_change(&ALL, false);
        let b = oracle.begin_change(&ALL, false);
        read(&mut oracle, &[0; 1024]).unwrap();
        read(&mut oracle, &data(a)).unwrap();
        assert!(read(&mut oracle, &[0; 1024]).is_err(), "back before an unanswered write");
        read(&mut oracle, &data(b)).unwrap();
        oracle.end_change(a, true, false);
        oracle.end_change(b, true, false);
        assert!(read(&mut oracle, &data(a)).is_err(), "back to a concurrent write");
        read(&mut oracle, &data(b)).unwrap();
    }

    #[test]
    fn unordered_writes_are_settled_by_a_read() {
        for second in [false, true] {
            let mut oracle = oracle();
            let a = oracle.begin_change(&ALL, false);
            let b = oracle.begin_change(&ALL, false);
            oracle.end_change(b, true, false);
            oracle.end_change(a, true, false);
            let (winner, loser) = if second { (b, a) } else { (a, b) };
            read(&mut oracle, &data(winner)).unwrap();
            assert!(read(&mut oracle, &data(loser)).is_err());
            flush(&mut oracle);
            // The loser was overwritten, but when is not known: a crash may show it.
            assert!(oracle.crash(data(winner), Survives::Durable).is_ok());
        }
    }

    #[test]
    fn a_failed_change_may_have_happened() {
        for seen in [false, true] {
            let mut oracle = oracle();
            let a = written(&mut oracle, false);
            let b = oracle.begin_change(&ALL, false);
            oracle.end_change(b, false, false);
            read(&mut oracle, &data(if seen { b } else { a })).unwrap();
            assert_eq!(read(&mut oracle, &data(a)).is_err(), seen);
            let c = written(&mut oracle, false);
            assert!(read(&mut oracle, &data(b)).is_err());
            read(&mut oracle, &data(c)).unwrap();
        }
    }

    #[test]
    fn crashes_lose_what_is_volatile_only() {
        let fresh = || {
            let mut oracle = oracle();
            let old = written(&mut oracle, false);
            let flushed = written(&mut oracle, false);
            flush(&mut oracle);
            let acknowledged = written(&mut oracle, false);
            let submitted = oracle.begin_change(&ALL, false);
            (oracle, [old, flushed, acknowledged, submitted])
        };
        for (which, durable, acknowledged) in
            [(0, false, false), (1, true, false), (2, true, true), (3, true, true)]
        {
            for (survives, right) in
                [(Survives::Durable, durable), (Survives::Acknowledged, acknowledged)]
            {
                let (mut oracle, ids) = fresh();
                let result = oracle.crash(data(ids[which]), survives);
                assert_eq!(result.is_ok(), right, "{which} {result:?}");
                if right {
                    read(&mut oracle, &data(ids[which])).unwrap();
                    assert!(read(&mut oracle, &[0; 1024]).is_err());
                }
            }
        }
        let (mut oracle, ids) = fresh();
        let mut torn = data(ids[1]);
        torn[..512].copy_from_slice(&data(ids[3])[..512]);
        assert_eq!(
            oracle.crash(torn.clone(), Survives::Durable),
            Ok(CrashCount { open: 2, older: 1 })
        );
        read(&mut oracle, &torn).unwrap();
        let (mut oracle, _) = fresh();
        assert!(oracle.crash(vec![0; 1024], Survives::Durable).is_err(), "older than durable");
    }

    #[test]
    fn fua_is_durable_and_a_flush_covers_only_what_was_acknowledged() {
        let mut oracle = oracle();
        let a = oracle.begin_change(&ALL, false);
        let begin = oracle.begin_flush();
        oracle.end_change(a, true, false);
        oracle.end_flush(begin);
        assert!(oracle.crash(vec![0; 1024], Survives::Durable).is_ok());
        let b = written(&mut oracle, true);
        assert!(oracle.crash(vec![0; 1024], Survives::Durable).is_err());
        assert!(oracle.crash(data(b), Survives::Durable).is_ok());
    }
}
