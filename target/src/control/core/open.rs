//! OPEN, CLOSE, LOGOUT: access to volumes, and the take-over of a volume.
//!
//! An OPEN for writing is decided when it comes, or once no [claim](super::claim) to the volume is
//! being written. If the opener may have the volume, it claims it in a new generation. The OPEN is
//! answered, and the opener may send commands, when
//!
//! - the change of holder is durable, so that the next run fences the same hosts. At that moment
//!   the fenced hosts lose the volume;
//! - no session is *leaving* the volume: no connection is left by which a command came while
//!   another session held the volume;
//! - in a new generation: all writes of earlier holders are durable. The opener may read them, and
//!   would not hear of it if a crash took them back.
//!
//! | the opener names | it is | generation |
//! | --- | --- | --- |
//! | the generation of the volume, as the host that has it | let in again | kept |
//! | any other | fenced permanently, even if no host holds the volume now | kept |
//! | none, and others exclude it | refused with the holder's name, or takes over | kept, or next |
//! | none, and a holder of the last run may come back | the same | the same |
//! | none | let in | next; kept among hosts that share |
//!
//! A host may at once replace its own session without connections, and its own absent holder: the
//! target takes it for the same machine after its old process ended. Machines cloned from one
//! another have one host id, so each clone needs its own `/etc/rblk/host-id`. Otherwise a clone
//! takes the volume from another one that is only cut off.
//!
//! Openers that only read neither exclude nor wait, and need no generation.

use std::time::Instant;

use rblk_protocol::{
    AccessMode, CommandCapsule, Epoch, Generation, HostId, Mutation, OpenReply, OpenRequest,
    Status, Tag,
};

use super::changes::Undurable;
use super::{
    AdminAnswer, ConnectionRef, Core, Effect, EventKind, Notice, Occurrence, QUIESCE_DEADLINE,
    Ticket, refuse, refuse_saying,
};
use crate::control::peers::peer_lines::PeerLine;
use crate::control::peers::session::Session;
use crate::data::poll_group::SettleTicket;
use crate::record::holders::Claimant;
use crate::volume::ids::{SessionIndex, VolumeIndex};
use crate::volume::{Placement, Volume};

/// An OPEN that was neither refused nor answered.
#[derive(Debug)]
pub(super) struct WaitingOpen {
    pub(super) from: ConnectionRef,
    pub(super) tag: Tag,
    pub(super) session: SessionIndex,
    pub(super) epoch: Epoch,
    pub(super) volume: VolumeIndex,
    mode: AccessMode,
    pub(super) stage: Stage,
    pub(super) settling: Settling,
    since: Instant,
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
    fn is_granted(&self) -> bool {
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

/// Names the holder of a volume, for a host that asks.
pub(super) fn held_by(session: &Session, asks: HostId) -> String {
    match session.host == asks {
        true => format!("held by another mount of this host ({})", session.peer),
        false => format!("held by {} ({})", session.host_name, session.peer),
    }
}

impl Core {
    pub(super) fn open(
        &mut self,
        from: ConnectionRef,
        session: SessionIndex,
        command: &CommandCapsule,
        body: &[u8],
        now: Instant,
    ) -> AdminAnswer {
        let request = match OpenRequest::from_wire(body) {
            Ok(request) => request,
            Err(error) => {
                if self.lines.may_write(PeerLine::BadCommand, now) {
                    tracing::warn!(error, "bad OPEN");
                }
                return refuse(Status::InvalidField);
            }
        };
        if let Err((status, text)) = self.rights(session).check_open(&request) {
            return refuse_saying(status, text);
        }
        let Some(volume) = self.exports.named(request.name).cloned() else {
            return refuse(Status::NoSuchVolume);
        };
        // A volume that was made read-only is given back to its holder, but refuses its writes.
        let is_fresh = request.generation.is_fresh();
        if volume.read_only && request.mode != AccessMode::ReadOnly && is_fresh {
            return refuse(Status::ReadOnly);
        }
        let has_it = self.mode_of(session, volume.index).is_some();
        if self.closing.contains(&volume.index) && is_fresh && !has_it {
            let text = "the volume is about to be removed".to_owned();
            return refuse_saying(Status::InUse, text);
        }
        self.reopen(session, volume.index, request.mode);
        let stage = if self.waits_for_claim(&volume, &request) {
            Stage::Undecided(request)
        } else {
            match self.decide(session, &volume, &request, now) {
                Ok(stage) => stage,
                Err(answer) => return answer,
            }
        };
        self.waiting_opens.push(WaitingOpen {
            from,
            tag: command.tag,
            session,
            epoch: command.epoch,
            volume: volume.index,
            mode: request.mode,
            stage,
            settling: Settling::NotNeeded,
            since: now,
        });
        AdminAnswer::Later
    }

    /// A session that has the volume, or waits for it, opens it.
    fn reopen(&mut self, session: SessionIndex, volume: VolumeIndex, mode: AccessMode) {
        let older = self.take_opens(|open| (open.session, open.volume) == (session, volume));
        let other_mode = self.mode_of(session, volume).is_some_and(|old| old != mode);
        if other_mode || older.iter().any(WaitingOpen::is_granted) {
            // To open in another mode is to close first: commands sent before may still be under
            // way.
            self.give_up(session, volume, Status::NoSuchVolume);
        }
        // The host asked again before the reply: the newer OPEN counts.
        for open in older {
            self.reply(open.from, open.tag, Status::NotReady, 0, Vec::new());
        }
    }

    fn mode_of(&self, session: SessionIndex, volume: VolumeIndex) -> Option<AccessMode> {
        self.sessions.get(session)?.mode_of(volume)
    }

    /// Decides whether a session gets a volume that has no claim. If so, starts all that the reply
    /// waits for.
    pub(super) fn decide(
        &mut self,
        session: SessionIndex,
        volume: &Volume,
        request: &OpenRequest,
        now: Instant,
    ) -> Result<Stage, AdminAnswer> {
        let Some(state) = self.sessions.get(session) else {
            return Err(refuse(Status::NotReady));
        };
        let (host, host_name) = (state.host, state.host_name);
        let claimant = Claimant { mode: request.mode, host, host_name };
        if claimant.mode == AccessMode::ReadOnly {
            self.enter(session, volume, &claimant, false);
            return Ok(Stage::Granted(None));
        }
        let returns = !request.generation.is_fresh();
        let is_last = if Mutation::FencingGeneration.is_on() {
            self.holders.record(&volume.uuid).is_some()
        } else {
            self.holders.is_last(&volume.uuid, &claimant, request.generation)
        };
        if returns && !is_last {
            return Err(self.refuse_return(volume, &claimant, request.generation));
        }
        if self.changes.are_too_many() {
            let text = "the target's state directory does not keep up".to_owned();
            return Err(refuse_saying(Status::LimitReached, text));
        }
        let take_over = request.take_over && !returns;
        if !take_over {
            let excluded = self.must_not_be_excluded(session, volume, &claimant, returns, now);
            excluded.map_err(|text| self.refuse_used(volume, text))?;
        }
        let changed = if returns {
            self.holders.come_back(&volume.uuid, &claimant, request.generation)
        } else {
            let claimed = self.holders.claim(&volume.uuid, &claimant).map_err(|error| {
                tracing::error!(volume = %volume.name, %error, "OPEN refused");
                refuse_saying(Status::Internal, error.to_string())
            })?;
            if let Some(record) = claimed {
                return Ok(self.claim(record, take_over));
            }
            self.holders.join(&volume.uuid, &claimant)
        };
        // Other hosts that share the volume may still come back.
        if claimant.mode == AccessMode::Exclusive {
            self.kept_for.remove(&volume.index);
        }
        self.enter(session, volume, &claimant, take_over);
        // A record that did not change now may still be on its way, or has to be tried again.
        let ticket = match (changed, self.changes.undurable(&volume.uuid)) {
            (Some(record), _) => Some(self.persist_change(record)),
            (None, Some(Undurable::Writing(ticket))) => Some(ticket),
            (None, Some(Undurable::NotWritten)) => {
                let record = self.holders.record(&volume.uuid).cloned();
                record.map(|record| self.persist_change(record))
            }
            (None, None) => None,
        };
        Ok(Stage::Granted(ticket))
    }

    /// A holder comes back after another host had the volume.
    fn refuse_return(
        &mut self,
        volume: &Volume,
        claimant: &Claimant,
        generation: Generation,
    ) -> AdminAnswer {
        self.decisions.refused_returns += 1;
        let text = match (self.sessions.writer(volume.index), self.holders.record(&volume.uuid)) {
            (Some(holder), _) => held_by(holder, claimant.host),
            (None, _) if self.holders.is_replaced(&volume.uuid) => {
                "is served from another file or device since, or was removed before all was written: unmount it and \
                 mount it again"
                    .to_owned()
            }
            (None, Some(record)) if record.host == claimant.host => {
                "was held by another mount of this host since".to_owned()
            }
            (None, Some(record)) => format!("was held by {} since", record.host_name),
            (None, None) => "its holders are not known any more".to_owned(),
        };
        if self.lines.may_write(PeerLine::OpenRefused, self.latest) {
            tracing::warn!(
                volume = %volume.name,
                host = %claimant.host_name,
                named = generation.0,
                generation = self.holders.generation(&volume.uuid).0,
                text,
                "OPEN refused: fenced"
            );
        }
        let what = Occurrence::new(EventKind::Fence, format!("refused: the volume {text}"));
        let what = Occurrence { host: Some(claimant.host_name.to_string()), ..what };
        self.happened(what.of_volume(volume.name));
        refuse_saying(Status::Fenced, text)
    }

    fn refuse_used(&mut self, volume: &Volume, text: String) -> AdminAnswer {
        if self.lines.may_write(PeerLine::OpenRefused, self.latest) {
            tracing::info!(volume = %volume.name, text, "OPEN refused: in use");
        }
        refuse_saying(Status::InUse, text)
    }

    /// Refuses an opener that may not take the volume from its holder, and names the holder.
    fn must_not_be_excluded(
        &self,
        session: SessionIndex,
        volume: &Volume,
        claimant: &Claimant,
        returns: bool,
        now: Instant,
    ) -> Result<(), String> {
        let excluders = self.sessions.excluders(session, volume.index, claimant.mode);
        for other in excluders.into_iter().filter_map(|other| self.sessions.get(other)) {
            // An old process of the same host without connections does not exclude a new one.
            if other.host != claimant.host || other.all_connections() > 0 {
                return Err(held_by(other, claimant.host));
            }
        }
        let absent = self.holders.record(&volume.uuid).filter(|record| {
            let shares = (record.mode, claimant.mode) == (AccessMode::Shared, AccessMode::Shared);
            // One record stands for all hosts that share: the opener's host may only have been the
            // first of them.
            let other = record.mode == AccessMode::Shared || record.host != claimant.host;
            !returns && record.present && other && !shares
        });
        if let (Some(record), Some(until)) = (absent, self.kept_for.get(&volume.index))
            && *until > now
        {
            let seconds = until.saturating_duration_since(now).as_secs_f32().ceil();
            let name = &record.host_name;
            let holders = match record.mode {
                AccessMode::Shared => format!("shared by {name} and perhaps others, which"),
                AccessMode::Exclusive | AccessMode::ReadOnly => format!("held by {name}, which"),
            };
            return Err(format!("{holders} may come back for another {seconds:.0} s"));
        }
        Ok(())
    }

    /// Ends the connections by which commands of earlier holders may still be under way.
    pub(super) fn end_leaving(
        &mut self,
        volume: VolumeIndex,
        except: SessionIndex,
        mode: AccessMode,
    ) {
        let leaving: Vec<_> = self.sessions.leaving(volume, except, mode).collect();
        for (session, until) in leaving {
            if let Some(before) = until.next() {
                self.all(Notice::EndConnections { session, before });
            }
        }
    }

    /// Answers every OPEN that has nothing left to wait for.
    pub(super) fn finish_opens(&mut self) {
        self.begin_settles();
        loop {
            if let Some(at) = self.waiting_opens.iter().position(|open| self.is_ready(open)) {
                let open = self.waiting_opens.remove(at);
                self.finish_open(&open);
            } else if !self.decide_waiting() {
                return;
            }
        }
    }

    fn is_ready(&self, open: &WaitingOpen) -> bool {
        self.has_volume_alone(open)
            && matches!(open.settling, Settling::NotNeeded | Settling::Settled)
    }

    /// Whether an OPEN waits for no record and for no earlier holder.
    fn has_volume_alone(&self, open: &WaitingOpen) -> bool {
        let mut leaving = self.sessions.leaving(open.volume, open.session, open.mode);
        matches!(open.stage, Stage::Granted(None))
            && !self.is_closed(open.volume)
            && (leaving.next().is_none() || Mutation::FencingWait.is_on())
    }

    /// Makes the writes of earlier holders durable for every OPEN that waits for nothing else.
    fn begin_settles(&mut self) {
        let due =
            |open: &WaitingOpen| open.settling == Settling::Needed && self.has_volume_alone(open);
        let due: Vec<usize> =
            (0..self.waiting_opens.len()).filter(|at| due(&self.waiting_opens[*at])).collect();
        for at in due {
            let volume = self.waiting_opens[at].volume;
            if self.settles.is_under_way(volume) {
                continue;
            }
            let has_store = self
                .exports
                .volume(volume)
                .is_some_and(|volume| matches!(volume.placement, Placement::Store));
            self.waiting_opens[at].settling = match has_store && !Mutation::OpenUnsettled.is_on() {
                true => {
                    let ticket = self.settles.begin(volume);
                    self.effects.push_back(Effect::Settle { ticket, volume });
                    Settling::Begun(ticket)
                }
                false => Settling::Settled,
            };
        }
    }

    /// The store has answered an [`Effect::Settle`]: the earlier writes to the volume are durable,
    /// or not all of them are, for this reason.
    pub fn settled(&mut self, ticket: SettleTicket, result: Result<(), String>) {
        self.settles.end(ticket);
        let is_it = |open: &WaitingOpen| open.settling == Settling::Begun(ticket);
        match result {
            Ok(()) => {
                let its = self.waiting_opens.iter_mut().filter(|open| is_it(open));
                its.for_each(|open| open.settling = Settling::Settled);
            }
            Err(error) => {
                for open in self.take_opens(is_it) {
                    let name = self.exports.volume(open.volume).map(|volume| volume.name);
                    let name = name.map(tracing::field::display);
                    tracing::error!(volume = name, error, "OPEN refused: its store fails");
                    let text = format!(
                        "not all that hosts wrote to it before can be made durable: {error}. Mend its store or make \
                         room there; if flushes go on failing, restart the target. It can be opened read-only"
                    );
                    self.fail_open(&open, Status::StoreError, text);
                }
            }
        }
        self.finish_opens();
    }

    fn finish_open(&mut self, open: &WaitingOpen) {
        let Some(volume) = self.exports.volume(open.volume).cloned() else {
            return self.reply(open.from, open.tag, Status::NoSuchVolume, 0, Vec::new());
        };
        let (session, mode) = (open.session, open.mode);
        debug_assert_eq!(self.mode_of(session, volume.index), Some(mode), "it was granted");
        let generation = self.holders.generation(&volume.uuid);
        self.sessions.admit(session, volume.index);
        self.all(Notice::Open { session, volume: volume.index, mode });
        if self.lines.may_write(PeerLine::Open, self.latest) {
            tracing::info!(
                session = session.index,
                volume = %volume.name,
                ?mode,
                generation = generation.0,
                "open"
            );
        }
        let reply = OpenReply {
            handle: volume.handle(),
            flags: volume.flags(mode),
            block_size: volume.block_size,
            blocks: volume.blocks,
            discard_granularity_bytes: volume.discard_granularity_bytes,
            uuid: volume.uuid,
            verifier: self.exports.verifier_of(&volume),
            generation,
        };
        self.reply(open.from, open.tag, Status::Ok, 0, reply.to_wire().to_vec());
    }

    pub(super) fn open_persisted(&mut self, ticket: Ticket) {
        for open in &mut self.waiting_opens {
            if matches!(open.stage, Stage::Granted(its) if its == Some(ticket)) {
                open.stage = Stage::Granted(None);
            }
        }
    }

    pub(super) fn open_not_persisted(&mut self, ticket: Ticket, error: &str) {
        for open in self.take_opens(|open| open.waits_for(ticket)) {
            let text = format!(
                "the target cannot record the holder of the volume (state_dir), so no host may write: {error}"
            );
            self.fail_open(&open, Status::StoreError, text);
        }
    }

    pub(super) fn end_late_opens(&mut self, now: Instant) {
        let late =
            |open: &WaitingOpen| now.saturating_duration_since(open.since) > QUIESCE_DEADLINE;
        for open in self.take_opens(late) {
            if self.is_closed(open.volume) {
                let text =
                    "the volume is being changed, and that takes long: try again in a minute";
                tracing::warn!(
                    session = open.session.index,
                    volume = open.volume.0,
                    "OPEN: {text}"
                );
                self.fail_open(&open, Status::TimedOut, text.to_owned());
                continue;
            }
            tracing::error!(
                session = open.session.index,
                volume = open.volume.0,
                stage = ?open.stage,
                settling = ?open.settling,
                "connections of an earlier holder do not end, the store does not answer, or the state directory takes \
                 no writes"
            );
            let text = match open.stage {
                Stage::Granted(None) if self.settles.is_under_way(open.volume) => {
                    "its store does not answer: the earlier writes of hosts are not durable yet"
                }
                Stage::Granted(None) => "commands of the holder before do not end",
                _ => "the target's state directory does not keep up",
            };
            self.fail_open(&open, Status::TimedOut, text.to_owned());
        }
    }

    /// The admin connection of that epoch is gone: its OPENs cannot be answered, and the session
    /// was not let in.
    pub(super) fn drop_opens_of(&mut self, session: SessionIndex, epoch: Epoch) {
        for open in self.take_opens(|open| (open.session, open.epoch) == (session, epoch)) {
            if open.is_granted() {
                self.give_up(session, open.volume, Status::NoSuchVolume);
            }
        }
    }

    /// Refuses an OPEN that waited.
    fn fail_open(&mut self, open: &WaitingOpen, status: Status, text: String) {
        if open.is_granted() {
            self.give_up(open.session, open.volume, Status::NoSuchVolume);
        }
        self.reply_saying(open.from, open.tag, status, text);
    }

    pub(super) fn take_opens(&mut self, which: impl Fn(&WaitingOpen) -> bool) -> Vec<WaitingOpen> {
        let (taken, kept) =
            std::mem::take(&mut self.waiting_opens).into_iter().partition(|open| which(open));
        self.waiting_opens = kept;
        taken
    }

    /// Takes a volume from a session. Returns false if the session did not have it.
    pub(super) fn give_up(
        &mut self,
        session: SessionIndex,
        volume: VolumeIndex,
        refusal: Status,
    ) -> bool {
        let Some(mode) = self.sessions.close(session, volume) else { return false };
        self.all(Notice::Close { session, volume, refusal });
        if mode != AccessMode::ReadOnly {
            self.left(volume);
        }
        true
    }

    /// A writer left the volume in good order: no opener has to wait for its return.
    fn left(&mut self, volume: VolumeIndex) {
        if self.sessions.writer(volume).is_some() {
            return;
        }
        let Some(uuid) = self.exports.volume(volume).map(|v| v.uuid) else { return };
        // Another host that shared it may come back.
        if self.kept_for.contains_key(&volume) {
            return;
        }
        let Some(record) = self.holders.leave(&uuid) else { return };
        if self.changes.has_claim(&uuid) {
            // The record is written if the claim fails.
            self.changes.postpone(uuid);
        } else {
            self.persist_change(record);
        }
    }

    pub(super) fn close(&mut self, session: SessionIndex, command: &CommandCapsule) -> AdminAnswer {
        let Some(volume) = Volume::index_of(command.volume) else {
            return refuse(Status::NoSuchVolume);
        };
        let waiting = self.take_opens(|open| (open.session, open.volume) == (session, volume));
        for open in &waiting {
            self.reply(open.from, open.tag, Status::NoSuchVolume, 0, Vec::new());
        }
        if !self.give_up(session, volume, Status::NoSuchVolume) && waiting.is_empty() {
            return refuse(Status::NoSuchVolume);
        }
        AdminAnswer::Now(Status::Ok, 0, Vec::new())
    }

    pub(super) fn logout(&mut self, session: SessionIndex) -> AdminAnswer {
        self.told_logout(session);
        for open in self.take_opens(|open| open.session == session) {
            self.reply(open.from, open.tag, Status::NotReady, 0, Vec::new());
        }
        for (volume, mode) in self.sessions.logout(session) {
            self.all(Notice::Close { session, volume, refusal: Status::NoSuchVolume });
            if mode != AccessMode::ReadOnly {
                self.left(volume);
            }
        }
        AdminAnswer::Now(Status::Ok, 0, Vec::new())
    }

    /// Ends a session after its host lost its place in the table. The session loses its volumes
    /// now, and ends with its connections.
    pub(super) fn revoke(&mut self, session: SessionIndex) {
        let Some(state) = self.sessions.get(session) else { return };
        tracing::warn!(host = %state.host_name, peer = state.peer, "ending a session: its key is revoked");
        let what =
            Occurrence::new(EventKind::Revoke, "the key of the host is not allowed any more");
        let what = what.of_host(state.host_name, &state.peer);
        let before = state.epoch.next();
        self.happened(what);
        let ended = self.take_everything(session, Status::NotAllowed);
        if let Some(before) = before {
            self.all(Notice::EndConnections { session, before });
        }
        if ended {
            self.forget(session);
        }
    }

    /// Ends a session with its connections, which the caller has ended.
    pub(super) fn end_session(&mut self, session: SessionIndex, refusal: Status) {
        if self.take_everything(session, refusal) {
            self.forget(session);
        }
    }

    /// Takes all volumes from a session and forbids to resume it. Returns whether it has no
    /// connection left either.
    fn take_everything(&mut self, session: SessionIndex, refusal: Status) -> bool {
        for open in self.take_opens(|open| open.session == session) {
            self.reply(open.from, open.tag, refusal, 0, Vec::new());
        }
        let (held, ended) = self.sessions.revoke(session);
        for (volume, mode) in held {
            self.all(Notice::Close { session, volume, refusal });
            if mode != AccessMode::ReadOnly {
                self.left(volume);
            }
        }
        ended
    }

    /// Closes the volumes that the host of a session has no right to any more.
    pub(super) fn close_forbidden(&mut self, session: SessionIndex) {
        let exports = &self.exports;
        let rights = self.rights(session);
        let is_forbidden = |volume: VolumeIndex, mode: AccessMode| {
            let name = exports.volume(volume).map(|volume| volume.name);
            !name.is_some_and(|name| rights.may_open(name, mode))
        };
        let opened = self.sessions.get(session).into_iter().flat_map(Session::opened);
        let forbidden: Vec<VolumeIndex> =
            opened.filter(|(volume, mode)| is_forbidden(*volume, *mode)).map(|(v, _)| v).collect();
        let waits =
            |open: &&WaitingOpen| open.session == session && is_forbidden(open.volume, open.mode);
        let waiting: Vec<(ConnectionRef, Tag)> =
            self.waiting_opens.iter().filter(waits).map(|open| (open.from, open.tag)).collect();
        for open in self.take_opens(|open| waiting.contains(&(open.from, open.tag))) {
            let text = "the right to it was withdrawn".to_owned();
            self.fail_open(&open, Status::NotAllowed, text);
        }
        for volume in forbidden {
            tracing::warn!(session = session.index, volume = volume.0, "a right was withdrawn");
            self.give_up(session, volume, Status::NotAllowed);
        }
    }
}
