//! [`DiskFiller`]: reads of a disk, until each of its queues has every request that it can have.

use std::alloc::{Layout, alloc_zeroed};
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use io_uring::{IoUring, opcode, types};
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use rblk_operate::CpuList;
use rblk_protocol::width::wide64;

use super::control::disk_path;
use super::error::{Result, UblkError};

/// The bytes of a read, and what its place is a multiple of: every disk takes that.
const READ: u32 = 4096;
/// `include/uapi/linux/fs.h`: a read that would wait for a tag fails with EAGAIN.
const RWF_NOWAIT: i32 = 8;
/// Entries of the ring.
const ENTRIES: u32 = 64;
/// Limit of the tries to find a place without unwritten pages.
const PLACES: u32 = 32;
/// `include/uapi/asm-generic/unistd.h`, since 6.5.
const SYS_CACHESTAT: libc::c_long = 451;

/// Reads a disk whose server withholds its answers. For a process that serves no disk: it waits for
/// the next server when it opens or closes the disk.
///
/// A read never waits for a tag. No read goes to a place with unwritten pages in memory: the kernel
/// would refuse it because of them.
pub(crate) struct DiskFiller {
    disk: File,
    blocks: u64,
    ring: IoUring,
    page: *mut u8,
    // The last place, as a state of random numbers.
    place: u64,
    // The reads of a round for each queue.
    reads: u16,
    round: u32,
    queues: Vec<QueueReads>,
}

impl std::fmt::Debug for DiskFiller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { disk, round, queues, .. } = self;
        f.debug_struct("DiskFiller")
            .field("disk", disk)
            .field("round", round)
            .field("queues", queues)
            .finish_non_exhaustive()
    }
}

/// The reads for a queue in one round.
#[derive(Debug)]
struct QueueReads {
    // The CPUs that submit to it. `None`: this host has none of them.
    cpus: Option<CpuSet>,
    sent: u16,
    refused: u16,
}

/// `struct cachestat_range`
#[repr(C)]
struct CacheRange {
    offset: u64,
    len: u64,
}

/// `struct cachestat`
#[repr(C)]
#[derive(Default)]
struct CacheCounts {
    cached: u64,
    dirty: u64,
    in_writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

impl DiskFiller {
    /// Opens the disk of a device. The CPUs are those that submit to each queue. Blocks as long as
    /// the disk does not answer.
    ///
    /// # Errors
    /// The disk cannot be opened, or there is no ring.
    pub(crate) fn open(device: u32, reads: u16, cpus: &[CpuList]) -> Result<Self> {
        let path = disk_path(device);
        let system = |source| UblkError::system(format!("opening {}", path.display()), source);
        let disk = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path);
        let mut disk = disk.map_err(system)?;
        let bytes = disk.seek(SeekFrom::End(0)).map_err(system)?;
        let online = CpuList::online();
        let ring = IoUring::new(ENTRIES).map_err(system)?;
        Ok(Self {
            disk,
            blocks: bytes / u64::from(READ),
            ring,
            page: page(),
            place: u64::from(std::process::id()),
            reads,
            round: 0,
            queues: cpus.iter().map(|cpus| QueueReads::new(cpus, &online)).collect(),
        })
    }

    /// The queues to which no CPU of this host submits.
    pub(crate) fn without_cpu(&self) -> impl Iterator<Item = u16> {
        (0..).zip(&self.queues).filter(|(_, queue)| queue.cpus.is_none()).map(|(at, _)| at)
    }

    /// Sends the reads of a round to every queue. Moves the calling thread to other CPUs: give it a
    /// process of its own.
    ///
    /// # Errors
    /// The ring's.
    pub(crate) fn send(&mut self) -> Result<()> {
        self.round = self.round.wrapping_add(1);
        for at in 0..self.queues.len() {
            let sent = self.send_to(at)?;
            if let Some(queue) = self.queues.get_mut(at) {
                (queue.sent, queue.refused) = (sent, 0);
            }
        }
        Ok(())
    }

    /// Sends reads to one queue, and returns their number.
    fn send_to(&mut self, at: usize) -> Result<u16> {
        let cpus = self.queues.get(at).and_then(|queue| queue.cpus);
        // The CPUs may be forbidden to this process. Then nothing is known of the queue.
        if cpus.is_none_or(|cpus| sched_setaffinity(Pid::from_raw(0), &cpus).is_err()) {
            return Ok(0);
        }
        let sent = (0..self.reads).filter(|_| self.push_read(at)).count();
        let submitted = self.ring.submit();
        submitted.map_err(|source| UblkError::system("reading the disk", source))?;
        Ok(u16::try_from(sent).unwrap_or(u16::MAX))
    }

    /// Ends the reading. Those under way go on.
    pub(crate) fn into_disk(self) -> File {
        self.disk
    }

    /// The queues for which every read of the last round was refused: the kernel has no place for
    /// another request.
    pub(crate) fn refused(&mut self) -> impl Iterator<Item = u16> {
        for entry in self.ring.completion() {
            let (round, queue) = (entry.user_data() >> 32, entry.user_data() & u64::from(u32::MAX));
            let queue = usize::try_from(queue).ok().and_then(|at| self.queues.get_mut(at));
            if round == u64::from(self.round)
                && entry.result() == -(Errno::EAGAIN as i32)
                && let Some(queue) = queue
            {
                queue.refused += 1;
            }
        }
        let is_refused = |queue: &QueueReads| queue.sent > 0 && queue.refused == queue.sent;
        (0..).zip(&self.queues).filter(move |(_, queue)| is_refused(queue)).map(|(at, _)| at)
    }

    /// Queues a read for a queue. Returns whether there is a place for it.
    fn push_read(&mut self, queue: usize) -> bool {
        let Some(offset) = self.clean_place() else { return false };
        let read = opcode::Read::new(types::Fd(self.disk.as_raw_fd()), self.page, READ);
        let read = read.offset(offset).rw_flags(RWF_NOWAIT).build();
        let read = read.user_data(u64::from(self.round) << 32 | wide64(queue));
        // SAFETY: the caller submits the entry while `disk` is open, and the kernel keeps the file
        // from then on. The page is never freed, and nobody reads it; if there is no memory for it,
        // its address is null, and the read fails with EFAULT.
        unsafe { self.ring.submission().push(&read) }.is_ok()
    }

    /// A place in the disk without unwritten pages. Any will do, but two neighbours would become
    /// one request.
    fn clean_place(&mut self) -> Option<u64> {
        (0..PLACES).find_map(|_| {
            self.place = self.place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(12_345);
            let block = (self.place >> 16).checked_rem(self.blocks)?;
            let offset = block * u64::from(READ);
            self.is_clean(offset).then_some(offset)
        })
    }

    /// Whether no page of a place waits for its write. True where the kernel does not say it.
    fn is_clean(&self, offset: u64) -> bool {
        let (range, mut counts) = (CacheRange { offset, len: READ.into() }, CacheCounts::default());
        let (fd, flags): (libc::c_int, libc::c_uint) = (self.disk.as_raw_fd(), 0);
        // SAFETY: the kernel reads the range and writes the counts, which both live until the call
        // returns. A kernel without the call touches neither.
        let result =
            unsafe { libc::syscall(SYS_CACHESTAT, fd, &raw const range, &raw mut counts, flags) };
        result != 0 || counts.dirty + counts.in_writeback == 0
    }
}

impl QueueReads {
    fn new(cpus: &CpuList, online: &CpuList) -> Self {
        let mut set = CpuSet::new();
        let mut has_some = false;
        for cpu in cpus.iter() {
            // An error means a CPU beyond the bits of the set.
            let _ = set.set(cpu.into());
            // A list that could not be read has none.
            has_some |= online.has(cpu) || online.iter().next().is_none();
        }
        Self { cpus: has_some.then_some(set), sent: 0, refused: 0 }
    }
}

/// A page for data that nobody looks at. It is never freed: a read may be under way until the next
/// server answers.
fn page() -> *mut u8 {
    const LAYOUT: Layout = match Layout::from_size_align(READ as usize, READ as usize) {
        Ok(layout) => layout,
        Err(_) => panic!("a power of two"),
    };
    // SAFETY: the layout has a size.
    unsafe { alloc_zeroed(LAYOUT) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> CpuList {
        text.parse().expect("a list")
    }

    #[test]
    fn a_queue_has_no_cpu_if_none_of_its_own_is_online() {
        let has_cpu =
            |cpus: &str, online: &str| QueueReads::new(&list(cpus), &list(online)).cpus.is_some();
        assert!(has_cpu("0,2", "0-1") && has_cpu("2", "0-3"));
        assert!(!has_cpu("2,3", "0-1") && !has_cpu("", "0-1"));
        assert!(has_cpu("2", ""), "the kernel does not say which are online");
    }

    #[test]
    fn a_place_without_unwritten_pages_is_clean() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(1 << 20).expect("a length");
        let mut filler = DiskFiller {
            disk: file,
            blocks: 256,
            ring: IoUring::new(1).expect("a ring"),
            page: std::ptr::null_mut(),
            place: 1,
            reads: 4,
            round: 0,
            queues: Vec::new(),
        };
        let place = filler.clean_place().expect("an empty file has no pages");
        assert_eq!(place % u64::from(READ), 0);
        assert!(place < 1 << 20);
        filler.blocks = 0;
        assert_eq!(filler.clean_place(), None, "a disk without a block");
    }
}
