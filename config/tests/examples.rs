//! The examples load, and show the true defaults. `reference.rs` makes them.

use std::fs;
use std::path::{Path, PathBuf};

use rblk_config::{
    BackingConfig, HostConfig, LISTEN_DEFAULT, MountConfig, Schema, TargetConfig, VolumeConfig,
};

fn example(name: &str) -> (PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name);
    let text = fs::read_to_string(&path).unwrap();
    (path, text)
}

/// Keys of a volume that only a store in a Ceph cluster has.
const OF_CEPH: [&str; 4] = ["image", "ceph_conf", "user", "keyring"];
/// The key of a target with such stores alone.
const OF_GROUPS: &str = "member";

/// The text with each `#key = value` made a `key = value`, save those that only another store has.
fn with_optional_keys(text: &str) -> String {
    let others = [&OF_CEPH[..], &[OF_GROUPS]].concat();
    let is_of_ceph = |line: &str| others.iter().any(|key| line.starts_with(&format!("{key} =")));
    let uncomment = |line: &str| match line.strip_prefix('#') {
        Some(rest) if is_of_ceph(rest) => line.to_owned(),
        Some(rest) if rest.starts_with(|c: char| c.is_ascii_lowercase() || c == '[') => {
            rest.to_owned()
        }
        _ => line.to_owned(),
    };
    text.lines().map(|line| uncomment(line) + "\n").collect()
}

/// The same text with the first volume in a Ceph cluster, and all keys that such a volume has.
fn with_keys_of_ceph(text: &str) -> String {
    let mut all = String::new();
    for line in text.lines() {
        let key = line.trim_start_matches('#').split(" =").next().unwrap_or_default();
        match line {
            "store = \"file\"" => all += "store = \"rbd\"\n",
            _ if OF_CEPH.contains(&key) => all += &(line.trim_start_matches('#').to_owned() + "\n"),
            _ if key == "path" && line.contains("vol0.img") => {}
            _ => all += &(line.to_owned() + "\n"),
        }
    }
    all
}

#[test]
fn every_example_is_loaded_by_a_test() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut names: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["mount.toml", "target-minimal.toml", "target.toml"]);
}

#[test]
fn target() {
    let (path, text) = example("target.toml");
    let config = TargetConfig::load(&path).unwrap();
    let defaults = TargetConfig { volumes: config.volumes.clone(), ..TargetConfig::default() };
    assert_eq!(config, defaults, "the example shows another default");
    assert_eq!(config.volumes[0], VolumeConfig::file("vol0", "/srv/rblk/vol0.img"));

    let full = TargetConfig::parse(&with_optional_keys(&text), &path).unwrap();
    assert!(full.name.is_some() && full.cpus.is_some() && full.volumes[0].size.is_some());
    assert!(full.key_file_next.is_some() && full.hosts[0].memory_max.is_some());
    // What the comments say absence means.
    assert!(full.listen.contains(&LISTEN_DEFAULT.to_owned()), "{:?}", full.listen);
    assert_eq!(full.auth, Some(config.authentication()));
    assert_eq!(full.dirty_max, Some(config.dirty_limit()));
    let BackingConfig::File { cache, .. } = config.volumes[0].backing().unwrap() else {
        unreachable!()
    };
    assert_eq!(full.volumes[0].cache, Some(cache));
    assert_eq!(TargetConfig::parse(&full.dump().unwrap(), "dump").unwrap(), full);
}

#[test]
fn target_minimal() {
    let config = TargetConfig::load(&example("target-minimal.toml").0).unwrap();
    let expected = TargetConfig {
        volumes: vec![VolumeConfig::file("vol0", "/srv/rblk/vol0.img")],
        ..TargetConfig::default()
    };
    assert_eq!(config, expected);
}

#[test]
fn mount() {
    let (path, text) = example("mount.toml");
    let config = MountConfig::load(&path).unwrap();
    let mut defaults = MountConfig::default();
    defaults.target.clone_from(&config.target);
    defaults.volume.clone_from(&config.volume);
    assert_eq!(config, defaults, "the example shows another default");

    let full = MountConfig::parse(&with_optional_keys(&text), &path).unwrap();
    assert!(full.queues.is_some() && full.fail_after.is_some() && full.host_name.is_some());
    assert_eq!(full.target_keys.len(), 1);
    assert_eq!(MountConfig::parse(&full.dump().unwrap(), "dump").unwrap(), full);
}

/// A dump of everything set has just the keys of the schema, so that neither can get a key alone.
#[test]
fn schemas_have_the_keys_of_the_types() {
    fn keys(text: &str) -> Vec<String> {
        let mut keys: Vec<_> = text.parse::<toml::Table>().unwrap().keys().cloned().collect();
        keys.sort();
        keys
    }
    fn names(schema: &Schema) -> Vec<&str> {
        let mut names: Vec<_> = schema.keys().map(|key| key.name).collect();
        names.sort_unstable();
        names
    }
    let full = |name: &str| with_optional_keys(&example(name).1);
    let target = TargetConfig::parse(&full("target.toml"), "target.toml").unwrap();
    let ceph = TargetConfig::parse(&with_keys_of_ceph(&example("target.toml").1), "ceph").unwrap();
    let mut of_target = keys(&target.dump().unwrap());
    of_target.push(OF_GROUPS.to_owned());
    of_target.sort();
    assert_eq!(of_target, names(TargetConfig::keys()));
    let volumes = [&target.volumes[0], &ceph.volumes[0]];
    let mut of_volumes = volumes.map(|volume| keys(&toml::to_string(volume).unwrap())).concat();
    of_volumes.sort();
    of_volumes.dedup();
    assert_eq!(of_volumes, names(VolumeConfig::keys()));
    let host = toml::to_string(&target.hosts[0]).unwrap();
    assert_eq!(keys(&host), names(HostConfig::keys()));
    let mount = MountConfig::parse(&full("mount.toml"), "mount.toml").unwrap();
    assert_eq!(keys(&mount.dump().unwrap()), names(MountConfig::keys()));
}
