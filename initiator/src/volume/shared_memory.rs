//! [`SharedMemory`]: files of tmpfs or hugetlbfs that programs map. Their direct I/O moves data
//! from and to this memory without a copy (`UBLK_F_SHMEM_ZC`, Linux 7.1).
//!
//! The driver knows this memory by the numbers of its pages, from its
//! [registration](crate::front::ublk::Device::share) to the end of the device: processes that serve
//! the device may come and go meanwhile. So the note of the mount has a [`PageSum`] of each file. A
//! process that takes the device over uses a file only if it still has the same pages: if the file
//! was truncated or replaced, requests name pages that no process of rblk can reach. Those requests
//! fail with EIO, and all others go on.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use rblk_fabric::{PageKind, Region};
use rblk_protocol::width::wide64;
use serde::{Deserialize, Serialize};

/// The driver's limit of a file's length.
const LEN_MAX: u64 = 4 << 30;
/// Bytes of a page in `/proc/self/pagemap`.
const PAGE: usize = 4096;
/// Bytes of one entry of `/proc/self/pagemap`.
const ENTRY: usize = 8;
/// The bits of an entry with the number of a present page.
const NUMBER: u64 = (1 << 55) - 1;
/// Entries read at once.
const ENTRIES: usize = 512;

/// A sum of the numbers of a file's pages, in order: FNV-1a, 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct PageSum(u64);

/// The note's entry for a file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct NotedFile {
    path: PathBuf,
    pages: PageSum,
}

/// The shared memory of a mount. The index of a file is that of the driver.
#[derive(Clone, Default, Debug)]
pub(crate) struct SharedMemory {
    paths: Vec<PathBuf>,
    // For an unusable file: one page of private memory.
    regions: Arc<[Arc<Region>]>,
    // Bytes open to requests; 0 for an unusable file.
    lens: Arc<[u64]>,
    // The files that the driver has; empty before the registration.
    noted: Vec<NotedFile>,
}

impl SharedMemory {
    /// Maps the files of a new mount.
    ///
    /// # Errors
    /// A file is missing, or cannot be shared memory.
    pub(crate) fn map(paths: &[PathBuf]) -> anyhow::Result<Self> {
        let regions = paths.iter().map(|path| map(path)).collect::<anyhow::Result<Vec<_>>>()?;
        let lens = regions.iter().map(|region| wide64(region.len())).collect();
        Ok(Self { paths: paths.to_vec(), regions: regions.into(), lens, noted: Vec::new() })
    }

    /// The memory of a guest. The driver does not know it.
    pub(super) fn of_guest(regions: Arc<[Arc<Region>]>) -> Self {
        let lens = regions.iter().map(|region| wide64(region.len())).collect();
        Self { regions, lens, ..Self::default() }
    }

    /// Maps the files that the driver has from an earlier process.
    ///
    /// # Errors
    /// There is not enough memory.
    pub(crate) fn again(noted: Vec<NotedFile>) -> anyhow::Result<Self> {
        let (mut regions, mut lens) = (Vec::new(), Vec::new());
        for file in &noted {
            match map_again(file) {
                Ok(region) => {
                    lens.push(wide64(region.len()));
                    regions.push(region);
                }
                Err(error) => {
                    tracing::error!(
                        file = %file.path.display(),
                        error = rblk_operate::said_once(error.as_ref()),
                        "requests with this shared memory fail with EIO"
                    );
                    lens.push(0);
                    regions.push(Region::allocate(PAGE, PageKind::Normal)?);
                }
            }
        }
        let paths = noted.iter().map(|file| file.path.clone()).collect();
        Ok(Self { paths, regions: regions.into(), lens: lens.into(), noted })
    }

    /// Whether there are no memories.
    pub(super) fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// The memory, for the paths of the queues.
    pub(crate) fn regions(&self) -> &Arc<[Arc<Region>]> {
        &self.regions
    }

    /// The usable bytes of each memory.
    pub(crate) fn lens(&self) -> &Arc<[u64]> {
        &self.lens
    }

    /// The note's entries.
    pub(crate) fn noted(&self) -> &[NotedFile] {
        &self.noted
    }

    /// Records that the driver has registered all of it: its pages stay in place.
    ///
    /// # Errors
    /// The system does not report the page numbers.
    pub(super) fn registered(&mut self) -> anyhow::Result<()> {
        let files = self.paths.iter().zip(self.regions.iter());
        let noted = files.map(|(path, region)| {
            let pages = sum_of(region).with_context(|| format!("the pages of {}", path.display()));
            Ok(NotedFile { path: path.clone(), pages: pages? })
        });
        self.noted = noted.collect::<anyhow::Result<_>>()?;
        Ok(())
    }
}

fn map(path: &Path) -> anyhow::Result<Arc<Region>> {
    let what = || format!("shared memory {}", path.display());
    let file = OpenOptions::new().read(true).write(true).open(path).with_context(what)?;
    let len = file.metadata().with_context(what)?.len();
    anyhow::ensure!(
        len <= LEN_MAX,
        "{}: {len} bytes are more than {LEN_MAX}, the most that the driver takes; use several files",
        what()
    );
    Region::map_file(&file).with_context(what)
}

fn map_again(file: &NotedFile) -> anyhow::Result<Arc<Region>> {
    let region = map(&file.path)?;
    let pages = sum_of(&region).with_context(|| format!("{}", file.path.display()))?;
    anyhow::ensure!(
        pages == file.pages,
        "{} has other pages than when the mount began: it was cut, or is another file",
        file.path.display()
    );
    Ok(region)
}

/// The sum of the numbers of the pages of a mapping: proc_pid_pagemap(5).
fn sum_of(region: &Region) -> io::Result<PageSum> {
    let mut pagemap = File::open("/proc/self/pagemap")?;
    pagemap.seek(SeekFrom::Start(region.address() / wide64(PAGE) * wide64(ENTRY)))?;
    let mut left = region.len() / PAGE;
    let mut sum = FNV_OFFSET;
    let mut entries = [0; ENTRIES * ENTRY];
    while left > 0 {
        let now = left.min(ENTRIES);
        pagemap.read_exact(&mut entries[..now * ENTRY])?;
        for entry in entries[..now * ENTRY].as_chunks::<ENTRY>().0 {
            let number = u64::from_ne_bytes(*entry) & NUMBER;
            if number == 0 {
                return Err(io::Error::other(
                    "a page is not in memory, or CAP_SYS_ADMIN is missing",
                ));
            }
            sum = add(sum, number);
        }
        left -= now;
    }
    Ok(PageSum(sum))
}

const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

fn add(sum: u64, number: u64) -> u64 {
    number
        .to_le_bytes()
        .iter()
        .fold(sum, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(FNV_PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_depends_on_the_order_of_the_pages() {
        let sum = |pages: &[u64]| pages.iter().fold(FNV_OFFSET, |sum, page| add(sum, *page));
        assert_eq!(sum(&[7, 9]), sum(&[7, 9]));
        assert_ne!(sum(&[7, 9]), sum(&[9, 7]));
        assert_ne!(sum(&[7]), sum(&[7, 0]));
    }

    #[test]
    fn files_other_than_memory_are_refused_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory");
        let error = |path: &PathBuf| {
            let error = SharedMemory::map(std::slice::from_ref(path)).unwrap_err();
            rblk_operate::said_once(error.as_ref())
        };
        assert!(error(&path).contains("memory"), "{}", error(&path));
        let file = File::create(&path).unwrap();
        assert!(error(&path).contains("0 bytes"), "{}", error(&path));
        file.set_len(4097).unwrap();
        assert!(error(&path).contains("4097 bytes"), "{}", error(&path));
        file.set_len(LEN_MAX + 4096).unwrap();
        assert!(error(&path).contains("use several files"), "{}", error(&path));
    }

    #[test]
    fn memory_of_several_processes_is_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("memory");
        std::fs::write(&path, [5; 2 * PAGE]).unwrap();
        let shared = SharedMemory::map(std::slice::from_ref(&path)).unwrap();
        assert_eq!(shared.lens()[..], [wide64(2 * PAGE)]);
        shared.regions()[0].write(PAGE, &[6]);
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!((bytes[PAGE - 1], bytes[PAGE], bytes[PAGE + 1]), (5, 6, 5));
    }
}
