//! Devices and their objects, over the providers: [`Device`], [`ProtectionDomain`],
//! [`MemoryRegion`], [`PollerHandle`].
//!
//! These belong to control, so each is an enum over the providers. The data side is one trait,
//! [`Poller`].

use std::sync::Arc;

use rblk_protocol::width::{wide, wide64};

use crate::caps::{DeviceCaps, Transport};
use crate::completion_vector::CompletionVector;
use crate::diagnosis::DeviceFacts;
use crate::error::Result;
use crate::provider::poller::Poller;
use crate::region::Region;
use crate::soft;
#[cfg(feature = "verbs")]
use crate::verbs;
use crate::work::{Access, Lkey, MemoryOrder, RemoteBuffer, Rkey, Sge};

/// An opened device.
#[derive(Clone, Debug)]
pub enum Device {
    /// Software provider.
    Soft(soft::Device),
    /// Verbs device.
    #[cfg(feature = "verbs")]
    Verbs(verbs::Device),
}

impl Device {
    /// The abilities of the device.
    #[must_use]
    pub fn caps(&self) -> &DeviceCaps {
        match self {
            Self::Soft(d) => d.caps(),
            #[cfg(feature = "verbs")]
            Self::Verbs(d) => d.caps(),
        }
    }

    /// Whether connections can be encrypted ([`crate::Connection::secure`]): those of the TCP
    /// device, if the kernel has TLS. [`soft::tls::kernel_has_tls`] names the missing part.
    ///
    /// The first call tries it, and the kernel may load modules for that. So a mount that encrypts
    /// nothing must not ask: modules of a host may lie on the disk that waits for the connection.
    #[must_use]
    pub fn encrypts(&self) -> bool {
        self.caps().transport == Transport::SoftTcp && soft::tls::kernel_has_tls().is_ok()
    }

    /// The facts that the device and its port report. `None` for the software provider.
    ///
    /// # Errors
    /// The verbs call's errno.
    pub fn facts(&self, port: u8) -> Result<Option<DeviceFacts>> {
        match self {
            Self::Soft(_) => {
                // The device has no ports.
                let _ = port;
                Ok(None)
            }
            #[cfg(feature = "verbs")]
            Self::Verbs(d) => verbs::facts_of_device(d, port).map(Some),
        }
    }

    /// A new protection domain.
    ///
    /// # Errors
    /// The verbs call's errno.
    pub fn alloc_pd(&self) -> Result<ProtectionDomain> {
        self.alloc_pd_with(MemoryOrder::default())
    }

    /// As [`Self::alloc_pd`]. All memory that is registered in the domain is written in that order.
    /// The software provider writes in the order of arrival in any case.
    ///
    /// # Errors
    /// As there.
    #[cfg_attr(not(feature = "verbs"), expect(unused_variables, reason = "of verbs"))]
    pub fn alloc_pd_with(&self, order: MemoryOrder) -> Result<ProtectionDomain> {
        match self {
            Self::Soft(d) => Ok(ProtectionDomain::Soft(soft::ProtectionDomain::new(d))),
            #[cfg(feature = "verbs")]
            Self::Verbs(d) => verbs::ProtectionDomain::alloc(d, order).map(ProtectionDomain::Verbs),
        }
    }

    /// Whether both are the same device. Then one PD serves both.
    #[must_use]
    pub fn same_as(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Soft(a), Self::Soft(b)) => a.same_as(b),
            #[cfg(feature = "verbs")]
            (Self::Verbs(a), Self::Verbs(b)) => a.same_as(b),
            #[cfg(feature = "verbs")]
            _ => false,
        }
    }
}

/// A protection domain. A QP can use only MRs of its own domain.
#[derive(Clone, Debug)]
pub enum ProtectionDomain {
    /// Software provider.
    Soft(soft::ProtectionDomain),
    /// Verbs.
    #[cfg(feature = "verbs")]
    Verbs(verbs::ProtectionDomain),
}

impl ProtectionDomain {
    /// A further domain of the same device, where memory is written in the same order.
    ///
    /// # Errors
    /// The verbs call's errno.
    pub fn another(&self) -> Result<Self> {
        match self {
            Self::Soft(pd) => Ok(Self::Soft(soft::ProtectionDomain::new(pd.device()))),
            #[cfg(feature = "verbs")]
            Self::Verbs(pd) => {
                verbs::ProtectionDomain::alloc(pd.device(), pd.order()).map(Self::Verbs)
            }
        }
    }

    /// Registers the whole region. The MR keeps the region alive and is deregistered on drop.
    ///
    /// Remote memory has another address for peers than in this process: a random one for each
    /// registration. So the address in a command does not tell a peer where memory of this process
    /// is. iWARP is the exception: its software provider takes the process's own addresses only
    /// (`siw_reg_user_mr` of the kernel).
    ///
    /// # Errors
    /// [`MemlockTooSmall`](crate::FabricError::MemlockTooSmall) with limit and fix if that is the
    /// cause; [`NoRoomToRegister`](crate::FabricError::NoRoomToRegister), which may pass; else the
    /// errno.
    pub fn register(&self, region: &Arc<Region>, access: Access) -> Result<MemoryRegion> {
        let own = region.address();
        let is_reached = access.remote_read || access.remote_write;
        let base = if is_reached && self.takes_any_address() { random_base(own) } else { own };
        let inner = match self {
            Self::Soft(pd) => MrInner::Soft(pd.register(region, base, access)?),
            #[cfg(feature = "verbs")]
            Self::Verbs(pd) => {
                MrInner::Verbs(verbs::MemoryRegion::register(pd, region, base, access)?)
            }
        };
        Ok(MemoryRegion { inner, base, region: Arc::clone(region) })
    }

    /// Whether the address of an MR may differ from that of its memory.
    fn takes_any_address(&self) -> bool {
        match self {
            Self::Soft(_) => true,
            #[cfg(feature = "verbs")]
            Self::Verbs(pd) => {
                matches!(pd.device().caps().transport, Transport::InfiniBand | Transport::Roce)
            }
        }
    }

    /// A CQ of at least `cq_entries`. Successive CQs take successive completion vectors. The box
    /// goes to the data thread. The handle stays with control, which needs it to make QPs.
    ///
    /// # Errors
    /// [`Limit`](crate::FabricError::Limit) when the device has fewer entries; else the errno.
    pub fn poller(&self, cq_entries: u32) -> Result<(Box<dyn Poller>, PollerHandle)> {
        self.poller_at(cq_entries, CompletionVector::Turn)
    }

    /// A CQ of at least `cq_entries` on the given completion vector.
    ///
    /// # Errors
    /// As there.
    #[cfg_attr(not(feature = "verbs"), allow(unused_variables, reason = "software has none"))]
    pub fn poller_at(
        &self,
        cq_entries: u32,
        vector: CompletionVector,
    ) -> Result<(Box<dyn Poller>, PollerHandle)> {
        match self {
            Self::Soft(pd) => {
                let (poller, handle) = soft::Poller::create(pd, cq_entries)?;
                Ok((Box::new(poller), PollerHandle::Soft(handle)))
            }
            #[cfg(feature = "verbs")]
            Self::Verbs(pd) => {
                let (poller, handle) = verbs::Poller::create(pd, cq_entries, vector)?;
                Ok((Box::new(poller), PollerHandle::Verbs(handle)))
            }
        }
    }
}

/// Low bits that the address of an MR has in common with its memory: devices map pages of up to
/// 1 GiB, and both must be aligned alike.
const BASE_KEPT: u64 = (1 << 30) - 1;
/// Highest bits of the address of an MR: far below the end of 64 bits, so that no range wraps
/// around.
const BASE_MASK: u64 = (1 << 62) - 1;

/// A random address for memory at `own`.
fn random_base(own: u64) -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // SipHash with keys of the system's random bytes, which differ for each `RandomState`.
    let random = RandomState::new().hash_one(own);
    (own & BASE_KEPT) | (random & BASE_MASK & !BASE_KEPT)
}

#[derive(Debug)]
enum MrInner {
    Soft(soft::MemoryRegion),
    #[cfg(feature = "verbs")]
    Verbs(verbs::MemoryRegion),
}

/// A registered [`Region`]. Dropping it deregisters the region; its keys are dead then.
#[derive(Debug)]
pub struct MemoryRegion {
    // Before `region`: deregistered before the memory is freed.
    inner: MrInner,
    // Address of the first byte in WRs, ours and the peer's.
    base: u64,
    region: Arc<Region>,
}

impl MemoryRegion {
    /// The memory.
    #[must_use]
    pub fn region(&self) -> &Arc<Region> {
        &self.region
    }

    /// Key for our own WRs.
    #[must_use]
    pub(crate) fn lkey(&self) -> Lkey {
        match &self.inner {
            MrInner::Soft(mr) => mr.lkey(),
            #[cfg(feature = "verbs")]
            MrInner::Verbs(mr) => mr.lkey(),
        }
    }

    /// Key to give to a peer.
    #[must_use]
    pub fn rkey(&self) -> Rkey {
        match &self.inner {
            MrInner::Soft(mr) => mr.rkey(),
            #[cfg(feature = "verbs")]
            MrInner::Verbs(mr) => mr.rkey(),
        }
    }

    /// An SGE over `len` bytes from `offset`, or `None` when that is not inside the region.
    #[must_use]
    pub fn sge(&self, offset: usize, len: u32) -> Option<Sge> {
        let end = offset.checked_add(wide(len))?;
        (end <= self.region.len()).then(|| Sge {
            addr: self.base + wide64(offset),
            len,
            lkey: self.lkey(),
        })
    }

    /// The address and rkey by which a peer reaches `offset` of the region.
    #[must_use]
    pub fn remote(&self, offset: usize) -> RemoteBuffer {
        RemoteBuffer { addr: self.base + wide64(offset), rkey: self.rkey() }
    }
}

/// Control's handle of a [`Poller`]. It is needed to make QPs that complete on its CQ.
#[derive(Clone, Debug)]
pub enum PollerHandle {
    /// Software provider.
    Soft(soft::PollerHandle),
    /// Verbs.
    #[cfg(feature = "verbs")]
    Verbs(verbs::PollerHandle),
}

impl PollerHandle {
    /// The entries of the CQ: the requested number, or more. `None` for the software provider: its
    /// queues belong to no device.
    #[must_use]
    pub fn entries(&self) -> Option<u32> {
        match self {
            Self::Soft(_) => None,
            #[cfg(feature = "verbs")]
            Self::Verbs(handle) => Some(verbs::entries_of_cq(handle)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::PageKind;

    #[test]
    fn a_peer_does_not_learn_where_memory_is() {
        let pd = Device::Soft(soft::Device::tcp()).alloc_pd().unwrap();
        let region = Region::allocate(4096, PageKind::Normal).unwrap();
        let own = region.address();
        let mut told = Vec::new();
        for access in [Access::REMOTE, Access { remote_write: false, ..Access::REMOTE }] {
            for _ in 0..4 {
                let mr = pd.register(&region, access).unwrap();
                let (first, last) = (mr.remote(0), mr.remote(4095));
                assert_eq!(last.addr, first.addr + 4095);
                assert_eq!(mr.sge(1, 1).unwrap().addr, first.addr + 1);
                assert_eq!((first.addr ^ own) & BASE_KEPT, 0, "aligned as the memory is");
                assert!(first.addr.checked_add(1 << 62).is_some(), "far from the end");
                assert!(first.addr.abs_diff(own) > BASE_KEPT, "the process's own address");
                told.push(first.addr);
            }
        }
        told.sort_unstable();
        told.dedup();
        assert_eq!(told.len(), 8, "the same address for another registration");
        // Memory that no peer reaches has its own address, which inline payloads need.
        let mr = pd.register(&region, Access::LOCAL_WRITE).unwrap();
        assert_eq!(mr.sge(0, 1).unwrap().addr, own);
    }
}
