//! Volumes that change while the target of a [`Rig`] runs: the steps that control would order.

use std::sync::Arc;

use rblk_operate::target::volume_counts::VolumeStats;
use rblk_target::data::poll_group::{StepTicket, ToGroup, VolumeStep};
use rblk_target::store::Store;
use rblk_target::volume::Volume;

use super::Rig;

/// The step under way.
#[derive(Debug, Default)]
pub(super) struct Changing {
    ticket: u64,
    // The answers of the poll groups.
    answers: Vec<Result<(), String>>,
}

impl Changing {
    /// Takes the answer of a poll group.
    pub(super) fn stepped(&mut self, ticket: StepTicket, result: Result<(), String>) {
        if ticket.0 == self.ticket {
            self.answers.push(result);
        }
    }
}

impl<S: Store> Rig<S> {
    /// Orders a step from every poll group. [`Self::step_outcome`] returns the result.
    pub fn begin_step(&mut self, volume: &Arc<Volume>, step: VolumeStep) {
        let ticket = self.next_step();
        for group in 0..self.groups.len() {
            let volume = Arc::clone(volume);
            let mail = match step {
                VolumeStep::Add => ToGroup::AddVolume {
                    volume,
                    backing: None,
                    stats: Arc::new(VolumeStats::default()),
                    registered: Vec::new(),
                    step: Some(ticket),
                },
                _ => ToGroup::Step { ticket, volume, step },
            };
            self.mail_to(group, mail);
        }
    }

    fn next_step(&mut self) -> StepTicket {
        self.changing.ticket += 1;
        self.changing.answers.clear();
        StepTicket(self.changing.ticket)
    }

    /// The result of the present step; `None` while a poll group has not done it.
    pub fn step_outcome(&mut self) -> Option<Result<(), String>> {
        if self.changing.answers.len() < self.groups.len() {
            return None;
        }
        Some(self.changing.answers.drain(..).find(Result::is_err).unwrap_or(Ok(())))
    }

    /// Replaces the volume with that index.
    pub fn note_volume(&mut self, volume: Arc<Volume>) {
        let at = usize::from(volume.index.0);
        if at < self.volumes.len() {
            self.volumes[at] = volume;
        } else {
            self.volumes.push(volume);
        }
    }
}
