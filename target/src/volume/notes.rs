//! [`VolumeNotes`]: what people want to know of a volume beyond what the wire says.

use serde::{Deserialize, Serialize};

/// What people want to know of a volume beyond what the wire says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeNotes {
    /// File or device, where it has one.
    pub path: Option<String>,
    /// I/O passes by the page cache.
    pub direct: Option<bool>,
    /// The volume that it shows as it once was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_of: Option<String>,
}
