//! All faults of a configuration at once: of keys, of ports, between keys, each with its place.

use rblk_config::{ConfigError, MountConfig, TargetConfig, ignored_drop_ins};

fn places(error: &ConfigError) -> Vec<String> {
    let ConfigError::Invalid { faults } = error else { panic!("{error}") };
    let place = |fault: &rblk_config::Fault| {
        let site = fault.site.as_ref().unwrap_or_else(|| panic!("no place: {fault}"));
        format!("{} {}", site.line, fault.key)
    };
    faults.iter().map(place).collect()
}

const NINE: &str = "\
listen = ['tcp://192.0.2.1:99999', 'tcp://x']
arenna = '1GiB'
arena = '4MiB'
max_io = '2MiB'
inline = '1.5KiB'
poll_groups = 4
cpus = [1, 2]
drain_timeout = 5
auth = 'none'
[[volume]]
name = 'a'
store = 'file'
[[volume]]
name = 'a'
store = 'memory'
size = 5000
[[volume]]
name = 'c/d'
store = 'null'
size = '1MiB'
path = '/x'
[[host]]
name = 'h'
keys = ['rblk1:rmntdxzdp7243knecdmiemm4oyocypa7zz7jqx3pl4dllz3we4n5uqpkpe']
volumes = ['b:rw']
";

#[test]
fn a_target_hears_of_every_fault_at_once() {
    let error = TargetConfig::parse(NINE, "t.toml").unwrap_err();
    let expected = [
        "1 listen[0]",
        "2 arenna",
        // Between keys: 4 x max_io.
        "3 arena",
        "5 inline",
        // Between keys: as many CPUs as poll groups.
        "6 poll_groups",
        "8 drain_timeout",
        // Between keys of a volume: a file has a path.
        "10 volume[0].path",
        // Between volumes; and the size is no whole number of blocks.
        "14 volume[1].name",
        "16 volume[1].size",
        "18 volume[2].name",
    ];
    assert_eq!(places(&error), expected, "{error}");
    assert!(
        error.to_string().contains("t.toml:1:11: listen[0] = \"tcp://192.0.2.1:99999\": the port")
    );
    // Without the volume whose name is wrong, the right of the host is one to no volume. With it,
    // nobody knows: `auth` likewise, which rests on `listen`.
    let mended = NINE.replace("c/d", "c").replace(":99999", "");
    let places = places(&TargetConfig::parse(&mended, "t.toml").unwrap_err());
    for found in ["9 auth", "21 volume[2].path", "25 host[0].volumes[0]"] {
        assert!(places.contains(&found.to_owned()), "{found}: {places:?}");
    }
}

#[test]
fn a_relation_of_a_refused_key_is_not_judged() {
    // The default of max_io (1 MiB) would be too much for this arena.
    let text = "arena = '2MiB'\nmax_io = '3KiB'\n";
    let error = TargetConfig::parse(text, "t.toml").unwrap_err();
    assert_eq!(places(&error), ["2 max_io"]);
    let text = "target = ['x:0']\nvolume = 'v'\nqueues = 64\nlanes = 4\nmax_io = '4MiB'\nqueue_depth = 1024\n\
                shared = true\nread_only = true\n";
    let error = MountConfig::parse(text, "m.toml").unwrap_err();
    assert_eq!(places(&error), ["1 target[0]", "3 queues", "7 shared"], "{error}");
}

#[test]
fn required_keys_that_are_missing_are_named_beside_the_rest() {
    let text = "arena = '1MiB'\n[[volume]]\n[[host]]\nname = 'h'\n";
    let error = TargetConfig::parse(text, "t.toml").unwrap_err();
    let places = places(&error);
    for found in ["1 arena", "2 volume[0].name", "2 volume[0].store", "3 host[0].keys"] {
        assert!(places.contains(&found.to_owned()), "{found}: {places:?}");
    }
}

#[test]
fn a_directory_that_is_no_drop_in_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("target.toml");
    std::fs::create_dir(dir.path().join("target.d")).unwrap();
    assert_eq!(ignored_drop_ins(&file), None);
    std::fs::create_dir(dir.path().join("target.toml.d")).unwrap();
    let warning = ignored_drop_ins(&file).unwrap();
    assert!(warning.contains("target.toml.d is not read"), "{warning}");
    assert!(warning.ends_with("target.d"), "{warning}");
    std::fs::create_dir(dir.path().join("conf.d")).unwrap();
    let warning = ignored_drop_ins(&dir.path().join("conf")).unwrap();
    assert!(warning.contains("does not end in .toml"), "{warning}");
}
