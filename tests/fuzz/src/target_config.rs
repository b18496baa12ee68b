//! The configuration file of a target. An accepted file loads to the same value after a write and a
//! read. A refusal is a text for the administrator.

use rblk_config::TargetConfig;

/// The bytes are the file.
pub fn run(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    match TargetConfig::parse(text, "target.toml") {
        Ok(config) => {
            config.validate().expect("what was accepted");
            let written = config.dump().expect("what can be written");
            let again = TargetConfig::parse(&written, "again.toml").expect("what was written");
            assert_eq!(again.dump().expect("what can be written"), written, "changed by a write");
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty(), "a refusal without a word");
            false
        }
    }
}

/// The examples.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    vec![
        include_bytes!("../../../config/examples/target.toml").to_vec(),
        include_bytes!("../../../config/examples/target-minimal.toml").to_vec(),
    ]
}
