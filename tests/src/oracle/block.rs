//! [`Block`]: the facts about one block: the changes that may have taken effect, when, and the
//! values that reads returned.
//!
//! A block is a register: its [`Version`]s are the values that it may have, each with bounds of the
//! moment at which it took effect. The newest attempt of a change comes last. Moments are those of
//! the oracle's clock.

use super::value::{Content, Source, is_stamp, is_zero, word};
use super::{ChangeId, Host, SECTOR};

/// After the end of time: a change that may still take effect.
pub(super) const NEVER: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
pub(super) struct Version {
    pub(super) source: Source,
    // The change took effect within these bounds.
    pub(super) earliest: u64,
    pub(super) latest: u64,
    // The change took effect: it was acknowledged, or a read returned it.
    pub(super) certain: bool,
    pub(super) acknowledged: bool,
    pub(super) durable: bool,
    // The beginning and the end of the request itself, independent of reads.
    pub(super) begun: u64,
    pub(super) ended: u64,
    // Acknowledged before the target died; its host has a copy and will write it again.
    pub(super) kept: Option<Host>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Observation {
    pub(super) content: Content,
    pub(super) begin: u64,
    pub(super) end: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) versions: Vec<Version>,
    pub(super) observations: Vec<Observation>,
    // A restart lost an acknowledged change of this block, and a host has a copy of it.
    pub(super) lost: bool,
}

impl Block {
    pub(super) fn new() -> Self {
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

    /// The value that a read of this block returned, if the block may have had that value. `first`
    /// is the number of the block's first sector; `base` has the block's bytes at the beginning.
    pub(super) fn content(&self, bytes: &[u8], first: usize, base: &[u8]) -> Option<Content> {
        if is_zero(bytes) {
            return Some(Content::Zeroes);
        }
        let id = ChangeId(word(bytes, 0));
        let known = self.versions.iter().any(|v| v.source == Source::Stamp(id));
        let whole = || {
            bytes.chunks(SECTOR).enumerate().all(|(at, sector)| is_stamp(sector, id, first + at))
        };
        if known && whole() {
            return Some(Content::Stamp(id));
        }
        let has_base = self.versions.iter().any(|v| v.source == Source::Base);
        (has_base && bytes == base).then_some(Content::Base)
    }

    /// The newest attempt of a change.
    pub(super) fn version(&mut self, id: ChangeId) -> Option<&mut Version> {
        self.versions.iter_mut().rfind(|v| v.source.id() == Some(id))
    }

    /// Ends the present attempt of a change and begins another one.
    pub(super) fn attempt_again(&mut self, source: Source, begun: u64, now: u64) {
        if let Some(version) = source.id().and_then(|id| self.version(id)) {
            version.latest = version.latest.min(now);
        }
        self.versions.push(Version::attempt(source, begun, now));
    }

    /// Bounds of a version's effect if a read between `begin` and `end` returned it; none if it
    /// cannot have.
    pub(super) fn bounds(
        &self,
        at: usize,
        content: Content,
        begin: u64,
        end: u64,
    ) -> Option<(u64, u64)> {
        let version = &self.versions[at];
        let mut earliest = version.earliest;
        for (other, overwriter) in self.versions.iter().enumerate() {
            // This version overwrote a value that was certainly there when the read began.
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
    pub(super) fn is_lost(&self, version: &Version, counts: impl Fn(&Version) -> bool) -> bool {
        self.versions
            .iter()
            .any(|w| w.source != version.source && counts(w) && version.latest < w.earliest)
    }

    /// Forgets versions that neither a read submitted at `horizon` or later nor a crash can bring
    /// back.
    pub(super) fn prune(&mut self, horizon: u64) {
        if self.versions.len() > 1 {
            let all = self.clone();
            self.versions
                .retain(|v| !all.is_lost(v, |w| w.durable && w.certain && w.latest < horizon));
        }
    }
}

impl Version {
    pub(super) fn attempt(source: Source, begun: u64, now: u64) -> Self {
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
