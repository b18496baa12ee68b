//! [`Oracle`]: the contents that a volume may have when requests overlap and machines crash. Pure.
//!
//! A block is a register. Every change of it takes effect whole, once, at a moment between its
//! submission and its end. A read returns the value at a moment between its own submission and end.
//! So a read may return any of the values that concurrent writes give the block, but none that was
//! overwritten before it began, nothing that an earlier read has shown to be overwritten, and no
//! mixture. The oracle keeps bounds of each change's moment, and reads tighten them.
//!
//! After a crash each sector has the value of the last durable change, or of a later one. A change
//! is durable if it was acknowledged with FUA, or before a flush was submitted that succeeded.
//!
//! Hosts send a request again after they lose the connection, so a change may take effect more than
//! once: at most once in each of its attempts. An attempt is over when the target has admitted the
//! host to a newer epoch ([`Oracle::new_attempt`]). A host that lost the volume to another changes
//! nothing after that moment ([`Oracle::fence`]), and its earlier writes are durable then
//! ([`Oracle::settle`]). When the target dies and comes back ([`Oracle::restart`]), outstanding
//! requests go on. A host that retains its writes writes lost ones again (`Oracle::settled`);
//! otherwise a flush must report the loss ([`Oracle::end_flush`]).
//!
//! Every write has a number and fills each of its sectors with a stamp of that number and the
//! sector's ([`Oracle::fill`]), so a value identifies its write. Zeroes do not: zeroes that may
//! belong to several changes are attributed to an allowed one.

mod block;
mod crash;
#[cfg(test)]
mod tests;
mod value;

use std::collections::BTreeMap;
use std::ops::Range;

use self::block::{Block, NEVER, Observation, Version};
use self::value::{Content, Source, is_stamp, is_zero, stamp, word};

/// The bytes that a device writes atomically.
pub const SECTOR: usize = 512;

/// Observations kept of a block. Fewer make the oracle more lenient, never wrong.
const OBSERVATIONS: usize = 8;

/// A host that makes requests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Host(pub u8);

/// Names a change.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ChangeId(u64);

/// A read or flush that was submitted.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Begin {
    at: u64,
    host: Host,
}

/// The changes that survive a crash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Survives {
    /// Durable changes.
    Durable,
    /// Acknowledged changes.
    Acknowledged,
}

/// Counts of a check after a crash.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CrashCount {
    /// Sectors that could have had more than one value.
    pub open: u64,
    /// Sectors among these that lack the newest value.
    pub older: u64,
}

/// A change that is outstanding, or acknowledged and not durable.
#[derive(Clone, Debug)]
struct Change {
    host: Host,
    // The life of the host that acknowledged it.
    life: u32,
    source: Source,
    blocks: Range<usize>,
    begun: u64,
    ended: u64,
    // A flush that covered it has failed: it may be lost.
    told: bool,
}

/// An acknowledged change that is gone.
#[derive(Clone, Copy, Debug)]
struct Loss {
    host: Host,
    // When it was acknowledged.
    ended: u64,
    // When it was lost.
    at: u64,
    // A flush that covered it has failed.
    told: bool,
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
    outstanding: BTreeMap<ChangeId, Change>,
    // Acknowledged changes that are not durable.
    volatile: Vec<(ChangeId, Change)>,
    // Reads outstanding by when they began.
    reads: BTreeMap<u64, ()>,
    losses: Vec<Loss>,
    // Hosts that lost the volume, and when.
    fenced: BTreeMap<Host, u64>,
    // Lives of hosts that died.
    lives: BTreeMap<Host, u32>,
    // No flush that failed ends a loss.
    losses_last: bool,
}

impl Oracle {
    /// The oracle of a volume that holds `image`, in blocks of `block_bytes`.
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
            outstanding: BTreeMap::new(),
            volatile: Vec::new(),
            reads: BTreeMap::new(),
            losses: Vec::new(),
            fenced: BTreeMap::new(),
            lives: BTreeMap::new(),
            losses_last: false,
        }
    }

    /// A volume with hosts that report a loss by every flush: a failed flush does not end the loss.
    #[must_use]
    pub fn with_lasting_losses(self, losses_last: bool) -> Self {
        Self { losses_last, ..self }
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

    /// Submits a change of a range in bytes: a write of the data that [`Self::fill`] makes, or
    /// `zeroes`.
    pub fn begin_change(&mut self, range: &Range<usize>, zeroes: bool) -> ChangeId {
        self.begin_change_by(Host(0), range, zeroes)
    }

    /// [`Self::begin_change`] by one of several hosts.
    pub fn begin_change_by(&mut self, host: Host, range: &Range<usize>, zeroes: bool) -> ChangeId {
        let now = self.tick();
        self.changes += 1;
        let id = ChangeId(self.changes);
        let source = if zeroes { Source::Zeroes(id) } else { Source::Stamp(id) };
        let horizon = self.reads.keys().next().copied().unwrap_or(now);
        let blocks = range.start / self.block_bytes..range.end / self.block_bytes;
        if !self.fenced.contains_key(&host) {
            for block in &mut self.blocks[blocks.clone()] {
                block.prune(horizon);
                block.versions.push(Version::attempt(source, now, now));
            }
        }
        let life = self.life(host);
        let change = Change { host, life, source, blocks, begun: now, ended: NEVER, told: false };
        self.outstanding.insert(id, change);
        id
    }

    fn life(&self, host: Host) -> u32 {
        self.lives.get(&host).copied().unwrap_or(0)
    }

    /// The target has ended the epoch in which a host had these changes under way: its earlier
    /// messages take no effect any more, and the host sends the changes again.
    pub fn new_attempt(&mut self, host: Host, is_of: impl Fn(ChangeId) -> bool) {
        let now = self.tick();
        if self.fenced.contains_key(&host) {
            return;
        }
        let outstanding = self.outstanding.iter().filter(|(id, _)| is_of(**id));
        for (_, change) in outstanding.filter(|(_, change)| change.host == host) {
            for block in &mut self.blocks[change.blocks.clone()] {
                block.attempt_again(change.source, change.begun, now);
            }
        }
    }

    /// The host has died. When it is back, it repeats the requests that had no answer.
    pub fn host_died(&mut self, host: Host) {
        *self.lives.entry(host).or_default() += 1;
        self.settled(host, None);
    }

    /// The target has given the volume to another host: this host changes nothing any more.
    pub fn fence(&mut self, host: Host) {
        let now = self.tick();
        if self.fenced.contains_key(&host) {
            return;
        }
        self.fenced.insert(host, now);
        for change in self.outstanding.values().filter(|change| change.host == host) {
            let id = change.source.id();
            for block in &mut self.blocks[change.blocks.clone()] {
                for version in block.versions.iter_mut().filter(|v| v.source.id() == id) {
                    version.latest = version.latest.min(now);
                }
            }
        }
        // A fenced host will not write them again, and no loss is reported to it.
        for block in &mut self.blocks {
            for version in block.versions.iter_mut().filter(|v| v.kept == Some(host)) {
                (version.kept, version.latest) = (None, version.latest.min(now));
                version.acknowledged = false;
                let id = version.source.id();
                self.volatile.retain(|(of, _)| Some(*of) != id);
            }
        }
        self.losses.retain(|loss| loss.host != host);
    }

    /// The target has given the volume to a host in a new generation. Writes acknowledged to
    /// earlier hosts are durable then: the new host reads them, and would not hear of their loss.
    pub fn settle(&mut self) {
        let kept = |version: &Version| version.kept.is_some();
        for block in &mut self.blocks {
            for version in block.versions.iter_mut().filter(|v| v.acknowledged && !kept(v)) {
                version.durable = true;
            }
        }
        let blocks = &self.blocks;
        self.volatile.retain(|(id, change)| {
            let versions =
                |at: usize| blocks[at].versions.iter().rfind(|v| v.source.id() == Some(*id));
            !change.blocks.clone().all(|at| versions(at).is_none_or(|version| version.durable))
        });
    }

    /// Whether a host has lost the volume.
    #[must_use]
    pub fn is_fenced(&self, host: Host) -> bool {
        self.fenced.contains_key(&host)
    }

    /// The data of a write at a byte offset.
    pub fn fill(id: ChangeId, offset: usize, data: &mut [u8]) {
        for (at, sector) in data.chunks_mut(SECTOR).enumerate() {
            stamp(id, offset / SECTOR + at, sector);
        }
    }

    /// Ends a change. `durable`: a write with FUA. A change that is not `ok` may have taken effect
    /// or not, but does not take effect later.
    ///
    /// # Errors
    /// The change cannot have ended so, in words.
    ///
    /// # Panics
    /// The change is not outstanding.
    pub fn end_change(&mut self, id: ChangeId, ok: bool, durable: bool) -> Result<(), String> {
        let now = self.tick();
        let mut change = self.outstanding.remove(&id).expect("an outstanding change");
        change.ended = now;
        if let Some(fenced) = self.fenced.get(&change.host).filter(|at| ok && **at < change.begun) {
            return Err(format!(
                "{id:?} of {:?}, begun at {}, was acknowledged, but the host was fenced at {fenced}",
                change.host, change.begun
            ));
        }
        for block in &mut self.blocks[change.blocks.clone()] {
            if let Some(version) = block.version(id) {
                version.latest = version.latest.min(now);
                version.ended = now;
                version.certain |= ok;
                version.acknowledged = ok;
                version.durable = ok && durable;
            }
        }
        if ok && !durable {
            change.life = self.life(change.host);
            self.volatile.push((id, change));
        }
        Ok(())
    }

    /// Submits a flush.
    pub fn begin_flush(&mut self) -> Begin {
        self.begin_flush_by(Host(0))
    }

    /// [`Self::begin_flush`] by one of several hosts.
    pub fn begin_flush_by(&mut self, host: Host) -> Begin {
        Begin { at: self.tick(), host }
    }

    /// Ends a flush. A failed flush promises nothing, and reports every loss that it would have
    /// covered.
    ///
    /// # Errors
    /// The flush cannot have succeeded, in words.
    pub fn end_flush(&mut self, begin: Begin, ok: bool) -> Result<(), String> {
        self.end_flush_given(begin, begin, ok)
    }

    /// [`Self::end_flush`] for a flush that waited before the host got it. The flush covers all
    /// changes that ended before `begin`; it reports losses of changes that ended before `given`.
    ///
    /// # Errors
    /// As [`Self::end_flush`].
    pub fn end_flush_given(&mut self, begin: Begin, given: Begin, ok: bool) -> Result<(), String> {
        let now = self.tick();
        let Begin { at, host } = begin;
        let mut losses = self.losses.iter_mut().filter(|loss| loss.host == host);
        if !ok {
            losses.filter(|loss| loss.ended < given.at).for_each(|loss| loss.told = true);
            let covered = |change: &&mut Change| change.host == host && change.ended < given.at;
            let volatile = self.volatile.iter_mut().map(|(_, change)| change);
            volatile.filter(covered).for_each(|change| change.told = true);
            return Ok(());
        }
        let lasts = self.losses_last;
        let hides =
            |loss: &&mut Loss| loss.ended < at && (lasts || !loss.told || given.at < loss.at);
        if let Some(loss) = losses.find(hides) {
            return Err(format!("a flush of {at}..{now} succeeded over {loss:?}"));
        }
        if let Some(fenced) = self.fenced.get(&host).filter(|fenced| **fenced < at) {
            return Err(format!("a flush of {at}..{now} of {host:?}, fenced at {fenced}"));
        }
        let blocks = &mut self.blocks;
        self.volatile.retain(|(id, change)| {
            let covered = change.ended < at;
            if covered {
                for block in &mut blocks[change.blocks.clone()] {
                    if let Some(version) = block.version(*id) {
                        version.durable = true;
                    }
                }
            }
            !covered
        });
        Ok(())
    }

    /// Submits a read.
    pub fn begin_read(&mut self) -> Begin {
        self.begin_read_by(Host(0))
    }

    /// [`Self::begin_read`] by one of several hosts.
    pub fn begin_read_by(&mut self, host: Host) -> Begin {
        let at = self.tick();
        self.reads.insert(at, ());
        Begin { at, host }
    }

    /// Drops a read that failed.
    pub fn drop_read(&mut self, begin: Begin) {
        self.reads.remove(&begin.at);
    }

    /// Ends a read that returned these bytes of the volume at a byte offset.
    ///
    /// # Errors
    /// The read cannot have returned them, in words.
    pub fn end_read(&mut self, begin: Begin, offset: usize, data: &[u8]) -> Result<(), String> {
        let end = self.tick();
        self.reads.remove(&begin.at);
        if let Some(fenced) = self.fenced.get(&begin.host).filter(|at| **at < begin.at) {
            return Err(format!("a read of {:?}, fenced at {fenced}", begin.host));
        }
        for (at, bytes) in data.chunks(self.block_bytes).enumerate() {
            let block = offset / self.block_bytes + at;
            self.observe(block, bytes, begin.at, end)?;
        }
        Ok(())
    }

    fn observe(&mut self, at: usize, bytes: &[u8], begin: u64, end: u64) -> Result<(), String> {
        let first = at * self.block_bytes;
        let base = &self.base[first..first + self.block_bytes];
        let block = &self.blocks[at];
        let content = block.content(bytes, first / SECTOR, base);
        let Some(content) = content else {
            return Err(format!(
                "block {at} has a value that no change gave it, or several:\n{}",
                self.describe(at, bytes)
            ));
        };
        // After a restart, a change may write the same bytes as the volume had at the beginning.
        let is_base = bytes == base;
        let matches = |source: Source| match (source, content) {
            (Source::Base, _) => is_base,
            (Source::Zeroes(_), Content::Zeroes) => true,
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

    /// Describes the bytes and the known versions of a block.
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
