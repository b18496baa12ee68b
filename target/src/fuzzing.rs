//! What `tests/fuzz` feeds with bytes: the files that a target finds in its state directory.
//!
//! Each function returns whether the bytes were accepted. It panics when the parser breaks a
//! promise.

use crate::holders::file;
use crate::verifier;

/// The file of the holders. What was accepted is the same when it is written and read again.
#[must_use]
pub fn holders_file(text: &[u8]) -> bool {
    let Ok(holders) = file::parse(text) else { return false };
    let written = file::text_of(&holders).unwrap_or_else(|error| panic!("{error}"));
    let again = file::parse(&written).unwrap_or_else(|error| panic!("{error}"));
    assert!(holders.records().eq(again.records()), "other records after a write");
    assert!(holders.stores().eq(again.stores()), "other stores after a write");
    true
}

/// The lineage file.
#[must_use]
pub fn lineage_file(text: &[u8]) -> bool {
    verifier::accepts(text)
}
