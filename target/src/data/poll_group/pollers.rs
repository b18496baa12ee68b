//! [`Pollers`]: the CQs of a poll group, one for each device, by place.
//!
//! A place is the index of the device in control's table. A broken CQ (overrun, or its device is
//! gone) keeps its place, and its memory stays registered, until the CQ's last connection is
//! removed: until then the device may touch the memory. After that the place is empty, and control
//! may put a new CQ there.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

use rblk_fabric::{Connection, MemoryRegion, Poller, PollerCounters, QpIndex};
use rblk_protocol::width::wide;

use super::PollerMemory;
use crate::volume::ids::VolumeIndex;

/// One CQ, with its QPs and the memory of this poll group, if it is registered with the device.
pub(super) struct PollerEntry {
    pub(super) poller: Box<dyn Poller>,
    pub(super) memory: Option<PollerMemory>,
    // Connection index by QP.
    qps: Vec<Option<u16>>,
    broken: bool,
}

/// All CQs of a poll group.
#[derive(Default)]
pub(super) struct Pollers {
    places: Vec<Option<PollerEntry>>,
    broken: usize,
    // Counters of removed CQs.
    counted: PollerCounters,
}

impl Pollers {
    /// Number of places, including empty ones.
    pub(super) fn places(&self) -> usize {
        self.places.len()
    }

    /// Puts a CQ at an empty place. False: the place is taken, and nothing changed.
    pub(super) fn put(
        &mut self,
        place: usize,
        poller: Box<dyn Poller>,
        memory: Option<PollerMemory>,
    ) -> bool {
        if self.places.len() <= place {
            self.places.resize_with(place + 1, || None);
        }
        if self.places[place].is_some() {
            return false;
        }
        self.places[place] = Some(PollerEntry { poller, memory, qps: Vec::new(), broken: false });
        true
    }

    /// Adds the registration of a memory volume with the device at a place.
    pub(super) fn add_volume(
        &mut self,
        place: usize,
        volume: VolumeIndex,
        registered: Arc<MemoryRegion>,
    ) {
        let entry = self.places.get_mut(place).and_then(Option::as_mut);
        if let Some(memory) = entry.and_then(|entry| entry.memory.as_mut()) {
            memory.volumes.push((volume, registered));
        }
    }

    /// Drops the registrations of a memory volume. No connection sends from it any more.
    pub(super) fn remove_volume(&mut self, volume: VolumeIndex) {
        for memory in self.places.iter_mut().flatten().filter_map(|entry| entry.memory.as_mut()) {
            memory.volumes.retain(|(index, _)| *index != volume);
        }
    }

    /// The CQ at a place, if it exists and works.
    #[inline]
    pub(super) fn working(&mut self, place: usize) -> Option<&mut PollerEntry> {
        self.places.get_mut(place)?.as_mut().filter(|entry| !entry.broken)
    }

    /// The index of the QP's connection. `None`: the connection ended.
    #[inline]
    pub(super) fn connection_at(&self, place: usize, qp: QpIndex) -> Option<u16> {
        self[place].qps.get(wide(qp.0)).copied().flatten()
    }

    /// Assigns a QP to its connection.
    pub(super) fn attached(&mut self, place: usize, qp: QpIndex, connection: u16) {
        let (entry, at) = (&mut self[place], wide(qp.0));
        if entry.qps.len() <= at {
            entry.qps.resize(at + 1, None);
        }
        entry.qps[at] = Some(connection);
    }

    /// Moves a QP to the error state and takes it off its CQ, to destroy it.
    pub(super) fn detach(&mut self, place: usize, qp: QpIndex) -> Option<Connection> {
        let entry = &mut self[place];
        entry.poller.fail(qp);
        if let Some(connection) = entry.qps.get_mut(wide(qp.0)) {
            *connection = None;
        }
        entry.poller.detach(qp)
    }

    /// All working CQs, with their places.
    pub(super) fn all_working(&mut self) -> impl Iterator<Item = (usize, &mut PollerEntry)> {
        let all = self.places.iter_mut().enumerate();
        all.filter_map(|(at, entry)| Some((at, entry.as_mut().filter(|entry| !entry.broken)?)))
    }

    /// The counters of all CQs, including removed ones.
    pub(super) fn counters(&self) -> PollerCounters {
        let mut sum = self.counted;
        for entry in self.places.iter().flatten() {
            sum.add(&entry.poller.counters());
        }
        sum
    }

    /// Marks the CQ at a place as broken: it is not used any more. False if it was marked before.
    pub(super) fn note_broken(&mut self, place: usize) -> bool {
        let Some(entry) = self.working(place) else { return false };
        entry.broken = true;
        self.broken += 1;
        true
    }

    /// Whether a broken CQ still has its place.
    #[inline]
    pub(super) fn has_broken(&self) -> bool {
        self.broken > 0
    }

    /// Takes a broken CQ out of its place.
    pub(super) fn take_broken(&mut self, place: usize) -> Option<PollerEntry> {
        let entry = self.places.get_mut(place)?.take_if(|entry| entry.broken)?;
        self.broken -= 1;
        self.counted.add(&entry.poller.counters());
        Some(entry)
    }
}

impl Index<usize> for Pollers {
    type Output = PollerEntry;

    #[inline(always)]
    fn index(&self, place: usize) -> &PollerEntry {
        let Some(entry) = &self.places[place] else { unreachable!("a connection keeps its CQ") };
        entry
    }
}

impl IndexMut<usize> for Pollers {
    #[inline(always)]
    fn index_mut(&mut self, place: usize) -> &mut PollerEntry {
        let Some(entry) = &mut self.places[place] else {
            unreachable!("a connection keeps its CQ")
        };
        entry
    }
}
