//! [`MemoryRegion`]: an `ibv_mr` over a [`Region`].
//!
//! Contract: the pages stay mapped while the device may reach them. So the MR owns an `Arc` of its
//! region. When deregistration fails, that `Arc` is leaked together with the MR.

use std::io;
use std::mem;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::sys::resource::{Resource, getrlimit};
use rblk_protocol::width::wide64;

use super::ffi;
use super::protection_domain::ProtectionDomain;
use crate::error::{FabricError, Result};
use crate::region::Region;
use crate::work::{Access, Lkey, MemoryOrder, Rkey};

// Bytes that all MRs of this process have pinned. The memlock limit is a limit of this sum.
static PINNED: AtomicU64 = AtomicU64::new(0);

/// A registered region. Dropping it deregisters the region; its keys are dead then.
#[derive(Debug)]
pub(crate) struct MemoryRegion {
    raw: NonNull<ffi::ibv_mr>,
    lkey: Lkey,
    rkey: Rkey,
    bytes: u64,
    pd: ProtectionDomain,
    region: Arc<Region>,
}

// SAFETY: an ibv_mr is only read after registration, and ibv_dereg_mr may run on any thread.
unsafe impl Send for MemoryRegion {}
// SAFETY: as for Send; shared access reads two copied keys.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers the whole region. Its first byte has the address `base` in WRs. Within a page,
    /// and within a huge page, `base` is where the memory is.
    ///
    /// # Errors
    /// [`FabricError::Limit`], [`FabricError::MemlockTooSmall`],
    /// [`FabricError::NoRoomToRegister`], or the errno of `ibv_reg_mr`.
    pub(crate) fn register(
        pd: &ProtectionDomain,
        region: &Arc<Region>,
        base: u64,
        access: Access,
    ) -> Result<Self> {
        let caps = pd.device().caps();
        let bytes = wide64(region.len());
        if bytes > caps.max_region_bytes {
            return Err(FabricError::Limit {
                device: caps.name.clone(),
                what: "bytes of one memory region",
                limit: caps.max_region_bytes,
                asked: bytes,
            });
        }
        let pointer = region.pointer(0, region.len()).map_or(std::ptr::null_mut(), NonNull::as_ptr);
        let flags = flags(access, pd.order());
        // SAFETY: the range is a live mapping. The Arc stored below keeps it mapped until after
        // deregistration. `Region` allows the device and a peer to change its bytes.
        let raw =
            unsafe { ffi::ibv_reg_mr_iova2(pd.raw(), pointer.cast(), region.len(), base, flags) };
        let Some(raw) = NonNull::new(raw) else {
            let error = io::Error::last_os_error();
            let memlock = Memlock::of_this_process();
            return Err(registration_error(&caps.name, error, bytes, memlock));
        };
        PINNED.fetch_add(bytes, Ordering::Relaxed);
        // SAFETY: ibv_reg_mr returned it, valid until ibv_dereg_mr.
        let (lkey, rkey) = unsafe { (Lkey((*raw.as_ptr()).lkey), Rkey((*raw.as_ptr()).rkey)) };
        // Inline payload is read by this process, at the address in the SGE.
        if base == region.address() {
            pd.note(lkey, region);
        }
        Ok(Self { raw, lkey, rkey, bytes, pd: pd.clone(), region: Arc::clone(region) })
    }

    /// Key for our own WRs.
    #[must_use]
    pub(crate) fn lkey(&self) -> Lkey {
        self.lkey
    }

    /// Key to give to a peer.
    #[must_use]
    pub(crate) fn rkey(&self) -> Rkey {
        self.rkey
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        self.pd.forget(self.lkey);
        // SAFETY: the MR was made by ibv_reg_mr and is freed only here; its PD lives in `pd`.
        let errno = unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) };
        if errno == 0 {
            PINNED.fetch_sub(self.bytes, Ordering::Relaxed);
            return;
        }
        // The device may still reach the pages, so they stay mapped.
        mem::forget(Arc::clone(&self.region));
        mem::forget(self.pd.clone());
        tracing::error!(
            device = self.pd.device().name(),
            bytes = self.bytes,
            error = %io::Error::from_raw_os_error(errno),
            "ibv_dereg_mr failed; the memory region and its pages are leaked"
        );
    }
}

/// Relaxed ordering is an optional flag: rdma-core drops it where the kernel does not know optional
/// flags, and drivers that cannot do it ignore it.
fn flags(access: Access, order: MemoryOrder) -> u32 {
    let mut flags = match order {
        MemoryOrder::Relaxed => ffi::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0,
        MemoryOrder::Strict => 0,
    };
    if access.local_write {
        flags |= ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
    }
    if access.remote_write {
        flags |= ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
    }
    if access.remote_read {
        flags |= ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
    }
    flags
}

/// The error of a failed registration. The kernel says ENOMEM or EPERM when the memlock limit is
/// reached, which holds only for those without CAP_IPC_LOCK. Devices say ENOMEM, too, when their
/// table of regions or of pages is full.
fn registration_error(
    device: &str,
    source: io::Error,
    bytes: u64,
    memlock: Memlock,
) -> FabricError {
    let errno = source.raw_os_error();
    if let (Some(libc::ENOMEM | libc::EPERM), Memlock::Limit(limit)) = (errno, memlock)
        && limit < bytes.saturating_add(PINNED.load(Ordering::Relaxed))
    {
        return FabricError::MemlockTooSmall { bytes, limit };
    }
    match errno {
        Some(libc::ENOMEM | libc::ENOSPC | libc::EAGAIN) => {
            FabricError::NoRoomToRegister { device: device.to_owned(), bytes, source }
        }
        _ => FabricError::Call { call: "ibv_reg_mr", source },
    }
}

/// How much this process may lock.
#[derive(Clone, Copy, Debug)]
enum Memlock {
    /// As much as there is.
    Unlimited,
    /// The length in bytes.
    Limit(u64),
}

impl Memlock {
    fn of_this_process() -> Self {
        let read = |file| std::fs::read_to_string(file).unwrap_or_default();
        if locks_all(&read("/proc/self/status"), &read("/proc/self/uid_map")) {
            return Self::Unlimited;
        }
        match getrlimit(Resource::RLIMIT_MEMLOCK) {
            Ok((limit, _hard)) => Self::Limit(limit),
            Err(_) => Self::Unlimited,
        }
    }
}

/// Whether a process has CAP_IPC_LOCK where it counts: in the first user namespace, which maps all
/// ids to themselves. Root of a container with ids of its own is limited.
fn locks_all(status: &str, uid_map: &str) -> bool {
    /// CAP_IPC_LOCK (linux/capability.h).
    const IPC_LOCK: u32 = 14;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = effective.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
    let is_first = uid_map.split_whitespace().eq(["0", "0", "4294967295"]);
    is_first && set >> IPC_LOCK & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_is_what_verbs_h_says() {
        let strict = |access| flags(access, MemoryOrder::Strict);
        assert_eq!(strict(Access::LOCAL_READ), 0);
        assert_eq!(strict(Access::LOCAL_WRITE), 1);
        assert_eq!(strict(Access::REMOTE), 7);
        assert_eq!(flags(Access::REMOTE, MemoryOrder::Relaxed), 7 | 1 << 20);
    }

    fn error_of(errno: i32, memlock: Memlock) -> FabricError {
        registration_error("card0", io::Error::from_raw_os_error(errno), 1 << 30, memlock)
    }

    #[test]
    fn memlock_is_named_only_where_it_counts() {
        let small = Memlock::Limit(64 << 10);
        for errno in [libc::ENOMEM, libc::EPERM] {
            let error = error_of(errno, small);
            assert!(matches!(error, FabricError::MemlockTooSmall { .. }), "{error}");
        }
        // Root, and a limit that is wide enough: then the card is full, and may have room later.
        for memlock in [Memlock::Unlimited, Memlock::Limit(u64::MAX)] {
            let error = error_of(libc::ENOMEM, memlock);
            assert!(matches!(error, FabricError::NoRoomToRegister { .. }), "{error}");
            assert!(error.to_string().contains("card0"), "{error}");
        }
    }

    #[test]
    fn who_may_lock_all() {
        let status = |set| format!("Name:\tx\nCapPrm:\t0\nCapEff:\t{set}\n");
        let (first, container) = ("         0          0 4294967295\n", "0 100000 65536\n");
        assert!(locks_all(&status("000001ffffffffff"), first));
        assert!(locks_all(&status("0000000000004000"), first));
        assert!(!locks_all(&status("0000000000003fff"), first));
        assert!(!locks_all(&status("000001ffffffffff"), container));
        assert!(!locks_all("", ""));
    }

    #[test]
    fn other_errors_keep_their_errno() {
        let error = error_of(libc::EFAULT, Memlock::Limit(0));
        assert!(matches!(error, FabricError::Call { call: "ibv_reg_mr", .. }));
    }
}
