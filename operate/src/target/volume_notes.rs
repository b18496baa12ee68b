//! [`VolumeNotes`]: what people want to know of a volume beyond what the wire says.

use serde::{Deserialize, Serialize};

/// Facts about a volume for people, beyond those on the wire.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeNotes {
    /// File or device, if it has one.
    pub path: Option<String>,
    /// I/O passes by the page cache.
    pub direct: Option<bool>,
    /// The volume that it is a snapshot of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_of: Option<String>,
}
