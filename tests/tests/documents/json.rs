//! Samples of JSON: an object is of `rblk-target status`, an array of `rblk-initiator list`. Every
//! key is one that the program prints, with a value of that kind.

use std::fs::File;
use std::process::Command;

use rblk_operate::mount::mount_status::MountStatus;
use rblk_tests::program::{Target, program, run};
use serde_json::Value;

use crate::markdown::{Block, Document};

pub(crate) fn faults(documents: &[Document]) -> Vec<String> {
    let blocks: Vec<Block> = documents.iter().flat_map(|d| d.blocks(&["json"])).collect();
    assert!(blocks.len() >= 2, "only {} samples were found", blocks.len());
    let (status, list) = (status(), serde_json::json!([MountStatus::default()]));
    let of_block = |block: &Block| {
        let sample = match serde_json::from_str(&block.lines.join("\n")) {
            Ok(sample) => sample,
            Err(error) => return vec![format!("{}: {error}", block.place)],
        };
        let real = if matches!(sample, Value::Array(_)) { &list } else { &status };
        differences(&block.place, &sample, real)
    };
    blocks.iter().flat_map(of_block).collect()
}

/// The status of a target.
fn status() -> Value {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("vol0.img");
    File::create(&path).and_then(|file| file.set_len(1 << 20)).expect("a file");
    let target = Target::start(dir.path(), &["--file", &format!("vol0={}", path.display())]);
    let mut command = Command::new(program("rblk-target"));
    command.args(["status", "--output", "json", "--control-socket"]).arg(&target.socket);
    let ended = run(&mut command);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    serde_json::from_str(&ended.stdout).expect("JSON")
}

/// Keys of a sample that the real output lacks, and values of another kind.
fn differences(place: &str, sample: &Value, real: &Value) -> Vec<String> {
    match (sample, real) {
        (Value::Object(sample), Value::Object(real)) => {
            let of_key = |(key, value): (&String, &Value)| match real.get(key) {
                Some(real) => differences(&format!("{place}.{key}"), value, real),
                None => vec![format!("{place}: there is no \"{key}\"")],
            };
            sample.iter().flat_map(of_key).collect()
        }
        (Value::Array(sample), Value::Array(real)) => {
            let Some(first) = real.first() else { return Vec::new() };
            sample.iter().flat_map(|value| differences(place, value, first)).collect()
        }
        // An absent value may be present another time.
        (Value::Null, _) | (_, Value::Null) => Vec::new(),
        (sample, real) => {
            let same = std::mem::discriminant(sample) == std::mem::discriminant(real);
            if same { Vec::new() } else { vec![format!("{place}: {sample} instead of {real}")] }
        }
    }
}

#[test]
fn a_wrong_key_or_kind_is_a_fault() {
    let real = serde_json::json!({"a": [{"b": 1, "c": null}], "d": "e"});
    let faults = |sample| differences("here", &sample, &real);
    assert!(faults(serde_json::json!({"a": [{"b": 2, "c": "f"}, {"b": 3}]})).is_empty());
    assert_eq!(faults(serde_json::json!({"a": [{"x": 2}]})), ["here.a: there is no \"x\""]);
    assert_eq!(faults(serde_json::json!({"d": 1})), ["here.d: 1 instead of \"e\""]);
}
