//! Devices a target was reached by: one protection domain each, one poller per poll group.

use std::sync::Arc;

use rblk_fabric::{
    Access, Device, MemoryRegion, PageKind, PollerHandle, ProtectionDomain, Region, Result,
    Transport,
};

use super::Control;
use crate::arena::MIN_EXTENT_BYTES;
use crate::memory::Human;
use crate::poll_group::{PollerMemory, ToGroup};
use crate::store::VolumeIndex;
use crate::volume::Placement;

/// CQ entries of one poller, where the device has them: about a hundred I/O queues of default depth.
const CQ_ENTRIES: u32 = 1 << 16;
/// The same of the software provider, where an entry has memory only once it was used: thousands of sessions.
const CQ_ENTRIES_SOFTWARE: u32 = 1 << 20;
/// Sink of READs per poll group, on devices that need one.
const SINK_BYTES: usize = 16 << 20;

#[derive(Debug)]
pub(super) struct DeviceEntry {
    pub(super) device: Device,
    pub(super) pd: ProtectionDomain,
    /// By poll group.
    pub(super) pollers: Vec<PollerHandle>,
}

impl Control {
    /// The index of a device, which is also that of its poller in every poll group. A new device gets its
    /// domain, registrations and pollers now.
    ///
    /// # Errors
    /// Memory cannot be registered or a CQ cannot be made.
    pub fn device(&mut self, device: &Device) -> Result<usize> {
        if let Some(at) = self.devices.iter().position(|entry| entry.device.same_as(device)) {
            return Ok(at);
        }
        let caps = device.caps();
        let begin = std::time::Instant::now();
        let pd = device.alloc_pd()?;
        let register = |region: &Arc<Region>, access| pd.register(region, access).map(Arc::new);
        // Never remote: no peer reaches the arena, whatever key it guesses.
        let arena = register(&self.arena, Access::LOCAL_WRITE)?;
        let zeros = register(&self.zeros, Access::LOCAL_READ)?;
        let mut bytes = self.arena.len() as u64;
        let mut volumes: Vec<(VolumeIndex, Arc<MemoryRegion>)> = Vec::new();
        for volume in self.core.volumes() {
            if let Placement::Memory(region) = &volume.placement {
                volumes.push((volume.index, register(region, Access::LOCAL_WRITE)?));
                bytes += region.len() as u64;
            }
        }
        tracing::info!("registered {} with {} in {:.1?}", Human(bytes), caps.name, begin.elapsed());
        let cq_entries = match caps.transport {
            Transport::SoftTcp | Transport::SoftMemory => CQ_ENTRIES_SOFTWARE,
            _ => CQ_ENTRIES,
        };
        let mut pollers = Vec::new();
        let mut boxes = Vec::new();
        for _ in &self.groups {
            let sink = if caps.read_sink_needs_remote_write {
                let region = Region::allocate(SINK_BYTES, PageKind::Normal).map_err(|e| {
                    rblk_fabric::FabricError::Call {
                        call: "mmap",
                        source: std::io::Error::other(e),
                    }
                })?;
                Some(register(
                    &region,
                    Access { local_write: true, remote_write: true, remote_read: false },
                )?)
            } else {
                None
            };
            let (poller, handle) = pd.poller(cq_entries.min(caps.max_cq_entries))?;
            let memory = PollerMemory {
                arena: Arc::clone(&arena),
                zeros: Arc::clone(&zeros),
                sink,
                sink_extent_max: self.limits.io_max_bytes.max(MIN_EXTENT_BYTES),
                volumes: volumes.clone(),
            };
            boxes.push((poller, memory));
            pollers.push(handle);
        }
        for (group, (poller, memory)) in boxes.into_iter().enumerate() {
            self.send(group, ToGroup::AddPoller { poller, memory });
        }
        tracing::info!(device = caps.name, transport = %caps.transport, "serving by a device");
        self.devices.push(DeviceEntry { device: device.clone(), pd, pollers });
        Ok(self.devices.len() - 1)
    }
}
