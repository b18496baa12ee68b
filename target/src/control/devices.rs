//! Devices a target was reached by: one protection domain each, one poller per poll group.
//!
//! A device has a place, which is that of its pollers in every poll group. A CQ that broke is made
//! anew when the next connection for it comes, but only after its poll group gave the old one back:
//! until then its QPs are being destroyed. A device with no CQ left gives its place up: what comes
//! by it next registers everything again, as with a device that was reset or plugged in again,
//! which is another one.

use std::sync::Arc;

use rblk_fabric::{
    Access, Device, FabricError, MemoryRegion, PageKind, Poller, PollerHandle, ProtectionDomain,
    Region, Result, Transport,
};

use super::Control;
use crate::arena::MIN_EXTENT_BYTES;
use crate::memory::Human;
use crate::poll_group::thread::POLLERS_MAX;
use crate::poll_group::{PollerMemory, ToGroup};
use crate::store::VolumeIndex;
use crate::volume::Placement;

/// CQ entries of one poller, where the device has them: about a hundred I/O queues of default
/// depth.
const CQ_ENTRIES: u32 = 1 << 16;
/// The same of the software provider, where an entry has memory only once it was used: thousands of
/// sessions.
const CQ_ENTRIES_SOFTWARE: u32 = 1 << 20;
/// Sink of READs per poll group, on devices that need one.
const SINK_BYTES: usize = 16 << 20;

/// The CQ of a device in one poll group.
#[derive(Debug)]
enum Cq {
    /// It takes connections.
    Works(PollerHandle),
    /// It broke, and its connections are not buried.
    Ends,
    /// It broke, and its place in the poll group is empty.
    Gone,
}

#[derive(Debug)]
pub(super) struct DeviceEntry {
    pub(super) device: Device,
    pub(super) pd: ProtectionDomain,
    arena: Arc<MemoryRegion>,
    zeros: Arc<MemoryRegion>,
    volumes: Vec<(VolumeIndex, Arc<MemoryRegion>)>,
    // By poll group.
    cqs: Vec<Cq>,
}

impl DeviceEntry {
    /// A CQ for one poll group, and the memory of the poll group as the device knows it.
    fn make_poller(
        &self,
        io_max_bytes: u32,
    ) -> Result<(Box<dyn Poller>, PollerHandle, PollerMemory)> {
        let caps = self.device.caps();
        let sink = if caps.read_sink_needs_remote_write {
            let region = Region::allocate(SINK_BYTES, PageKind::Normal).map_err(|e| {
                FabricError::Call { call: "mmap", source: std::io::Error::other(e) }
            })?;
            let access = Access { local_write: true, remote_write: true, remote_read: false };
            Some(Arc::new(self.pd.register(&region, access)?))
        } else {
            None
        };
        let entries = match caps.transport {
            Transport::SoftTcp | Transport::SoftMemory => CQ_ENTRIES_SOFTWARE,
            _ => CQ_ENTRIES,
        };
        let (poller, handle) = self.pd.poller(entries.min(caps.max_cq_entries))?;
        let memory = PollerMemory {
            arena: Arc::clone(&self.arena),
            zeros: Arc::clone(&self.zeros),
            sink,
            sink_extent_max: io_max_bytes.max(MIN_EXTENT_BYTES),
            volumes: self.volumes.clone(),
        };
        Ok((poller, handle, memory))
    }
}

impl Control {
    /// The place of a device. A new device gets its domain, registrations and pollers now.
    ///
    /// # Errors
    /// Memory cannot be registered, a CQ cannot be made, or the target has too many devices.
    pub fn device(&mut self, device: &Device) -> Result<usize> {
        let is_it = |entry: &DeviceEntry| entry.device.same_as(device);
        if let Some(at) = self.devices.iter().position(|e| e.as_ref().is_some_and(is_it)) {
            return Ok(at);
        }
        let place = self.devices.iter().position(Option::is_none).unwrap_or(self.devices.len());
        if place >= POLLERS_MAX {
            return Err(FabricError::Limit {
                device: device.caps().name.clone(),
                what: "devices of one target",
                limit: POLLERS_MAX as u64,
                asked: place as u64 + 1,
            });
        }
        let mut entry = self.register(device)?;
        let io_max = self.limits.io_max_bytes;
        let made = self.groups.iter().map(|_| entry.make_poller(io_max));
        for (group, (poller, handle, memory)) in
            made.collect::<Result<Vec<_>>>()?.into_iter().enumerate()
        {
            entry.cqs.push(Cq::Works(handle));
            self.send(group, ToGroup::AddPoller { place, poller, memory });
        }
        let caps = device.caps();
        tracing::info!(device = caps.name, transport = %caps.transport, "serving by a device");
        if place == self.devices.len() {
            self.devices.push(None);
        }
        self.devices[place] = Some(entry);
        Ok(place)
    }

    /// Registers what is everybody's with a device.
    fn register(&self, device: &Device) -> Result<DeviceEntry> {
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
        let name = &device.caps().name;
        tracing::info!("registered {} with {name} in {:.1?}", Human(bytes), begin.elapsed());
        let cqs = Vec::with_capacity(self.groups.len());
        Ok(DeviceEntry { device: device.clone(), pd, arena, zeros, volumes, cqs })
    }

    /// The domain of the device at a place, and its CQ in a poll group, made anew where that broke.
    ///
    /// # Errors
    /// What the peer is told: the CQ broke and is not gone yet, or the device gives no other.
    pub(super) fn poller(
        &mut self,
        place: usize,
        group: usize,
    ) -> std::result::Result<(ProtectionDomain, PollerHandle), String> {
        let io_max = self.limits.io_max_bytes;
        let Some(entry) = self.devices.get_mut(place).and_then(Option::as_mut) else {
            return Err("the device is gone".to_owned());
        };
        match &entry.cqs[group] {
            Cq::Works(handle) => return Ok((entry.pd.clone(), handle.clone())),
            Cq::Ends => {
                return Err("the device broke, and its old connections are not destroyed yet: \
                            connect again"
                    .to_owned());
            }
            Cq::Gone => {}
        }
        let (poller, handle, memory) = entry
            .make_poller(io_max)
            .map_err(|error| format!("the device broke and has to be reset: {error}"))?;
        entry.cqs[group] = Cq::Works(handle.clone());
        let (pd, name) = (entry.pd.clone(), &entry.device.caps().name);
        tracing::info!(device = name, poll_group = group, "a completion queue is made anew");
        self.send(group, ToGroup::AddPoller { place, poller, memory });
        Ok((pd, handle))
    }

    /// A CQ broke: no connection is made for it any more.
    pub(super) fn on_poller_broken(&mut self, group: usize, place: usize) {
        if let Some(entry) = self.devices.get_mut(place).and_then(Option::as_mut)
            && let Some(cq) = entry.cqs.get_mut(group)
        {
            *cq = Cq::Ends;
        }
    }

    /// A CQ that broke has no connection left. It is destroyed; with the last one of a device
    /// everything is that was made there.
    pub(super) fn on_poller_gone(
        &mut self,
        group: usize,
        place: usize,
        poller: Box<dyn Poller>,
        memory: PollerMemory,
    ) {
        let mut last = None;
        if let Some(place) = self.devices.get_mut(place)
            && let Some(entry) = place
        {
            if let Some(cq) = entry.cqs.get_mut(group) {
                *cq = Cq::Gone;
            }
            if entry.cqs.iter().all(|cq| matches!(cq, Cq::Gone)) {
                last = place.take();
            }
        }
        // Deregistering much memory takes long, and the device's last owner waits for its event
        // thread. The CQ goes first. Without a thread the closure, and so all of it, is dropped
        // here.
        let leaving = (poller, memory, last);
        let _ = std::thread::Builder::new().name("rblk-cq-gone".into()).spawn(move || {
            drop(leaving);
        });
    }
}
