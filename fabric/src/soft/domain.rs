//! Protection domains, memory regions and the tables of keys.
//!
//! Each poller has its own copy of the key table behind its own lock, so that data threads never
//! meet on one: a turn reads its own copy; registering and deregistering, which are rare, write to
//! every copy. `std`'s lock lets a waiting writer in before new readers, so a busy poller cannot
//! starve them.

use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};

use super::device::Device;
use super::poller::{Poller, PollerHandle};
use crate::device::QpLimits;
use crate::error::{FabricError, Result};
use crate::region::Region;
use crate::work::{Access, Lkey, Rkey, Sge};

/// Low bits of a key: the slot. The rest is a generation, whose lowest bit tells rkeys from lkeys.
const SLOT_BITS: u32 = 16;
const SLOT_MASK: u32 = (1 << SLOT_BITS) - 1;

#[derive(Clone, Debug)]
struct Entry {
    lkey: u32,
    rkey: u32,
    access: Access,
    region: Arc<Region>,
}

impl Entry {
    fn pointer(&self, addr: u64, len: u32) -> Option<NonNull<u8>> {
        let offset = usize::try_from(addr.checked_sub(self.region.address())?).ok()?;
        self.region.pointer(offset, len as usize)
    }

    fn place(&self, addr: u64) -> Option<(Arc<Region>, usize)> {
        let offset = usize::try_from(addr.checked_sub(self.region.address())?).ok()?;
        Some((Arc::clone(&self.region), offset))
    }
}

/// What a peer wants to do with an MR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Right {
    Read,
    Write,
}

/// The live keys of a domain.
#[derive(Clone, Default, Debug)]
pub(super) struct KeyTable {
    slots: Vec<Option<Entry>>,
}

impl KeyTable {
    fn entry(&self, key: u32) -> Option<&Entry> {
        self.slots.get((key & SLOT_MASK) as usize)?.as_ref()
    }

    /// Where an SGE lies, if key, bounds and rights are good. Valid while the table is borrowed.
    pub(super) fn local(&self, sge: Sge, write: bool) -> Option<NonNull<u8>> {
        let entry = self.entry(sge.lkey.0).filter(|e| e.lkey == sge.lkey.0)?;
        if write && !entry.access.local_write {
            return None;
        }
        entry.pointer(sge.addr, sge.len)
    }

    /// Where the bytes that a peer named lie, if key, bounds and rights are good.
    pub(super) fn remote(
        &self,
        key: Rkey,
        addr: u64,
        len: u32,
        right: Right,
    ) -> Option<NonNull<u8>> {
        let entry = self.entry(key.0).filter(|e| e.rkey == key.0)?;
        let allowed = match right {
            Right::Read => entry.access.remote_read,
            Right::Write => entry.access.remote_write,
        };
        if allowed { entry.pointer(addr, len) } else { None }
    }

    /// The place of an SGE that may be written to.
    pub(super) fn local_place(&self, sge: Sge) -> Option<(Arc<Region>, usize)> {
        self.local(sge, true)?;
        self.entry(sge.lkey.0)?.place(sge.addr)
    }

    /// The place of what a peer writes.
    pub(super) fn remote_place(
        &self,
        key: Rkey,
        addr: u64,
        len: u32,
    ) -> Option<(Arc<Region>, usize)> {
        self.remote(key, addr, len, Right::Write)?;
        self.entry(key.0)?.place(addr)
    }

    fn set(&mut self, slot: usize, entry: Option<Entry>) {
        if self.slots.len() <= slot {
            self.slots.resize(slot + 1, None);
        }
        self.slots[slot] = entry;
    }
}

/// One poller's copy of the table.
#[derive(Debug)]
pub(super) struct KeyCopy(RwLock<KeyTable>);

impl KeyCopy {
    /// The keys as of now. Regions cannot go while the guard lives.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, KeyTable> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The keys as of now, unless they are being changed.
    pub(super) fn try_read(&self) -> Option<RwLockReadGuard<'_, KeyTable>> {
        self.0.try_read().ok()
    }

    fn set(&self, slot: usize, entry: Option<Entry>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).set(slot, entry);
    }
}

#[derive(Debug, Default)]
struct Keys {
    table: KeyTable,
    free: Vec<usize>,
    generations: Vec<u32>,
    copies: Vec<Weak<KeyCopy>>,
}

#[derive(Debug)]
struct Domain {
    device: Device,
    salt: u32,
    keys: Mutex<Keys>,
}

impl Domain {
    fn keys(&self) -> MutexGuard<'_, Keys> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keys {
    fn set(&mut self, slot: usize, entry: Option<&Entry>) {
        self.table.set(slot, entry.cloned());
        self.copies.retain(|copy| match copy.upgrade() {
            Some(copy) => {
                copy.set(slot, entry.cloned());
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
    pub(super) fn new(device: Device, salt: u64) -> Self {
        let salt = ((salt ^ (salt >> 32)) & 0x7fff) as u32;
        Self(Arc::new(Domain { device, salt, keys: Mutex::default() }))
    }

    pub(super) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(super) fn same_as(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Registers a region.
    ///
    /// # Errors
    /// EINVAL for remote write without local write, as verbs has it; [`FabricError::Limit`] when
    /// there are no keys left.
    pub fn register(&self, region: &Arc<Region>, access: Access) -> Result<MemoryRegion> {
        if access.remote_write && !access.local_write {
            let source = io::Error::from_raw_os_error(libc::EINVAL);
            return Err(FabricError::Call { call: "register", source });
        }
        self.device().within(
            "region bytes",
            self.device().caps().max_region_bytes,
            region.len() as u64,
        )?;
        let mut keys = self.0.keys();
        let slot = match keys.free.pop() {
            Some(slot) => slot,
            None => {
                let slot = keys.generations.len();
                self.device().within("memory regions", SLOT_MASK.into(), slot as u64)?;
                keys.generations.push(0);
                slot
            }
        };
        keys.generations[slot] = keys.generations[slot].wrapping_add(1);
        let tag = (keys.generations[slot].wrapping_add(self.0.salt) & 0x7fff) << (SLOT_BITS + 1);
        let low = u32::try_from(slot).unwrap_or(SLOT_MASK);
        let (lkey, rkey) = (tag | low, tag | (1 << SLOT_BITS) | low);
        keys.set(slot, Some(&Entry { lkey, rkey, access, region: Arc::clone(region) }));
        drop(keys);
        Ok(MemoryRegion { domain: self.clone(), slot, lkey: Lkey(lkey), rkey: Rkey(rkey) })
    }

    /// A completion queue of `cq_entries`, and control's handle to it.
    ///
    /// # Errors
    /// [`FabricError::Limit`], or no epoll instance could be made.
    pub fn poller(&self, cq_entries: u32) -> Result<(Poller, PollerHandle)> {
        let caps = self.device().caps();
        self.device().within("CQ entries", caps.max_cq_entries.into(), cq_entries.into())?;
        let mut keys = self.0.keys();
        let copy = Arc::new(KeyCopy(RwLock::new(keys.table.clone())));
        keys.copies.push(Arc::downgrade(&copy));
        drop(keys);
        Poller::new(self.clone(), copy, cq_entries)
    }

    /// Checks that a QP of these limits may be made here for that poller.
    pub(super) fn check(&self, poller: &PollerHandle, limits: &QpLimits) -> Result<()> {
        if !poller.is_of(self) {
            return Err(FabricError::Mixed("poller and protection domain"));
        }
        self.device().check(limits)
    }
}

/// A registered region in software. Dropping it kills its keys, at once and for good.
#[derive(Debug)]
pub struct MemoryRegion {
    domain: ProtectionDomain,
    slot: usize,
    lkey: Lkey,
    rkey: Rkey,
}

impl MemoryRegion {
    /// Key for our own WRs.
    #[must_use]
    pub fn lkey(&self) -> Lkey {
        self.lkey
    }

    /// Key for the peer.
    #[must_use]
    pub fn rkey(&self) -> Rkey {
        self.rkey
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        let mut keys = self.domain.0.keys();
        // Waits for a turn of each poller at most: turns never block.
        keys.set(self.slot, None);
        keys.free.push(self.slot);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::PageKind;

    #[test]
    fn keys_check_bounds_and_rights_and_die() {
        let pd = Device::memory(7, 4096, false).alloc_pd().unwrap();
        let region = Region::allocate(4096, PageKind::Normal).unwrap();
        let mr = pd.register(&region, Access::LOCAL_WRITE).unwrap();
        let base = region.address();
        let table = pd.0.keys().table.clone();
        let sge = |addr, len| Sge { addr, len, lkey: mr.lkey() };
        assert!(table.local(sge(base, 4096), true).is_some());
        assert!(table.local(sge(base, 4097), true).is_none());
        assert!(table.local(sge(base + 4096, 1), true).is_none());
        assert!(table.local(sge(base - 1, 1), true).is_none());
        assert!(table.local(sge(u64::MAX, 2), true).is_none());
        assert!(table.local(Sge { addr: base, len: 1, lkey: Lkey(mr.rkey().0) }, false).is_none());
        assert!(table.remote(mr.rkey(), base, 1, Right::Read).is_none());
        let rw = pd.register(&region, Access::REMOTE).unwrap();
        let table = pd.0.keys().table.clone();
        assert!(table.remote(rw.rkey(), base, 4096, Right::Write).is_some());
        assert!(table.remote(Rkey(rw.lkey().0), base, 1, Right::Write).is_none());
        let (dead, old) = (rw.rkey(), rw.lkey());
        drop(rw);
        let again = pd.register(&region, Access::REMOTE).unwrap();
        assert_ne!((again.rkey(), again.lkey()), (dead, old));
        assert!(pd.0.keys().table.remote(dead, base, 1, Right::Write).is_none());
        let bad = Access { local_write: false, remote_write: true, remote_read: false };
        assert!(pd.register(&region, bad).is_err());
        let longer = Region::allocate(8192, PageKind::Normal).unwrap();
        let refused = pd.register(&longer, Access::LOCAL_WRITE);
        assert!(matches!(refused, Err(FabricError::Limit { limit: 4096, asked: 8192, .. })));
    }
}
