//! What the kernels of a [`Rig`] do when connections end: QPs are destroyed some steps later, as
//! the seed has it.

use rblk_fabric::Connection;
use rblk_initiator::grave::Grave;
use rblk_initiator::path::DeadPath;
use rblk_target::connection::ConnectionId;
use rblk_target::poll_group::ToGroup;
use rblk_target::store::Store;

use super::Rig;
use crate::seed::Random;

/// A connection that ended and is not destroyed.
#[derive(Debug)]
pub(super) enum Corpse {
    /// Of the target, with the poll group to tell.
    Target { group: usize, id: ConnectionId, qp: Option<Connection> },
    /// Of an initiator. The path goes first.
    Initiator { dead: DeadPath, grave: Option<Grave> },
}

/// Connections that ended and are not destroyed.
#[derive(Debug)]
pub(super) struct Corpses {
    // With the steps at which they are destroyed.
    due: Vec<(u64, Corpse)>,
    most_steps: u64,
    random: Random,
    held: bool,
}

impl Corpses {
    pub(super) fn new(seed: u64, most_steps: u64) -> Self {
        let random = Random::new(seed ^ 0x6275_7279);
        Self { due: Vec::new(), most_steps, random, held: false }
    }

    pub(super) fn add(&mut self, step: u64, corpse: Corpse) {
        let steps = if self.most_steps == 0 { 0 } else { self.random.below(self.most_steps + 1) };
        self.due.push((step + steps, corpse));
    }

    fn take(&mut self, step: u64) -> Vec<Corpse> {
        if self.held || self.due.is_empty() {
            return Vec::new();
        }
        self.due.extract_if(.., |(due, _)| *due <= step).map(|(_, corpse)| corpse).collect()
    }

    /// Those of the target are destroyed with its process.
    pub(super) fn drop_target(&mut self) {
        self.due.retain(|(_, corpse)| matches!(corpse, Corpse::Initiator { .. }));
    }
}

impl<S: Store> Rig<S> {
    /// Destroys what is due.
    pub(super) fn destroy_due(&mut self) {
        for corpse in self.corpses.take(self.steps) {
            match corpse {
                Corpse::Target { group, id, qp } => {
                    drop(qp);
                    self.mail_to(group, ToGroup::Destroyed { connection: id });
                }
                Corpse::Initiator { dead, grave } => {
                    drop(dead);
                    drop(grave);
                }
            }
        }
    }

    /// While this is set, no kernel comes to destroying QPs.
    pub fn hold_destroys(&mut self, held: bool) {
        self.corpses.held = held;
        self.destroy_due();
    }

    /// Connections of the target that ended and whose QPs are not destroyed.
    #[must_use]
    pub fn undestroyed(&self) -> usize {
        let of_target = |(_, corpse): &&(u64, Corpse)| matches!(corpse, Corpse::Target { .. });
        self.corpses.due.iter().filter(of_target).count()
    }
}
