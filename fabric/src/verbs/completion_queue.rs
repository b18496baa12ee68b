//! `CompletionQueue`: an `ibv_cq` with a completion channel of its own, and [`PollerHandle`].
//!
//! Shared by the poller that reads it and the QPs that complete on it; destroyed when the last of
//! them is gone. The poller acknowledges every event it took before it lets go.
//!
//! A QP that completes here holds room for all its WRs, its [`Reservation`], until it is destroyed
//! and the CQ was read empty after that. Its flushes may come as long as it lives, and some drivers
//! leave what came of it in the CQ (rxe): who had the room earlier would fill the CQ beyond its
//! end.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::device::Device;
use super::ffi;
use super::protection_domain::ProtectionDomain;
use crate::error::{FabricError, Result};

#[derive(Debug)]
pub(super) struct CompletionQueue {
    raw: NonNull<ffi::ibv_cq>,
    channel: NonNull<ffi::ibv_comp_channel>,
    entries: u32,
    broken: AtomicBool,
    // Entries that destroyed QPs had reserved, since the CQ was made.
    released: AtomicU64,
    // Last: the context outlives CQ and channel. QPs of this CQ are all of this PD.
    pd: ProtectionDomain,
}

// SAFETY: libibverbs serialises calls on a CQ and on a channel inside.
unsafe impl Send for CompletionQueue {}
// SAFETY: as for Send.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    pub(super) fn create(pd: &ProtectionDomain, entries: u32) -> Result<Arc<Self>> {
        let device = pd.device();
        let caps = device.caps();
        let limit = |limit: u32| FabricError::Limit {
            device: caps.name.clone(),
            what: "entries of one completion queue",
            limit: limit.into(),
            asked: entries.into(),
        };
        if entries == 0 || entries > caps.max_cq_entries {
            return Err(limit(caps.max_cq_entries));
        }
        let Ok(wanted) = i32::try_from(entries) else { return Err(limit(i32::MAX.unsigned_abs())) };
        // SAFETY: the context is open while `device` lives.
        let channel = unsafe { ffi::ibv_create_comp_channel(device.context()) };
        let channel =
            NonNull::new(channel).ok_or_else(|| FabricError::last_os("ibv_create_comp_channel"))?;
        // SAFETY: the channel was just made; its fd is open until it is destroyed.
        let fd = unsafe { (*channel.as_ptr()).fd };
        let raw = set_nonblocking(fd).and_then(|()| {
            // SAFETY: context and channel are live; no cq_context is used.
            let raw = unsafe {
                ffi::ibv_create_cq(
                    device.context(),
                    wanted,
                    std::ptr::null_mut(),
                    channel.as_ptr(),
                    device.next_completion_vector(),
                )
            };
            NonNull::new(raw).ok_or_else(|| FabricError::last_os("ibv_create_cq"))
        });
        let raw = match raw {
            Ok(raw) => raw,
            Err(error) => {
                // SAFETY: no CQ uses the channel.
                unsafe { ffi::ibv_destroy_comp_channel(channel.as_ptr()) };
                return Err(error);
            }
        };
        // SAFETY: ibv_create_cq returned it.
        let granted = unsafe { (*raw.as_ptr()).cqe };
        let queue = Arc::new(Self {
            raw,
            channel,
            entries: u32::try_from(granted).unwrap_or(entries).max(entries),
            broken: AtomicBool::new(false),
            released: AtomicU64::new(0),
            pd: pd.clone(),
        });
        device.watch(&queue);
        Ok(queue)
    }

    /// The CQ, valid while `self` lives.
    pub(super) fn raw(&self) -> *mut ffi::ibv_cq {
        self.raw.as_ptr()
    }

    /// The channel, valid while `self` lives.
    pub(super) fn channel(&self) -> *mut ffi::ibv_comp_channel {
        self.channel.as_ptr()
    }

    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel and its descriptor live as long as `self`, which the result borrows.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }

    pub(super) fn entries(&self) -> u32 {
        self.entries
    }

    pub(super) fn device(&self) -> &Device {
        self.pd.device()
    }

    pub(super) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// Entries that QPs had reserved which are destroyed by now: all of them together, since the CQ
    /// was made. They may be reserved again when the CQ is found empty after this call.
    pub(super) fn released(&self) -> u64 {
        // With the drop of a reservation: whatever the QP left in the CQ is seen by a poll that
        // follows.
        self.released.load(Ordering::Acquire)
    }

    /// Whether nothing will complete here any more (overrun, device gone).
    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    pub(super) fn mark_broken(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: all QPs of the CQ hold an Arc of this value and are gone; the poller acknowledged
        // its events. A failed destroy leaves the CQ usable, so the channel it points to is then
        // kept.
        let errno = unsafe { ffi::ibv_destroy_cq(self.raw.as_ptr()) };
        let errno = match errno {
            // SAFETY: the only CQ of the channel is destroyed.
            0 => unsafe { ffi::ibv_destroy_comp_channel(self.channel.as_ptr()) },
            errno => errno,
        };
        if errno != 0 {
            let error = io::Error::from_raw_os_error(errno);
            tracing::error!(device = self.device().name(), %error, "ibv_destroy_cq failed; leaked");
        }
    }
}

/// A QP's room in its CQ. Drop it when the QP is destroyed.
#[derive(Debug)]
pub(super) struct Reservation {
    queue: Arc<CompletionQueue>,
    entries: u64,
    taken: bool,
}

impl Reservation {
    /// Of so many entries, which are not taken yet.
    pub(super) fn new(queue: &Arc<CompletionQueue>, entries: u64) -> Self {
        Self { queue: Arc::clone(queue), entries, taken: false }
    }

    /// The CQ.
    pub(super) fn queue(&self) -> &Arc<CompletionQueue> {
        &self.queue
    }

    /// Entries that are to be taken: none when they were taken before.
    pub(super) fn wanted(&self) -> u64 {
        if self.taken { 0 } else { self.entries }
    }

    /// They are taken, until the drop.
    pub(super) fn take(&mut self) {
        self.taken = true;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.taken {
            self.queue.released.fetch_add(self.entries, Ordering::Release);
        }
    }
}

/// Lets reads on a descriptor of libibverbs or librdmacm end with EAGAIN.
pub(super) fn set_nonblocking(fd: RawFd) -> Result<()> {
    // SAFETY: the caller owns the object the descriptor belongs to, so it stays open during the
    // call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let fail = |e: nix::Error| FabricError::Call { call: "fcntl", source: e.into() };
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL).map_err(fail)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).map_err(fail)?;
    Ok(())
}

/// Control's end of a poller: names the CQ that new QPs complete on.
#[derive(Clone, Debug)]
pub struct PollerHandle(Arc<CompletionQueue>);

impl PollerHandle {
    pub(super) fn new(queue: Arc<CompletionQueue>) -> Self {
        Self(queue)
    }

    pub(super) fn queue(&self) -> &Arc<CompletionQueue> {
        &self.0
    }
}
