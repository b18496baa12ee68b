//! The file with the last holders of a target's volumes.

use rblk_target::record::fuzzed_parsers::holders_file;

/// The bytes are the file.
pub fn run(data: &[u8]) -> bool {
    holders_file(data)
}

/// Both forms.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let holder = r#"{"uuid":"01010101010101010101010101010101","generation":7,"mode":"exclusive",
        "host":"02020202020202020202020202020202","host_name":"db1","present":true}"#;
    let store = r#"{"uuid":"01010101010101010101010101010101","identity":"file 8:1 12"}"#;
    vec![
        format!(r#"{{"version":1,"volumes":[{holder}]}}"#).into_bytes(),
        format!(r#"{{"version":2,"volumes":[{holder}],"stores":[{store}]}}"#).into_bytes(),
    ]
}
