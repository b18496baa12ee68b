//! [`Features`]: the features that a kernel offers and a device uses, one bit each.

use std::fmt;
use std::ops::{BitAnd, BitOr};

/// A set of driver features (`UBLK_F_*`). Unknown bits are kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Features(u64);

impl Features {
    /// No feature.
    pub(crate) const NONE: Self = Self(0);
    /// Request pages as io_uring fixed buffers. Not used here: they have no address to register as
    /// an MR.
    pub(crate) const SUPPORT_ZERO_COPY: Self = Self(1 << 0);
    /// Always on: the driver completes commands in the server's own context.
    pub(crate) const COMP_IN_TASK: Self = Self(1 << 1);
    /// Write data is copied on a second command. Not used here.
    pub(crate) const NEED_GET_DATA: Self = Self(1 << 2);
    /// The disk outlives its server.
    pub(crate) const USER_RECOVERY: Self = Self(1 << 3);
    /// Requests of a dead server are sent again to the next one (else they fail).
    pub(crate) const USER_RECOVERY_REISSUE: Self = Self(1 << 4);
    /// Devices of ordinary users. Not used here.
    pub(crate) const UNPRIVILEGED_DEV: Self = Self(1 << 5);
    /// Ioctl-encoded commands, the only ones used here.
    pub(crate) const CMD_IOCTL_ENCODE: Self = Self(1 << 6);
    /// Data moves by pread and pwrite. Not used here.
    pub(crate) const USER_COPY: Self = Self(1 << 7);
    /// Zoned disks. Not used here.
    pub(crate) const ZONED: Self = Self(1 << 8);
    /// Without a server requests fail at once instead of waiting.
    pub(crate) const USER_RECOVERY_FAIL_IO: Self = Self(1 << 9);
    /// A live disk can be resized.
    pub(crate) const UPDATE_SIZE: Self = Self(1 << 10);
    /// Zero copy with automatic registration. Not used here.
    pub(crate) const AUTO_BUF_REG: Self = Self(1 << 11);
    /// A live disk can be parked, for a hand-over to another server process.
    pub(crate) const QUIESCE: Self = Self(1 << 12);
    /// Tags of one queue may be served by several threads.
    pub(crate) const PER_IO_DAEMON: Self = Self(1 << 13);
    /// Buffer registration from any thread. Not used here.
    pub(crate) const BUF_REG_OFF_DAEMON: Self = Self(1 << 14);
    /// Several requests per command. Not used here: a server that dies loses requests of a device
    /// with it (7.2).
    pub(crate) const BATCH_IO: Self = Self(1 << 15);
    /// Integrity metadata. Not used here.
    pub(crate) const INTEGRITY: Self = Self(1 << 16);
    /// Stop that refuses while the disk is open.
    pub(crate) const SAFE_STOP_DEV: Self = Self(1 << 17);
    /// The kernel does not look for partitions at the start.
    pub(crate) const NO_AUTO_PART_SCAN: Self = Self(1 << 18);
    /// Direct I/O with memory that the server also maps is not copied.
    pub(crate) const SHMEM_ZC: Self = Self(1 << 19);

    /// The features of a kernel without GET_FEATURES (6.4).
    pub(crate) const OF_6_4: Self = Self(0x7f);

    /// From the kernel's word.
    #[must_use]
    pub(crate) const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The kernel's word.
    #[must_use]
    pub(crate) const fn bits(self) -> u64 {
        self.0
    }

    /// All of `other` are in this set.
    #[must_use]
    pub(crate) const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both sets together.
    #[must_use]
    pub(crate) const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// This set without `other`.
    #[must_use]
    pub(crate) const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The known features in the set: kernel name, and first kernel release that has it.
    pub(crate) fn names(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        TABLE
            .iter()
            .filter(move |(bit, ..)| self.contains(*bit))
            .map(|(_, name, since)| (*name, *since))
    }
}

/// Every feature this file knows: bit, kernel name, first release.
const TABLE: [(Features, &str, &str); 20] = [
    (Features::SUPPORT_ZERO_COPY, "SUPPORT_ZERO_COPY", "6.15"),
    (Features::COMP_IN_TASK, "URING_CMD_COMP_IN_TASK", "6.0"),
    (Features::NEED_GET_DATA, "NEED_GET_DATA", "6.0"),
    (Features::USER_RECOVERY, "USER_RECOVERY", "6.1"),
    (Features::USER_RECOVERY_REISSUE, "USER_RECOVERY_REISSUE", "6.1"),
    (Features::UNPRIVILEGED_DEV, "UNPRIVILEGED_DEV", "6.3"),
    (Features::CMD_IOCTL_ENCODE, "CMD_IOCTL_ENCODE", "6.4"),
    (Features::USER_COPY, "USER_COPY", "6.5"),
    (Features::ZONED, "ZONED", "6.6"),
    (Features::USER_RECOVERY_FAIL_IO, "USER_RECOVERY_FAIL_IO", "6.13"),
    (Features::UPDATE_SIZE, "UPDATE_SIZE", "6.16"),
    (Features::AUTO_BUF_REG, "AUTO_BUF_REG", "6.16"),
    (Features::QUIESCE, "QUIESCE", "6.16"),
    (Features::PER_IO_DAEMON, "PER_IO_DAEMON", "6.16"),
    (Features::BUF_REG_OFF_DAEMON, "BUF_REG_OFF_DAEMON", "6.17"),
    (Features::BATCH_IO, "BATCH_IO", "7.0"),
    (Features::INTEGRITY, "INTEGRITY", "7.0"),
    (Features::SAFE_STOP_DEV, "SAFE_STOP_DEV", "7.0"),
    (Features::NO_AUTO_PART_SCAN, "NO_AUTO_PART_SCAN", "7.0"),
    (Features::SHMEM_ZC, "SHMEM_ZC", "7.1"),
];

impl BitOr for Features {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        self.union(other)
    }
}

impl BitAnd for Features {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        let mut separator = "";
        for (bit, name, _) in TABLE {
            if self.contains(bit) {
                write!(f, "{separator}{name}")?;
                separator = " ";
                rest &= !bit.0;
            }
        }
        match (rest, separator) {
            (0, "") => f.write_str("none"),
            (0, _) => Ok(()),
            _ => write!(f, "{separator}{rest:#x}"),
        }
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Features({:#x}: {self})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_the_kernels() {
        assert_eq!(Features::USER_RECOVERY.bits(), 0x8);
        assert_eq!(Features::USER_RECOVERY_REISSUE.bits(), 0x10);
        assert_eq!(Features::UPDATE_SIZE.bits(), 0x400);
        assert_eq!(Features::QUIESCE.bits(), 0x1000);
        assert_eq!(Features::SHMEM_ZC.bits(), 0x8_0000);
        let all = TABLE.iter().fold(Features::NONE, |sum, (bit, ..)| sum | *bit);
        assert_eq!(all.bits(), 0xf_ffff);
    }

    #[test]
    fn unknown_bits_are_shown_and_kept() {
        let set = Features::from_bits(1 << 40 | 1 << 3);
        assert_eq!(set.to_string(), "USER_RECOVERY 0x10000000000");
        assert_eq!(Features::NONE.to_string(), "none");
        assert_eq!(set.without(Features::USER_RECOVERY).bits(), 1 << 40);
        assert!(!Features::NONE.contains(Features::QUIESCE));
    }
}
