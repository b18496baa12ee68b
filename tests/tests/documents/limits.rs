//! docs/limits.md has the limits of the protocol and of the keys.

use rblk_config::{ByteSize, HostConfig, MountConfig, Rule, Schema, TargetConfig, VolumeConfig};
use rblk_protocol::limits;

use crate::markdown::Document;

pub(crate) fn faults(page: &Document) -> Vec<String> {
    let size = |bytes: u64| ByteSize(bytes).to_string();
    let (target, mount) = (TargetConfig::keys(), MountConfig::keys());
    let (host, volume) = (HostConfig::keys(), VolumeConfig::keys());
    let expected = [
        ("## A target", "`sessions_max`", most(target, "sessions_max")),
        ("## A target", "connections of one session", (limits::MOUNT_QPS_MAX + 2).to_string()),
        ("## A target", "`listen`", most(target, "listen")),
        ("## A target", "`devices`", most(target, "devices")),
        ("## A target", "`poll_groups`", most(target, "poll_groups")),
        ("## A target", "`arena`", most(target, "arena")),
        ("## A volume", "`read_ahead`", most(volume, "read_ahead")),
        ("## A volume", "`cache_min`", most(volume, "cache_min")),
        ("## A volume", "`cache_max`", most(volume, "cache_max")),
        ("## A volume", "`iops`", most(volume, "iops")),
        ("## A host", "`keys`", most(host, "keys")),
        ("## A host", "`volumes`", most(host, "volumes")),
        ("## A host", "`connections_max`", most(host, "connections_max")),
        ("## A host", "`memory_max`", most(host, "memory_max")),
        ("## A mount", "`target`", most(mount, "target")),
        ("## A mount", "connections (QPs)", limits::MOUNT_QPS_MAX.to_string()),
        ("## A mount", "`lanes`", most(mount, "lanes")),
        ("## A mount", "`queue_depth`", most(mount, "queue_depth")),
        ("## A mount", "`retain`", most(mount, "retain")),
        ("## A mount", "`shared_memory`", most(mount, "shared_memory")),
        ("## A mount", "`device_id`", most(mount, "device_id")),
        ("## A mount", "`target_keys`", most(mount, "target_keys")),
        ("## Both ends", "one request |", size(limits::IO_MAX_BYTES.into())),
        ("## Both ends", "with [digests]", size(limits::DIGEST_IO_MAX_BYTES.into())),
        ("## Both ends", "`inline`", most(target, "inline")),
        ("## Both ends", "length of a name", limits::NAME_BYTES.to_string()),
        ("## Both ends", "`discover`", limits::LIST_ENTRIES_MAX.to_string()),
    ];
    expected
        .into_iter()
        .filter_map(|(heading, what, value)| fault(page, heading, what, &value))
        .collect()
}

/// The error of the rows under a heading that have these words: the value is in none of them.
fn fault(page: &Document, heading: &str, what: &str, value: &str) -> Option<String> {
    let rows: Vec<String> = page.rows(heading).iter().map(|row| row.join(" | ")).collect();
    let is_value = |word: &str| word.trim_matches([',', '.']) == value;
    let has_both = |row: &&String| row.contains(what) && row.split_whitespace().any(is_value);
    rows.iter().find(has_both).is_none().then(|| format!("{heading}, {what}: it is {value}"))
}

/// The largest value of a key.
fn most(schema: &Schema, name: &str) -> String {
    match &schema.key(name).unwrap_or_else(|| panic!("there is no key {name}")).rule {
        Rule::Count { max, .. } => max.to_string(),
        Rule::Size { max, .. } | Rule::PowerOfTwo { max, .. } => ByteSize(*max).to_string(),
        Rule::List { max, .. } => max.to_string(),
        other => panic!("{name} has no most: {other:?}"),
    }
}

#[test]
fn a_wrong_limit_is_a_fault() {
    let text =
        "## A mount\n\n| what | at most | set by |\n| --- | --- | --- |\n| lanes | 5 | `lanes` |\n";
    let page = Document { path: "docs/limits.md".to_owned(), text: text.to_owned() };
    assert_eq!(fault(&page, "## A mount", "`lanes`", "5"), None);
    let found = faults(&page);
    assert!(found.contains(&"## A mount, `lanes`: it is 4".to_owned()), "{found:?}");
}
