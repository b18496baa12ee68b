//! [`ProtectionDomain`]: an `ibv_pd`.

use std::collections::HashMap;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::device::Device;
use super::ffi;
use crate::error::{FabricError, Result};
use crate::region::Region;
use crate::work::{Lkey, MemoryOrder};

/// A protection domain of a verbs device. Clones name the same one. It is freed with the last MR,
/// poller and QP that were made in it.
#[derive(Clone, Debug)]
pub struct ProtectionDomain(Arc<PdInner>);

#[derive(Debug)]
struct PdInner {
    raw: NonNull<ffi::ibv_pd>,
    // The registered regions, by lkey. Needed where no device checks keys: for inline payloads.
    regions: Mutex<HashMap<u32, Weak<Region>>>,
    order: MemoryOrder,
    // After `raw`: the context outlives the PD.
    device: Device,
}

// SAFETY: verbs objects may be used from any thread; libibverbs locks inside (ibv_alloc_pd(3) and
// the thread-safety chapter of libibverbs).
unsafe impl Send for PdInner {}
// SAFETY: as for Send.
unsafe impl Sync for PdInner {}

impl ProtectionDomain {
    /// Allocates a protection domain.
    ///
    /// # Errors
    /// The errno of `ibv_alloc_pd`.
    pub(crate) fn alloc(device: &Device, order: MemoryOrder) -> Result<Self> {
        // SAFETY: the context is open while `device` lives.
        let raw = unsafe { ffi::ibv_alloc_pd(device.context()) };
        let raw = NonNull::new(raw).ok_or_else(|| FabricError::last_os("ibv_alloc_pd"))?;
        let regions = Mutex::default();
        Ok(Self(Arc::new(PdInner { raw, regions, order, device: device.clone() })))
    }

    /// The PD, valid while `self` lives.
    pub(super) fn raw(&self) -> *mut ffi::ibv_pd {
        self.0.raw.as_ptr()
    }

    /// In which order the device may write to the memory of the domain.
    pub(crate) fn order(&self) -> MemoryOrder {
        self.0.order
    }

    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    /// Records the region that a key stands for.
    pub(super) fn note(&self, lkey: Lkey, region: &Arc<Region>) {
        let mut regions = self.0.regions.lock().unwrap_or_else(PoisonError::into_inner);
        regions.insert(lkey.0, Arc::downgrade(region));
    }

    /// The key is about to be deregistered.
    pub(super) fn forget(&self, lkey: Lkey) {
        self.0.regions.lock().unwrap_or_else(PoisonError::into_inner).remove(&lkey.0);
    }

    /// The region a live key stands for.
    pub(super) fn region_of(&self, lkey: Lkey) -> Option<Arc<Region>> {
        let regions = self.0.regions.lock().unwrap_or_else(PoisonError::into_inner);
        regions.get(&lkey.0)?.upgrade()
    }
}

impl Drop for PdInner {
    fn drop(&mut self) {
        // SAFETY: everything made in the PD holds an Arc of this value and is gone.
        let errno = unsafe { ffi::ibv_dealloc_pd(self.raw.as_ptr()) };
        if errno != 0 {
            let error = io::Error::from_raw_os_error(errno);
            tracing::error!(device = self.device.name(), %error, "ibv_dealloc_pd failed; leaked");
        }
    }
}
