//! [`Sums`]: the checksums of the files in a directory.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// The checksum of each file, by its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sums(BTreeMap<String, String>);

impl Sums {
    /// Of the files in a directory.
    pub(crate) fn of(directory: &Path) -> Result<Self> {
        let mut sums = BTreeMap::new();
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            if path.is_file() {
                let name = path.file_name().and_then(|name| name.to_str()).context("a name")?;
                let bytes = fs::read(&path).with_context(|| path.display().to_string())?;
                sums.insert(name.to_owned(), hex(&Sha256::digest(bytes)));
            }
        }
        Ok(Self(sums))
    }

    /// As `sha256sum -c` reads them.
    pub(crate) fn text(&self) -> String {
        self.0.iter().map(|(name, sum)| format!("{sum}  {name}\n")).collect()
    }

    /// A line for each file that differs, or that one of both lacks.
    pub(crate) fn differences(&self, other: &Self) -> Vec<String> {
        let names = self.0.keys().chain(other.0.keys().filter(|name| !self.0.contains_key(*name)));
        let absent = "absent".to_owned();
        names
            .filter(|name| self.0.get(*name) != other.0.get(*name))
            .map(|name| {
                let sum = |sums: &Self| sums.0.get(name).unwrap_or(&absent).clone();
                format!("differs: {name}: {} and {}", sum(self), sum(other))
            })
            .collect()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_differs_or_is_missing_is_named() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for (directory, name, text) in [
            (&one, "a", "x"),
            (&two, "a", "x"),
            (&one, "b", "x"),
            (&two, "b", "y"),
            (&two, "c", ""),
        ] {
            fs::write(directory.path().join(name), text).unwrap();
        }
        let (one, two) = (Sums::of(one.path()).unwrap(), Sums::of(two.path()).unwrap());
        let lines = one.differences(&two);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(
            lines[0].starts_with("differs: b: ")
                && lines[1].starts_with("differs: c: absent and e3b0")
        );
        assert!(one.differences(&one).is_empty());
        assert!(
            one.text().starts_with(
                "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881  a\n"
            )
        );
    }
}
