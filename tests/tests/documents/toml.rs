//! Samples of configuration: the first line names the file.

use std::fs;

use rblk_config::{ConfigError, MountConfig, TargetConfig};

use crate::markdown::{Block, Document};

pub(crate) fn faults(documents: &[Document]) -> Vec<String> {
    let blocks: Vec<Block> = documents.iter().flat_map(|d| d.blocks(&["toml"])).collect();
    assert!(blocks.len() >= 5, "only {} samples were found", blocks.len());
    blocks.iter().filter_map(|block| fault(&block.lines, &block.place)).collect()
}

fn fault(lines: &[String], place: &str) -> Option<String> {
    let text = lines.join("\n");
    let path = lines.first().and_then(|line| line.strip_prefix("# ")).unwrap_or_default();
    let result = if path == "/etc/rblk/target.toml" {
        TargetConfig::parse(&text, path).map(drop)
    } else if path.starts_with("/etc/rblk/target.d/") {
        drop_in(&text)
    } else if path.starts_with("/etc/rblk/mounts.d/") {
        MountConfig::parse(&text, path).map(drop)
    } else {
        return Some(format!("{place}: the first line is not `# /etc/rblk/...`"));
    };
    result.err().map(|error| format!("{place}: {error}"))
}

/// A drop-in, over the smallest configuration of a target.
fn drop_in(text: &str) -> Result<(), ConfigError> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("target.toml");
    fs::create_dir(dir.path().join("target.d")).expect("a directory");
    fs::write(&path, "listen = ['tcp://[::]:7721']\n").expect("a file");
    fs::write(dir.path().join("target.d/sample.toml"), text).expect("a file");
    TargetConfig::load(&path).map(drop)
}

#[test]
fn a_wrong_configuration_is_a_fault() {
    let fault = |text: &str| {
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        fault(&lines, "here").unwrap_or_default()
    };
    assert_eq!(fault("# /etc/rblk/target.toml\nlisten = ['tcp://[::]:7721']"), "");
    assert!(fault("# /etc/rblk/target.toml\narena = '8GB'").contains("GiB"));
    assert!(fault("# /etc/rblk/target.d/a.toml\narena = '8GB'").contains("GiB"));
    assert!(fault("# /etc/rblk/mounts.d/a.toml\nvolume = 'v'").contains("target: missing"));
    assert!(fault("volume = 'v'").contains("the first line"));
}
