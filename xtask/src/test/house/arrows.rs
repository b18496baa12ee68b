//! The crates that each crate may use. A crate that is not in the table is an error, so that each
//! new one gets its place. What only tests use is not looked at.

use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::process;
use crate::workspace::Workspace;

/// Each crate, and those that it may use. Crates that are not in the workspace are passed over.
const ARROWS: [(&str, &[&str]); 17] = [
    ("crc32c", &[]),
    ("protocol", &["crc32c"]),
    ("runtime", &["protocol"]),
    ("fabric", &["protocol", "runtime"]),
    ("config", &["protocol"]),
    ("operate", &["config", "protocol", "runtime"]),
    ("target", &["config", "fabric", "operate", "protocol", "runtime"]),
    ("initiator", &["config", "fabric", "operate", "protocol", "runtime"]),
    ("client", &["config", "fabric", "initiator", "protocol", "runtime"]),
    ("capi", &["client"]),
    ("cli", &["config", "operate", "protocol", "runtime"]),
    ("packaging", &["cli", "config", "operate"]),
    ("rig", &["fabric", "initiator", "operate", "protocol", "runtime", "target"]),
    (
        "bench",
        &["config", "fabric", "initiator", "operate", "protocol", "rig", "runtime", "target"],
    ),
    (
        "tests",
        &[
            "bench",
            "cli",
            "client",
            "config",
            "fabric",
            "initiator",
            "operate",
            "protocol",
            "rig",
            "runtime",
            "target",
        ],
    ),
    (
        "fuzz",
        &[
            "config",
            "fabric",
            "initiator",
            "operate",
            "protocol",
            "rig",
            "runtime",
            "target",
            "tests",
        ],
    ),
    ("xtask", &[]),
];

/// How the names of the crates begin.
const PREFIX: &str = "rblk-";
/// Limit on asking cargo.
const LIMIT: Duration = Duration::from_secs(120);

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Debug, Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Debug, Deserialize)]
struct Dependency {
    name: String,
    kind: Option<String>,
}

/// The arrows that the table does not have.
pub(super) fn broken(workspace: &Workspace) -> Result<Vec<String>> {
    let mut command = workspace.cargo(&["metadata", "--no-deps", "--format-version", "1"]);
    let json = process::output(&mut command, LIMIT)?;
    let metadata: Metadata =
        serde_json::from_str(&json).context("cargo metadata gave something else than expected")?;
    Ok(judge(&metadata))
}

fn judge(metadata: &Metadata) -> Vec<String> {
    let mut broken = Vec::new();
    for package in &metadata.packages {
        let name = short(&package.name);
        let Some((_, allowed)) = ARROWS.iter().find(|(known, _)| *known == name) else {
            broken.push(format!("the crate {name} is not in the table of arrows ({})", file!()));
            continue;
        };
        let ours = |dependency: &&Dependency| dependency.name.starts_with(PREFIX);
        let used = package.dependencies.iter().filter(ours).filter(|used| used.kind.is_none());
        for used in used.map(|used| short(&used.name)).filter(|used| !allowed.contains(used)) {
            broken.push(format!("{name} uses {used}, which the table of arrows does not allow"));
        }
    }
    broken
}

fn short(name: &str) -> &str {
    name.strip_prefix(PREFIX).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arrow_that_is_not_in_the_table_is_named() {
        let json = r#"{"packages":[
            {"name":"rblk-fabric","dependencies":[{"name":"rblk-target","kind":null},
             {"name":"rblk-protocol","kind":null},{"name":"rblk-rig","kind":"dev"}]},
            {"name":"rblk-misc","dependencies":[]}]}"#;
        let broken = judge(&serde_json::from_str(json).unwrap());
        assert_eq!(broken.len(), 2, "{broken:?}");
        assert!(broken[0].starts_with("fabric uses target"), "{broken:?}");
        assert!(broken[1].contains("misc"), "{broken:?}");
    }

    #[test]
    fn arrows_go_one_way() {
        for (at, (name, allowed)) in ARROWS.iter().enumerate() {
            for used in *allowed {
                let place = ARROWS.iter().position(|(known, _)| known == used);
                assert!(place.is_some_and(|place| place < at), "{name} uses {used}");
            }
        }
    }
}
