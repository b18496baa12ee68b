//! A *claim*: a new holder of a volume, while its record is being written.
//!
//! Nothing changes before the record is durable: the holder of the volume goes on, and may even
//! come back. Then everything changes at once, if the session that claimed still lives. If it is
//! gone, or if the disk fails (which may have written the record all the same), the record of the
//! holder is written again, so that the next run knows no other.
//!
//! A volume has one claim at a time ([`HolderBook`](super::HolderBook)). Every other OPEN for
//! writing waits for the outcome and is decided then.

use std::time::Instant;

use rblk_operate::target::events::{EventKind, Occurrence};
use rblk_protocol::{AccessMode, Epoch, Mutation, Status};

use super::Holdings;
use super::open::held_by;
use crate::control::core::effect::Ticket;
use crate::control::core::outbox::Outbox;
use crate::control::core::sessions::HostSessions;
use crate::data::poll_group::Notice;
use crate::record::holders::{Claimant, HolderRecord};
use crate::volume::Volume;
use crate::volume::ids::{SessionIndex, VolumeIndex};

impl Holdings {
    /// The claim of a ticket is durable.
    pub(super) fn claimed(
        &mut self,
        record: HolderRecord,
        ticket: Ticket,
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) {
        let volume = self.exports.with_uuid(&record.volume).cloned();
        let granted = volume.and_then(|volume| {
            let (session, take_over) = self.openings.grant_claim(ticket, sessions.table())?;
            Some((volume, session, take_over))
        });
        let Some((volume, session, take_over)) = granted else {
            return self.book.withdraw(&record.volume, out);
        };
        let claimant =
            Claimant { mode: record.mode, host: record.host, host_name: record.host_name };
        self.book.establish(record, volume.index);
        self.enter(session, (&volume, &claimant, take_over), sessions, out, now);
    }

    /// Gives the volume to the session and takes it from the sessions that exclude the opener.
    pub(super) fn enter(
        &mut self,
        session: SessionIndex,
        (volume, claimant, take_over): (&Volume, &Claimant, bool),
        sessions: &mut HostSessions,
        out: &mut Outbox,
        now: Instant,
    ) {
        for victim in sessions.table().excluders(session, volume.index, claimant.mode) {
            let Some(state) = sessions.table().get(victim) else { continue };
            // This was checked when the OPEN came, but the session may have connected again while
            // the record was written.
            let old = state.host == claimant.host && state.all_connections() == 0;
            if take_over || !old {
                self.fence((victim, session), (volume, claimant), (sessions, out), now);
            }
        }
        match sessions.table_mut().open(session, volume.index, claimant.mode) {
            Ok(ended) => {
                ended.into_iter().for_each(|ended| self.forget_ended(ended, sessions, out));
            }
            Err((_, text)) => debug_assert!(false, "{text} is in the way"),
        }
        end_leaving(volume.index, (session, claimant.mode), sessions, out);
    }

    /// A session that excludes the opener is fenced, from this moment and permanently.
    fn fence(
        &mut self,
        (victim, by): (SessionIndex, SessionIndex),
        (volume, claimant): (&Volume, &Claimant),
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) {
        let Some(state) = sessions.table().get(victim) else { return };
        tracing::warn!(
            volume = %volume.name,
            from = %state.host_name,
            peer = state.peer,
            by = %claimant.host_name,
            "take-over: fencing the holder"
        );
        self.take_overs += 1;
        let text = format!("{} took the volume over", claimant.host_name);
        let what = Occurrence::new(EventKind::Fence, text).of_volume(volume.name);
        out.happened(what.of_host(state.host_name, &state.peer));
        let (newest, host) = (state.newest, state.host);
        for open in self.openings.take(|open| open.session == victim) {
            let by = sessions.table().get(by).map(|by| held_by(by, host)).unwrap_or_default();
            out.reply_saying(open.from, open.tag, Status::Fenced, by);
        }
        let (held, ended) = sessions.table_mut().fence(victim);
        for (lost, mode) in held {
            let refusal = Status::Fenced;
            out.tell_all(Notice::Close { session: victim, volume: lost, refusal });
            // Its other volumes were not taken over. It may come back for them, in a new session.
            if lost != volume.index && mode != AccessMode::ReadOnly {
                self.book.keep_for_absent(lost, now + sessions.table().lease());
            }
        }
        if ended {
            self.forget_ended(victim, sessions, out);
        } else {
            end_up_to(victim, newest, out);
        }
    }
}

/// Ends the connections of a session up to that epoch.
fn end_up_to(session: SessionIndex, epoch: Epoch, out: &mut Outbox) {
    if Mutation::WayFenceOne.is_on() {
        return out.tell_all(Notice::EndEpoch { session, epoch });
    }
    if let Some(before) = epoch.next() {
        out.tell_all(Notice::EndConnections { session, before });
    }
}

/// Ends the connections by which commands of earlier holders may still be under way.
fn end_leaving(
    volume: VolumeIndex,
    (except, mode): (SessionIndex, AccessMode),
    sessions: &HostSessions,
    out: &mut Outbox,
) {
    for (session, until) in sessions.table().leaving(volume, except, mode) {
        end_up_to(session, until, out);
    }
}
