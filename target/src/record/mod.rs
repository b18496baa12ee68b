//! [`VolumeRecord`]: the facts about a volume that must outlive the process that serves it: its
//! holder, its store, and the place of its acknowledged writes. Pure.
//!
//! A record belongs to its volume, and only the run that serves the volume writes it. A run vouches
//! only for data that it synced itself:
//!
//! - A volume that a run does not serve keeps its record. A volume that it serves for reading alone
//!   stays as much at risk as it was.
//! - A start that fails writes nothing.
//! - A store that fails is noted in the record of its volume, and does not affect other volumes.
//!
//! The [`WriteVerifier`] of a volume stays as long as every acknowledged write is durable or can
//! still become durable. The record names the place of the writes that are not in the store durably
//! ([`AtRisk`]), and so the failure that would lose them:
//!
//! | at risk | the next run keeps the verifier |
//! | --- | --- |
//! | nothing | always |
//! | machine | if the kernel has the writes: no boot since, and the disk was not detached |
//! | process | never |
//!
//! Invariant: the record states the risk, durably, before a host may write. [`Records`] has the
//! records of a run, [`Keeper`] is the place where one is kept, and [`StateDirectory`] has such
//! places in files. The record of a volume that a group of targets serves is beside its image:
//! [`SharedPlaces`].

mod directory;
pub(crate) mod durable;
pub(crate) mod former;
#[cfg(feature = "fuzzing")]
pub mod fuzzed_parsers;
pub mod holders;
mod keeper;
pub(crate) mod losses;
mod records;
mod shared_places;
pub(crate) mod text;
mod writer;

use std::fmt;

use rblk_protocol::{Name, WriteVerifier};
use serde::{Deserialize, Serialize};

use crate::record::holders::{HolderRecord, VolumeUuid};
use crate::store::{Attachment, StoreIdentity};
use crate::volume::{CacheMode, Volume};

pub use directory::{Keeping, StateDirectory};
pub use keeper::{KeepError, Keeper, KeeperContent, Keepers, Place, Revision};
pub use records::{Fresh, Records, ServedVolume};
pub use shared_places::{GroupKeepers, SharedPlaces};
pub(crate) use text::{parse as parse_record, text_of as record_text};
pub(crate) use writer::{RecordOutcome, RecordWriter};

/// The place of acknowledged writes that are not in the store durably.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AtRisk {
    /// No write: all acknowledged ones are in the store, durably.
    Nothing,
    /// In the kernel's memory or in a disk's cache: they survive the process, not the machine.
    Machine,
    /// In the memory of the process: they do not survive it.
    Process,
}

impl AtRisk {
    /// The risk of writes to a volume. `None`: its data does not outlive a run anyway.
    #[must_use]
    pub fn by_writes_to(volume: &Volume) -> Option<Self> {
        use crate::volume::Placement;
        match (&volume.placement, volume.cache) {
            (Placement::Store, CacheMode::WriteBack) => Some(Self::Process),
            (Placement::Store, CacheMode::None | CacheMode::WriteThrough) => {
                let is_durable = volume.is_durable_at_once;
                Some(if is_durable { Self::Nothing } else { Self::Machine })
            }
            (Placement::Memory(_) | Placement::Null, _) => None,
        }
    }
}

/// The boot of the machine that a run belongs to (`/proc/sys/kernel/random/boot_id`), and the
/// attachment of the disk below a store in that boot, as `BOOT#ATTACHMENT`. Writes in the kernel's
/// memory outlive neither. Empty: unknown, and different from every other one.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BootId(String);

/// Longest id that is taken from a file.
const BOOT_ID_MAX: usize = 64;

impl BootId {
    /// The id in that text.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let text: String = text.trim().chars().take(BOOT_ID_MAX).collect();
        Self(text.trim_end().to_owned())
    }

    /// The id of this machine's boot now.
    #[must_use]
    pub fn of_now() -> Self {
        Self::new(&std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default())
    }

    /// This boot, with the attachment of the disk below a store.
    #[must_use]
    pub fn with(&self, attachment: Option<Attachment>) -> Self {
        match attachment {
            Some(Attachment(number)) if !self.0.is_empty() => {
                Self::new(&format!("{self}#{number}"))
            }
            _ => self.clone(),
        }
    }

    /// Whether both are of one boot, and of one attachment, as far as is known.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        let parts = |of: &'_ Self| match of.0.split_once('#') {
            Some((boot, attachment)) => (boot.to_owned(), Some(attachment.to_owned())),
            None => (of.0.clone(), None),
        };
        let ((boot, attachment), (other_boot, other_attachment)) = (parts(self), parts(other));
        // Older versions did not record the attachment.
        let is_same = attachment.is_none() || other_attachment.is_none();
        !boot.is_empty() && boot == other_boot && (is_same || attachment == other_attachment)
    }
}

impl fmt::Display for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The end of the last run that served a volume for writing, as far as the volume is concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Before {
    /// All acknowledged data is durable.
    Saved,
    /// The process died, and the kernel has all acknowledged data.
    InKernel,
    /// Acknowledged data may be lost: it was in the memory of the process, or the machine booted
    /// since.
    Lost,
    /// Unknown, or writes were lost while the run went on.
    Unknown,
}

impl fmt::Display for Before {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Saved => "every acknowledged write is in the store",
            Self::InKernel => "the process died, and the kernel had every acknowledged write",
            Self::Lost => "acknowledged writes may be lost",
            Self::Unknown => "unknown, as of a new volume",
        })
    }
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeRecord {
    volume: VolumeUuid,
    // The name, for people.
    name: Option<Name>,
    // `None`: the next run has a new one.
    verifier: Option<WriteVerifier>,
    at_risk: AtRisk,
    // The boot of the last writes that were put at risk.
    boot: BootId,
    store: Option<StoreIdentity>,
    holder: Option<HolderRecord>,
}

impl VolumeRecord {
    /// The record of a new volume.
    #[must_use]
    pub fn new(volume: VolumeUuid) -> Self {
        Self {
            volume,
            name: None,
            verifier: None,
            at_risk: AtRisk::Nothing,
            boot: BootId::default(),
            store: None,
            holder: None,
        }
    }

    /// The volume.
    #[must_use]
    pub fn volume(&self) -> VolumeUuid {
        self.volume
    }

    /// Its name, if that is known.
    #[must_use]
    pub fn name(&self) -> Option<&Name> {
        self.name.as_ref()
    }

    /// Its verifier. `None`: the next run makes a new one.
    #[must_use]
    pub fn verifier(&self) -> Option<WriteVerifier> {
        self.verifier
    }

    /// The place of writes that were acknowledged under its verifier.
    #[must_use]
    pub fn at_risk(&self) -> AtRisk {
        self.at_risk
    }

    /// The host that held it last.
    #[must_use]
    pub fn holder(&self) -> Option<&HolderRecord> {
        self.holder.as_ref()
    }

    /// The last store that it was served from.
    #[must_use]
    pub fn store(&self) -> Option<&StoreIdentity> {
        self.store.as_ref()
    }

    /// A run begins to serve the volume, on a machine of that boot. The verifier changes to `fresh`
    /// if acknowledged writes may be lost.
    pub fn begin(&mut self, boot: &BootId, fresh: WriteVerifier) -> Before {
        let before = match (self.verifier, self.at_risk) {
            (None, _) => Before::Unknown,
            (Some(_), AtRisk::Nothing) => return Before::Saved,
            (Some(_), AtRisk::Machine) if self.boot.is(boot) => return Before::InKernel,
            (Some(_), AtRisk::Machine | AtRisk::Process) => Before::Lost,
        };
        self.vouch_anew(fresh);
        before
    }

    /// Sets a new verifier. No write was acknowledged under it yet.
    pub fn vouch_anew(&mut self, fresh: WriteVerifier) {
        (self.verifier, self.at_risk) = (Some(fresh), AtRisk::Nothing);
    }

    /// Hosts may write with this risk, in a run on a machine of that boot. Earlier writes at risk
    /// stay at risk: they belong to this boot ([`Self::begin`]).
    pub fn put_at_risk(&mut self, risk: AtRisk, boot: &BootId) {
        self.at_risk = self.at_risk.max(risk);
        if self.at_risk != AtRisk::Nothing {
            self.boot = boot.clone();
        }
    }

    /// Lowers the risk to at most this: the run that calls this made the rest durable.
    pub fn lower_risk(&mut self, risk: AtRisk) {
        self.at_risk = self.at_risk.min(risk);
    }

    /// Gives the verifier up: acknowledged writes may be lost, although no process and no machine
    /// died. The next run has a new one, however this run ends.
    pub fn renounce(&mut self) {
        (self.verifier, self.at_risk) = (None, AtRisk::Nothing);
    }

    /// Sets the volume's name.
    pub fn set_name(&mut self, name: Name) {
        self.name = Some(name);
    }

    /// Sets the store that the volume is served from.
    pub fn set_store(&mut self, store: Option<StoreIdentity>) {
        self.store = store;
    }

    /// Sets the last holder.
    pub fn set_holder(&mut self, holder: Option<HolderRecord>) {
        debug_assert!(holder.as_ref().is_none_or(|holder| holder.volume == self.volume));
        self.holder = holder;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: VolumeUuid = [7; 16];
    const OLD: WriteVerifier = WriteVerifier([1; 16]);
    const FRESH: WriteVerifier = WriteVerifier([2; 16]);

    fn served(risk: AtRisk, boot: &str) -> VolumeRecord {
        let mut record = VolumeRecord::new(V);
        record.vouch_anew(OLD);
        record.put_at_risk(risk, &BootId::new(boot));
        record
    }

    #[test]
    fn each_end_of_the_run_before() {
        use AtRisk::{Machine, Nothing, Process};
        use Before::{InKernel, Lost, Saved};
        for (risk, boot, now, before) in [
            (Nothing, "a", "a", Saved),
            (Nothing, "a", "b", Saved),
            (Machine, "a", "a", InKernel),
            (Machine, "a", "b", Lost),
            (Machine, "", "", Lost),
            (Machine, "a#7", "a#7", InKernel),
            (Machine, "a#7", "a#8", Lost),
            (Machine, "a#7", "b#7", Lost),
            (Machine, "a", "a#7", InKernel),
            (Machine, "a#7", "a", InKernel),
            (Process, "a", "a", Lost),
            (Process, "a", "b", Lost),
        ] {
            let mut record = served(risk, boot);
            assert_eq!(record.begin(&BootId::new(now), FRESH), before, "{risk:?} {boot} {now}");
            let kept = matches!(before, Saved | InKernel);
            assert_eq!(record.verifier(), Some(if kept { OLD } else { FRESH }));
            let risk = if before == InKernel { Machine } else { Nothing };
            assert_eq!(record.at_risk(), risk, "a new verifier vouches for no write yet");
        }
        let mut unknown = VolumeRecord::new(V);
        assert_eq!(unknown.begin(&BootId::new("a"), FRESH), Before::Unknown);
        assert_eq!(unknown.verifier(), Some(FRESH));
    }

    #[test]
    fn a_run_lowers_only_what_it_made_durable() {
        let (a, b) = (BootId::new("a"), BootId::new("b"));
        let mut record = served(AtRisk::Process, "a");
        // The cache mode has changed, and dirty blocks were written: hosts know one verifier.
        record.lower_risk(AtRisk::Machine);
        assert_eq!(record.begin(&a, FRESH), Before::InKernel);
        assert_eq!(record.verifier(), Some(OLD));
        // A run that only reads leaves the record as it is.
        assert_eq!(record.clone().begin(&b, FRESH), Before::Lost);
        // A run that writes puts it at risk again, and syncs it in the end.
        record.put_at_risk(AtRisk::Machine, &a);
        record.lower_risk(AtRisk::Nothing);
        assert_eq!(record.begin(&b, FRESH), Before::Saved);
    }

    #[test]
    fn a_renounced_verifier_is_not_inherited() {
        let boot = BootId::new("a");
        let mut record = served(AtRisk::Machine, "a");
        record.renounce();
        record.put_at_risk(AtRisk::Machine, &boot);
        record.lower_risk(AtRisk::Nothing);
        assert_eq!(record.begin(&boot, FRESH), Before::Unknown, "however the run ends");
        assert_eq!(record.verifier(), Some(FRESH));
    }

    #[test]
    fn the_risk_follows_the_place_of_the_writes() {
        use crate::volume::tests::volume;
        use rblk_fabric::{PageKind, Region};

        let memory =
            crate::volume::Placement::Memory(Region::allocate(4096, PageKind::Normal).unwrap());
        let store = crate::volume::Placement::Store;
        let image = Volume { is_durable_at_once: true, placement: store.clone(), ..volume() };
        let risk_of = |cache| AtRisk::by_writes_to(&Volume { cache, ..image.clone() });
        assert_eq!(risk_of(CacheMode::WriteThrough), Some(AtRisk::Nothing));
        assert_eq!(risk_of(CacheMode::WriteBack), Some(AtRisk::Process));
        for (placement, cache, risk) in [
            (store.clone(), CacheMode::WriteBack, Some(AtRisk::Process)),
            (store.clone(), CacheMode::WriteThrough, Some(AtRisk::Machine)),
            (store, CacheMode::None, Some(AtRisk::Machine)),
            (memory, CacheMode::None, None),
        ] {
            let volume = Volume { placement, cache, ..volume() };
            assert_eq!(AtRisk::by_writes_to(&volume), risk, "{volume:?}");
        }
    }
}
