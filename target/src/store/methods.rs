//! [`Methods`]: the ways to discard or zero a range of a backing, and the ways it refuses.
//!
//! The abilities of a backing are found when it is opened. A method that it refuses later is not
//! tried again.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::stat::{major, minor};

use super::BackingKind;

/// A way to discard or zero a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Method {
    /// BLOCK_URING_CMD_DISCARD, Linux 6.12.
    BlockDiscard,
    /// The same by a worker of io_uring, which may wait. A device that takes no request with
    /// REQ_NOWAIT, such as dm-crypt or VDO, refuses a short discard otherwise.
    WaitingDiscard,
    /// `fallocate` with FALLOC_FL_PUNCH_HOLE.
    PunchHole,
    /// `fallocate` with FALLOC_FL_ZERO_RANGE.
    ZeroRange,
    /// Plain writes of zeroes.
    WriteZeroes,
}

impl Method {
    /// Mode for `fallocate`, for the two methods that use it.
    pub(super) fn fallocate_mode(self) -> FallocateFlags {
        let how = match self {
            Self::ZeroRange => FallocateFlags::FALLOC_FL_ZERO_RANGE,
            _ => FallocateFlags::FALLOC_FL_PUNCH_HOLE,
        };
        how | FallocateFlags::FALLOC_FL_KEEP_SIZE
    }

    /// Whether the error means that the method never works here.
    pub(super) fn is_refused_by(self, errno: Errno) -> bool {
        self != Self::WriteZeroes
            && matches!(errno, Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::ENOTTY | Errno::ENODEV)
    }
}

/// A discard or zeroing of a file or a usual device takes at most this many bytes at a time: file
/// systems hold the inode's lock for the whole of a fallocate, and other I/O on the file waits.
const RANGE_STEP: u64 = 1 << 30;
/// Requests of the device in one step. A device that takes little of a discard at a time, such as
/// VDO with 4 KiB, keeps a worker of io_uring for as long as a step takes; nothing ends it, and the
/// syncs of other volumes need workers, too.
const REQUESTS_OF_STEP: u64 = 1024;
const SMALLEST_STEP: u64 = 1 << 20;

/// The methods of one backing.
#[derive(Debug)]
pub(super) struct Methods {
    read_only: bool,
    // 0: unknown.
    discard_granularity: u32,
    range_step: u64,
    no_block_discard: AtomicBool,
    no_waiting_discard: AtomicBool,
    no_punch_hole: AtomicBool,
    no_zero_range: AtomicBool,
}

impl Methods {
    /// All methods that this kind of backing may have.
    pub(super) fn new(kind: BackingKind, read_only: bool) -> Self {
        Self {
            read_only,
            discard_granularity: 0,
            range_step: RANGE_STEP,
            no_block_discard: AtomicBool::new(kind == BackingKind::File),
            no_waiting_discard: AtomicBool::new(kind == BackingKind::File),
            no_punch_hole: AtomicBool::new(false),
            no_zero_range: AtomicBool::new(false),
        }
    }

    /// Finds the abilities of a backing of `size` bytes that the system reports.
    pub(super) fn probe(
        &mut self,
        file: &File,
        kind: BackingKind,
        size: u64,
        block_size: u32,
        metadata: &fs::Metadata,
    ) {
        match kind {
            BackingKind::File => {
                self.discard_granularity = u32::try_from(metadata.blksize()).unwrap_or(0);
                if self.read_only {
                    return;
                }
                // A hole past the end with KEEP_SIZE changes nothing, but fails where holes are not
                // supported.
                let end = i64::try_from(size).unwrap_or(i64::MAX - i64::from(u16::MAX));
                let mode = Method::PunchHole.fallocate_mode();
                if let Err(errno) = fallocate(file, mode, end, i64::from(block_size))
                    && Method::PunchHole.is_refused_by(errno)
                {
                    self.refuse(Method::PunchHole);
                }
            }
            BackingKind::BlockDevice => {
                let device = metadata.rdev();
                let granularity = queue_limit(device, "discard_granularity");
                self.discard_granularity =
                    granularity.and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
                match queue_limit(device, "discard_max_bytes") {
                    Some(0) => {
                        self.refuse(Method::BlockDiscard);
                        self.refuse(Method::WaitingDiscard);
                    }
                    Some(bytes) => self.range_step = step_of(bytes),
                    None => {}
                }
                if queue_limit(device, "write_zeroes_max_bytes") == Some(0) {
                    self.refuse(Method::PunchHole);
                }
            }
        }
    }

    /// Discards below this many bytes, or not aligned to it, free no space. 0: unknown.
    pub(super) fn discard_granularity(&self) -> u32 {
        self.discard_granularity
    }

    /// The most bytes of a discard or zeroing that are under way at a time. A power of two.
    pub(super) fn range_step(&self) -> u64 {
        self.range_step
    }

    /// The way to discard a range. `None`: discard does not work.
    pub(super) fn discard(&self) -> Option<Method> {
        if self.read_only {
            None
        } else if !self.no_block_discard.load(Ordering::Relaxed) {
            Some(Method::BlockDiscard)
        } else if !self.no_waiting_discard.load(Ordering::Relaxed) {
            Some(Method::WaitingDiscard)
        } else {
            self.discard_by_call()
        }
    }

    /// The way to discard a range without io_uring's own commands.
    pub(super) fn discard_by_call(&self) -> Option<Method> {
        let refused = self.read_only || self.no_punch_hole.load(Ordering::Relaxed);
        (!refused).then_some(Method::PunchHole)
    }

    /// The way to zero a range; with `may_unmap` the space may be freed.
    pub(super) fn zero(&self, may_unmap: bool) -> Method {
        if may_unmap && !self.no_punch_hole.load(Ordering::Relaxed) {
            Method::PunchHole
        } else if !self.no_zero_range.load(Ordering::Relaxed) {
            Method::ZeroRange
        } else {
            Method::WriteZeroes
        }
    }

    /// Remembers that a method does not work here.
    pub(super) fn refuse(&self, method: Method) {
        match method {
            Method::BlockDiscard => self.no_block_discard.store(true, Ordering::Relaxed),
            Method::WaitingDiscard => self.no_waiting_discard.store(true, Ordering::Relaxed),
            Method::PunchHole => self.no_punch_hole.store(true, Ordering::Relaxed),
            Method::ZeroRange => self.no_zero_range.store(true, Ordering::Relaxed),
            Method::WriteZeroes => {}
        }
    }
}

/// The step for a device that takes at most so many bytes of a discard at a time.
fn step_of(discard_max: u64) -> u64 {
    let bytes = discard_max.saturating_mul(REQUESTS_OF_STEP).clamp(SMALLEST_STEP, RANGE_STEP);
    1 << bytes.ilog2()
}

/// A limit of a block device's queue.
pub(super) fn queue_limit(device: u64, name: &str) -> Option<u64> {
    queue_attribute(device, name)?.parse().ok()
}

/// A sysfs attribute of a block device's queue; a partition has the queue of its disk.
pub(super) fn queue_attribute(device: u64, name: &str) -> Option<String> {
    let directory = format!("/sys/dev/block/{}:{}", major(device), minor(device));
    ["queue", "../queue"]
        .iter()
        .find_map(|queue| fs::read_to_string(format!("{directory}/{queue}/{name}")).ok())
        .map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_refuses_to_be_asked_without_a_wait_is_asked_with_one() {
        let methods = Methods::new(BackingKind::BlockDevice, false);
        let ways = [Method::BlockDiscard, Method::WaitingDiscard, Method::PunchHole];
        for way in ways {
            assert!(way.is_refused_by(Errno::EOPNOTSUPP));
            assert_eq!(methods.discard(), Some(way));
            methods.refuse(way);
        }
        assert_eq!(methods.discard(), None);
    }

    #[test]
    fn a_step_is_some_requests_of_the_device() {
        assert_eq!(step_of(4096), 4 << 20);
        assert_eq!(step_of(3 << 10), 2 << 20);
        assert_eq!(step_of(512), 1 << 20);
        assert_eq!((step_of(1 << 31), step_of(u64::MAX)), (1 << 30, 1 << 30));
    }

    #[test]
    fn a_file_has_no_command_of_block_devices() {
        let methods = Methods::new(BackingKind::File, false);
        assert_eq!(methods.discard(), Some(Method::PunchHole));
    }
}
