//! [`SettlesUnderWay`]: the poll groups that have not yet made the writes of hosts to a volume
//! durable.

use std::collections::BTreeMap;

use crate::control::groups::Groups;
use crate::data::poll_group::{SettleTicket, ToGroup};
use crate::volume::ids::VolumeIndex;

/// One settle.
#[derive(Debug)]
struct SettleUnderWay {
    // Poll groups that have not answered.
    waiting: usize,
    failure: Option<String>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct SettlesUnderWay {
    settles: BTreeMap<SettleTicket, SettleUnderWay>,
}

impl SettlesUnderWay {
    /// Asks every poll group.
    pub(super) fn begin(&mut self, ticket: SettleTicket, volume: VolumeIndex, groups: &mut Groups) {
        let waiting = groups.len();
        self.settles.insert(ticket, SettleUnderWay { waiting, failure: None });
        (0..waiting).for_each(|group| groups.send(group, ToGroup::Settle { ticket, volume }));
    }

    /// A poll group has answered. Returns the outcome, if that was the last one.
    pub(super) fn ended(
        &mut self,
        ticket: SettleTicket,
        result: Result<(), String>,
    ) -> Option<Result<(), String>> {
        let settle = self.settles.get_mut(&ticket)?;
        settle.waiting = settle.waiting.saturating_sub(1);
        if let Err(error) = result {
            settle.failure.get_or_insert(error);
        }
        (settle.waiting == 0).then_some(())?;
        self.settles.remove(&ticket).map(|settle| settle.failure.map_or(Ok(()), Err))
    }
}
