//! [`InlineSources`]: which memory may be sent inside a WR.
//!
//! The library of the provider copies an inline payload, in this process, from the address in the
//! SGE. It checks neither key nor bounds. Safe code can forge an SGE, so the check is made here:
//! the bytes must be in a region that is registered under that key, in the PD of the QP, or of
//! another QP of the poller that used the key lately. The region is held until the provider has
//! copied the bytes. A payload that fails the check is sent without the inline flag, and the device
//! then checks it. So does a payload from memory that peers may reach: the addresses of its SGEs
//! are not those of this process.

use std::sync::{Arc, Weak};

use rblk_protocol::width::wide;

use crate::region::Region;
use crate::verbs::protection_domain::ProtectionDomain;
use crate::work::{Lkey, Sge};

/// Regions that are remembered. Headers and small replies come from one or two regions.
const REMEMBERED: usize = 4;

/// The regions that inline payloads came from lately.
#[derive(Debug)]
pub(in crate::verbs) struct InlineSources {
    entries: [HeldRegion; REMEMBERED],
    next: usize,
}

#[derive(Debug)]
struct HeldRegion {
    lkey: Lkey,
    region: Weak<Region>,
    // Held from a check to `release`.
    held: Option<Arc<Region>>,
}

impl InlineSources {
    pub(in crate::verbs) fn new() -> Self {
        let entries =
            std::array::from_fn(|_| HeldRegion { lkey: Lkey(0), region: Weak::new(), held: None });
        Self { entries, next: 0 }
    }

    /// Whether the bytes may be read. If so, they stay mapped until [`Self::release`].
    #[inline]
    pub(in crate::verbs) fn hold(&mut self, pd: &ProtectionDomain, sge: &Sge) -> bool {
        if let Some(entry) = self.entries.iter_mut().find(|entry| entry.lkey == sge.lkey) {
            if entry.held.is_none() {
                entry.held = entry.region.upgrade();
            }
            if entry.held.as_deref().is_some_and(|region| contains(region, sge)) {
                return true;
            }
        }
        // The first use of a key, a key that now stands for other memory, or a forged key.
        let Some(region) = pd.region_of(sge.lkey).filter(|region| contains(region, sge)) else {
            return false;
        };
        let place = self.entries.iter().position(|entry| entry.lkey == sge.lkey).or_else(|| {
            self.next = (self.next + 1) % REMEMBERED;
            (0..REMEMBERED)
                .map(|i| (self.next + i) % REMEMBERED)
                .find(|i| self.entries[*i].held.is_none())
        });
        // This batch holds all places: send this payload without the inline flag.
        let Some(place) = place else { return false };
        let entry = &mut self.entries[place];
        if entry.held.is_some() {
            return false;
        }
        *entry = HeldRegion { lkey: sge.lkey, region: Arc::downgrade(&region), held: Some(region) };
        true
    }

    /// The provider has copied all payloads that were held.
    #[inline]
    pub(in crate::verbs) fn release(&mut self) {
        for entry in &mut self.entries {
            entry.held = None;
        }
    }
}

fn contains(region: &Region, sge: &Sge) -> bool {
    let offset = sge.addr.checked_sub(region.address()).and_then(|o| usize::try_from(o).ok());
    offset.is_some_and(|offset| region.pointer(offset, wide(sge.len)).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::PageKind;

    #[test]
    fn bounds() {
        let region = Region::allocate(4096, PageKind::Normal).unwrap();
        let sge = |offset: i64, len| Sge {
            addr: region.address().wrapping_add_signed(offset),
            len,
            lkey: Lkey(1),
        };
        assert!(contains(&region, &sge(0, 4096)));
        assert!(contains(&region, &sge(4095, 1)));
        for (offset, len) in [(-1, 1), (0, 4097), (4095, 2), (4096, 1), (i64::MAX, u32::MAX)] {
            assert!(!contains(&region, &sge(offset, len)), "{offset} {len}");
        }
    }
}
