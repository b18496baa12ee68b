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

/// The methods of one backing.
#[derive(Debug)]
pub(super) struct Methods {
    read_only: bool,
    // 0: unknown.
    discard_granularity: u32,
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
                if queue_limit(device, "discard_max_bytes") == Some(0) {
                    self.refuse(Method::BlockDiscard);
                    self.refuse(Method::WaitingDiscard);
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
    fn a_file_has_no_command_of_block_devices() {
        let methods = Methods::new(BackingKind::File, false);
        assert_eq!(methods.discard(), Some(Method::PunchHole));
    }
}
