//! [`StateChange`]: one operation on the object beside an image, which compares and then writes, and
//! [`StatePlace`], where the object is: in a cluster, or in a simulation. Pure.

use nix::errno::Errno;
use rblk_protocol::Mutation;

use super::owner_note::OwnerNote;

/// The attribute with the revision of the record.
pub const REVISION: &str = "rblk.revision";
/// The attribute with the epoch of the owner.
pub const EPOCH: &str = "rblk.epoch";
/// The attribute with the owner.
pub const OWNER: &str = "rblk.owner";

/// See the module. An attribute that was never set is empty.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StateChange {
    /// The object must not exist yet.
    pub creates: bool,
    /// Attributes, and the values that they must have.
    pub only_if: Vec<(&'static str, String)>,
    /// Attributes and their new values.
    pub sets: Vec<(&'static str, String)>,
    /// The new record.
    pub text: Option<Vec<u8>>,
}

impl StateChange {
    /// Replaces the record of revision `expected`, in this epoch of the owner.
    fn of_record(epoch: u64, (expected, next): (u64, u64), text: &[u8]) -> Self {
        Self {
            creates: false,
            only_if: compared(vec![(EPOCH, number(epoch)), (REVISION, number(expected))]),
            sets: vec![(REVISION, number(next))],
            text: Some(text.to_vec()),
        }
    }

    /// Notes an owner. The first one creates the object.
    fn of_owner(note: &OwnerNote, expected: Option<u64>) -> Result<Self, Errno> {
        let words = serde_json::to_string(note).map_err(|_| Errno::EINVAL)?;
        Ok(Self {
            creates: expected.is_none(),
            only_if: compared(expected.map(|epoch| (EPOCH, number(epoch))).into_iter().collect()),
            sets: vec![(EPOCH, number(note.epoch)), (OWNER, words)],
            text: None,
        })
    }
}

fn compared(values: Vec<(&'static str, String)>) -> Vec<(&'static str, String)> {
    if Mutation::GroupStateBlindWrite.is_on() { Vec::new() } else { values }
}

/// The value of an attribute that was never set is empty.
fn number(number: u64) -> String {
    if number == 0 { String::new() } else { number.to_string() }
}

/// The kept record, if there is one, and its revision.
pub type KeptText = Option<(Vec<u8>, u64)>;

/// The place of the object. Each call may block.
pub trait StatePlace {
    /// Carries out a change. False: a comparison failed. `EEXIST`: the object exists already;
    /// `ENOENT`: it does not exist.
    ///
    /// # Errors
    /// The cluster's.
    fn carry_out(&self, change: &StateChange) -> Result<bool, Errno>;

    /// Replaces the record of revision `expected`, in this epoch of the owner. False: it has
    /// another revision, or the image another owner.
    ///
    /// # Errors
    /// The cluster's.
    fn replace(&self, epoch: u64, revisions: (u64, u64), text: &[u8]) -> Result<bool, Errno> {
        match self.carry_out(&StateChange::of_record(epoch, revisions, text)) {
            // The note of the owner is gone with the object.
            Err(Errno::ENOENT) => Ok(false),
            replaced => replaced,
        }
    }

    /// Makes this member the owner, or (with an empty client) nobody, if the owner's epoch is
    /// `expected`. False: it is another one.
    ///
    /// # Errors
    /// The cluster's.
    fn swap_owner(&self, expected: u64, note: &OwnerNote) -> Result<bool, Errno> {
        if expected == 0 {
            match self.carry_out(&StateChange::of_owner(note, None)?) {
                Err(Errno::EEXIST) => {}
                made => return made,
            }
        }
        match self.carry_out(&StateChange::of_owner(note, Some(expected))?) {
            Err(Errno::ENOENT) => Ok(false),
            swapped => swapped,
        }
    }
}
