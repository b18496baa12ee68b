//! [`GuestNews`]: changes that control reports to the thread of the front ends, and [`Memories`],
//! the reverse.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, OnceLock};

use nix::sys::eventfd::{EfdFlags, EventFd};
use rblk_fabric::Region;

use super::guest_disk::GuestDisk;

/// The changing state of a disk.
#[derive(Debug)]
pub(crate) struct GuestNews {
    size_bytes: AtomicU64,
    read_only: AtomicBool,
    ends: Arc<AtomicBool>,
    ends_by_force: AtomicBool,
    // The result of the front ends' thread, once it has ended without a panic.
    ended: OnceLock<Result<(), String>>,
    has_front_end: AtomicBool,
    guest_stays: AtomicBool,
    // For each ring, whether it is unknown which of its requests were answered.
    in_doubt: Box<[AtomicBool]>,
    // Rings that a predecessor left in doubt, beyond the rings of this disk.
    others_in_doubt: Box<[u16]>,
    event: EventFd,
}

/// The state that a process leaves to the next one at the socket.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct GuestLeft {
    /// A guest may go on with the disk.
    pub(crate) guest_stays: bool,
    /// Rings with an unknown set of answered requests.
    pub(crate) rings_in_doubt: Vec<u16>,
}

impl GuestLeft {
    /// Rings in doubt beyond the rings of this disk: it cannot resolve them.
    fn rings_not_of(&self, rings: u16) -> impl Iterator<Item = u16> {
        self.rings_in_doubt.iter().copied().filter(move |ring| *ring >= rings)
    }

    /// Rings in doubt when a process with so many rings is killed.
    pub(crate) fn rings_of_killed(&self, rings: u16) -> Vec<u16> {
        (0..rings).chain(self.rings_not_of(rings)).collect()
    }
}

/// The memory of the guest that every new path registers.
#[derive(Debug)]
pub(crate) struct Memories {
    /// The files of the memory.
    pub(crate) regions: Arc<[Arc<Region>]>,
    /// Notified once new paths do so.
    pub(crate) reply: SyncSender<()>,
}

impl GuestNews {
    /// The news of a disk, with the state of its rings after the process before.
    ///
    /// # Errors
    /// The system has no descriptor.
    pub(super) fn new(disk: &GuestDisk, left: &GuestLeft) -> io::Result<Self> {
        let in_doubt = |ring| AtomicBool::new(left.rings_in_doubt.contains(&ring));
        let others = left.rings_not_of(disk.queues);
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        Ok(Self {
            size_bytes: AtomicU64::new(disk.size_bytes),
            read_only: AtomicBool::new(disk.read_only),
            ends: Arc::default(),
            ends_by_force: AtomicBool::new(false),
            ended: OnceLock::new(),
            has_front_end: AtomicBool::new(false),
            guest_stays: AtomicBool::new(left.guest_stays),
            in_doubt: (0..disk.queues).map(in_doubt).collect(),
            others_in_doubt: others.collect(),
            event: EventFd::from_value_and_flags(0, flags)?,
        })
    }

    /// Publishes the state of the volume.
    pub(crate) fn tell(&self, size_bytes: u64, read_only: bool) {
        let changed = self.size_bytes.swap(size_bytes, Ordering::Relaxed) != size_bytes;
        if self.read_only.swap(read_only, Ordering::Relaxed) != read_only || changed {
            self.wake();
        }
    }

    /// Ends the disk. By `force`, there is no time to flush the guest's writes.
    pub(super) fn end(&self, force: bool) {
        self.ends_by_force.fetch_or(force, Ordering::Release);
        self.ends.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // A full counter has woken the thread already.
        let _ = self.event.write(1);
    }

    /// Whether the disk ends.
    pub(super) fn ends(&self) -> bool {
        self.ends.load(Ordering::Acquire)
    }

    /// The flag behind [`Self::ends`].
    pub(super) fn ends_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.ends)
    }

    /// Whether the disk ends by force.
    pub(super) fn ends_by_force(&self) -> bool {
        self.ends_by_force.load(Ordering::Acquire)
    }

    /// The disk is not served any more: it was ended, or it broke.
    pub(super) fn ended(&self, how: Result<(), String>) {
        let _ = self.ended.set(how);
    }

    /// Whether the disk is not served any more.
    #[cfg(feature = "fuzzing")]
    pub(super) fn has_ended(&self) -> bool {
        self.ended.get().is_some()
    }

    /// The error that broke the disk, if it is not served any more.
    pub(crate) fn broke_by(&self) -> Option<&str> {
        match self.ended.get() {
            Some(Ok(())) => None,
            Some(Err(why)) => Some(why),
            None => Some("the thread of its front ends panicked"),
        }
    }

    /// Whether a front end is connected.
    pub(crate) fn has_front_end(&self) -> bool {
        self.has_front_end.load(Ordering::Relaxed)
    }

    /// A front end connected or left.
    pub(super) fn set_front_end(&self, has: bool) {
        self.has_front_end.store(has, Ordering::Relaxed);
    }

    /// Sets whether a guest may go on with the disk when a next process serves it. Only a process
    /// that has served rings of a guest knows.
    pub(super) fn set_guest_stays(&self, stays: bool) {
        self.guest_stays.store(stays, Ordering::Relaxed);
    }

    /// Whether it is unknown which requests of a ring were answered.
    pub(super) fn is_in_doubt(&self, ring: usize) -> bool {
        self.in_doubt.get(ring).is_some_and(|ring| ring.load(Ordering::Relaxed))
    }

    /// Records that this process knows the answered requests of a ring.
    pub(super) fn is_sure(&self, ring: usize) {
        if let Some(in_doubt) = self.in_doubt.get(ring) {
            in_doubt.store(false, Ordering::Relaxed);
        }
    }

    /// The state for the next process, once the disk has ended.
    pub(crate) fn left(&self) -> GuestLeft {
        let in_doubt = self.in_doubt.iter().map(|ring| ring.load(Ordering::Relaxed));
        let in_doubt = (0..).zip(in_doubt).filter_map(|(at, is)| is.then_some(at));
        GuestLeft {
            guest_stays: self.guest_stays.load(Ordering::Relaxed),
            rings_in_doubt: in_doubt.chain(self.others_in_doubt.iter().copied()).collect(),
        }
    }

    /// Readable after a change.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Resets the event. Check for changes afterwards.
    pub(super) fn clear(&self) {
        let _ = self.event.read();
    }

    /// The disk with its changes.
    pub(super) fn disk(&self, disk: GuestDisk) -> GuestDisk {
        let size_bytes = self.size_bytes.load(Ordering::Relaxed);
        GuestDisk { size_bytes, read_only: self.read_only.load(Ordering::Relaxed), ..disk }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(guest_stays: bool, rings_in_doubt: &[u16]) -> GuestLeft {
        GuestLeft { guest_stays, rings_in_doubt: rings_in_doubt.to_vec() }
    }

    #[test]
    fn a_disk_of_fewer_rings_passes_on_the_doubt_about_the_others() {
        let disk = GuestDisk {
            size_bytes: 1 << 20,
            block: 512,
            read_only: false,
            volatile_cache: true,
            discard: None,
            write_zeroes: false,
            max_io: 4096,
            queues: 2,
            id: GuestDisk::id_of("v"),
        };
        let before = left(true, &[0, 1, 2, 5]);
        let news = GuestNews::new(&disk, &before).unwrap();
        assert_eq!(news.left(), before);
        assert!(!news.is_in_doubt(2));
        news.is_sure(0);
        news.is_sure(2);
        assert_eq!(news.left(), left(true, &[1, 2, 5]));
        assert_eq!(left(true, &[1, 3]).rings_of_killed(2), [0, 1, 3]);
    }
}
