//! Devices and what is made on them, over the providers: [`Device`], [`ProtectionDomain`],
//! [`MemoryRegion`], [`PollerHandle`].
//!
//! These belong to control, so each is an enum over the providers. The data side is one trait,
//! [`Poller`].

use std::sync::Arc;

use rblk_protocol::width::{wide, wide64};

use crate::caps::DeviceCaps;
use crate::error::Result;
use crate::poller::Poller;
use crate::region::Region;
use crate::soft;
#[cfg(feature = "verbs")]
use crate::verbs;
use crate::work::{Access, Lkey, RemoteBuffer, Rkey, Sge};

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
    /// What the device can do.
    #[must_use]
    pub fn caps(&self) -> &DeviceCaps {
        match self {
            Self::Soft(d) => d.caps(),
            #[cfg(feature = "verbs")]
            Self::Verbs(d) => d.caps(),
        }
    }

    /// A new protection domain.
    ///
    /// # Errors
    /// The verbs call's errno.
    pub fn alloc_pd(&self) -> Result<ProtectionDomain> {
        match self {
            Self::Soft(d) => Ok(ProtectionDomain::Soft(soft::ProtectionDomain::new(d))),
            #[cfg(feature = "verbs")]
            Self::Verbs(d) => verbs::ProtectionDomain::alloc(d).map(ProtectionDomain::Verbs),
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
    /// Registers the whole region. The MR keeps the region alive and is deregistered on drop.
    ///
    /// # Errors
    /// [`MemlockTooSmall`](crate::FabricError::MemlockTooSmall) with limit and fix if that is the
    /// cause; else the errno.
    pub fn register(&self, region: &Arc<Region>, access: Access) -> Result<MemoryRegion> {
        let inner = match self {
            Self::Soft(pd) => MrInner::Soft(pd.register(region, access)?),
            #[cfg(feature = "verbs")]
            Self::Verbs(pd) => MrInner::Verbs(verbs::MemoryRegion::register(pd, region, access)?),
        };
        Ok(MemoryRegion { inner, region: Arc::clone(region) })
    }

    /// A CQ of at least `cq_entries`. The box goes to the data thread. The handle stays with
    /// control, which needs it to make QPs.
    ///
    /// # Errors
    /// [`Limit`](crate::FabricError::Limit) when the device has fewer entries; else the errno.
    pub fn poller(&self, cq_entries: u32) -> Result<(Box<dyn Poller>, PollerHandle)> {
        match self {
            Self::Soft(pd) => {
                let (poller, handle) = soft::Poller::create(pd, cq_entries)?;
                Ok((Box::new(poller), PollerHandle::Soft(handle)))
            }
            #[cfg(feature = "verbs")]
            Self::Verbs(pd) => {
                let (poller, handle) = verbs::Poller::create(pd, cq_entries)?;
                Ok((Box::new(poller), PollerHandle::Verbs(handle)))
            }
        }
    }
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
            addr: self.region.address() + wide64(offset),
            len,
            lkey: self.lkey(),
        })
    }

    /// What a peer needs to reach `offset` of the region.
    #[must_use]
    pub fn remote(&self, offset: usize) -> RemoteBuffer {
        RemoteBuffer { addr: self.region.address() + wide64(offset), rkey: self.rkey() }
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
