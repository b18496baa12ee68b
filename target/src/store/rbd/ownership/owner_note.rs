//! [`OwnerNote`]: the member of a group that owns an image, as the object beside the image names
//! it. Pure.

use serde::{Deserialize, Serialize};

/// The member of a group that owns an image, or gave it back last.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct OwnerNote {
    /// Its name in the group.
    pub member: String,
    /// The addresses that it listens on.
    pub addresses: Vec<String>,
    /// The address of its client of the cluster, as the lock names it. Empty: the image was given
    /// back, and nobody owns it.
    pub client: String,
    /// The client that gave the image back. No write of it is under way, and it closes the image.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub closing: String,
    /// The member that asked for the image that was given back, and is about to take it. The others
    /// wait for that for a moment.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub next: String,
    /// The number of the change of owner.
    pub epoch: u64,
    /// How often another client than a member may have written to the image between two members.
    #[serde(default)]
    pub lineage: u64,
}

impl OwnerNote {
    /// Whether the owner of the lock has given the image back, and is about to close it.
    pub fn is_closing(&self, lock: Option<&str>) -> bool {
        self.client.is_empty() && lock.is_some_and(|client| client == self.closing)
    }

    /// Whether the owner is a target that is in no group.
    pub fn is_alone(&self) -> bool {
        self.epoch > 0 && self.member.is_empty()
    }

    /// The note of a target in no group that is the owner now, as this client. None: no member of a
    /// group ever had the image, and nothing is noted.
    pub fn of_alone(&self, client: &str) -> Option<Self> {
        let lineage = self.lineage + u64::from(!self.is_alone());
        let (client, epoch) = (client.to_owned(), self.epoch + 1);
        let note = Self { client, epoch, lineage, ..Self::default() };
        (self.epoch > 0).then_some(note)
    }

    /// Whether the image was given back for another member than this one.
    pub fn is_promised_beside(&self, member: &str) -> bool {
        self.client.is_empty() && !self.next.is_empty() && self.next != member
    }

    /// The note of the owner when it has given the image back, for this member or for any.
    pub(super) fn given_back(&self, next: Option<&str>) -> Self {
        let (client, closing) = (String::new(), self.client.clone());
        let next = next.unwrap_or_default().to_owned();
        Self { client, closing, next, epoch: self.epoch + 1, ..self.clone() }
    }
}
