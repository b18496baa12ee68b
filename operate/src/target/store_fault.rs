//! [`StoreFault`]: a fault of the file or device of a volume while the volume is served.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The kind of a [`StoreFault`], for programs.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoreFaultKind {
    /// The file is deleted, and nothing is at its path.
    Deleted,
    /// Another file or device is at its path.
    Replaced,
    /// The path leads nowhere; the file or device exists elsewhere.
    Away,
    /// The store is shorter than its volume, or no whole number of blocks.
    Resized,
    /// The store takes no writes, but its volume is served for writing.
    ReadOnly,
    /// The open file or its path cannot be examined.
    CannotSee,
    /// The cluster of an image does not answer.
    Stalled,
    /// The image belongs to another client.
    Lost,
    /// A kind that a later version of the target has. No target of this version reports it.
    #[serde(other)]
    Later,
}

impl StoreFaultKind {
    /// The word in JSON and metrics.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Deleted => "deleted",
            Self::Replaced => "replaced",
            Self::Away => "away",
            Self::Resized => "resized",
            Self::ReadOnly => "read-only",
            Self::CannotSee => "cannot-see",
            Self::Stalled => "stalled",
            Self::Lost => "lost",
            Self::Later => "later",
        }
    }
}

impl fmt::Display for StoreFaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

/// A fault of the file or device of a volume while the volume is served.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoreFault {
    /// The kind.
    pub kind: StoreFaultKind,
    /// The fault in words.
    pub text: String,
    /// The remedy, if one exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// The file has no name any more: its bytes are lost when the target closes it.
    #[serde(default)]
    pub ends_with_target: bool,
}

impl StoreFault {
    /// Whether the path no longer leads to the store.
    #[must_use]
    pub fn is_astray(&self) -> bool {
        use StoreFaultKind::{Away, Deleted, Replaced};
        matches!(self.kind, Deleted | Replaced | Away)
    }
}

impl fmt::Display for StoreFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        self.advice.iter().try_for_each(|advice| write!(f, ": {advice}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_of_a_later_version_is_understood() {
        let text = r#"{"kind":"of-tomorrow","text":"the store is odd"}"#;
        let fault: StoreFault = serde_json::from_str(text).expect("a fault");
        assert_eq!(fault.kind, StoreFaultKind::Later);
    }
}
