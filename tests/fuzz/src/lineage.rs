//! The file with the end of a target's last run.

use rblk_target::record::fuzzed_parsers::lineage_file;

/// The bytes are the file.
pub fn run(data: &[u8]) -> bool {
    lineage_file(data)
}

/// A clean stop.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let text = r#"{"version":1,"boot_id":"a-boot","process":"01010101010101010101010101010101",
        "machine":"02020202020202020202020202020202","clean":true}"#;
    vec![text.as_bytes().to_vec()]
}
