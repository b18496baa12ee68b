//! `CompletionQueue`: an `ibv_cq` with a completion channel of its own, and [`PollerHandle`].
//!
//! The poller that reads the CQ and the QPs that complete on it share it. It is destroyed when the
//! last of them is gone. The poller acknowledges every event that it took before it drops its
//! share. `cq_room` says which QPs may fill how much of the CQ.

pub(super) mod cq_events;
pub(super) mod cq_room;
pub(super) mod late_flushes;
pub(super) mod work_completion;

use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::device::Device;
use super::device::cq_health::CqHealth;
use super::ffi;
use super::nonblocking::set_nonblocking;
use super::protection_domain::ProtectionDomain;
use crate::completion_vector::CompletionVector;
use crate::error::{FabricError, Result};

/// A CQ and its completion channel.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    raw: NonNull<ffi::ibv_cq>,
    channel: NonNull<ffi::ibv_comp_channel>,
    entries: u32,
    health: Arc<CqHealth>,
    // Entries that destroyed QPs had reserved, since the CQ was made.
    released: AtomicU64,
    // Last: the context outlives CQ and channel. All QPs of this CQ are of this PD.
    pd: ProtectionDomain,
}

// SAFETY: libibverbs serialises calls on a CQ and on a channel inside.
unsafe impl Send for CompletionQueue {}
// SAFETY: as for Send.
unsafe impl Sync for CompletionQueue {}

impl CompletionQueue {
    pub(super) fn create(
        pd: &ProtectionDomain,
        entries: u32,
        vector: CompletionVector,
    ) -> Result<Arc<Self>> {
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
                    device.completion_vector(vector),
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
        let health = Arc::new(CqHealth::of(raw.as_ptr()));
        let queue = Arc::new(Self {
            raw,
            channel,
            entries: u32::try_from(granted).unwrap_or(0).max(entries),
            health: Arc::clone(&health),
            released: AtomicU64::new(0),
            pd: pd.clone(),
        });
        device.watch(&health);
        Ok(queue)
    }

    /// The CQ, valid while `self` lives.
    #[inline]
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

    /// Entries that destroyed QPs had reserved: the sum since the CQ was made. They may be reserved
    /// again when the CQ is found empty after this call.
    #[inline]
    pub(super) fn released(&self) -> u64 {
        // Pairs with `release`: a poll that follows sees all that the destroyed QPs left in the CQ.
        self.released.load(Ordering::Acquire)
    }

    /// A QP that had reserved `entries` is destroyed.
    pub(super) fn release(&self, entries: u64) {
        self.released.fetch_add(entries, Ordering::Release);
    }

    /// Whether nothing will complete here any more (overrun, device gone).
    #[inline]
    pub(super) fn is_broken(&self) -> bool {
        self.health.is_broken()
    }

    pub(super) fn mark_broken(&self) {
        self.health.mark_broken();
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        // SAFETY: all QPs of the CQ hold an Arc of this value and are gone; the poller acknowledged
        // its events. A failed destroy leaves the CQ usable, so the channel that the CQ points to
        // is kept then.
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

/// The error of a call on a CQ that does not work any more.
pub(super) fn broken() -> FabricError {
    FabricError::Call {
        call: "completion queue (overrun, or the device is gone)",
        source: io::Error::from_raw_os_error(libc::EIO),
    }
}

/// Control's handle of a poller: names the CQ that new QPs complete on.
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
