//! [`Table`]: `packaging/packages.toml`, the packages and their files.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::machine;

/// The packages.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    /// In the order of the file.
    #[serde(rename = "package")]
    pub(crate) packages: Vec<Package>,
}

/// A package.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Package {
    /// The name.
    pub(crate) name: String,
    /// In one line.
    pub(crate) summary: String,
    /// In some lines.
    pub(crate) description: String,
    /// The section of Debian's archive.
    pub(crate) section: String,
    /// The directory of its scripts.
    pub(crate) scripts: Option<String>,
    /// The file of its triggers for dpkg.
    pub(crate) triggers: Option<String>,
    /// The script that rpm runs after a transaction.
    pub(crate) after_transaction: Option<String>,
    /// Without one of its files there is no package.
    #[serde(default)]
    pub(crate) needs_files: bool,
    /// What it cannot work without.
    #[serde(default)]
    pub(crate) requires: Relations,
    /// What it usually needs.
    #[serde(default)]
    pub(crate) recommends: Relations,
    /// What goes well with it.
    #[serde(default)]
    pub(crate) suggests: Relations,
    /// Its files.
    pub(crate) files: Vec<Entry>,
}

/// Other packages, by their names in each kind of system.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Relations {
    /// Relations of Debian.
    #[serde(default)]
    pub(crate) deb: Vec<String>,
    /// Names.
    #[serde(default)]
    pub(crate) rpm: Vec<String>,
}

/// A file, or several.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    /// Where it comes from.
    pub(crate) from: String,
    /// Where it goes, below `/`.
    pub(crate) to: String,
    /// By gzip.
    #[serde(default)]
    pub(crate) compressed: bool,
    /// It may be absent.
    #[serde(default)]
    pub(crate) optional: bool,
    /// Only the lines whose owner and group are root.
    #[serde(default)]
    pub(crate) of_root: bool,
}

/// How the files of a package lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// As on Debian.
    Deb,
    /// As on Fedora.
    Rpm,
    /// As in the archive, which knows no system.
    Archive,
}

impl Table {
    /// Reads it.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        toml::from_str(&text).with_context(|| path.display().to_string())
    }
}

impl Layout {
    /// Its name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Deb => "deb",
            Self::Rpm => "rpm",
            Self::Archive => "archive",
        }
    }

    /// The directory of libraries.
    pub(crate) fn libraries(self) -> Result<String> {
        Ok(match self {
            Self::Deb => format!("usr/lib/{}", machine()?.2),
            Self::Rpm => "usr/lib64".to_owned(),
            Self::Archive => "usr/lib".to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let table = Table::read(&root.join("packaging/packages.toml")).unwrap();
        let names: Vec<&str> = table.packages.iter().map(|package| &*package.name).collect();
        assert_eq!(names, ["rblk-target", "rblk-initiator", "rblk-client", "rblk-initiator-boot"]);
        for package in &table.packages {
            for script in package.scripts.iter().flat_map(|scripts| {
                ["postinst", "prerm", "postrm"].map(|name| root.join(scripts).join(name))
            }) {
                assert!(script.is_file(), "{}", script.display());
            }
            for file in [&package.triggers, &package.after_transaction].into_iter().flatten() {
                assert!(root.join(file).is_file(), "{file}");
            }
            for entry in &package.files {
                assert!(!entry.to.starts_with('/'), "{}", entry.to);
                let is_pattern = entry.from.contains('*');
                assert!(!is_pattern || entry.to.ends_with('/'), "{}", entry.to);
            }
        }
    }
}
