//! [`Steps`]: the steps by which volumes change while a poll group runs.
//!
//! Control orders one step at a time, from every poll group, and waits for all of them. A volume
//! grows while commands run: first every shard knows the new size, then commands are checked
//! against it. For everything else the volume is closed first: the connections of all sessions that
//! ever opened it end, as if their links had broken, and their hosts connect again. When they are
//! gone, no command, no RDMA and no part of a command at another shard is of the volume any more,
//! in any poll group. What is left are write-backs and prefetches of its shards, and those end.

use std::sync::Arc;

use rblk_protocol::width::narrow;

use super::{FromGroup, PollGroup, StepTicket, VolumeStep};
use crate::cache::{PartToken, ShardReply, ShardRequest};
use crate::identity::ConnectionId;
use crate::store::{Store, VolumeIndex};
use crate::volume::Volume;

/// What a step waits for.
#[derive(Debug)]
enum Until {
    /// These connections are gone.
    Gone(Vec<ConnectionId>),
    /// The shard has written what was dirty.
    Written,
    /// The shard has made everything durable.
    Durable,
    /// Nothing works on the volume; then it becomes this one, or (`None`) it goes.
    Quiet(Option<Arc<Volume>>),
}

/// The step under way, if one is.
#[derive(Debug, Default)]
pub(super) struct Steps(Option<(StepTicket, VolumeIndex, Until)>);

impl Steps {
    /// Whether a step waits for something.
    #[inline]
    pub(super) fn are_waiting(&self) -> bool {
        self.0.is_some()
    }
}

impl<S: Store> PollGroup<S> {
    /// Begins a step.
    pub(super) fn take_step(&mut self, ticket: StepTicket, volume: VolumeIndex, step: VolumeStep) {
        // Control has given up a step that it did not wait for.
        self.steps.0 = None;
        let until = match step {
            VolumeStep::Add { volume, backing: _, stats, registered } => {
                for (place, memory) in registered {
                    self.turn.pollers.add_volume(place, volume.index, memory);
                }
                self.turn.access.announce(volume.index, Arc::clone(&stats));
                self.add_to_shard(&volume, stats);
                return self.stepped(ticket, Ok(()));
            }
            VolumeStep::Grow { size_bytes } => {
                self.turn.shard.grow_volume(volume, size_bytes);
                return self.stepped(ticket, Ok(()));
            }
            VolumeStep::Access(volume) => {
                self.limits_changed(Some(volume.index), None);
                self.turn.access.open_to_commands(volume);
                return self.stepped(ticket, Ok(()));
            }
            VolumeStep::Close => {
                self.turn.access.remove(volume);
                Until::Gone(self.end_those_who_know(volume))
            }
            VolumeStep::WriteBack => {
                let from = self.token_of(ticket);
                self.turn.shard.request(ShardRequest::Flush { from, volume }, self.turn.now);
                Until::Written
            }
            VolumeStep::Reshape(shaped) => Until::Quiet(Some(shaped)),
            VolumeStep::Drop => Until::Quiet(None),
        };
        self.steps.0 = Some((ticket, volume, until));
    }

    /// Ends the connections of every session that ever opened a volume. Returns them, and those
    /// that were ending already.
    fn end_those_who_know(&mut self, volume: VolumeIndex) -> Vec<ConnectionId> {
        let access = &self.turn.access;
        let knows = self.connections.iter().filter(|c| access.knows(c.params().session, volume));
        let ids: Vec<ConnectionId> = knows.map(|connection| connection.id()).collect();
        self.end_all("its volume changes", |connection| ids.contains(&connection.id()));
        ids
    }

    fn token_of(&self, ticket: StepTicket) -> PartToken {
        PartToken::of_control(narrow(self.turn.group), narrow(ticket.0 & u64::from(u16::MAX)))
    }

    fn stepped(&mut self, ticket: StepTicket, result: Result<(), String>) {
        let group = self.turn.group;
        self.turn.outbox.push(FromGroup::Stepped { group, ticket, result });
    }

    /// The shard answered what a step asked for.
    #[cold]
    pub(super) fn on_step_reply(&mut self, number: u16, reply: &ShardReply) {
        let ShardReply::Done { result, .. } = reply else {
            return debug_assert!(false, "a step asks for nothing else");
        };
        let Some((ticket, volume, until)) = self.steps.0.take() else { return };
        if self.token_of(ticket).number_of_control() != Some(number) {
            // The answer to a step that was given up.
            self.steps.0 = Some((ticket, volume, until));
            return;
        }
        if let Err(errno) = result {
            return self.stepped(ticket, Err(format!("its store failed: {errno}")));
        }
        if matches!(until, Until::Written) && self.turn.shard.is_writable(volume) {
            let from = self.token_of(ticket);
            self.steps.0 = Some((ticket, volume, Until::Durable));
            self.turn.shard.request(ShardRequest::Sync { from, volume }, self.turn.now);
        } else {
            self.stepped(ticket, Ok(()));
        }
    }

    /// Goes on with the step under way, if what it waited for is there. Returns whether it was.
    #[cold]
    pub(super) fn go_on_stepping(&mut self) -> bool {
        let Some((ticket, volume, until)) = self.steps.0.take() else { return false };
        let result = match &until {
            Until::Gone(ids) if !ids.iter().any(|id| self.connections.has(*id)) => Ok(()),
            Until::Quiet(shaped) if self.turn.shard.is_quiet(volume) => match shaped {
                Some(shaped) => {
                    let (cache, bytes) = (shaped.cache, shaped.size_bytes());
                    self.turn.shard.reshape_volume(volume, cache, bytes);
                    Ok(())
                }
                None => {
                    self.turn.pollers.remove_volume(volume);
                    self.turn.shard.remove_volume(volume).map_err(|error| error.to_string())
                }
            },
            _ => {
                self.steps.0 = Some((ticket, volume, until));
                return false;
            }
        };
        self.stepped(ticket, result);
        true
    }
}
