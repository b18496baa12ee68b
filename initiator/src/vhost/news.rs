//! [`News`]: what control tells the thread of the front ends, and [`Memories`], the other way.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

use nix::sys::eventfd::{EfdFlags, EventFd};
use rblk_fabric::Region;

use super::disk::Disk;

/// What may change in the life of a disk.
#[derive(Debug)]
pub(crate) struct News {
    size_bytes: AtomicU64,
    read_only: AtomicBool,
    ends: AtomicBool,
    has_front_end: AtomicBool,
    event: EventFd,
}

/// The memory of the guest that every path is to register from now on.
#[derive(Debug)]
pub(crate) struct Memories {
    /// Files of it.
    pub(crate) regions: Arc<[Arc<Region>]>,
    /// Told when paths that are made from now on do so.
    pub(crate) reply: SyncSender<()>,
}

impl News {
    /// As the disk is.
    ///
    /// # Errors
    /// The system has no descriptor.
    pub(super) fn new(disk: &Disk) -> io::Result<Self> {
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        Ok(Self {
            size_bytes: AtomicU64::new(disk.size_bytes),
            read_only: AtomicBool::new(disk.read_only),
            ends: AtomicBool::new(false),
            has_front_end: AtomicBool::new(false),
            event: EventFd::from_value_and_flags(0, flags)?,
        })
    }

    /// The volume is like this now.
    pub(crate) fn tell(&self, size_bytes: u64, read_only: bool) {
        let changed = self.size_bytes.swap(size_bytes, Ordering::Relaxed) != size_bytes;
        if self.read_only.swap(read_only, Ordering::Relaxed) != read_only || changed {
            self.wake();
        }
    }

    /// The disk is to go.
    pub(super) fn end(&self) {
        self.ends.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // One that is full was told before.
        let _ = self.event.write(1);
    }

    /// Whether the disk is to go.
    pub(super) fn ends(&self) -> bool {
        self.ends.load(Ordering::Acquire)
    }

    /// Whether a front end is connected.
    pub(crate) fn has_front_end(&self) -> bool {
        self.has_front_end.load(Ordering::Relaxed)
    }

    /// A front end has come or gone.
    pub(super) fn set_front_end(&self, has: bool) {
        self.has_front_end.store(has, Ordering::Relaxed);
    }

    /// Readable when something changed.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Resets that. Look afterwards.
    pub(super) fn clear(&self) {
        let _ = self.event.read();
    }

    /// The disk with what has changed.
    pub(super) fn disk(&self, disk: Disk) -> Disk {
        let size_bytes = self.size_bytes.load(Ordering::Relaxed);
        Disk { size_bytes, read_only: self.read_only.load(Ordering::Relaxed), ..disk }
    }
}
