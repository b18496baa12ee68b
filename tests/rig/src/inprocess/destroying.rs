//! [`Destroys`]: the QPs of a [`Rig`] whose connections ended. As with a real kernel, a QP is
//! destroyed some steps after the end of its connection; the seed decides when.

use rblk_fabric::Connection;
use rblk_initiator::engine::path::DeadPath;
use rblk_initiator::queue::undestroyed::UndestroyedPath;
use rblk_target::data::poll_group::ToGroup;
use rblk_target::store::Store;
use rblk_target::volume::ids::ConnectionId;

use super::Rig;
use crate::seed::Random;

/// A connection that ended, with a QP to destroy.
#[derive(Debug)]
pub(super) enum Ended {
    /// A connection of the target, with the poll group to notify.
    Target { group: usize, id: ConnectionId, qp: Option<Connection> },
    /// A connection of an initiator. The path is dropped first.
    Initiator { dead: DeadPath, undestroyed: Option<UndestroyedPath> },
}

/// Connections that ended, with QPs to destroy.
#[derive(Debug)]
pub(super) struct Destroys {
    // With the steps at which they are destroyed.
    due: Vec<(u64, Ended)>,
    most_steps: u64,
    random: Random,
    held: bool,
}

impl Destroys {
    pub(super) fn new(seed: u64, most_steps: u64) -> Self {
        let random = Random::new(seed ^ 0x6275_7279);
        Self { due: Vec::new(), most_steps, random, held: false }
    }

    pub(super) fn add(&mut self, step: u64, ended: Ended) {
        let steps = if self.most_steps == 0 { 0 } else { self.random.below(self.most_steps + 1) };
        self.due.push((step + steps, ended));
    }

    fn take(&mut self, step: u64) -> Vec<Ended> {
        if self.held || self.due.is_empty() {
            return Vec::new();
        }
        self.due.extract_if(.., |(due, _)| *due <= step).map(|(_, ended)| ended).collect()
    }

    /// The QPs of the target are destroyed with its process.
    pub(super) fn drop_target(&mut self) {
        self.due.retain(|(_, ended)| matches!(ended, Ended::Initiator { .. }));
    }
}

impl<S: Store> Rig<S> {
    /// Destroys the QPs that are due.
    pub(super) fn destroy_due(&mut self) {
        for ended in self.destroys.take(self.steps) {
            match ended {
                Ended::Target { group, id, qp } => {
                    drop(qp);
                    self.mail_to(group, ToGroup::Destroyed { connection: id });
                }
                Ended::Initiator { dead, undestroyed } => {
                    drop(dead);
                    drop(undestroyed);
                }
            }
        }
    }

    /// Holds the destruction of QPs.
    pub fn hold_destroys(&mut self, held: bool) {
        self.destroys.held = held;
        self.destroy_due();
    }

    /// The target's connections that ended, with QPs to destroy.
    #[must_use]
    pub fn undestroyed(&self) -> usize {
        let of_target = |(_, ended): &&(u64, Ended)| matches!(ended, Ended::Target { .. });
        self.destroys.due.iter().filter(of_target).count()
    }
}
