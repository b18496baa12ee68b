//! The file with the record of a volume.

use rblk_target::record::fuzzed_parsers::record;

/// The bytes are the file.
pub fn run(data: &[u8]) -> bool {
    record(data)
}

/// A complete record, and a minimal one.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let uuid = "01".repeat(16);
    let whole = format!(
        r#"{{"version":1,"revision":3,"name":"v","uuid":"{uuid}","verifier":"{uuid}","at_risk":"machine",
        "boot_id":"a-boot","store":"inode:1:2","holder":{{"generation":7,"mode":"exclusive","host":"{uuid}",
        "host_name":"db1","present":true}}}}"#
    );
    let least =
        format!(r#"{{"version":1,"revision":0,"uuid":"{uuid}","at_risk":"nothing","boot_id":""}}"#);
    vec![whole.into_bytes(), least.into_bytes()]
}
