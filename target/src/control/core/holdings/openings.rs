//! [`Openings`]: the OPENs that were neither refused nor answered, in the order in which they came.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use rblk_protocol::{AccessMode, Epoch, Mutation, OpenRequest, Tag};

use super::open_settles::OpenSettles;
use crate::control::core::QUIESCE_DEADLINE;
use crate::control::core::effect::{ConnectionRef, Effect, Ticket};
use crate::control::core::exports::Exports;
use crate::control::core::outbox::Outbox;
use crate::control::peers::session::SessionTable;
use crate::data::poll_group::SettleTicket;
use crate::volume::ids::{SessionIndex, VolumeIndex};
use crate::volume::{Placement, Volume};

/// An OPEN that was neither refused nor answered.
#[derive(Debug)]
pub(super) struct WaitingOpen {
    /// The connection.
    pub(super) from: ConnectionRef,
    /// The command's tag.
    pub(super) tag: Tag,
    /// The session.
    pub(super) session: SessionIndex,
    /// The epoch in which it was sent.
    pub(super) epoch: Epoch,
    /// The volume.
    pub(super) volume: VolumeIndex,
    /// The mode that is asked for.
    pub(super) mode: AccessMode,
    /// The host has the volume already, and comes back.
    pub(super) returns: bool,
    /// How far it is.
    pub(super) stage: Stage,
    /// Whether the writes of earlier holders are durable.
    pub(super) settling: Settling,
    /// When it came.
    pub(super) since: Instant,
}

/// Whether the writes of earlier holders are durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Settling {
    /// The opener does not need it.
    NotNeeded,
    /// Required, once no session is leaving any more.
    Needed,
    /// Under way.
    Begun(SettleTicket),
    /// Done.
    Settled,
}

/// How far an OPEN is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// The claim of another session is being written.
    Undecided(OpenRequest),
    /// The claim of this OPEN is being written.
    Claims {
        /// The ticket of the claim.
        ticket: Ticket,
        /// Also fences the sessions that exclude the opener.
        take_over: bool,
    },
    /// The session has the volume. The answer waits for this ticket.
    Granted(Option<Ticket>),
}

impl WaitingOpen {
    /// Whether the session has the volume.
    pub(super) fn is_granted(&self) -> bool {
        matches!(self.stage, Stage::Granted(_))
    }

    fn waits_for(&self, ticket: Ticket) -> bool {
        match self.stage {
            Stage::Undecided(_) => false,
            Stage::Claims { ticket: its, .. } => its == ticket,
            Stage::Granted(its) => its == Some(ticket),
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Openings {
    waiting: Vec<WaitingOpen>,
    settles: OpenSettles,
    // Volumes that only their present users may open.
    closing: BTreeSet<VolumeIndex>,
    // The volume that is closed while it changes.
    shut: Option<VolumeIndex>,
    // Volumes with a lost store, which are about to go.
    lost: BTreeSet<VolumeIndex>,
    // Volumes that only the holder of the record may have until then.
    for_holders: BTreeMap<VolumeIndex, Instant>,
}

impl Openings {
    /// Whether none waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Adds the newest.
    pub(super) fn push(&mut self, open: WaitingOpen) {
        self.waiting.push(open);
    }

    /// Takes out those that `which` names.
    pub(super) fn take(&mut self, which: impl Fn(&WaitingOpen) -> bool) -> Vec<WaitingOpen> {
        let (taken, kept) =
            std::mem::take(&mut self.waiting).into_iter().partition(|open| which(open));
        self.waiting = kept;
        taken
    }

    /// Takes out those that waited for too long.
    pub(super) fn take_late(&mut self, now: Instant) -> Vec<WaitingOpen> {
        self.take(|open| now.saturating_duration_since(open.since) > QUIESCE_DEADLINE)
    }

    /// Closes a volume to hosts that do not have it open, or opens it (false) to all again.
    pub(super) fn close_to_others(&mut self, volume: VolumeIndex, close: bool) {
        match close {
            true => self.closing.insert(volume),
            false => self.closing.remove(&volume),
        };
    }

    /// Whether only its present users may open a volume.
    pub(super) fn is_closed_to_others(&self, volume: VolumeIndex) -> bool {
        self.closing.contains(&volume)
    }

    /// The volume that is closed while it changes, from this moment.
    pub(super) fn shut(&mut self, volume: Option<VolumeIndex>) {
        self.shut = volume;
    }

    /// The store of a volume is lost: no OPEN of it is granted any more.
    pub(super) fn lose(&mut self, volume: VolumeIndex) {
        self.lost.insert(volume);
    }

    /// A volume is gone.
    pub(super) fn forget(&mut self, volume: VolumeIndex) {
        self.closing.remove(&volume);
        self.lost.remove(&volume);
        self.for_holders.remove(&volume);
    }

    /// Only the holder of the record may have a volume until then.
    pub(super) fn keep_for_holder(&mut self, volume: VolumeIndex, until: Instant) {
        self.for_holders.insert(volume, until);
    }

    /// Whether an OPEN of a volume by another host than the holder of the record has to wait.
    pub(super) fn is_for_holder(&self, volume: VolumeIndex, now: Instant) -> bool {
        let until = self.for_holders.get(&volume).filter(|_| !Mutation::GroupOthersAtOnce.is_on());
        until.is_some_and(|until| now < *until)
    }

    /// Whether an OPEN of a volume has to wait: it is closed while it changes, or about to go.
    pub(super) fn is_shut(&self, volume: VolumeIndex) -> bool {
        self.shut == Some(volume) || self.lost.contains(&volume)
    }

    /// Takes out the next one that nothing delays any more.
    pub(super) fn take_ready(&mut self, table: &SessionTable) -> Option<WaitingOpen> {
        let is_ready = |open: &WaitingOpen| {
            self.has_volume_alone(open, table)
                && matches!(open.settling, Settling::NotNeeded | Settling::Settled)
        };
        let at = self.waiting.iter().position(is_ready)?;
        Some(self.waiting.remove(at))
    }

    /// Whether an OPEN waits for no record and for no earlier holder.
    fn has_volume_alone(&self, open: &WaitingOpen, table: &SessionTable) -> bool {
        let mut leaving = table.leaving(open.volume, open.session, open.mode);
        matches!(open.stage, Stage::Granted(None))
            && !self.is_shut(open.volume)
            && (leaving.next().is_none() || Mutation::FencingWait.is_on())
    }

    // Decisions.

    /// Takes out the next one that waited for the outcome of a claim, or for the end of a change,
    /// and does not any more, with its place. `waits`: whether it has to wait.
    pub(super) fn take_undecided(
        &mut self,
        exports: &Exports,
        waits: impl Fn(&Self, &Volume, &OpenRequest) -> bool,
    ) -> Option<(usize, WaitingOpen, OpenRequest, Arc<Volume>)> {
        let (at, request, volume) = self.waiting.iter().enumerate().find_map(|(at, open)| {
            let Stage::Undecided(request) = open.stage else { return None };
            let volume = exports.volume(open.volume)?;
            (!waits(self, volume, &request)).then(|| (at, request, Arc::clone(volume)))
        })?;
        Some((at, self.waiting.remove(at), request, volume))
    }

    /// Puts back one that was decided, at its place.
    pub(super) fn put_back(&mut self, at: usize, open: WaitingOpen) {
        let at = at.min(self.waiting.len());
        self.waiting.insert(at, open);
    }

    // Records.

    /// The claim of a ticket is durable. Grants the volume to its session, if that still lives.
    /// Returns the session, and whether it takes the volume over.
    pub(super) fn grant_claim(
        &mut self,
        ticket: Ticket,
        table: &SessionTable,
    ) -> Option<(SessionIndex, bool)> {
        let lives = |open: &WaitingOpen| {
            // No connection is left for the answer to an OPEN of an epoch that ended.
            table.get(open.session).is_some_and(|session| session.way(open.epoch).is_some())
        };
        self.waiting.iter_mut().find_map(|open| match open.stage {
            Stage::Claims { ticket: its, take_over } if its == ticket && lives(open) => {
                (open.stage, open.settling) = (Stage::Granted(None), Settling::Needed);
                Some((open.session, take_over))
            }
            _ => None,
        })
    }

    /// The record of a ticket is durable.
    pub(super) fn confirmed(&mut self, ticket: Ticket) {
        for open in &mut self.waiting {
            if matches!(open.stage, Stage::Granted(its) if its == Some(ticket)) {
                open.stage = Stage::Granted(None);
            }
        }
    }

    /// Takes out those that wait for the record of a ticket.
    pub(super) fn take_waiting_for(&mut self, ticket: Ticket) -> Vec<WaitingOpen> {
        self.take(|open| open.waits_for(ticket))
    }

    // Settles.

    /// Makes the writes of earlier holders durable for every OPEN that waits for nothing else.
    pub(super) fn begin_settles(
        &mut self,
        table: &SessionTable,
        exports: &Exports,
        out: &mut Outbox,
    ) {
        let due = |open: &WaitingOpen| {
            open.settling == Settling::Needed && self.has_volume_alone(open, table)
        };
        let due: Vec<usize> =
            (0..self.waiting.len()).filter(|at| due(&self.waiting[*at])).collect();
        for at in due {
            let volume = self.waiting[at].volume;
            if self.settles.is_under_way(volume) {
                continue;
            }
            let has_store = exports
                .volume(volume)
                .is_some_and(|volume| matches!(volume.placement, Placement::Store));
            self.waiting[at].settling = match has_store && !Mutation::OpenUnsettled.is_on() {
                true => {
                    let ticket = self.settles.begin(volume);
                    out.order(Effect::Settle { ticket, volume });
                    Settling::Begun(ticket)
                }
                false => Settling::Settled,
            };
        }
    }

    /// Whether a settle of a volume is under way.
    pub(super) fn is_settling(&self, volume: VolumeIndex) -> bool {
        self.settles.is_under_way(volume)
    }

    /// A settle ended well, or not (false). Returns the OPENs that must fail therefore.
    pub(super) fn settled(&mut self, ticket: SettleTicket, is_durable: bool) -> Vec<WaitingOpen> {
        self.settles.end(ticket);
        let is_it = |open: &WaitingOpen| open.settling == Settling::Begun(ticket);
        if !is_durable {
            return self.take(is_it);
        }
        let its = self.waiting.iter_mut().filter(|open| is_it(open));
        its.for_each(|open| open.settling = Settling::Settled);
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::volume::ids::ConnectionId;

    fn open(tag: u16, volume: u16, stage: Stage, since: Instant) -> WaitingOpen {
        let connection = ConnectionId { index: 0, generation: 1 };
        WaitingOpen {
            from: ConnectionRef { group: 0, connection },
            tag: Tag(tag),
            session: SessionIndex { index: tag, life: 1 },
            epoch: Epoch(1),
            volume: VolumeIndex(volume),
            mode: AccessMode::Exclusive,
            returns: false,
            stage,
            settling: Settling::NotNeeded,
            since,
        }
    }

    fn tags(opens: &[WaitingOpen]) -> Vec<u16> {
        opens.iter().map(|open| open.tag.0).collect()
    }

    #[test]
    fn an_open_waits_for_its_record_and_for_a_volume_that_changes() {
        let (mut opens, now) = (Openings::default(), Instant::now());
        let table = SessionTable::new(4, Duration::from_secs(30));
        opens.push(open(1, 0, Stage::Granted(Some(Ticket(5))), now));
        opens.push(open(2, 1, Stage::Granted(None), now));
        opens.shut(Some(VolumeIndex(1)));
        assert!(opens.take_ready(&table).is_none());
        opens.confirmed(Ticket(4));
        assert!(opens.take_ready(&table).is_none(), "another record");
        opens.confirmed(Ticket(5));
        assert_eq!(opens.take_ready(&table).map(|open| open.tag), Some(Tag(1)));
        opens.shut(None);
        assert_eq!(opens.take_ready(&table).map(|open| open.tag), Some(Tag(2)));
        assert!(opens.is_empty());
    }

    #[test]
    fn no_open_of_a_lost_volume_is_granted_whatever_change_ends() {
        let (mut opens, now) = (Openings::default(), Instant::now());
        let table = SessionTable::new(4, Duration::from_secs(30));
        opens.push(open(1, 1, Stage::Granted(None), now));
        opens.shut(Some(VolumeIndex(1)));
        opens.lose(VolumeIndex(1));
        opens.shut(None);
        assert!(opens.take_ready(&table).is_none());
        assert!(opens.is_shut(VolumeIndex(1)) && !opens.is_shut(VolumeIndex(0)));
        opens.forget(VolumeIndex(1));
        assert_eq!(opens.take_ready(&table).map(|open| open.tag), Some(Tag(1)));
    }

    #[test]
    fn a_failed_settle_takes_its_opens_out_and_no_others() {
        let (mut opens, now) = (Openings::default(), Instant::now());
        for (tag, settling) in [(1, Settling::Begun(SettleTicket(1))), (2, Settling::Needed)] {
            opens.push(WaitingOpen { settling, ..open(tag, 0, Stage::Granted(None), now) });
        }
        assert_eq!(tags(&opens.settled(SettleTicket(1), false)), [1]);
        assert!(opens.take_late(now).is_empty());
        let late = now + QUIESCE_DEADLINE + Duration::from_millis(1);
        assert_eq!(tags(&opens.take_late(late)), [2]);
    }
}
