//! Protection domains and memory regions in software.
//!
//! Each poller has its own copy of the key table behind its own lock, so that data threads never
//! share a lock. A turn reads its own copy. Registering and deregistering are rare and write to
//! every copy. The lock of `std` lets a waiting writer in before new readers, so a busy poller
//! cannot starve a writer.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rblk_protocol::width::{narrow, wide64};

use super::device::Device;
use super::keys::{INDEX_MAX, KeyCopy, KeyEntry, KeyTable};
use crate::connect::QpLimits;
use crate::error::{FabricError, Result};
use crate::region::Region;
use crate::work::{Access, Lkey, Rkey};

#[derive(Debug, Default)]
struct DomainKeys {
    table: KeyTable,
    // Indexes that are not in use.
    free: Vec<usize>,
    // Of each index.
    generations: Vec<u32>,
    // Of the pollers.
    copies: Vec<Weak<KeyCopy>>,
}

#[derive(Debug)]
struct Domain {
    device: Device,
    salt: u32,
    keys: Mutex<DomainKeys>,
}

impl Domain {
    fn keys(&self) -> MutexGuard<'_, DomainKeys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DomainKeys {
    fn set(&mut self, index: usize, entry: Option<&KeyEntry>) {
        self.table.set(index, entry.cloned());
        self.copies.retain(|copy| match copy.upgrade() {
            Some(copy) => {
                copy.set(index, entry.cloned());
                true
            }
            None => false,
        });
    }
}

/// A protection domain in software.
#[derive(Clone, Debug)]
pub struct ProtectionDomain(Arc<Domain>);

impl ProtectionDomain {
    /// A new protection domain of the device.
    #[must_use]
    pub(crate) fn new(device: &Device) -> Self {
        let (device, salt) = (device.clone(), device.domain_salt());
        let salt = narrow((salt ^ (salt >> 32)) & 0x7fff);
        let table = KeyTable::new(device.caps().read_sink_needs_remote_write);
        let keys = Mutex::new(DomainKeys { table, ..DomainKeys::default() });
        Self(Arc::new(Domain { device, salt, keys }))
    }

    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(super) fn same_as(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Registers a region. Its first byte has the address `base` in WRs.
    ///
    /// # Errors
    /// EINVAL for remote write without local write, as in verbs; [`FabricError::Limit`] when all
    /// keys are in use.
    pub(crate) fn register(
        &self,
        region: &Arc<Region>,
        base: u64,
        access: Access,
    ) -> Result<MemoryRegion> {
        if access.remote_write && !access.local_write {
            let source = io::Error::from_raw_os_error(libc::EINVAL);
            return Err(FabricError::Call { call: "register", source });
        }
        self.device().within(
            "region bytes",
            self.device().caps().max_region_bytes,
            wide64(region.len()),
        )?;
        let mut keys = self.0.keys();
        let index = match keys.free.pop() {
            Some(index) => index,
            None => {
                let index = keys.generations.len();
                self.device().within("memory regions", INDEX_MAX.into(), wide64(index))?;
                keys.generations.push(0);
                index
            }
        };
        keys.generations[index] = keys.generations[index].wrapping_add(1);
        let generation = keys.generations[index].wrapping_add(self.0.salt);
        let entry = KeyEntry::new(narrow(index), generation, access, (base, region));
        keys.set(index, Some(&entry));
        drop(keys);
        Ok(MemoryRegion { domain: self.clone(), index, lkey: entry.lkey(), rkey: entry.rkey() })
    }

    /// A copy of the key table for a poller. It is kept up to date.
    pub(super) fn key_copy(&self) -> Arc<KeyCopy> {
        let mut keys = self.0.keys();
        let copy = Arc::new(KeyCopy::new(keys.table.clone()));
        keys.copies.push(Arc::downgrade(&copy));
        copy
    }

    /// Checks that a QP of these limits may be made here for that poller, which may be of another
    /// domain of the same device. Returns the keys that the QP knows, where the poller knows
    /// others.
    pub(super) fn check(
        &self,
        poller: &PollerHandle,
        limits: &QpLimits,
    ) -> Result<Option<Arc<KeyCopy>>> {
        if !poller.pd.device().same_as(self.device()) {
            return Err(FabricError::Mixed("poller and protection domain"));
        }
        self.device().check(limits)?;
        Ok((!poller.pd.same_as(self)).then(|| self.key_copy()))
    }
}

/// Control's handle of a [`super::Poller`].
#[derive(Clone, Debug)]
pub struct PollerHandle {
    pd: ProtectionDomain,
    id: u64,
}

impl PollerHandle {
    pub(super) fn new(pd: ProtectionDomain, id: u64) -> Self {
        Self { pd, id }
    }

    /// Number of the poller, unique in the process.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn pd(&self) -> &ProtectionDomain {
        &self.pd
    }
}

/// A registered region in software. Dropping it deregisters the region: when the drop returns, no
/// byte can land in it any more.
#[derive(Debug)]
pub struct MemoryRegion {
    domain: ProtectionDomain,
    index: usize,
    lkey: Lkey,
    rkey: Rkey,
}

impl MemoryRegion {
    /// Key for our own WRs.
    #[must_use]
    pub(crate) fn lkey(&self) -> Lkey {
        self.lkey
    }

    /// Key for the peer.
    #[must_use]
    pub(crate) fn rkey(&self) -> Rkey {
        self.rkey
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let mut keys = self.domain.0.keys();
        keys.set(self.index, None);
        keys.free.push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::super::keys::Right;
    use super::*;
    use crate::region::PageKind;
    use crate::work::Sge;

    #[test]
    fn keys_check_bounds_and_rights_and_die() {
        let pd = ProtectionDomain::new(&Device::memory(7, 4096, false));
        let region = Region::allocate(4096, PageKind::Normal).unwrap();
        let base = 0x3000_0000_1234_5000;
        let mr = pd.register(&region, base, Access::LOCAL_WRITE).unwrap();
        let table = pd.0.keys().table.clone();
        let sge = |addr, len| Sge { addr, len, lkey: mr.lkey() };
        assert!(table.local(sge(base, 4096), true).is_some());
        assert!(table.local(sge(base, 4097), true).is_none());
        assert!(table.local(sge(base + 4096, 1), true).is_none());
        assert!(table.local(sge(base - 1, 1), true).is_none());
        assert!(table.local(sge(u64::MAX, 2), true).is_none());
        assert!(table.local(Sge { addr: base, len: 1, lkey: Lkey(mr.rkey().0) }, false).is_none());
        assert!(table.remote(mr.rkey(), base, 1, Right::Read).is_none());
        let rw = pd.register(&region, base, Access::REMOTE).unwrap();
        let table = pd.0.keys().table.clone();
        assert!(table.remote(rw.rkey(), base, 4096, Right::Write).is_some());
        assert!(table.remote(Rkey(rw.lkey().0), base, 1, Right::Write).is_none());
        let (dead, old) = (rw.rkey(), rw.lkey());
        drop(rw);
        let again = pd.register(&region, base, Access::REMOTE).unwrap();
        assert_ne!((again.rkey(), again.lkey()), (dead, old));
        assert!(pd.0.keys().table.remote(dead, base, 1, Right::Write).is_none());
        let bad = Access { remote_write: true, ..Access::LOCAL_READ };
        assert!(pd.register(&region, base, bad).is_err());
        let longer = Region::allocate(8192, PageKind::Normal).unwrap();
        let refused = pd.register(&longer, longer.address(), Access::LOCAL_WRITE);
        assert!(matches!(refused, Err(FabricError::Limit { limit: 4096, asked: 8192, .. })));
    }
}
