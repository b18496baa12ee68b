//! [`Papers`]: the data that is too long for the note: the configurations that the next program may
//! start with, the stores that are left open, and the records of the volumes. The papers are in a
//! sealed file in memory, and the note names its descriptor.
//!
//! The next program starts with the judged configuration, even if the files have changed by then.
//! If the program before has to serve again, it starts with the configuration that ran.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use rblk_config::HostConfig;
use serde::{Deserialize, Serialize};

/// Longest papers: two configurations with all the volumes that a target can have.
const PAPERS_MAX: u64 = 128 << 20;
/// The content of the file and its length cannot change.
const SEALS: SealFlag = SealFlag::F_SEAL_SEAL
    .union(SealFlag::F_SEAL_SHRINK)
    .union(SealFlag::F_SEAL_GROW)
    .union(SealFlag::F_SEAL_WRITE);

/// A store that is left open, and its visible identity.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct StoreLeft {
    /// Its volume.
    pub(super) volume: String,
    /// The path by which it was opened.
    pub(super) path: PathBuf,
    /// The number of its descriptor.
    pub(super) descriptor: i32,
    /// The device and the inode of a file.
    pub(super) inode: (u64, u64),
    /// The number of a block device; 0 for a file.
    pub(super) device: u64,
    /// The size in force, in bytes.
    pub(super) size_bytes: u64,
}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(super) struct Papers {
    /// The name of the target.
    pub(super) name: String,
    /// The configuration that ran, in TOML.
    pub(super) ran: String,
    /// The configuration, in TOML, that the next program would start with by its own report.
    #[serde(default)]
    pub(super) judged: Option<String>,
    /// The hosts that may connect, if that changed after the program was asked: then they replace
    /// the judged ones.
    #[serde(default)]
    pub(super) hosts: Option<Vec<HostConfig>>,
    /// The stores.
    #[serde(default)]
    pub(super) stores: Vec<StoreLeft>,
    /// The records of the volumes, as the program that ran wrote them last.
    #[serde(default)]
    pub(super) records: Vec<String>,
}

impl Papers {
    /// Writes the papers into a sealed file in memory, which does not outlive an exec yet.
    ///
    /// # Errors
    /// The system's, or the papers are too long.
    pub(super) fn seal(&self) -> io::Result<OwnedFd> {
        let text = serde_json::to_vec(self)?;
        if u64::try_from(text.len()).map_or(true, |len| len > PAPERS_MAX) {
            return Err(io::Error::other(format!("papers of {} bytes", text.len())));
        }
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let mut file = File::from(memfd_create(c"rblk-hand-over", flags)?);
        file.write_all(&text)?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SEALS))?;
        Ok(file.into())
    }

    /// Reads the papers. `taken` are the descriptors that the note names.
    ///
    /// # Errors
    /// The file is not sealed, or its content is impossible.
    pub(super) fn read(file: &File, taken: &[i32]) -> Result<Self, String> {
        let unreadable = |error: io::Error| format!("the papers: {error}");
        let seals = fcntl(file, FcntlArg::F_GET_SEALS).map_err(|error| unreadable(error.into()))?;
        if !SealFlag::from_bits_retain(seals).contains(SEALS) {
            return Err("the papers are not sealed".to_owned());
        }
        let len = file.metadata().map_err(unreadable)?.len();
        if len > PAPERS_MAX {
            return Err(format!("papers of {len} bytes"));
        }
        let mut text = Vec::new();
        FromStart { file, at: 0 }.take(len).read_to_end(&mut text).map_err(unreadable)?;
        let papers: Self =
            serde_json::from_slice(&text).map_err(|error| format!("the papers: {error}"))?;
        papers.check(taken)?;
        Ok(papers)
    }

    /// Checks that each descriptor has one owner.
    fn check(&self, taken: &[i32]) -> Result<(), String> {
        let mut numbers: Vec<i32> = self.stores.iter().map(|store| store.descriptor).collect();
        numbers.extend(taken);
        match are_possible(&mut numbers) {
            true => Ok(()),
            false => Err(format!("papers with impossible descriptors: {numbers:?}")),
        }
    }
}

/// Whether descriptors are possible: each once, and no standard stream.
pub(super) fn are_possible(numbers: &mut [i32]) -> bool {
    numbers.sort_unstable();
    numbers.first().is_none_or(|first| *first > 2) && numbers.windows(2).all(|two| two[0] != two[1])
}

/// Reads a file from its start, wherever its offset is: the program before may have to read it
/// again.
struct FromStart<'f> {
    file: &'f File,
    at: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(into, self.at)?;
        self.at = self.at.saturating_add(u64::try_from(read).unwrap_or(u64::MAX));
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn papers() -> Papers {
        let store = |descriptor| StoreLeft {
            volume: format!("v{descriptor}"),
            path: "/srv/v".into(),
            descriptor,
            inode: (5, 6),
            device: 0,
            size_bytes: 1 << 20,
        };
        Papers {
            name: "store1".to_owned(),
            ran: "max_io = '1MiB'\n".to_owned(),
            judged: Some(String::new()),
            hosts: Some(Vec::new()),
            stores: vec![store(7), store(9)],
            records: vec!["{}".to_owned()],
        }
    }

    #[test]
    fn papers_come_back_as_they_were_as_often_as_they_are_read() {
        let file = File::from(papers().seal().unwrap());
        for _ in 0..2 {
            assert_eq!(Papers::read(&file, &[3, 8]), Ok(papers()));
        }
        assert!((&file).write_all(b"x").is_err(), "nobody changes them");
        assert!(file.set_len(0).is_err());
    }

    #[test]
    fn a_descriptor_has_one_owner() {
        let file = File::from(papers().seal().unwrap());
        let error = Papers::read(&file, &[3, 9]).unwrap_err();
        assert!(error.contains("impossible descriptors"), "{error}");
        for stores in [[7, 7], [2, 9], [-1, 9]] {
            let mut papers = papers();
            for (store, number) in papers.stores.iter_mut().zip(stores) {
                store.descriptor = number;
            }
            let file = File::from(papers.seal().unwrap());
            assert!(Papers::read(&file, &[]).is_err(), "{stores:?}");
        }
    }

    #[test]
    fn unsealed_papers_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("papers");
        std::fs::write(&path, serde_json::to_vec(&papers()).unwrap()).unwrap();
        assert!(Papers::read(&File::open(&path).unwrap(), &[]).is_err(), "a file");
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let mut open = File::from(memfd_create(c"open", flags).unwrap());
        open.write_all(&serde_json::to_vec(&papers()).unwrap()).unwrap();
        assert_eq!(Papers::read(&open, &[]), Err("the papers are not sealed".to_owned()));
        fcntl(&open, FcntlArg::F_ADD_SEALS(SEALS)).unwrap();
        assert_eq!(Papers::read(&open, &[]), Ok(papers()));
    }
}
