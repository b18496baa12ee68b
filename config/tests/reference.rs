//! docs/keys.md and the example files follow from the descriptions of the keys.
//!
//! After a change of a description, `RBLK_WRITE=1 cargo test -p rblk-config --test reference`
//! writes both again.

use std::fs;
use std::path::{Path, PathBuf};

use rblk_config::{HostConfig, Key, MountConfig, Rule, Schema, TargetConfig, VolumeConfig};
use toml::Value;

/// Columns of a line in an example.
const COLUMNS: usize = 118;

const TARGET_HEAD: &str = "\
# /etc/rblk/target.toml: every key of a target.
#
# Each key has its default value here, unless its comment says \"Required\". A key behind a single \"#\" is absent by
# default; its comment says what that means. Units of sizes: B, KiB, MiB, GiB, TiB, or none for bytes; 256M is 256MiB.
# Units of durations: us, ms, s, min, h; 5m is 5min.
#
# The files target.d/*.toml beside this file are read after it, in the order of their names. Their [[volume]] and
# [[host]] tables are added to those here. Every other key that they set replaces the key here, also a list.
#
# `rblk-target check` says what is wrong. `rblk-target serve --config FILE --dump-config` prints the values in effect.
";

const VOLUMES_HEAD: &str = "
# One table for each volume.
[[volume]]
";

const HOSTS_HEAD: &str = "
# A second volume, to measure everything except storage.
[[volume]]
name = \"nothing\"
store = \"null\"
size = \"1TiB\"

# One table for each host that may connect. `rblk-target host add` writes such a table into target.d/host-NAME.toml, and
# a running target uses it at once. After a change by hand, `rblk-target reload` does that.
#[[host]]
";

const MOUNT_HEAD: &str = "\
# /etc/rblk/mounts.d/NAME.toml: one mount, started as rblk-mount@NAME.service or with
# `rblk-initiator mount --config FILE`.
#
# Each key has its default value here, unless its comment says \"Required\". A key behind a single \"#\" is absent by
# default; its comment says what that means. Units of sizes: B, KiB, MiB, GiB, TiB, or none for bytes; 256M is 256MiB.
# Units of durations: us, ms, s, min, h; 5m is 5min.
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Compares a file with its text, or writes it.
#[track_caller]
fn assert_is(path: &Path, expected: &str) {
    if std::env::var_os("RBLK_WRITE").is_some() {
        fs::write(path, expected).unwrap();
    }
    let text = fs::read_to_string(path).unwrap();
    let differ = |(ours, theirs): &(&str, &str)| ours != theirs;
    let first = expected.lines().zip(text.lines()).find(differ);
    assert!(
        text == expected,
        "{} does not follow from the keys: {first:?}; write it by RBLK_WRITE=1",
        path.display()
    );
}

/// A paragraph as comment lines.
fn comment(paragraph: &str) -> String {
    let mut lines = vec!["#".to_owned()];
    for word in paragraph.split_whitespace() {
        let last = lines.last_mut().unwrap();
        if last.len() + 1 + word.len() > COLUMNS {
            lines.push(format!("# {word}"));
        } else {
            last.push(' ');
            last.push_str(word);
        }
    }
    lines.join("\n") + "\n"
}

/// The lines of a key in an example. `shown`: it has a value, though the key may be absent.
fn entry(schema: &Schema, key: &Key, shown: bool) -> String {
    let mut paragraphs = key.plain_paragraphs();
    let mut facts = if key.required { "Required. ".to_owned() } else { String::new() };
    facts.push_str(&format!("Value: {}.", key.rule.values()));
    if !key.absent.is_empty() {
        facts.push_str(&format!(" Absent: {}.", key.absent));
    }
    if !key.more.is_empty() {
        facts.push_str(&format!(" More: docs/{}.", key.more));
    }
    paragraphs.push(facts);
    let comments: String = paragraphs.iter().map(|paragraph| comment(paragraph)).collect();
    let value = schema.default_of(key).map_or(key.example.to_owned(), |value| value.to_string());
    let mark = if key.absent.is_empty() || shown { "" } else { "#" };
    format!("{comments}{mark}{} = {value}\n", key.name)
}

/// The entries of a table, with an empty line between two.
fn entries(schema: &Schema, shown: &[&str]) -> String {
    let keys = schema.keys().filter(|key| !matches!(key.rule, Rule::Tables(_)));
    let all: Vec<String> = keys.map(|key| entry(schema, key, shown.contains(&key.name))).collect();
    all.join("\n")
}

#[test]
fn examples() {
    let hosts: String = entries(HostConfig::keys(), &[])
        .lines()
        .map(|line| match line.starts_with('#') || line.is_empty() {
            true => format!("{line}\n"),
            false => format!("#{line}\n"),
        })
        .collect();
    let target = entries(TargetConfig::keys(), &[]);
    let volume = entries(VolumeConfig::keys(), &["path"]);
    let directory = root().join("config/examples");
    assert_is(
        &directory.join("target.toml"),
        &format!("{TARGET_HEAD}\n{target}{VOLUMES_HEAD}{volume}{HOSTS_HEAD}{hosts}"),
    );
    let mount = entries(MountConfig::keys(), &[]);
    assert_is(&directory.join("mount.toml"), &format!("{MOUNT_HEAD}\n{mount}"));
}

/// The row of a key in docs/keys.md.
fn row(schema: &Schema, key: &Key) -> String {
    let default = match schema.default_of(key) {
        _ if key.required => "required".to_owned(),
        None => "absent".to_owned(),
        Some(Value::String(text)) => format!("`{text}`"),
        Some(value) => format!("`{value}`"),
    };
    let values = key.rule.values().replace('"', "`");
    let live = if key.live { "yes" } else { "no" };
    let mut means = key.paragraphs().join(" ");
    if !key.absent.is_empty() {
        means.push_str(&format!(" Absent: {}.", key.absent));
    }
    if !key.more.is_empty() {
        means.push_str(&format!(" [More]({})", key.more));
    }
    format!("| `{}` | {default} | {values} | {live} | {means} |\n", key.name)
}

/// The page with another table below a heading.
fn with_table(page: &str, heading: &str, schema: &Schema) -> String {
    let start = page.find(&format!("\n{heading}\n")).expect(heading);
    let from = start + page[start..].find("\n| key |").expect("a table") + 1;
    let to = from + page[from..].find("\n\n").expect("the end of a table") + 1;
    let rows: String = schema.keys().map(|key| row(schema, key)).collect();
    let head = "| key | default | values | live | means |\n| --- | --- | --- | --- | --- |\n";
    format!("{}{head}{rows}{}", &page[..from], &page[to..])
}

#[test]
fn keys_page() {
    let path = root().join("docs/keys.md");
    let page = fs::read_to_string(&path).unwrap();
    let tables = [
        ("## Keys of the target", TargetConfig::keys()),
        ("## Keys of a volume", VolumeConfig::keys()),
        ("## Keys of a host", HostConfig::keys()),
        ("## Keys of a mount", MountConfig::keys()),
    ];
    let expected =
        tables.into_iter().fold(page, |page, (heading, schema)| with_table(&page, heading, schema));
    assert_is(&path, &expected);
}

#[test]
fn every_key_is_described_and_has_a_default_or_a_meaning_of_its_absence() {
    let tables =
        [TargetConfig::keys(), VolumeConfig::keys(), HostConfig::keys(), MountConfig::keys()];
    for schema in tables {
        for key in schema.keys() {
            let name = key.name;
            assert!(!key.paragraphs().is_empty(), "{name}");
            let is_table = matches!(key.rule, Rule::Tables(_));
            let has_default = schema.default_of(key).is_some();
            assert_eq!(has_default, key.example.is_empty() && !is_table, "{name}: example");
            assert_eq!(has_default || key.required, key.absent.is_empty(), "{name}: absent");
        }
    }
}
