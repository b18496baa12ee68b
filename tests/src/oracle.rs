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
//! Hosts send a request again when they lost the connection, so a change may take effect more than once: at most once
//! in each of its attempts, and an attempt is over when the target has admitted the host to a newer epoch
//! ([`Oracle::new_attempt`]). A host that lost the volume to another changes nothing from that moment on
//! ([`Oracle::fence`]). When the target dies and comes back ([`Oracle::restart`]), the outstanding goes on; what was
//! acknowledged and is lost is written again by a host that retains (`Oracle::settled`), or a flush must tell
//! ([`Oracle::end_flush`]).
//!
//! Every write has a number and fills each of its sectors with a stamp of that number and the sector's
//! ([`Oracle::fill`]), so that a value tells where it is from. Zeroes do not: what could be any of several
//! changes is taken for the one that is allowed.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// What a device writes whole or not at all, in bytes.
pub const SECTOR: usize = 512;

/// Observations kept of a block. Fewer make the oracle more lenient, never wrong.
const OBSERVATIONS: usize = 8;

/// After the end of time: a change that may still take effect.
const NEVER: u64 = u64::MAX;

/// Who makes requests.
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
    // The request's own life, whatever was read.
    begun: u64,
    ended: u64,
    // Acknowledged before the target died; its host has a copy and will write it again.
    kept: Option<Host>,
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
    // A restart lost something acknowledged here, which is kept.
    lost: bool,
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
            begun: 0,
            ended: 0,
            kept: None,
        };
        Self { versions: vec![base], observations: Vec::new(), lost: false }
    }

    /// The newest attempt of a change.
    fn version(&mut self, id: ChangeId) -> Option<&mut Version> {
        self.versions.iter_mut().rfind(|v| v.source.id() == Some(id))
    }

    /// The present attempt of a change is over; another begins.
    fn attempt_again(&mut self, source: Source, begun: u64, now: u64) {
        if let Some(version) = source.id().and_then(|id| self.version(id)) {
            version.latest = version.latest.min(now);
        }
        self.versions.push(Version::attempt(source, begun, now));
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

impl Version {
    fn attempt(source: Source, begun: u64, now: u64) -> Self {
        Self {
            source,
            earliest: now,
            latest: NEVER,
            certain: false,
            acknowledged: false,
            durable: false,
            begun,
            ended: NEVER,
            kept: None,
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

    /// Whether a sector of that number, which was `base` at the beginning, has its value.
    fn is(self, bytes: &[u8], base: &[u8], number: usize) -> bool {
        match self {
            Self::Base => bytes == base,
            Self::Zeroes(_) => is_zero(bytes),
            Self::Stamp(id) => is_stamp(bytes, id, number),
        }
    }
}

/// A change that is outstanding, or acknowledged and not durable.
#[derive(Clone, Debug)]
struct Change {
    host: Host,
    // Which life of the host acknowledged it.
    life: u32,
    source: Source,
    blocks: Range<usize>,
    begun: u64,
    ended: u64,
    // A flush that covered it has failed: it may be lost.
    told: bool,
}

/// Something acknowledged that is gone.
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
            outstanding: BTreeMap::new(),
            volatile: Vec::new(),
            reads: BTreeMap::new(),
            losses: Vec::new(),
            fenced: BTreeMap::new(),
            lives: BTreeMap::new(),
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

    /// The target has admitted a host to a new epoch: what the host had sent before takes effect no more, and all
    /// that is outstanding is sent again.
    pub fn new_attempt(&mut self, host: Host) {
        let now = self.tick();
        if self.fenced.contains_key(&host) {
            return;
        }
        for change in self.outstanding.values().filter(|change| change.host == host) {
            for block in &mut self.blocks[change.blocks.clone()] {
                block.attempt_again(change.source, change.begun, now);
            }
        }
    }

    /// The host has died; what it has not got an answer for it will ask for again when it is back.
    pub fn host_died(&mut self, host: Host) {
        *self.lives.entry(host).or_default() += 1;
        self.settled(host, None);
    }

    /// The target has given the volume to another host: nothing of this one takes effect any more.
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
        // It will not write them again, and nobody is owed anything for it.
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

    /// A change has ended. `durable`: it was a write with FUA. One that is not `ok` may have taken effect or
    /// not, but does so no more.
    ///
    /// # Errors
    /// It cannot have ended so, in words.
    ///
    /// # Panics
    /// It is not outstanding.
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

    /// A flush is submitted.
    pub fn begin_flush(&mut self) -> Begin {
        self.begin_flush_by(Host(0))
    }

    /// [`Self::begin_flush`] by one of several hosts.
    pub fn begin_flush_by(&mut self, host: Host) -> Begin {
        Begin { at: self.tick(), host }
    }

    /// A flush has ended. One that failed promises nothing, and tells of every loss that it would have covered.
    ///
    /// # Errors
    /// It cannot have succeeded, in words.
    pub fn end_flush(&mut self, begin: Begin, ok: bool) -> Result<(), String> {
        self.end_flush_given(begin, begin, ok)
    }

    /// [`Self::end_flush`] of one that had waited before it was given to whom it is for. What it covers is everything
    /// from before it began; what it can tell, or has to, is from before it was given.
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
        let hides = |loss: &&mut Loss| loss.ended < at && (!loss.told || given.at < loss.at);
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

    /// A read is submitted.
    pub fn begin_read(&mut self) -> Begin {
        self.begin_read_by(Host(0))
    }

    /// [`Self::begin_read`] by one of several hosts.
    pub fn begin_read_by(&mut self, host: Host) -> Begin {
        let at = self.tick();
        self.reads.insert(at, ());
        Begin { at, host }
    }

    /// A read has failed.
    pub fn drop_read(&mut self, begin: Begin) {
        self.reads.remove(&begin.at);
    }

    /// A read has returned these bytes of the volume from a byte offset on.
    ///
    /// # Errors
    /// It cannot have, in words.
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
        let content = content(bytes, first / SECTOR, base, block);
        let Some(content) = content else {
            return Err(format!(
                "block {at} has a value that nobody gave it, or several:\n{}",
                self.describe(at, bytes)
            ));
        };
        // What the volume began with may be what a change writes, after a restart.
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
            let is = |version: &Version| version.source.is(bytes, base, number);
            let counts = |w: &Version| match survives {
                Survives::Durable => w.durable,
                Survives::Acknowledged => w.acknowledged && w.kept.is_none(),
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
        self.losses.clear();
        Ok(count)
    }

    /// The target has died and the volume has these bytes now; the hosts live, and what is outstanding goes on.
    /// Those of which `retains` says so have copies of what was acknowledged in this life of theirs.
    ///
    /// # Errors
    /// Something is lost that had to survive, or is there that nobody wrote; in words.
    ///
    /// # Panics
    /// The image has not the volume's size.
    pub fn restart(
        &mut self,
        image: Vec<u8>,
        survives: Survives,
        retains: impl Fn(Host) -> bool,
    ) -> Result<CrashCount, String> {
        let now = self.tick();
        let blocks = self.blocks.clone();
        let outstanding = self.outstanding.clone();
        let volatile = self.volatile.clone();
        let losses = self.losses.clone();
        let reads = self.reads.clone();
        let lost: Vec<bool> = (0..blocks.len()).map(|at| self.loses(at, &image)).collect();
        let count = self.crash(image, survives)?;
        (self.outstanding, self.losses, self.reads) = (outstanding, losses, reads);
        for (block, _) in self.blocks.iter_mut().zip(&lost).filter(|(_, lost)| !**lost) {
            // What is there is as new as anything acknowledged so far.
            block.versions[0].ended = now;
        }
        for (id, change) in volatile {
            let fenced = self.fenced.contains_key(&change.host);
            let kept = retains(change.host) && change.life == self.life(change.host);
            let mut is_lost = false;
            let mut is_kept = false;
            for at in change.blocks.clone() {
                let versions = &blocks[at].versions;
                let newer = |v: &Version| v.acknowledged && change.ended < v.begun;
                let owed = versions.iter().any(|v| v.kept.is_some() && v.source.id() == Some(id));
                let survived = survives == Survives::Acknowledged && !owed;
                if fenced || survived || versions.iter().any(newer) {
                    continue;
                }
                if kept {
                    is_kept = true;
                    let version = Version {
                        acknowledged: true,
                        ended: change.ended,
                        kept: Some(change.host),
                        ..Version::attempt(change.source, change.begun, now)
                    };
                    self.blocks[at].versions.push(version);
                    self.blocks[at].lost |= lost[at] && !change.told;
                } else {
                    is_lost |= lost[at] && !change.told;
                }
            }
            if is_lost {
                let Change { host, ended, .. } = change;
                self.losses.push(Loss { host, ended, at: now, told: false });
            }
            if is_kept {
                self.volatile.push((id, change));
            } else if survives == Survives::Acknowledged && kept && !fenced {
                // It is durable, but its host may not know, and write it again after another restart.
                self.volatile.push((id, Change { told: true, ..change }));
            }
        }
        for change in self.outstanding.values() {
            if self.fenced.contains_key(&change.host) {
                continue;
            }
            for block in &mut self.blocks[change.blocks.clone()] {
                block.versions.push(Version::attempt(change.source, change.begun, now));
            }
        }
        Ok(count)
    }

    /// Whether an image has not what was acknowledged of a block, or something as new. Of requests that overlapped in
    /// time any may be the newest here, whatever was read since: who retains them knows only when they were answered.
    fn loses(&self, at: usize, image: &[u8]) -> bool {
        let block = &self.blocks[at];
        let sectors = at * self.block_bytes / SECTOR..(at + 1) * self.block_bytes / SECTOR;
        sectors.into_iter().any(|number| {
            let place = number * SECTOR..(number + 1) * SECTOR;
            let (bytes, base) = (&image[place.clone()], &self.base[place]);
            let newer = |v: &Version, w: &Version| w.acknowledged && v.ended < w.begun;
            let alive = |v: &&Version| !block.versions.iter().any(|w| newer(v, w));
            !block.versions.iter().filter(alive).any(|v| v.source.is(bytes, base, number))
        })
    }

    /// A host goes on after [`Self::restart`]: it has written again the blocks of which `rewritten` says so, from its
    /// copies, and made them durable; or, with none, nothing at all. What is lost then has to be told by its next flush,
    /// as always; with copies it need not be lost, unless the host has something to tell (`owes`) anyhow.
    ///
    /// # Errors
    /// It did not write again what is lost, in words.
    pub fn go_on(
        &mut self,
        host: Host,
        rewritten: Option<&dyn Fn(usize) -> bool>,
        owes: bool,
    ) -> Result<(), String> {
        if let Some(rewritten) = rewritten.filter(|_| !owes) {
            let missing = |(at, block): (usize, &Block)| {
                let kept = block.versions.iter().any(|v| v.kept == Some(host));
                (kept && block.lost && !rewritten(at)).then_some(at)
            };
            if let Some(at) = self.blocks.iter().enumerate().find_map(missing) {
                let bytes = &self.base[at * self.block_bytes..(at + 1) * self.block_bytes];
                let text = self.describe(at, bytes);
                return Err(format!("block {at} was lost and not written again:\n{text}"));
            }
        }
        self.settled(host, rewritten);
        Ok(())
    }

    fn settled(&mut self, host: Host, rewritten: Option<&dyn Fn(usize) -> bool>) {
        let now = self.tick();
        let mut settled = BTreeSet::new();
        let mut lost = BTreeMap::new();
        for (at, block) in self.blocks.iter_mut().enumerate() {
            let kept = block.versions.iter().filter(|v| v.kept == Some(host)).count();
            if kept == 0 {
                continue;
            }
            let again = rewritten.is_some_and(|rewritten| rewritten(at));
            for version in block.versions.iter_mut().filter(|v| v.kept == Some(host)) {
                settled.insert(version.source.id());
                if block.lost && !again {
                    lost.insert(version.source.id(), version.ended);
                }
                version.kept = None;
                version.latest = version.latest.min(now);
                version.acknowledged = again;
                version.durable = again;
                version.certain = again && kept == 1;
            }
            if again {
                // One of them is there.
                block.versions.retain(|v| v.source != Source::Base);
            }
            block.lost = false;
        }
        for (id, _) in self.volatile.iter().filter(|(_, change)| change.told) {
            lost.remove(&Some(*id));
        }
        for ended in lost.into_values() {
            self.losses.push(Loss { host, ended, at: now, told: false });
        }
        self.volatile.retain(|(id, _)| !settled.contains(&Some(*id)));
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
        oracle.end_change(id, true, fua).unwrap();
        id
    }

    fn read(oracle: &mut Oracle, bytes: &[u8]) -> Result<(), String> {
        let begin = oracle.begin_read();
        oracle.end_read(begin, 0, bytes)
    }

    fn flush(oracle: &mut Oracle) {
        let begin = oracle.begin_flush();
        oracle.end_flush(begin, true).unwrap();
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
        oracle.end_change(zeroes, true, false).unwrap();
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
        oracle.end_change(a, true, false).unwrap();
        oracle.end_change(b, true, false).unwrap();
        assert!(read(&mut oracle, &data(a)).is_err(), "back to a concurrent write");
        read(&mut oracle, &data(b)).unwrap();
    }

    #[test]
    fn unordered_writes_are_settled_by_a_read() {
        for second in [false, true] {
            let mut oracle = oracle();
            let a = oracle.begin_change(&ALL, false);
            let b = oracle.begin_change(&ALL, false);
            oracle.end_change(b, true, false).unwrap();
            oracle.end_change(a, true, false).unwrap();
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
            oracle.end_change(b, false, false).unwrap();
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
        oracle.end_change(a, true, false).unwrap();
        oracle.end_flush(begin, true).unwrap();
        assert!(oracle.crash(vec![0; 1024], Survives::Durable).is_ok());
        let b = written(&mut oracle, true);
        assert!(oracle.crash(vec![0; 1024], Survives::Durable).is_err());
        assert!(oracle.crash(data(b), Survives::Durable).is_ok());
    }

    const A: Host = Host(0);
    const B: Host = Host(1);

    #[test]
    fn a_change_may_take_effect_once_in_each_attempt() {
        let mut oracle = oracle();
        let a = oracle.begin_change(&ALL, false);
        let b = written(&mut oracle, false);
        // The path is lost, and the first copy of `a` is done only now.
        read(&mut oracle, &data(a)).unwrap();
        oracle.new_attempt(A);
        let c = written(&mut oracle, false);
        read(&mut oracle, &data(c)).unwrap();
        read(&mut oracle, &data(a)).unwrap();
        oracle.end_change(a, true, false).unwrap();
        let d = written(&mut oracle, false);
        assert!(read(&mut oracle, &data(a)).is_err(), "an attempt that was over");
        assert!(read(&mut oracle, &data(b)).is_err());
        read(&mut oracle, &data(d)).unwrap();
    }

    #[test]
    fn an_attempt_ends_with_its_epoch() {
        let mut oracle = oracle();
        let a = oracle.begin_change(&ALL, false);
        oracle.new_attempt(A);
        oracle.end_change(a, true, false).unwrap();
        let b = written(&mut oracle, false);
        assert!(read(&mut oracle, &data(a)).is_err(), "the copy of the old epoch");
        read(&mut oracle, &data(b)).unwrap();
        // The newest attempt is the one that was acknowledged.
        flush(&mut oracle);
        assert!(oracle.crash(data(a), Survives::Durable).is_err());
        // And one that another attempt repeats cannot come back after what was there in between.
        let c = oracle.begin_change(&ALL, false);
        read(&mut oracle, &data(c)).unwrap();
        oracle.new_attempt(A);
        let d = written(&mut oracle, false);
        read(&mut oracle, &data(d)).unwrap();
        oracle.end_change(c, false, false).unwrap();
        read(&mut oracle, &data(d)).unwrap();
    }

    #[test]
    fn a_fenced_host_changes_nothing_any_more() {
        let read = |oracle: &mut Oracle, bytes: &[u8]| {
            let begin = oracle.begin_read_by(B);
            oracle.end_read(begin, 0, bytes)
        };
        for early in [true, false] {
            let mut oracle = oracle();
            let a = oracle.begin_change_by(A, &ALL, false);
            oracle.fence(A);
            if early {
                read(&mut oracle, &[0; 1024]).unwrap();
                assert!(
                    read(&mut oracle, &data(a)).is_err(),
                    "after the other host saw the volume"
                );
            }
            oracle.new_attempt(A);
            let b = oracle.begin_change_by(B, &ALL, false);
            oracle.end_change(b, true, false).unwrap();
            assert!(read(&mut oracle, &data(a)).is_err());
            read(&mut oracle, &data(b)).unwrap();
            // An answer may have been under way. One to what came later may not.
            oracle.end_change(a, true, false).unwrap();
            read(&mut oracle, &data(b)).unwrap();
            let late = oracle.begin_change_by(A, &ALL, false);
            assert!(read(&mut oracle, &data(late)).is_err());
            assert!(oracle.end_change(late, true, false).is_err());
            let late = oracle.begin_change_by(A, &ALL, false);
            oracle.end_change(late, false, false).unwrap();
            let begin = oracle.begin_read_by(A);
            assert!(oracle.end_read(begin, 0, &data(b)).is_err());
            let begin = oracle.begin_flush_by(A);
            assert!(oracle.end_flush(begin, true).is_err());
            let begin = oracle.begin_flush_by(A);
            oracle.end_flush(begin, false).unwrap();
        }
    }

    #[test]
    fn what_a_restart_loses_is_told_by_every_flush_that_covers_it() {
        let mut oracle = oracle();
        let kept = written(&mut oracle, true);
        let lost = written(&mut oracle, false);
        let waits = oracle.begin_flush();
        let also = oracle.begin_flush();
        let under_way = oracle.begin_change(&ALL, false);
        oracle.restart(data(kept), Survives::Durable, |_| false).unwrap();
        read(&mut oracle, &data(kept)).unwrap();
        assert!(read(&mut oracle, &data(lost)).is_err());
        oracle.end_change(under_way, true, false).unwrap();
        read(&mut oracle, &data(under_way)).unwrap();
        assert!(oracle.end_flush(waits, true).is_err());
        oracle.end_flush(waits, false).unwrap();
        assert!(oracle.end_flush(also, true).is_err(), "it covered what is lost, too");
        flush(&mut oracle);
        assert!(oracle.crash(data(kept), Survives::Durable).is_err());
    }

    #[test]
    fn a_flush_that_covers_nothing_lost_tells_nothing() {
        let mut oracle = oracle();
        let waits = oracle.begin_flush();
        let lost = written(&mut oracle, false);
        oracle.restart(vec![0; 1024], Survives::Durable, |_| false).unwrap();
        oracle.end_flush(waits, false).unwrap();
        let begin = oracle.begin_flush();
        assert!(oracle.end_flush(begin, true).is_err(), "{lost:?} is lost and untold");
        // What is there is not lost.
        let mut oracle = self::oracle();
        let there = written(&mut oracle, false);
        oracle.restart(data(there), Survives::Durable, |_| false).unwrap();
        flush(&mut oracle);
        assert!(oracle.restart(vec![0; 1024], Survives::Durable, |_| false).is_err());
    }

    #[test]
    fn a_host_that_retains_writes_again_what_is_lost() {
        let fresh = || {
            let mut oracle = oracle();
            let old = written(&mut oracle, false);
            let new = written(&mut oracle, false);
            oracle.restart(vec![0; 1024], Survives::Durable, |_| true).unwrap();
            (oracle, old, new)
        };
        let (mut oracle, old, new) = fresh();
        assert!(oracle.go_on(A, Some(&|_| false), false).is_err(), "lost, and not written again");
        oracle.go_on(A, Some(&|_| true), false).unwrap();
        assert!(read(&mut oracle, &data(old)).is_err(), "older than the newest");
        assert!(read(&mut oracle, &[0; 1024]).is_err());
        read(&mut oracle, &data(new)).unwrap();
        flush(&mut oracle);
        assert!(oracle.crash(vec![0; 1024], Survives::Durable).is_err());
        // The target dies once more before all is written again.
        let (mut oracle, _, new) = fresh();
        oracle.restart(vec![0; 1024], Survives::Durable, |_| true).unwrap();
        assert!(oracle.go_on(A, Some(&|_| false), false).is_err());
        oracle.go_on(A, Some(&|_| true), false).unwrap();
        read(&mut oracle, &data(new)).unwrap();
        // The copies are lost, or nobody made use of them.
        for dies in [true, false] {
            let (mut oracle, ..) = fresh();
            if dies {
                oracle.host_died(A);
            } else {
                oracle.go_on(A, None, false).unwrap();
            }
            read(&mut oracle, &[0; 1024]).unwrap();
            let begin = oracle.begin_flush();
            assert!(oracle.end_flush(begin, true).is_err());
            oracle.end_flush(begin, false).unwrap();
            flush(&mut oracle);
        }
        // Nor does a clean stop make them needless.
        let (mut oracle, _, new) = fresh();
        oracle.restart(vec![0; 1024], Survives::Acknowledged, |_| true).unwrap();
        assert!(oracle.go_on(A, Some(&|_| false), false).is_err());
        oracle.go_on(A, Some(&|_| true), false).unwrap();
        read(&mut oracle, &data(new)).unwrap();
        // Those of an earlier life do not count.
        let mut oracle = self::oracle();
        written(&mut oracle, false);
        oracle.host_died(A);
        oracle.restart(vec![0; 1024], Survives::Durable, |_| true).unwrap();
        oracle.go_on(A, Some(&|_| true), false).unwrap();
        let begin = oracle.begin_flush();
        assert!(oracle.end_flush(begin, true).is_err());
    }

    #[test]
    fn concurrent_writes_are_written_again_in_either_order() {
        for second in [false, true] {
            let mut oracle = oracle();
            let a = oracle.begin_change(&ALL, false);
            let b = oracle.begin_change(&ALL, false);
            oracle.end_change(a, true, false).unwrap();
            oracle.end_change(b, true, false).unwrap();
            read(&mut oracle, &data(b)).unwrap();
            oracle.restart(vec![0; 1024], Survives::Durable, |_| true).unwrap();
            oracle.go_on(A, Some(&|_| true), false).unwrap();
            let (winner, loser) = if second { (b, a) } else { (a, b) };
            assert!(read(&mut oracle, &[0; 1024]).is_err());
            read(&mut oracle, &data(winner)).unwrap();
            assert!(read(&mut oracle, &data(loser)).is_err());
        }
    }

    #[test]
    fn what_a_failed_flush_told_is_not_told_again() {
        for keeps in [true, false] {
            let mut oracle = oracle();
            let a = written(&mut oracle, false);
            let begin = oracle.begin_flush();
            oracle.end_flush(begin, false).unwrap();
            oracle.restart(vec![0; 1024], Survives::Durable, |_| keeps).unwrap();
            let again = |_| keeps;
            oracle.go_on(A, Some(&again), false).unwrap();
            read(&mut oracle, &if keeps { data(a) } else { vec![0; 1024] }).unwrap();
            flush(&mut oracle);
        }
    }

    #[test]
    fn a_clean_stop_loses_nothing() {
        let mut oracle = oracle();
        let a = written(&mut oracle, false);
        assert!(oracle.restart(vec![0; 1024], Survives::Acknowledged, |_| true).is_err());
        oracle.restart(data(a), Survives::Acknowledged, |_| true).unwrap();
        read(&mut oracle, &data(a)).unwrap();
        flush(&mut oracle);
    }
}
