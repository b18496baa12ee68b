//! The archive of a corpus: one file that holds the inputs of one target.
//!
//! ```text
//! "rblk-corpus 1\n"
//! of each input:  length of the name, u16 | name | length of the bytes, u32 | bytes
//! ```
//!
//! Numbers are little-endian. An input that once broke something has a name, `found-...`, and
//! stays. The others have none. Inputs are in the order of their names, then of their bytes, and
//! none stands twice, so that one set of inputs has one archive.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

const MAGIC: &[u8] = b"rblk-corpus 1\n";
/// How the names of inputs begin that are kept for ever.
const FOUND: &str = "found-";

/// An input of a corpus.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Input {
    /// `found-...`, or empty.
    pub name: String,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// The place of the archive of a target.
#[must_use]
pub fn path(target: &str) -> PathBuf {
    directory().join(target).with_extension("inputs")
}

/// Where the archives are.
#[must_use]
pub fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

/// The inputs of a target.
///
/// # Errors
/// The archive cannot be read, or is none.
pub fn read(target: &str) -> io::Result<Vec<Input>> {
    let path = path(target);
    let named =
        |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let bytes = fs::read(&path).map_err(named)?;
    decode(&bytes)
        .ok_or_else(|| named(io::Error::new(ErrorKind::InvalidData, "no archive of inputs")))
}

/// Takes the inputs of a target out of its archive, into files of a directory.
///
/// # Errors
/// The archive cannot be read, or a file cannot be written.
pub fn unpack(target: &str, directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for (at, input) in read(target)?.into_iter().enumerate() {
        let name = if input.name.is_empty() { format!("{at:04}") } else { input.name };
        fs::write(directory.join(name), input.bytes)?;
    }
    Ok(())
}

/// Replaces the archive of a target by the files of a directory. Those of `found-...` that the old
/// archive has stay.
///
/// # Errors
/// A file cannot be read, or the archive cannot be written.
pub fn pack(target: &str, directory: &Path) -> io::Result<usize> {
    let mut inputs = BTreeSet::new();
    if path(target).exists() {
        inputs.extend(read(target)?.into_iter().filter(|input| !input.name.is_empty()));
    }
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let name = if name.starts_with(FOUND) { name.to_owned() } else { String::new() };
        inputs.insert(Input { name, bytes: fs::read(&path)? });
    }
    fs::write(path(target), encode(&inputs)?)?;
    Ok(inputs.len())
}

fn encode(inputs: &BTreeSet<Input>) -> io::Result<Vec<u8>> {
    let too_long = |_| io::Error::new(ErrorKind::InvalidInput, "the input is too long");
    let mut archive = MAGIC.to_vec();
    for Input { name, bytes } in inputs {
        archive.extend(u16::try_from(name.len()).map_err(too_long)?.to_le_bytes());
        archive.extend(name.as_bytes());
        archive.extend(u32::try_from(bytes.len()).map_err(too_long)?.to_le_bytes());
        archive.extend(bytes);
    }
    Ok(archive)
}

fn decode(archive: &[u8]) -> Option<Vec<Input>> {
    let mut rest = archive.strip_prefix(MAGIC)?;
    let mut inputs = Vec::new();
    while !rest.is_empty() {
        let (length, after) = rest.split_first_chunk()?;
        let (name, after) = after.split_at_checked(u16::from_le_bytes(*length).into())?;
        let (length, after) = after.split_first_chunk()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let (bytes, after) = after.split_at_checked(length)?;
        inputs.push(Input { name: String::from_utf8(name.to_vec()).ok()?, bytes: bytes.to_vec() });
        rest = after;
    }
    Some(inputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_was_put_in() {
        let input = |name: &str, bytes: &[u8]| Input { name: name.into(), bytes: bytes.into() };
        let inputs = [input("", b""), input("", b"abc"), input("found-a", b"abc")];
        let archive = encode(&BTreeSet::from(inputs.clone())).unwrap();
        assert_eq!(decode(&archive).unwrap(), inputs);
        for cut in (1..archive.len()).filter(|cut| *cut > MAGIC.len()) {
            // What is cut off between inputs is an archive of fewer.
            let part = decode(&archive[..cut]);
            assert!(part.is_none_or(|part| part.len() < inputs.len()), "{cut}");
        }
        assert_eq!(decode(b"other"), None);
    }
}
