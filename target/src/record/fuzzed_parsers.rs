//! The functions that `tests/fuzz` feeds with bytes: the parsers of the files in the state
//! directory.
//!
//! Each function returns whether the bytes were accepted. It panics when the parser breaks a
//! promise.

use crate::record::{former, text};

/// The record of a volume. An accepted record is equal after a write and another read.
#[must_use]
pub fn record(bytes: &[u8]) -> bool {
    let Ok((record, revision)) = text::parse(bytes) else { return false };
    let written = text::text_of(&record, revision).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(text::parse(&written), Ok((record, revision)), "another record after a write");
    true
}

/// The file of the holders of the version before.
#[must_use]
pub fn holders_file(bytes: &[u8]) -> bool {
    former::holders_in(bytes).is_ok()
}

/// The lineage file of the version before.
#[must_use]
pub fn lineage_file(bytes: &[u8]) -> bool {
    former::lineage_in(bytes).is_some()
}
