//! [`SpareMemory`]: registered memory that ended admin connections left, for the next ones.
//!
//! To allocate and to register memory takes longer than to make a QP. Every mount begins with an
//! admin connection. After a restart of the target many mounts connect at once, and each would wait
//! for that.
//!
//! Invariant: no device writes into spare memory. Memory becomes spare when the QP of its
//! connection is destroyed: [`EndedMemory`](super::EndedMemory) is dropped then.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rblk_fabric::MemoryRegion;

/// Pieces of spare memory that one device keeps at most.
const SPARES_MAX: usize = 16;

/// Spare memory in one protection domain. It is deregistered with the last clone of this value.
#[derive(Clone, Default, Debug)]
pub struct SpareMemory(Arc<Mutex<Vec<MemoryRegion>>>);

impl SpareMemory {
    /// Memory of at least so many bytes, if there is some. It is not cleared.
    pub fn take(&self, bytes: usize) -> Option<MemoryRegion> {
        let mut spares = self.lock();
        let at = spares.iter().position(|memory| memory.region().len() >= bytes)?;
        Some(spares.swap_remove(at))
    }

    /// Keeps memory that no device uses any more, or deregisters it if there is enough.
    pub(super) fn put(&self, memory: MemoryRegion) {
        let mut spares = self.lock();
        if spares.len() < SPARES_MAX {
            return spares.push(memory);
        }
        // To deregister takes long: other connections do not wait for it.
        drop(spares);
        drop(memory);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<MemoryRegion>> {
        // Nothing panics with the lock held.
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
    fn memory_is_used_again_where_it_is_large_enough() {
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
    fn so_much_is_kept_and_no_more() {
        let (pd, spares) = (domain(), SpareMemory::default());
        for _ in 0..SPARES_MAX + 3 {
            spares.put(registered(&pd, 4096));
        }
        assert_eq!(spares.lock().len(), SPARES_MAX);
    }
}
