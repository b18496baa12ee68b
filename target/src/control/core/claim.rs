//! A *claim*: a new holder of a volume, while its record is being written.
//!
//! Nothing changes before the record is durable: the holder of the volume goes on, and may even
//! come back. Then everything changes at once, if the session that claimed still lives. If it is
//! gone, or if the disk fails (which may have written the record all the same), the record of the
//! holder is written again, so that the next run knows no other.
//!
//! A volume has one claim at a time ([`Changes`](super::changes::Changes)). Every other OPEN for
//! writing waits for the outcome and is decided then.

use std::sync::Arc;

use rblk_protocol::{AccessMode, OpenRequest, Status};

use super::open::{Settling, Stage, held_by};
use super::{AdminAnswer, Core, EventKind, Notice, Occurrence, Ticket, refuse};
use crate::record::holders::{Claimant, HolderRecord, VolumeUuid};
use crate::volume::Volume;
use crate::volume::ids::SessionIndex;

impl Core {
    /// Writes the record of a new holder. Once it is durable, the host is the holder.
    pub(super) fn claim(&mut self, record: HolderRecord, take_over: bool) -> Stage {
        let ticket = self.persist(record.clone());
        self.changes.claim(record, ticket);
        Stage::Claims { ticket, take_over }
    }

    pub(super) fn claim_persisted(&mut self, ticket: Ticket) {
        let Some(record) = self.changes.take_claim(ticket) else { return };
        let volume = self.exports.with_uuid(&record.volume).cloned();
        let sessions = &self.sessions;
        let claims = self.waiting_opens.iter_mut().find_map(|open| match open.stage {
            // No connection is left for the answer to an OPEN of an older epoch.
            Stage::Claims { ticket: its, take_over }
                if its == ticket
                    && sessions.get(open.session).is_some_and(|s| s.epoch == open.epoch) =>
            {
                Some((open, take_over))
            }
            _ => None,
        });
        let (Some(volume), Some((open, take_over))) = (volume, claims) else {
            return self.write_again(&record.volume);
        };
        (open.stage, open.settling) = (Stage::Granted(None), Settling::Needed);
        let session = open.session;
        let claimant =
            Claimant { mode: record.mode, host: record.host, host_name: record.host_name };
        self.changes.is_durable_now(&record.volume);
        self.holders.put(record);
        self.kept_for.remove(&volume.index);
        self.enter(session, &volume, &claimant, take_over);
    }

    pub(super) fn claim_not_persisted(&mut self, ticket: Ticket) {
        if let Some(record) = self.changes.take_claim(ticket) {
            self.write_again(&record.volume);
        }
    }

    /// A claim failed, but the disk may have it.
    fn write_again(&mut self, volume: &VolumeUuid) {
        // Without a record no peer was ever told anything that the claim contradicts.
        let Some(record) = self.holders.record(volume).cloned() else { return };
        if self.changes.undurable(volume).is_some() {
            self.persist_change(record);
        } else {
            // This record was durable before: a holder that comes back in that generation need not
            // wait for it.
            self.persist(record);
        }
    }

    /// Gives the volume to the session and takes it from the sessions that exclude the opener.
    pub(super) fn enter(
        &mut self,
        session: SessionIndex,
        volume: &Volume,
        claimant: &Claimant,
        take_over: bool,
    ) {
        for victim in self.sessions.excluders(session, volume.index, claimant.mode) {
            let Some(state) = self.sessions.get(victim) else { continue };
            // This was checked when the OPEN came, but the session may have connected again while
            // the record was written.
            let old = state.host == claimant.host && state.all_connections() == 0;
            if take_over || !old {
                self.fence(victim, session, volume, claimant);
            }
        }
        match self.sessions.open(session, volume.index, claimant.mode) {
            Ok(ended) => ended.into_iter().for_each(|session| self.forget(session)),
            Err((_, text)) => debug_assert!(false, "{text} is in the way"),
        }
        self.end_leaving(volume.index, session, claimant.mode);
    }

    /// A session that excludes the opener is fenced, from this moment and permanently.
    fn fence(
        &mut self,
        victim: SessionIndex,
        by: SessionIndex,
        volume: &Volume,
        claimant: &Claimant,
    ) {
        let Some(state) = self.sessions.get(victim) else { return };
        tracing::warn!(
            volume = %volume.name,
            from = %state.host_name,
            peer = state.peer,
            by = %claimant.host_name,
            "take-over: fencing the holder"
        );
        self.decisions.take_overs += 1;
        let text = format!("{} took the volume over", claimant.host_name);
        let what = Occurrence::new(EventKind::Fence, text).of_volume(volume.name);
        let what = what.of_host(state.host_name, &state.peer);
        let (before, host) = (state.epoch.next(), state.host);
        self.happened(what);
        for open in self.take_opens(|open| open.session == victim) {
            let by = self.sessions.get(by).map(|by| held_by(by, host)).unwrap_or_default();
            self.reply_saying(open.from, open.tag, Status::Fenced, by);
        }
        let (held, ended) = self.sessions.fence(victim);
        for (lost, mode) in held {
            let refusal = Status::Fenced;
            self.all(Notice::Close { session: victim, volume: lost, refusal });
            // Its other volumes were not taken over. It may come back for them, in a new session.
            if lost != volume.index && mode != AccessMode::ReadOnly {
                self.kept_for.insert(lost, self.latest + self.sessions.lease());
            }
        }
        if ended {
            self.forget(victim);
        } else if let Some(before) = before {
            self.all(Notice::EndConnections { session: victim, before });
        }
    }

    /// Decides the next OPEN that waited for the claim of another session, in order of arrival.
    /// Returns false if there is none.
    pub(super) fn decide_waiting(&mut self) -> bool {
        let ready = self.waiting_opens.iter().enumerate().find_map(|(at, open)| {
            let Stage::Undecided(request) = open.stage else { return None };
            let volume = self.exports.volume(open.volume)?;
            let waits = self.waits_for_claim(volume, &request);
            (!waits).then(|| (at, request, Arc::clone(volume)))
        });
        let Some((at, request, volume)) = ready else { return false };
        let mut open = self.waiting_opens.remove(at);
        let (session, epoch) = (open.session, open.epoch);
        let stage = if self.sessions.get(session).is_some_and(|s| s.epoch == epoch) {
            self.decide(session, &volume, &request, self.latest)
        } else {
            Err(refuse(Status::Fenced))
        };
        match stage {
            Ok(stage) => {
                open.stage = stage;
                let at = at.min(self.waiting_opens.len());
                self.waiting_opens.insert(at, open);
            }
            Err(AdminAnswer::Now(status, value, payload)) => {
                self.reply(open.from, open.tag, status, value, payload);
            }
            Err(AdminAnswer::Later) => {}
        }
        true
    }

    /// Whether an OPEN has to wait for the outcome of a claim, or the end of an alteration, before
    /// it can be decided.
    pub(super) fn waits_for_claim(&self, volume: &Volume, request: &OpenRequest) -> bool {
        let writes = request.mode != AccessMode::ReadOnly;
        self.is_closed(volume.index) || writes && self.changes.has_claim(&volume.uuid)
    }
}
