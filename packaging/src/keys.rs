//! [`pages`]: section 5, the files of a target and of a mount. docs/keys.md follows from the same
//! descriptions: `config/tests/reference.rs`.

use rblk_config::{HostConfig, Key, MountConfig, Rule, Schema, TargetConfig, VolumeConfig};
use roff::{Roff, bold, italic, roman};
use toml::Value;

use crate::page;

/// What the values of every file have in common.
const UNITS: &str = "The files are TOML. Units of sizes: B, KiB, MiB, GiB, TiB, or none for bytes; 256M is 256MiB. \
                     Units of durations: us, ms, s, min, h; 5m is 5min. A key that is not listed here is an error.";

/// Both pages.
pub(crate) fn pages() -> Vec<(String, String)> {
    vec![("rblk-target.toml.5".to_owned(), target()), ("rblk-mount.toml.5".to_owned(), mount())]
}

fn target() -> String {
    let mut page = page::page("rblk-target.toml", "5", "configuration of a target of rblk");
    files(&mut page, &["/etc/rblk/target.toml", "/etc/rblk/target.d/*.toml"]);
    let about = [
        "rblk-target serve --config FILE reads the first file, and then the others in the order of their names. Their \
         [[volume]] and [[host]] tables are added to those of the first file. Every other key that they set replaces \
         the key of the first file, also a list.",
        "rblk-target check says what is wrong with the files. rblk-target reload applies a change to the target that \
         runs, for the keys that say so. Every other key needs a restart.",
        UNITS,
    ];
    description(&mut page, &about);
    keys(&mut page, "KEYS OF THE TARGET", TargetConfig::keys());
    keys(&mut page, "KEYS OF A [[VOLUME]] TABLE", VolumeConfig::keys());
    keys(&mut page, "KEYS OF A [[HOST]] TABLE", HostConfig::keys());
    example(
        &mut page,
        "arena = \"256MiB\"\n\n[[volume]]\nname = \"vol0\"\nstore = \"file\"\npath = \"/srv/vol0.img\"\n\n[[host]]\n\
         name = \"db1\"\nkeys = [\"rblk1:...\"]\nvolumes = [\"vol0:rw\"]",
    );
    let pages = [("rblk-target", "8"), ("rblk-target-check", "8"), ("rblk", "7")];
    page::see_also(&mut page, &pages.map(|(name, section)| (name.to_owned(), section)));
    page.render()
}

fn mount() -> String {
    let mut page = page::page("rblk-mount.toml", "5", "configuration of a mount of rblk");
    files(&mut page, &["/etc/rblk/mounts.d/NAME.toml"]);
    let about = [
        "One file makes one mount, of the name of the file: rblk-initiator mount --config FILE, or the service \
         rblk-mount@NAME.",
        "rblk-initiator reload applies a change to a mount that runs, for the keys that say so.",
        UNITS,
    ];
    description(&mut page, &about);
    keys(&mut page, "KEYS", MountConfig::keys());
    example(
        &mut page,
        "target = [\"rdma://192.0.2.1:7720\", \"tcp://192.0.2.1:7721\"]\nvolume = \"vol0\"\n\
         target_keys = [\"rblk1:...\"]",
    );
    let pages = [("rblk-initiator", "8"), ("rblk-initiator-mount", "8"), ("rblk", "7")];
    page::see_also(&mut page, &pages.map(|(name, section)| (name.to_owned(), section)));
    page.render()
}

fn files(page: &mut Roff, paths: &[&str]) {
    page.control("SH", ["SYNOPSIS"]);
    for (position, path) in paths.iter().enumerate() {
        if position > 0 {
            page.control("br", []);
        }
        page.text([italic(*path)]);
    }
}

fn description(page: &mut Roff, paragraphs: &[&str]) {
    page.control("SH", ["DESCRIPTION"]);
    let owned: Vec<String> = paragraphs.iter().map(|one| (*one).to_owned()).collect();
    page::paragraphs(page, &owned);
}

/// The keys of a table.
fn keys(page: &mut Roff, heading: &str, schema: &Schema) {
    page.control("SH", [heading]);
    for key in schema.keys() {
        page.control("TP", []);
        page.text([bold(key.name), roman(format!(" ({})", facts(schema, key)))]);
        let mut paragraphs = key.plain_paragraphs();
        paragraphs.push(format!("Values: {}.", key.rule.values()));
        if !key.absent.is_empty() {
            paragraphs.push(format!("Absent: {}.", key.absent));
        }
        for (position, paragraph) in paragraphs.iter().enumerate() {
            if position > 0 {
                page.control("IP", []);
            }
            page.text([roman(paragraph.as_str())]);
        }
    }
}

/// The default of a key, and whether a reload applies it.
fn facts(schema: &Schema, key: &Key) -> String {
    let default = match schema.default_of(key) {
        _ if key.required => "required".to_owned(),
        None if matches!(key.rule, Rule::Tables(_)) => "tables".to_owned(),
        None => "absent by default".to_owned(),
        Some(Value::String(text)) => format!("default: {text}"),
        Some(value) => format!("default: {value}"),
    };
    if key.live { format!("{default}; a reload applies it") } else { default }
}

fn example(page: &mut Roff, text: &str) {
    page.control("SH", ["EXAMPLES"]);
    page::verbatim(page, text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_in_its_page() {
        let tables = [
            (target(), TargetConfig::keys()),
            (target(), VolumeConfig::keys()),
            (target(), HostConfig::keys()),
            (mount(), MountConfig::keys()),
        ];
        for (text, schema) in tables {
            for key in schema.keys() {
                let name = format!("\\fB{}\\fR (", key.name);
                assert!(text.contains(&name), "{name}");
            }
        }
    }
}
