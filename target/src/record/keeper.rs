//! [`Keeper`]: the place where the record of one volume is kept: a file in the state directory, or
//! any other store that replaces a record as a whole and only if no other program did.

use std::collections::BTreeSet;
use std::fmt;
use std::io;

use super::{AtRisk, VolumeRecord};
use crate::record::holders::VolumeUuid;

/// How often a record was written so far. A run that did not write the revision that it replaces is
/// not the one that serves the volume.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Revision(pub u64);

impl Revision {
    /// There is no record.
    pub const NONE: Self = Self(0);

    /// The next revision. The text of a file may contain any number.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.wrapping_add(1).max(1))
    }
}

/// The content of a keeper.
#[expect(clippy::large_enum_variant, reason = "there is one at a time, when a volume is opened")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KeeperContent {
    /// No record was ever kept there, as far as can be seen.
    Nothing,
    /// A record, and its revision.
    Record(VolumeRecord, Revision),
    /// Data that is no record, and the reason. It is lost permanently.
    Garbage(String),
}

/// Why a record was not replaced.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// Another program wrote it.
    #[error(
        "another program wrote it meanwhile (revision {}, not {})", found.0, expected.0
    )]
    Conflict {
        /// The revision that is there.
        found: Revision,
        /// The revision that was to be replaced.
        expected: Revision,
    },
    /// The system's.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The place of one record. Each call may block.
pub trait Keeper: fmt::Debug + Send {
    /// The record as it is kept.
    ///
    /// # Errors
    /// The record cannot be read now. Its content is unknown, and must be neither ignored nor
    /// replaced.
    fn read(&self) -> io::Result<KeeperContent>;

    /// Replaces the record durably, as a whole, if it still has the revision `expected`. Returns
    /// the new revision. A record that vanished meanwhile is written again.
    ///
    /// # Errors
    /// [`KeepError`]. Then the old record or the new one is kept.
    fn replace(&self, record: &VolumeRecord, expected: Revision) -> Result<Revision, KeepError>;

    /// Makes the kept record vouch for nothing, durably, where [`Self::replace`] finds no space: a
    /// later [`Self::read`] finds it without a verifier.
    ///
    /// # Errors
    /// The system's.
    fn renounce(&self) -> io::Result<()>;

    /// The place, for people.
    fn place(&self) -> String;
}

/// Whether a run may write a record.
#[derive(Debug)]
pub enum Place {
    /// The run reads and writes it. Writing may fail.
    Ours(Box<dyn Keeper>),
    /// Another target has it: the run may read it, and keeps no record.
    Foreign(Box<dyn Keeper>),
    /// There is no place, and none can be made: no record is kept.
    Nothing,
}

/// Knows the places of records.
pub trait Keepers: fmt::Debug + Send {
    /// The place of the record of a volume.
    fn of(&self, volume: &VolumeUuid) -> Place;

    /// The record of a volume by the version before, from its own files. `risk`: the risk of writes
    /// to the volume, if it is served.
    fn former(&self, _volume: &VolumeUuid, _risk: Option<AtRisk>) -> Option<VolumeRecord> {
        None
    }

    /// The volumes that the version before kept records of.
    fn former_volumes(&self) -> BTreeSet<VolumeUuid> {
        BTreeSet::new()
    }

    /// The record as the program before this one in this process wrote it last, and its revision.
    fn left(&self, _volume: &VolumeUuid) -> Option<(VolumeRecord, Revision)> {
        None
    }

    /// Whether other targets may have written the record since this run served the volume: it is
    /// read again when the volume is served again.
    fn is_shared(&self, _volume: &VolumeUuid) -> bool {
        false
    }

    /// Removes the files of the version before, once their content is in records.
    fn forget_former(&mut self) {}
}
