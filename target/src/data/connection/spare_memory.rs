//! [`SpareMemory`]: registered memory that ended admin connections left, for the next ones.
//!
//! Allocation and registration of memory take longer than the creation of a QP. Every mount starts
//! with an admin connection. After a restart of the target many mounts connect at once, and each
//! would wait for that.
//!
//! Invariant: no device writes into spare memory. Memory becomes spare when the QP of its
//! connection is destroyed: [`EndedMemory`](super::EndedMemory) is dropped then.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rblk_fabric::MemoryRegion;

/// Most pieces of spare memory for one device.
const SPARES_MAX: usize = 16;

/// Spare memory in one protection domain. The last clone of this value deregisters it.
#[derive(Clone, Default, Debug)]
pub struct SpareMemory(Arc<Mutex<Vec<MemoryRegion>>>);

impl SpareMemory {
    /// Takes memory of at least `bytes`, if there is any. The memory is not cleared.
    pub fn take(&self, bytes: usize) -> Option<MemoryRegion> {
        let mut spares = self.lock();
        let at = spares.iter().position(|memory| memory.region().len() >= bytes)?;
        Some(spares.swap_remove(at))
    }

    /// Keeps memory that no device uses any more, or deregisters it if the list is full.
    pub(super) fn put(&self, memory: MemoryRegion) {
        let mut spares = self.lock();
        if spares.len() < SPARES_MAX {
            return spares.push(memory);
        }
        // Deregistration takes long: other connections must not wait for it.
        drop(spares);
        drop(memory);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<MemoryRegion>> {
        // No code panics with the lock held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use rblk_fabric::soft::network::Network;
    use rblk_fabric::{Access, Device, PageKind, ProtectionDomain, Region};

    use super::*;

    fn registered(pd: &ProtectionDomain, bytes: usize) -> MemoryRegion {
        let region = Region::allocate(bytes, PageKind::Normal).unwrap();
        pd.register(&region, Access::LOCAL_WRITE).unwrap()
    }

    fn domain() -> ProtectionDomain {
        Device::Soft(Network::new(1).device()).alloc_pd().unwrap()
    }

    #[test]
    fn memory_that_is_large_enough_is_reused() {
        let (pd, spares) = (domain(), SpareMemory::default());
        assert!(spares.take(1).is_none());
        let memory = registered(&pd, 8192);
        let region = Arc::downgrade(memory.region());
        spares.put(memory);
        assert!(spares.take(8193).is_none());
        let again = spares.take(4096).expect("spare memory");
        assert!(std::ptr::eq(Arc::as_ptr(again.region()), region.as_ptr()));
        assert!(spares.take(4096).is_none(), "two connections share no memory");
    }

    #[test]
    fn the_number_of_spares_is_bounded() {
        let (pd, spares) = (domain(), SpareMemory::default());
        for _ in 0..SPARES_MAX + 3 {
            spares.put(registered(&pd, 4096));
        }
        assert_eq!(spares.lock().len(), SPARES_MAX);
    }
}
