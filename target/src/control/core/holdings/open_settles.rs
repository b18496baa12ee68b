//! [`OpenSettles`]: the settles that OPENs wait for. One at a time for a volume, however long its
//! store takes.

use std::collections::BTreeMap;

use crate::data::poll_group::SettleTicket;
use crate::volume::ids::VolumeIndex;

/// The settles under way, and how many were asked for.
#[derive(Debug, Default)]
pub(super) struct OpenSettles {
    asked: u64,
    under_way: BTreeMap<VolumeIndex, SettleTicket>,
}

impl OpenSettles {
    /// Whether one of the volume is under way. It does not cover what was written since it began.
    pub(super) fn is_under_way(&self, volume: VolumeIndex) -> bool {
        self.under_way.contains_key(&volume)
    }

    /// Begins one of a volume that has none.
    pub(super) fn begin(&mut self, volume: VolumeIndex) -> SettleTicket {
        self.asked += 1;
        let ticket = SettleTicket(self.asked);
        self.under_way.insert(volume, ticket);
        ticket
    }

    /// One has ended.
    pub(super) fn end(&mut self, ticket: SettleTicket) {
        self.under_way.retain(|_, under_way| *under_way != ticket);
    }
}
