//! Crashes, as the oracle judges them: the contents of the volume afterwards, and the hosts that
//! continue.
//!
//! Durable changes survive, or acknowledged ones ([`Survives`]); of later changes any may survive.
//! A host that retains its writes writes the lost ones again. The next FLUSH must report every loss
//! that is not written again.

use std::collections::{BTreeMap, BTreeSet};

use super::block::{Block, Version};
use super::value::Source;
use super::{Change, CrashCount, Host, Loss, Oracle, SECTOR, Survives};

impl Oracle {
    /// Takes the volume's bytes after a crash that ended every outstanding request. Later checks
    /// build on these bytes.
    ///
    /// # Errors
    /// A change that had to survive is lost, or data was never written; in words.
    ///
    /// # Panics
    /// The image's size is not the volume's.
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

    /// Takes the volume's bytes after a death of the target. The hosts live, and outstanding
    /// requests go on. A host for which `retains` returns true has copies of all writes that were
    /// acknowledged in its present life.
    ///
    /// # Errors
    /// A change that had to survive is lost, or data was never written; in words.
    ///
    /// # Panics
    /// The image's size is not the volume's.
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
            // The bytes on the disk are as new as any change acknowledged so far.
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
                // The change is durable. Its host may not know that, and may write it again after
                // another restart.
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

    /// Whether an image lacks the acknowledged value of a block, and anything as new. Of requests
    /// that overlapped in time any may be the newest, whatever reads returned: a host that retains
    /// them knows only the times of their answers.
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

    /// Continues a host after [`Self::restart`]. With `rewritten`, the host has written the blocks
    /// for which it returns true again from its copies, and made them durable. Without it, the host
    /// wrote nothing. The next flush must report blocks that stay lost. A host with copies may lose
    /// nothing, unless it has a loss to report anyhow (`owes`).
    ///
    /// # Errors
    /// The host did not write a lost block again; in words.
    pub fn go_on(
        &mut self,
        host: Host,
        rewritten: Option<&dyn Fn(usize) -> bool>,
        owes: bool,
    ) -> Result<(), String> {
        if let Some(rewritten) = rewritten.filter(|_| !owes) {
            // A flush that failed since the restart has told of them.
            let is_told = |version: &Version| {
                let mut told = self.volatile.iter().filter(|(_, change)| change.told);
                told.any(|(id, _)| version.source.id() == Some(*id))
            };
            let missing = |(at, block): (usize, &Block)| {
                let kept = block.versions.iter().any(|v| v.kept == Some(host) && !is_told(v));
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

    pub(super) fn settled(&mut self, host: Host, rewritten: Option<&dyn Fn(usize) -> bool>) {
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
                // The block has one of these versions.
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
}
