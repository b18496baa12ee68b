//! [`Devices`]: the RDMA devices that a target serves by: one protection domain each, one CQ per
//! poll group. On iWARP each I/O connection has a domain of its own as well
//! ([`crate::data::connection::BounceMemory`]), and shared memory is not registered.
//!
//! A device has a place in the table. The same number names its CQ in every poll group.
//!
//! A CQ that broke is made anew when the next connection for it comes, but only after its poll
//! group gave the old CQ back: until then the old QPs are being destroyed. A device without any CQ
//! leaves the table. When a connection comes by it again, it is registered as a new device, as
//! after a reset or when it is plugged in again (`registration`).

use std::sync::Arc;

use rblk_config::TargetConfig;
use rblk_fabric::{
    Access, CompletionVector, Device, FabricError, MemoryOrder, MemoryRegion, Poller, PollerHandle,
    ProtectionDomain, Region, Result, Transport,
};
use rblk_protocol::width::wide64;

use super::vectors::Vectors;
use crate::control::groups::Groups;
use crate::data::connection::SpareMemory;
use crate::data::poll_group::group_thread::POLLERS_MAX;
use crate::data::poll_group::{PollerMemory, ToGroup};
use crate::memory::demand::Human;
use crate::volume::ids::VolumeIndex;
use crate::volume::{Placement, Volume};

/// Entries of one CQ, if the device allows as many: enough for about a hundred I/O queues of
/// default depth.
const CQ_ENTRIES: u32 = 1 << 16;
/// Entries of one CQ of the software provider, which allocates an entry when it is first used:
/// enough for thousands of sessions.
const CQ_ENTRIES_SOFTWARE: u32 = 1 << 20;

/// The CQ of a device in one poll group.
#[derive(Debug)]
enum Cq {
    /// The CQ takes connections.
    Works(PollerHandle),
    /// The CQ broke, and its QPs are not destroyed yet.
    Ends,
    /// The CQ broke, and the poll group has given it back.
    Gone,
}

#[derive(Debug)]
struct DeviceEntry {
    device: Device,
    // Of admin connections.
    spares: SpareMemory,
    pd: ProtectionDomain,
    // `None` if its connections share no memory.
    memory: Option<PollerMemory>,
    // By poll group.
    cqs: Vec<Cq>,
}

impl DeviceEntry {
    /// A CQ for one poll group, and the memory of the poll group as the device knows it.
    fn make_poller(
        &self,
        vector: CompletionVector,
    ) -> Result<(Box<dyn Poller>, PollerHandle, Option<PollerMemory>)> {
        let (poller, handle) = self.pd.poller_at(self.cq_entries(), vector)?;
        Ok((poller, handle, self.memory.clone()))
    }

    /// Entries of a CQ.
    fn cq_entries(&self) -> u32 {
        let caps = self.device.caps();
        let entries = match caps.transport {
            Transport::SoftTcp | Transport::SoftMemory => CQ_ENTRIES_SOFTWARE,
            _ => CQ_ENTRIES,
        };
        entries.min(caps.max_cq_entries)
    }
}

/// The memory that every device registers.
#[derive(Clone, Debug)]
pub(in crate::control) struct TargetMemory {
    // One region, cut among the poll groups.
    arena: Arc<Region>,
    zeros: Arc<Region>,
    // Volumes in memory, which devices reach directly.
    volumes: Vec<(VolumeIndex, Arc<Region>)>,
    order: MemoryOrder,
}

/// Whether connections by a device are taken: `allowed` are the names of the only RDMA devices in
/// use.
pub(crate) fn may_serve(allowed: Option<&[String]>, device: &Device) -> bool {
    let caps = device.caps();
    let is_rdma = !matches!(caps.transport, Transport::SoftTcp | Transport::SoftMemory);
    !is_rdma || allowed.is_none_or(|names| names.contains(&caps.name))
}

/// A device with its registrations.
#[derive(Debug)]
pub(in crate::control) struct Registered {
    device: Device,
    pd: ProtectionDomain,
    // `None` if its connections share no memory.
    memory: Option<PollerMemory>,
}

impl TargetMemory {
    /// Registers the memory that all connections share, if they do. Much memory takes long.
    ///
    /// # Errors
    /// Memory cannot be registered.
    pub(in crate::control) fn register(&self, device: &Device) -> Result<Registered> {
        let pd = device.alloc_pd_with(self.order)?;
        let apart = device.caps().read_sink_needs_remote_write;
        let memory = if apart { None } else { Some(self.register_in(device, &pd)?) };
        Ok(Registered { device: device.clone(), pd, memory })
    }

    fn register_in(&self, device: &Device, pd: &ProtectionDomain) -> Result<PollerMemory> {
        let begin = std::time::Instant::now();
        let register = |region: &Arc<Region>, access| pd.register(region, access).map(Arc::new);
        // Never remote: no peer reaches the arena, whichever key it guesses.
        let arena = register(&self.arena, Access::LOCAL_WRITE)?;
        let zeros = register(&self.zeros, Access::LOCAL_READ)?;
        let mut bytes = wide64(self.arena.len());
        let mut volumes = Vec::new();
        for (index, region) in &self.volumes {
            volumes.push((*index, register(region, Access::LIVE_WRITE)?));
            bytes += wide64(region.len());
        }
        let name = &device.caps().name;
        tracing::info!("registered {} with {name} in {:.1?}", Human(bytes), begin.elapsed());
        Ok(PollerMemory { arena, zeros, volumes })
    }
}

impl Registered {
    /// Catches up with the volumes that came, went or got other memory since the start. A volume in
    /// memory that is resized keeps its index and has another region.
    fn follow(&mut self, shared: &TargetMemory) -> Result<()> {
        let Some(memory) = self.memory.as_mut() else { return Ok(()) };
        let is_of = |index: VolumeIndex, mr: &MemoryRegion, of: &(VolumeIndex, Arc<Region>)| {
            index == of.0 && Arc::ptr_eq(mr.region(), &of.1)
        };
        memory.volumes.retain(|(index, mr)| shared.volumes.iter().any(|of| is_of(*index, mr, of)));
        for of in &shared.volumes {
            if !memory.volumes.iter().any(|(index, mr)| is_of(*index, mr, of)) {
                let (index, region) = of;
                let mr = Arc::new(self.pd.register(region, Access::LIVE_WRITE)?);
                memory.volumes.push((*index, mr));
            }
        }
        Ok(())
    }
}

/// Every device of a target, with its registrations.
#[derive(Debug)]
pub(in crate::control) struct Devices {
    // By place.
    entries: Vec<Option<DeviceEntry>>,
    shared: TargetMemory,
    // The RDMA devices that may be used, by name; `None`: all.
    allowed: Option<Vec<String>>,
    vectors: Vectors,
}

impl Devices {
    /// No device yet. Each will register the arena, the zeros and the volumes in memory. RDMA
    /// devices that `running` does not name are not used.
    pub(in crate::control) fn new(
        arena: Arc<Region>,
        zeros: Arc<Region>,
        volumes: &[Arc<Volume>],
        running: &TargetConfig,
    ) -> Self {
        let volumes = volumes.iter().filter_map(|volume| match &volume.placement {
            Placement::Memory(region) => Some((volume.index, Arc::clone(region))),
            Placement::Store | Placement::Null => None,
        });
        let order = match running.transport.relaxed_ordering {
            true => MemoryOrder::Relaxed,
            false => MemoryOrder::Strict,
        };
        let shared = TargetMemory { arena, zeros, volumes: volumes.collect(), order };
        let vectors = Vectors::of_cpus(running.cpus.clone().unwrap_or_default());
        Self { entries: Vec::new(), shared, allowed: running.devices.clone(), vectors }
    }

    /// The memory that devices register.
    pub(in crate::control) fn shared(&self) -> &TargetMemory {
        &self.shared
    }

    /// Whether connections by a device are taken.
    pub(in crate::control) fn may_serve(&self, device: &Device) -> bool {
        may_serve(self.allowed.as_deref(), device)
    }

    /// The arena.
    pub(in crate::control) fn arena(&self) -> &Region {
        &self.shared.arena
    }

    /// All devices.
    pub(in crate::control) fn iter(&self) -> impl Iterator<Item = &Device> {
        self.entries.iter().flatten().map(|entry| &entry.device)
    }

    /// The device at a place.
    pub(in crate::control) fn at(&self, place: usize) -> Option<&Device> {
        self.entries.get(place)?.as_ref().map(|entry| &entry.device)
    }

    /// The place of a device that the target serves by.
    pub(in crate::control) fn find(&self, device: &Device) -> Option<usize> {
        let is_it = |entry: &DeviceEntry| entry.device.same_as(device);
        self.entries.iter().position(|e| e.as_ref().is_some_and(is_it))
    }

    /// The place of a device. A new device gets its domain, registrations and CQs now.
    ///
    /// # Errors
    /// Memory cannot be registered, a CQ cannot be made, or the target has too many devices.
    pub(in crate::control) fn place(
        &mut self,
        device: &Device,
        groups: &mut Groups,
    ) -> Result<usize> {
        match self.find(device) {
            Some(at) => Ok(at),
            None => self.take(self.shared.register(device)?, groups),
        }
    }

    /// The place of a device that has registered the memory. The device gets its CQs.
    ///
    /// # Errors
    /// A CQ cannot be made, a volume that came since cannot be registered, or the target has too
    /// many devices.
    pub(in crate::control) fn take(
        &mut self,
        mut new: Registered,
        groups: &mut Groups,
    ) -> Result<usize> {
        if let Some(at) = self.find(&new.device) {
            return Ok(at);
        }
        let place = self.entries.iter().position(Option::is_none).unwrap_or(self.entries.len());
        if place >= POLLERS_MAX {
            return Err(FabricError::Limit {
                device: new.device.caps().name.clone(),
                what: "devices of one target",
                limit: wide64(POLLERS_MAX),
                asked: wide64(place) + 1,
            });
        }
        new.follow(&self.shared)?;
        let Registered { device, pd, memory } = new;
        let (spares, cqs) = (SpareMemory::default(), Vec::with_capacity(groups.len()));
        let mut entry = DeviceEntry { device, spares, pd, memory, cqs };
        let name = &entry.device.caps().name;
        let made = (0..groups.len()).map(|at| entry.make_poller(self.vectors.of(at, name)));
        for (group, (poller, handle, memory)) in
            made.collect::<Result<Vec<_>>>()?.into_iter().enumerate()
        {
            entry.cqs.push(Cq::Works(handle));
            groups.send(group, ToGroup::AddPoller { place, poller, memory });
        }
        let caps = entry.device.caps();
        tracing::info!(device = caps.name, transport = %caps.transport, "serving by a device");
        if place == self.entries.len() {
            self.entries.push(None);
        }
        self.entries[place] = Some(entry);
        Ok(place)
    }

    /// Registers a volume in memory with every device that has shared memory. Returns the
    /// registrations by place.
    ///
    /// # Errors
    /// A device does not register it. Then no device knows it.
    pub(in crate::control) fn add_volume(
        &mut self,
        volume: VolumeIndex,
        region: &Arc<Region>,
    ) -> Result<Vec<(usize, Arc<MemoryRegion>)>> {
        let mut registered = Vec::new();
        for (place, entry) in self.entries.iter().enumerate() {
            let Some(entry) = entry.as_ref().filter(|entry| entry.memory.is_some()) else {
                continue;
            };
            registered.push((place, Arc::new(entry.pd.register(region, Access::LIVE_WRITE)?)));
        }
        for (place, memory) in &registered {
            let entry = self.entries.get_mut(*place).and_then(Option::as_mut);
            if let Some(shared) = entry.and_then(|entry| entry.memory.as_mut()) {
                shared.volumes.push((volume, Arc::clone(memory)));
            }
        }
        self.shared.volumes.push((volume, Arc::clone(region)));
        Ok(registered)
    }

    /// Makes every device forget a volume in memory. Poll groups may still have registrations.
    pub(in crate::control) fn remove_volume(&mut self, volume: VolumeIndex) {
        for memory in self.entries.iter_mut().flatten().filter_map(|entry| entry.memory.as_mut()) {
            memory.volumes.retain(|(index, _)| *index != volume);
        }
        self.shared.volumes.retain(|(index, _)| *index != volume);
    }

    /// The domain of the device at a place, and its CQ in a poll group, made anew if that broke.
    ///
    /// # Errors
    /// The text for the peer: the CQ broke and is not gone yet, or the device makes no other.
    pub(in crate::control) fn poller(
        &mut self,
        place: usize,
        group: usize,
        groups: &mut Groups,
    ) -> std::result::Result<(ProtectionDomain, PollerHandle), String> {
        let Some(entry) = self.entries.get_mut(place).and_then(Option::as_mut) else {
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
        let vector = self.vectors.of(group, &entry.device.caps().name);
        let (poller, handle, memory) = entry
            .make_poller(vector)
            .map_err(|error| format!("the device broke and has to be reset: {error}"))?;
        entry.cqs[group] = Cq::Works(handle.clone());
        let (pd, name) = (entry.pd.clone(), &entry.device.caps().name);
        tracing::info!(device = name, poll_group = group, "a completion queue is made anew");
        groups.send(group, ToGroup::AddPoller { place, poller, memory });
        Ok((pd, handle))
    }

    /// Memory that earlier admin connections left in the domain of the device at a place.
    pub(in crate::control) fn spares(&self, place: usize) -> SpareMemory {
        let entry = self.entries.get(place).and_then(Option::as_ref);
        entry.map(|entry| entry.spares.clone()).unwrap_or_default()
    }

    /// Entries of each CQ of the device at a place; 0 without one.
    pub(in crate::control) fn cq_entries(&self, place: usize) -> u32 {
        self.entries.get(place).and_then(Option::as_ref).map_or(0, DeviceEntry::cq_entries)
    }

    /// A CQ of the device at `place` broke: no connection is made for it any more.
    pub(in crate::control) fn poller_broke(&mut self, group: usize, place: usize) {
        let cq = self.entries.get_mut(place).and_then(Option::as_mut);
        let cq = cq.and_then(|entry| entry.cqs.get_mut(group));
        debug_assert!(cq.is_some(), "poll group {group} has no CQ of a device {place}");
        if let Some(cq) = cq {
            *cq = Cq::Ends;
        }
    }

    /// A broken CQ has no connection left. It is destroyed, and with the last CQ of a device the
    /// whole device entry.
    pub(in crate::control) fn poller_gone(
        &mut self,
        group: usize,
        place: usize,
        poller: Box<dyn Poller>,
        memory: Option<PollerMemory>,
    ) {
        let mut last = None;
        if let Some(place) = self.entries.get_mut(place)
            && let Some(entry) = place
        {
            if let Some(cq) = entry.cqs.get_mut(group) {
                *cq = Cq::Gone;
            }
            if entry.cqs.iter().all(|cq| matches!(cq, Cq::Gone)) {
                last = place.take();
            }
        }
        // To deregister much memory takes long, and the device's last owner waits for its event
        // thread. The CQ goes first. If no thread starts, the closure, with all of it, is dropped
        // here.
        let leaving = (poller, memory, last);
        let _ = std::thread::Builder::new().name("rblk-cq-gone".into()).spawn(move || {
            drop(leaving);
        });
    }

    /// Whether there is a device at a place.
    #[cfg(test)]
    pub(in crate::control) fn has(&self, place: usize) -> bool {
        self.entries.get(place).is_some_and(Option::is_some)
    }
}

#[cfg(test)]
mod tests {
    use rblk_fabric::PageKind;
    use rblk_fabric::soft::network::Network;

    use super::*;

    #[test]
    fn a_device_that_is_being_registered_follows_the_memory_of_a_volume() {
        let region = || Region::allocate(4096, PageKind::Normal).unwrap();
        let (index, other) = (VolumeIndex(3), VolumeIndex(4));
        let before = TargetMemory {
            arena: region(),
            zeros: region(),
            volumes: vec![(index, region()), (other, region())],
            order: MemoryOrder::Strict,
        };
        let mut new = before.register(&Device::Soft(Network::new(1).device())).unwrap();
        // The volume is resized meanwhile: it keeps its index and has other memory.
        let resized = region();
        let after = TargetMemory {
            volumes: vec![(other, Arc::clone(&before.volumes[1].1)), (index, Arc::clone(&resized))],
            ..before.clone()
        };
        new.follow(&after).unwrap();
        let volumes = new.memory.unwrap().volumes;
        assert_eq!(volumes.len(), 2);
        for (index, region) in &after.volumes {
            let (_, mr) = volumes.iter().find(|(known, _)| known == index).unwrap();
            assert!(Arc::ptr_eq(mr.region(), region), "{index:?} is reached by other memory");
        }
    }
}
