//! [`write()`]: the bill of materials (SBOM) in the form of CycloneDX 1.5: each crate in the
//! programs, with version, licence and checksum.
//!
//! `cargo metadata` and `Cargo.lock` are its sources, and not cargo-cyclonedx 0.5.7: that writes a
//! file for each crate into the sources, of which none describes the programs together, and its
//! references have the path of the checkout, so two checkouts never have the same bill.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::checkout::Checkout;
use crate::process;

/// Limit on cargo.
const LIMIT: Duration = Duration::from_secs(10 * 60);
/// The crates whose programs and libraries are in the packages.
const ROOTS: [&str; 4] = ["rblk-cli", "rblk-target", "rblk-initiator", "rblk-capi"];

/// Writes it.
pub(crate) fn write(checkout: &Checkout, out: &Path) -> Result<()> {
    let workspace = checkout.workspace();
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut command = workspace.cargo(&["metadata", "--locked", "--format-version", "1"]);
    command.args(["--filter-platform", &target]);
    for name in &ROOTS[1..] {
        command.args(["--features", &format!("{name}/verbs")]);
    }
    let metadata: Value = serde_json::from_str(&process::output(&mut command, LIMIT)?)?;
    let lock = fs::read_to_string(checkout.root.join("Cargo.lock")).context("Cargo.lock")?;
    let bill = bill(&metadata, &checksums(&lock)?, &checkout.version)?;
    let text = serde_json::to_string_pretty(&bill)? + "\n";
    let name = format!("rblk-{}.cdx.json", checkout.version);
    fs::write(out.join(name), text).context("cannot write the bill of materials")
}

/// The checksums of a lock file, by name and version.
fn checksums(lock: &str) -> Result<BTreeMap<(String, String), String>> {
    let lock: toml::Table = lock.parse().context("Cargo.lock")?;
    let packages = lock.get("package").and_then(toml::Value::as_array);
    let text = |package: &toml::Value, key: &str| {
        package.get(key).and_then(toml::Value::as_str).map(str::to_owned)
    };
    let entry = |package| {
        let key = (text(package, "name")?, text(package, "version")?);
        Some((key, text(package, "checksum")?))
    };
    Ok(packages.into_iter().flatten().filter_map(entry).collect())
}

/// The bill.
fn bill(
    metadata: &Value,
    checksums: &BTreeMap<(String, String), String>,
    version: &str,
) -> Result<Value> {
    let text = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let packages: BTreeMap<String, &Value> = metadata["packages"]
        .as_array()
        .context("cargo metadata")?
        .iter()
        .map(|package| (text(package, "id"), package))
        .collect();
    let linked = linked(metadata, &packages)?;
    let reference = |id: &String| {
        let package = packages[id];
        format!("pkg:cargo/{}@{}", text(package, "name"), text(package, "version"))
    };
    let mut components = BTreeMap::new();
    let mut dependencies = BTreeMap::new();
    for (id, needs) in &linked {
        let package = packages[id];
        let (name, number) = (text(package, "name"), text(package, "version"));
        let mut component = json!({
            "type": "library", "bom-ref": reference(id), "purl": reference(id),
            "name": name, "version": number,
            "licenses": [{"expression": text(package, "license").replace('/', " OR ")}],
        });
        if let Some(sum) = checksums.get(&(name, number)) {
            component["hashes"] = json!([{"alg": "SHA-256", "content": sum}]);
        }
        components.insert(reference(id), component);
        let needs: BTreeSet<String> = needs.iter().map(&reference).collect();
        dependencies.insert(reference(id), json!({"ref": reference(id), "dependsOn": needs}));
    }
    Ok(json!({
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"component": {
            "type": "application", "bom-ref": format!("rblk@{version}"), "name": "rblk", "version": version,
        }},
        "components": components.into_values().collect::<Vec<_>>(),
        "dependencies": dependencies.into_values().collect::<Vec<_>>(),
    }))
}

/// The crates that are linked into the programs, each with those that it needs: neither the crates
/// of build scripts nor those of tests.
fn linked(
    metadata: &Value,
    packages: &BTreeMap<String, &Value>,
) -> Result<BTreeMap<String, Vec<String>>> {
    let nodes = metadata["resolve"]["nodes"].as_array().context("cargo metadata")?;
    let normal = |dependency: &&Value| {
        let kinds = dependency["dep_kinds"].as_array();
        kinds.into_iter().flatten().any(|kind| kind["kind"].is_null())
    };
    let needs: BTreeMap<&str, Vec<String>> = nodes
        .iter()
        .map(|node| {
            let all = node["deps"].as_array().into_iter().flatten().filter(normal);
            let ids = all.filter_map(|dependency| dependency["pkg"].as_str().map(str::to_owned));
            (node["id"].as_str().unwrap_or_default(), ids.collect())
        })
        .collect();
    let is_root = |package: &Value| ROOTS.iter().any(|root| package["name"] == **root);
    let roots = packages.iter().filter(|(_, package)| is_root(package));
    let mut to_visit: Vec<String> = roots.map(|(id, _)| id.clone()).collect();
    let mut linked = BTreeMap::new();
    while let Some(id) = to_visit.pop() {
        if linked.contains_key(&id) {
            continue;
        }
        let below = needs.get(id.as_str()).cloned().unwrap_or_default();
        to_visit.extend(below.iter().cloned());
        linked.insert(id, below);
    }
    Ok(linked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crates_of_build_scripts_and_tests_are_no_materials() {
        let dependency =
            |name: &str, kind: Value| json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let package = |name: &str| json!({"id": name, "name": name, "version": "1.0.0", "license": "MIT/Apache-2.0"});
        let packages = ["rblk-cli", "used", "of-build", "of-tests"].map(package);
        let metadata = json!({
            "packages": packages,
            "resolve": {"nodes": [
                {"id": "rblk-cli", "deps": [
                    dependency("used", Value::Null), dependency("of-build", "build".into()),
                    dependency("of-tests", "dev".into())]},
                {"id": "used", "deps": []},
            ]},
        });
        let sums =
            checksums("[[package]]\nname = \"used\"\nversion = \"1.0.0\"\nchecksum = \"ab\"\n");
        let bill = bill(&metadata, &sums.unwrap(), "0.1.0").unwrap();
        let names: Vec<&Value> =
            bill["components"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
        assert_eq!(names, ["rblk-cli", "used"]);
        let used = &bill["components"][1];
        assert_eq!(used["hashes"][0]["content"], "ab");
        assert_eq!(used["licenses"][0]["expression"], "MIT OR Apache-2.0");
    }
}
