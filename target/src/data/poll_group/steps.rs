//! [`Steps`]: the steps by which volumes change while a poll group runs.
//!
//! Control orders one step at a time, from every poll group, and waits for all of them. A volume
//! grows while commands run: first every shard knows the new size, then commands are checked
//! against it. For everything else the volume is closed first: the connections of all sessions that
//! ever opened it end, as if their links had broken, and their hosts connect again. When they are
//! gone, no command, no RDMA and no part of a command at another shard is of the volume any more,
//! in any poll group. What is left are write-backs and prefetches of its shards, and those end.
//!
//! A store that does not answer keeps all of that from ending. Control waits for a bounded time,
//! and then orders [`VolumeStep::Access`] again, or gives the volume up ([`VolumeStep::Abandon`]).
//! Of a volume that was given up only what its store still works on is left. It goes when that
//! ends.
//!
//! For a snapshot the volume stays open, and its new writes are held ([`super::held`]).

use std::sync::Arc;

use rblk_fabric::MemoryRegion;
use rblk_protocol::Tag;
use rblk_protocol::width::narrow;

use super::settles::OF_SETTLES;
use super::{FromGroup, PollGroup, StepTicket, VolumeStep};
use crate::cache::{PartToken, ShardReply, ShardRequest};
use crate::store::Store;
use crate::volume::Volume;
use crate::volume::ids::{ConnectionId, VolumeIndex};
use rblk_operate::target::volume_counts::VolumeStats;

/// The condition that ends a step.
#[derive(Debug)]
enum Until {
    /// These connections are gone.
    Gone(Vec<ConnectionId>),
    /// The shard has written its dirty blocks.
    Written,
    /// The shard has made all data durable.
    Durable,
    /// The volume is quiet.
    Idle,
    /// These writes have ended.
    Ended(Vec<(ConnectionId, Tag)>),
    /// The volume is quiet; then it takes the shape of this one, or (`None`) it is removed.
    Quiet(Option<Arc<Volume>>),
}

/// An abandoned volume.
#[derive(Debug)]
struct Abandoned {
    volume: VolumeIndex,
    // Connections that may still send from it.
    ids: Vec<ConnectionId>,
}

/// The current step, if any, and abandoned volumes that are not gone yet.
#[derive(Debug, Default)]
pub(super) struct Steps {
    under_way: Option<(StepTicket, VolumeIndex, Until)>,
    abandoned: Vec<Abandoned>,
}

impl Steps {
    /// Whether a step or an abandoned volume waits.
    #[inline]
    pub(super) fn are_waiting(&self) -> bool {
        self.under_way.is_some() || !self.abandoned.is_empty()
    }
}

impl<S: Store> PollGroup<S> {
    /// Serves another volume, which no command may name yet.
    pub(super) fn add_by_step(
        &mut self,
        ticket: StepTicket,
        volume: &Volume,
        stats: Arc<VolumeStats>,
        registered: Vec<(usize, Arc<MemoryRegion>)>,
    ) {
        // Control has dropped a step that it did not wait for.
        self.steps.under_way = None;
        for (place, memory) in registered {
            self.state.pollers.add_volume(place, volume.index, memory);
        }
        self.state.access.announce(volume.index, Arc::clone(&stats));
        self.add_to_shard(volume, stats);
        self.tell_stepped(ticket, Ok(()));
    }

    /// Starts a step.
    pub(super) fn take_step(&mut self, ticket: StepTicket, volume: Arc<Volume>, step: VolumeStep) {
        // Control has dropped a step that it did not wait for.
        let given_up = self.steps.under_way.take();
        let index = volume.index;
        let until = match step {
            VolumeStep::Grow => {
                self.state.shard.grow_volume(index, volume.size_bytes());
                return self.tell_stepped(ticket, Ok(()));
            }
            // The way back of a change, too, opens no volume again that is lost.
            VolumeStep::Access if self.state.access.is_lost(index) => {
                self.release_writes(index);
                return self.tell_stepped(ticket, Ok(()));
            }
            VolumeStep::Access => {
                self.limits_change(Some(index), None);
                self.bound_cache(&volume);
                if !volume.read_only {
                    self.state.shard.open_for_writing(index);
                }
                self.state.access.open_to_commands(volume);
                self.release_writes(index);
                return self.tell_stepped(ticket, Ok(()));
            }
            VolumeStep::Hold => Until::Ended(self.hold_writes(&volume)),
            VolumeStep::Close => {
                self.hide(index);
                Until::Gone(self.end_those_who_know(index))
            }
            VolumeStep::WriteBack => {
                let from = self.token_of(ticket);
                self.state.shard.request(ShardRequest::Flush { from, volume: index });
                Until::Written
            }
            VolumeStep::Quiet => Until::Idle,
            VolumeStep::Abandon => {
                let ids = match given_up {
                    Some((_, of, Until::Gone(ids))) if of == index => ids,
                    _ => Vec::new(),
                };
                self.hide(index);
                self.state.shard.abandon_volume(index);
                self.steps.abandoned.push(Abandoned { volume: index, ids });
                return self.tell_stepped(ticket, Ok(()));
            }
            VolumeStep::Reshape => Until::Quiet(Some(volume)),
            VolumeStep::Drop => Until::Quiet(None),
            VolumeStep::Record
            | VolumeStep::Lower
            | VolumeStep::Store
            | VolumeStep::CutBack
            | VolumeStep::Probe
            | VolumeStep::Clone
            | VolumeStep::Add => {
                return self
                    .tell_stepped(ticket, Err(format!("{step:?} is no step of a poll group")));
            }
        };
        self.steps.under_way = Some((ticket, index, until));
    }

    /// Ends the connections of a volume with a lost store. From here on this poll group answers
    /// nothing of it, neither from the store nor from the cache. Other poll groups may still do so,
    /// from this one's shard: the ops of the store go on to be held until all know of the loss.
    #[cold]
    pub(super) fn lose(&mut self, volume: VolumeIndex) {
        self.hide(volume);
        self.state.access.lose(volume);
        self.end_those_who_know(volume);
        let group = self.state.index;
        self.state.told.outbox.push(FromGroup::KnowsLoss { group, volume });
    }

    /// No command finds a volume any more. The connections of those that waited for its store are
    /// about to end.
    fn hide(&mut self, volume: VolumeIndex) {
        self.state.access.remove(volume);
        drop(self.state.later.silence.take(volume));
    }

    /// Ends the connections of every session that ever opened a volume. Returns them, together with
    /// those that were ending before.
    fn end_those_who_know(&mut self, volume: VolumeIndex) -> Vec<ConnectionId> {
        let access = &self.state.access;
        let knows = self.connections.iter().filter(|c| access.knows(c.params().session, volume));
        let ids: Vec<ConnectionId> = knows.map(|connection| connection.id()).collect();
        self.end_all("its volume changes", |connection| ids.contains(&connection.id()));
        ids
    }

    fn token_of(&self, ticket: StepTicket) -> PartToken {
        let number = narrow(ticket.0 & u64::from(!OF_SETTLES));
        PartToken::of_control(narrow(self.state.index), number)
    }

    fn tell_stepped(&mut self, ticket: StepTicket, result: Result<(), String>) {
        let group = self.state.index;
        self.state.told.outbox.push(FromGroup::Stepped { group, ticket, result });
    }

    /// The shard answered a request of a step.
    #[cold]
    pub(super) fn on_step_reply(&mut self, number: u16, reply: &ShardReply) {
        let ShardReply::Done { result, .. } = reply else {
            return debug_assert!(false, "a step asks for nothing else");
        };
        let Some((ticket, volume, until)) = self.steps.under_way.take() else { return };
        if self.token_of(ticket).number_of_control() != Some(number) {
            // The answer belongs to a dropped step.
            self.steps.under_way = Some((ticket, volume, until));
            return;
        }
        if let Err(errno) = result {
            return self.tell_stepped(ticket, Err(format!("its store failed: {errno}")));
        }
        if matches!(until, Until::Written) && self.state.shard.is_writable(volume) {
            let from = self.token_of(ticket);
            self.steps.under_way = Some((ticket, volume, Until::Durable));
            self.state.shard.request(ShardRequest::Sync { from, volume });
        } else {
            self.tell_stepped(ticket, Ok(()));
        }
    }

    /// Finishes or continues the current step, if its condition is met. Returns whether it was.
    #[cold]
    pub(super) fn go_on_stepping(&mut self) -> bool {
        let is_less = self.leave_abandoned();
        let Some((ticket, volume, until)) = self.steps.under_way.take() else { return is_less };
        let result = match &until {
            Until::Idle if self.state.shard.is_quiet(volume) => Ok(()),
            Until::Ended(writes) if !self.are_in_flight(volume, writes) => Ok(()),
            Until::Gone(ids) if !ids.iter().any(|id| self.connections.has(*id)) => Ok(()),
            Until::Quiet(shaped) if self.state.shard.is_quiet(volume) => match shaped {
                Some(shaped) => {
                    let (cache, bytes) = (shaped.cache, shaped.size_bytes());
                    self.state.shard.reshape_volume(volume, cache, bytes);
                    Ok(())
                }
                None => {
                    self.state.pollers.remove_volume(volume);
                    self.state.shard.remove_volume(volume).map_err(|error| error.to_string())
                }
            },
            _ => {
                self.steps.under_way = Some((ticket, volume, until));
                return is_less;
            }
        };
        self.tell_stepped(ticket, result);
        true
    }

    /// Closes the stores of abandoned volumes that are quiet. Returns whether there was one.
    fn leave_abandoned(&mut self) -> bool {
        let (group, connections) = (&mut self.state, &self.connections);
        let before = self.steps.abandoned.len();
        self.steps.abandoned.retain(|Abandoned { volume, ids }| {
            let is_used = ids.iter().any(|id| connections.has(*id));
            if !group.shard.is_left(*volume) || is_used {
                return true;
            }
            group.pollers.remove_volume(*volume);
            match group.shard.remove_volume(*volume) {
                Ok(()) => tracing::warn!(volume = volume.0, "the store of a removed volume is closed"),
                Err(error) => {
                    tracing::error!(volume = volume.0, %error, "the store of a removed volume stays open");
                }
            }
            false
        });
        self.steps.abandoned.len() < before
    }
}
