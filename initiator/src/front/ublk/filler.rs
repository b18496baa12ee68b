//! [`DiskFiller`]: reads of a disk, until each of its queues has every request that it can have.

use std::alloc::{Layout, alloc_zeroed};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

use super::error::{Result, UblkError};
use super::leave_gate::LeaveGate;
use super::placement::Placement;

/// The bytes of a read, and what its place is a multiple of: every disk takes that.
const READ: u32 = 4096;
/// Between two looks at the queues.
const STEP: Duration = Duration::from_millis(1);
/// `include/uapi/linux/fs.h`: a read that would wait for a tag fails with EAGAIN.
const RWF_NOWAIT: i32 = 8;
/// Entries of the ring.
const ENTRIES: u32 = 64;

/// Fills the queues of a disk whose server is about to leave. The next server answers the reads.
/// When it is dropped, the gate is open.
///
/// A read never waits for a tag: such a thread could not end before the next server answers. No
/// read goes to a place with dirty pages in memory, which would wait for their write.
#[derive(Debug)]
pub(crate) struct DiskFiller {
    disk: PathBuf,
    blocks: u64,
    // By queue: the CPUs that submit to it.
    cpus: Vec<Vec<usize>>,
    gate: Arc<LeaveGate>,
}

impl DiskFiller {
    /// For a disk of so many bytes.
    pub(super) fn new(
        disk: PathBuf,
        bytes: u64,
        cpus: Vec<Vec<usize>>,
        gate: Arc<LeaveGate>,
    ) -> Self {
        Self { disk, blocks: bytes / u64::from(READ), cpus, gate }
    }

    /// Reads until every queue is full, or for that time. Moves the calling thread to other CPUs:
    /// give it a thread of its own.
    ///
    /// # Errors
    /// The disk cannot be read, or a queue is not full in time: a request may be lost.
    pub(crate) fn fill(self, within: Duration) -> Result<()> {
        match self.read_until_full(within)? {
            true => Ok(()),
            false => Err(UblkError::NotFull { id: self.gate.device(), held: self.gate.held() }),
        }
    }

    /// Returns whether every queue is full.
    fn read_until_full(&self, within: Duration) -> Result<bool> {
        let Some(limit) = self.gate.limit() else { return Ok(true) };
        let system = |source| UblkError::system(format!("reading {}", self.disk.display()), source);
        let disk = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&self.disk);
        let disk = disk.map_err(system)?;
        let mut ring = IoUring::new(ENTRIES).map_err(system)?;
        let (begin, buffer, mut block) = (Instant::now(), page(), 0u64);
        let placement = Placement::of_this_thread();
        while !self.gate.is_full() {
            if begin.elapsed() >= within {
                return Ok(false);
            }
            for (queue, cpus) in self.cpus.iter().enumerate() {
                if self.gate.wants_more(queue) {
                    placement.run_on(cpus);
                    for _ in 0..limit {
                        // Any place will do, but two neighbours would become one request.
                        block = block.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(12_345);
                        let at = (block >> 16).checked_rem(self.blocks).unwrap_or(0);
                        push_read(&mut ring, &disk, buffer, at * u64::from(READ));
                    }
                    ring.submit().map_err(system)?;
                }
            }
            std::thread::sleep(STEP);
            ring.completion().for_each(drop);
        }
        Ok(true)
    }
}

impl Drop for DiskFiller {
    fn drop(&mut self) {
        if !self.gate.is_full() {
            self.gate.open();
        }
    }
}

/// A page for data that nobody looks at. The process never reuses it: a read may be under way until
/// the next server answers.
fn page() -> *mut u8 {
    const LAYOUT: Layout = match Layout::from_size_align(READ as usize, READ as usize) {
        Ok(layout) => layout,
        Err(_) => panic!("a power of two"),
    };
    // SAFETY: the layout has a size.
    unsafe { alloc_zeroed(LAYOUT) }
}

fn push_read(ring: &mut IoUring, disk: &File, page: *mut u8, offset: u64) {
    let read = opcode::Read::new(types::Fd(disk.as_raw_fd()), page, READ);
    let read = read.offset(offset).rw_flags(RWF_NOWAIT).build();
    // SAFETY: the caller submits the entry while `disk` is open, and the kernel keeps the file from
    // then on. The page is never freed, and nobody reads it; if there is no memory for it, its
    // address is null, and the read fails with EFAULT.
    let pushed = unsafe { ring.submission().push(&read) };
    // A full ring has enough reads.
    let _ = pushed;
}
