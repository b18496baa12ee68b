//! [`GuestMemory`]: the memory of a guest, shared by its front end: files that both ends map.
//!
//! The device addresses data by [`DataPlace`]: a file and an offset. The rings are read and written
//! by guest addresses ([`GuestMemory::view`]), through the checked accesses of rust-vmm's
//! vm-memory. Both use one mapping.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use rblk_config::ByteSize;
use rblk_fabric::Region;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use super::cut_memory::Marked;
use super::vhost_user::MemoryPart;
use crate::engine::path::{DataPlace, MemoryIndex};

/// A file, identified independently of its descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct FileId {
    device: u64,
    inode: u64,
    len: u64,
}

/// A part of the guest's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct GuestMemoryPart {
    of: MemoryPart,
    region: u16,
}

/// The memory of a guest.
#[derive(Debug)]
pub(super) struct GuestMemory {
    // First field, so that the view is dropped before its mappings.
    view: GuestMemoryMmap,
    regions: Arc<[Arc<Region>]>,
    files: Vec<FileId>,
    _marked: Vec<Marked>,
    // By the address of the guest.
    parts: Vec<GuestMemoryPart>,
}

impl GuestMemory {
    /// Maps the memory of a table: a file for each part. Files that `known` has mapped stay mapped
    /// at their place; if there are no others, the regions are those of `known`. The files may have
    /// at most `most` bytes together.
    ///
    /// # Errors
    /// A file is no memory, or the files are too large, or a part is not inside its file or
    /// overlaps another part, or the system cannot map it.
    pub(super) fn map(
        table: &[MemoryPart],
        given: &[File],
        known: Option<&Self>,
        most: Option<ByteSize>,
    ) -> io::Result<Self> {
        let ids = given.iter().map(FileId::of).collect::<io::Result<Vec<_>>>()?;
        must_not_be_more(&ids, most)?;
        let find = |files: &[FileId], id| files.iter().position(|file| *file == id);
        let kept = known.filter(|known| {
            known.files.iter().all(|file| ids.contains(file))
                && ids.iter().all(|id| known.files.contains(id))
        });
        let (regions, files) = match kept {
            Some(kept) => (Arc::clone(&kept.regions), kept.files.clone()),
            None => {
                let (mut regions, mut files) = (Vec::new(), Vec::new());
                for (file, id) in given.iter().zip(&ids) {
                    if files.contains(id) {
                        continue;
                    }
                    let old = known.and_then(|known| {
                        find(&known.files, *id).map(|at| Arc::clone(&known.regions[at]))
                    });
                    regions.push(match old {
                        Some(region) => region,
                        None => Region::map_file_lazily(file)?,
                    });
                    files.push(*id);
                }
                (regions.into(), files)
            }
        };
        let mut parts = Vec::new();
        for (of, id) in table.iter().zip(ids) {
            let region = find(&files, id).and_then(|at| u16::try_from(at).ok());
            let region = region.ok_or_else(|| io::Error::other("memory without a file"))?;
            parts.push(GuestMemoryPart { of: *of, region });
        }
        parts.sort_by_key(|part| part.of.guest);
        let view = view(&parts, &regions)?;
        let marked = regions.iter().zip(&files);
        let marked =
            marked.map(|(region, file)| Marked::new(region, file.device, file.inode)).collect();
        Ok(Self { view, regions, files, _marked: marked, parts })
    }

    /// The memory by the addresses of the guest.
    pub(super) fn view(&self) -> &GuestMemoryMmap {
        &self.view
    }

    /// The memory, for the paths of the queues.
    pub(super) fn regions(&self) -> &Arc<[Arc<Region>]> {
        &self.regions
    }

    /// Translates an address of the front end to one of the guest.
    pub(super) fn guest_address(&self, user: u64) -> Option<u64> {
        self.parts.iter().find_map(|GuestMemoryPart { of, .. }| {
            let within = user.checked_sub(of.user).filter(|within| *within < of.len)?;
            Some(of.guest + within)
        })
    }

    /// The place of `len` bytes of the guest, and the length of the first piece in one region.
    /// `None` if the first byte is outside the memory.
    pub(super) fn place(&self, guest: u64, len: u64) -> Option<(DataPlace, u64)> {
        let after = self.parts.partition_point(|part| part.of.guest <= guest);
        let GuestMemoryPart { of, region } = self.parts.get(after.checked_sub(1)?)?;
        let within = guest - of.guest;
        let left = of.len.checked_sub(within).filter(|left| *left > 0)?;
        let memory = MemoryIndex::shared(*region)?;
        let offset = usize::try_from(of.offset + within).ok()?;
        Some((DataPlace { memory, offset }, len.min(left)))
    }

    /// The region of a place from [`Self::place`].
    pub(super) fn region(&self, guest: u64) -> Option<&Arc<Region>> {
        let after = self.parts.partition_point(|part| part.of.guest <= guest);
        let part = self.parts.get(after.checked_sub(1)?)?;
        self.regions.get(usize::from(part.region))
    }
}

impl FileId {
    /// # Errors
    /// The file is no memory.
    fn of(file: &File) -> io::Result<Self> {
        if !is_memory(file.as_fd()) {
            return Err(io::Error::other(
                "memory of the guest in a file that is none of a memfd, tmpfs or hugetlbfs",
            ));
        }
        let metadata = file.metadata()?;
        Ok(Self { device: metadata.dev(), inode: metadata.ino(), len: metadata.len() })
    }
}

/// Whether a file is memory: of a memfd, tmpfs or hugetlbfs. Only the kernel answers the question:
/// a query to a file of FUSE would go to its daemon, which the front end may run.
pub(super) fn is_memory(file: BorrowedFd<'_>) -> bool {
    nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_GET_SEALS).is_ok()
}

/// Checks that the files have at most so many bytes together. Each file counts once.
///
/// # Errors
/// The files have more.
fn must_not_be_more(files: &[FileId], most: Option<ByteSize>) -> io::Result<()> {
    let Some(most) = most else { return Ok(()) };
    let first = |(at, file): &(usize, &FileId)| !files[..*at].contains(file);
    let lens = files.iter().enumerate().filter(first).map(|(_, file)| file.len);
    let len = ByteSize(lens.fold(0, u64::saturating_add));
    if len <= most {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "the memory of the guest has {len}, and --memory-max allows {most}: raise it, or give the guest less"
    )))
}

/// Maps guest addresses to the parts.
fn view(parts: &[GuestMemoryPart], regions: &[Arc<Region>]) -> io::Result<GuestMemoryMmap> {
    let mut mapped = Vec::new();
    for GuestMemoryPart { of, region } in parts {
        let region = &regions[usize::from(*region)];
        let range = usize::try_from(of.offset).ok().zip(usize::try_from(of.len).ok());
        let pointer = range
            .filter(|(_, len)| *len > 0)
            .and_then(|(offset, len)| Some((region.pointer(offset, len)?, len)));
        let (pointer, len) = pointer.ok_or_else(|| {
            io::Error::other(format!(
                "{} bytes of memory from {} on, of a file that has {}",
                of.len,
                of.offset,
                region.len()
            ))
        })?;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: the range is inside the mapping of the region (checked by `pointer`), which is
        // mapped like this, and which lives as long as the view: `GuestMemory` has both and gives
        // out neither the view nor copies of it.
        let mapping = unsafe { MmapRegion::build_raw(pointer.as_ptr(), len, protection, flags) };
        let mapping = mapping.map_err(io::Error::other)?;
        let guest = GuestAddress(of.guest);
        let part = GuestRegionMmap::new(mapping, guest);
        mapped.push(part.ok_or_else(|| io::Error::other("memory beyond the last address"))?);
    }
    GuestMemoryMmap::from_regions(mapped).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    #[test]
    fn only_memory_is_memory() {
        let memory = File::from(memfd_create(c"m", MFdFlags::MFD_CLOEXEC).unwrap());
        assert!(is_memory(memory.as_fd()));
        let (pipe, _other) = nix::unistd::pipe().unwrap();
        assert!(!is_memory(pipe.as_fd()));
        assert!(!is_memory(File::open("/proc/self/status").unwrap().as_fd()));
        assert!(!is_memory(File::open("/dev/zero").unwrap().as_fd()));
    }

    #[test]
    fn a_file_counts_once_for_the_most_memory() {
        let file = |inode, len| FileId { device: 1, inode, len };
        let most = Some(ByteSize(8192));
        let all = |files: &[FileId]| must_not_be_more(files, most);
        assert!(all(&[file(1, 4096), file(2, 4096)]).is_ok());
        assert!(all(&[file(1, 8192), file(1, 8192)]).is_ok());
        let error = all(&[file(1, 8192), file(2, 4096)]).unwrap_err().to_string();
        assert_eq!(
            error,
            "the memory of the guest has 12KiB, and --memory-max allows 8KiB: raise it, or give the guest less"
        );
        assert!(all(&[file(1, u64::MAX), file(2, u64::MAX)]).is_err());
        assert!(must_not_be_more(&[file(1, u64::MAX)], None).is_ok());
    }
}
