//! OPEN: whether a session gets a volume, and all that the reply waits for.

use std::time::Instant;

use rblk_operate::target::events::{EventKind, Occurrence};
use rblk_protocol::{AccessMode, Generation, HostId, Mutation, OpenRequest, Status};

use super::elsewhere::Asked;
use super::openings::{Openings, Settling, Stage, WaitingOpen};
use super::{ELSEWHERE, GIVEN_AWAY, HolderBook, Holdings};
use crate::control::core::admin_command::{AdminAnswer, AdminCommand, refuse, refuse_saying};
use crate::control::core::effect::Effect;
use crate::control::core::outbox::Outbox;
use crate::control::core::sessions::HostSessions;
use crate::control::peers::peer_lines::PeerLine;
use crate::control::peers::session::{Session, SessionTable};
use crate::record::holders::Claimant;
use crate::store::rbd::image_claim::Wish;
use crate::volume::Volume;
use crate::volume::ids::{SessionIndex, VolumeIndex};

/// Why a host that only reads gets no volume of a group: the member that serves it may answer from
/// its cache for seconds after another member has taken the volume over.
const NO_READERS: &str = "a group of targets serves this volume, and has no hosts that only read beside a writer, since they \
                          could read old data when another member takes the volume over: make a snapshot of its image \
                          (`rbd snap create POOL/IMAGE@SNAP`), serve that as a volume of its own, and mount that one";

/// Names the holder of a volume, for a host that asks.
pub(super) fn held_by(session: &Session, asks: HostId) -> String {
    match session.host == asks {
        true => format!("held by another mount of this host ({})", session.peer),
        false => format!("held by {} ({})", session.host_name, session.peer),
    }
}

/// Whether an OPEN has to wait before it can be decided: for the outcome of a claim, for the end of
/// a change, or, if another host is the holder, until a former owner of the image answers nothing.
fn waits_for_claim(
    (openings, book): (&Openings, &HolderBook),
    volume: &Volume,
    request: &OpenRequest,
    now: Instant,
) -> bool {
    let writes = request.mode != AccessMode::ReadOnly;
    openings.is_shut(volume.index)
        || writes && book.has_claim(&volume.uuid)
        || request.generation.is_fresh() && openings.is_for_holder(volume.index, now)
}

/// Refuses an opener that may not take the volume from a session that holds it, and names that.
fn check_holders(
    table: &SessionTable,
    session: SessionIndex,
    volume: VolumeIndex,
    claimant: &Claimant,
) -> Result<(), String> {
    let excluders = table.excluders(session, volume, claimant.mode);
    for other in excluders.into_iter().filter_map(|other| table.get(other)) {
        // An old process of the same host without connections does not exclude a new one.
        if other.host != claimant.host || other.all_connections() > 0 {
            return Err(held_by(other, claimant.host));
        }
    }
    Ok(())
}

impl Holdings {
    /// OPEN.
    pub(in crate::control::core) fn open(
        &mut self,
        command: &AdminCommand<'_>,
        session: SessionIndex,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) -> AdminAnswer {
        let request = match OpenRequest::from_wire(command.body) {
            Ok(request) => request,
            Err(error) => {
                if out.lines().may_write(PeerLine::BadCommand, command.now) {
                    tracing::warn!(error, "bad OPEN");
                }
                return refuse(Status::InvalidField);
            }
        };
        if let Err((status, text)) = sessions.proofs().rights(session).check_open(&request) {
            return refuse_saying(status, text);
        }
        let Some(volume) = self.exports.named(request.name).cloned() else {
            return self.open_elsewhere(command, session, &request, (sessions, out));
        };
        if request.mode == AccessMode::ReadOnly && self.book.holders().is_shared(&volume.uuid) {
            return refuse_saying(Status::NotSupported, NO_READERS.to_owned());
        }
        // A volume that was made read-only is given back to its holder, but refuses its writes.
        let is_fresh = request.generation.is_fresh();
        if volume.read_only && request.mode != AccessMode::ReadOnly && is_fresh {
            return refuse(Status::ReadOnly);
        }
        let has_it = sessions.mode_of(session, volume.index).is_some();
        if self.openings.is_closed_to_others(volume.index) && is_fresh && !has_it {
            let text = "the volume is about to be removed".to_owned();
            return refuse_saying(Status::InUse, text);
        }
        self.reopen((session, volume.index), request.mode, sessions, out);
        let places = (&self.openings, &self.book);
        let stage = if waits_for_claim(places, &volume, &request, command.now) {
            Stage::Undecided(request)
        } else {
            match self.decide(session, (&volume, &request), (sessions, out), command.now) {
                Ok(stage) => stage,
                Err(answer) => return answer,
            }
        };
        self.openings.push(WaitingOpen {
            from: command.from,
            tag: command.capsule.tag,
            session,
            epoch: command.capsule.epoch,
            volume: volume.index,
            mode: request.mode,
            returns: !is_fresh,
            stage,
            settling: Settling::NotNeeded,
            since: command.now,
        });
        AdminAnswer::Later
    }

    /// OPEN of a volume that this target does not serve. A member of a group may claim it.
    fn open_elsewhere(
        &mut self,
        command: &AdminCommand<'_>,
        session: SessionIndex,
        request: &OpenRequest,
        (sessions, out): (&HostSessions, &mut Outbox),
    ) -> AdminAnswer {
        let Some(state) = sessions.table().get(session) else { return refuse(Status::NotReady) };
        let name = request.name;
        match self.elsewhere.ask(name, command.now) {
            Asked::Unknown => return refuse(Status::NoSuchVolume),
            Asked::GivenAway => return refuse_saying(ELSEWHERE, GIVEN_AWAY.to_owned()),
            // A claim under way takes the wish, too: it may be stronger.
            Asked::Begins | Asked::Waits => {
                let wish = match (request.generation.is_fresh(), request.take_over) {
                    (false, _) => Wish::Return(state.host, request.generation),
                    (true, true) => Wish::TakeOver,
                    (true, false) => Wish::Fresh,
                };
                out.order(Effect::Claim { name, wish });
            }
        }
        let from = (command.from, command.id);
        let sent = (command.capsule, command.body);
        self.elsewhere.push(name, from, session, sent, command.now);
        AdminAnswer::Later
    }

    /// A session that has the volume, or waits for it, opens it.
    fn reopen(
        &mut self,
        which: (SessionIndex, VolumeIndex),
        mode: AccessMode,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) {
        let older = self.openings.take(|open| (open.session, open.volume) == which);
        let other_mode = sessions.mode_of(which.0, which.1).is_some_and(|old| old != mode);
        if other_mode || older.iter().any(WaitingOpen::is_granted) {
            // To open in another mode is to close first: commands sent before may still be under
            // way.
            self.give_up(which, Status::NoSuchVolume, sessions, out);
        }
        // The host asked again before the reply: the newer OPEN counts.
        for open in older {
            out.reply_status(open.from, open.tag, Status::NotReady);
        }
    }

    /// Decides whether a session gets a volume that has no claim. If so, starts all that the reply
    /// waits for.
    fn decide(
        &mut self,
        session: SessionIndex,
        (volume, request): (&Volume, &OpenRequest),
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) -> Result<Stage, AdminAnswer> {
        let Some(state) = sessions.table().get(session) else {
            return Err(refuse(Status::NotReady));
        };
        let (host, host_name) = (state.host, state.host_name);
        let claimant = Claimant { mode: request.mode, host, host_name };
        if claimant.mode == AccessMode::ReadOnly {
            self.enter(session, (volume, &claimant, false), sessions, out, now);
            return Ok(Stage::Granted(None));
        }
        let (uuid, generation) = (&volume.uuid, request.generation);
        let returns = !generation.is_fresh();
        let is_last = if Mutation::FencingGeneration.is_on() {
            self.book.holders().record(uuid).is_some()
        } else {
            self.book.holders().is_last(uuid, &claimant, generation)
        };
        if returns && !is_last {
            return Err(self.refuse_return((volume, &claimant), generation, (sessions, out), now));
        }
        if self.book.is_behind() {
            let text = "the target's state directory does not keep up".to_owned();
            return Err(refuse_saying(Status::LimitReached, text));
        }
        let take_over = request.take_over && !returns;
        if !take_over {
            let held = check_holders(sessions.table(), session, volume.index, &claimant);
            let held = held.and_then(|()| match returns {
                true => Ok(()),
                false => self.book.check_absent(volume, &claimant, now),
            });
            held.map_err(|text| refuse_used(volume, text, out, now))?;
        }
        let changed = if returns {
            self.book.come_back(uuid, &claimant, generation)
        } else {
            let claimed = self.book.claim(uuid, &claimant, out).map_err(|error| {
                tracing::error!(volume = %volume.name, %error, "OPEN refused");
                refuse_saying(Status::Internal, error.to_string())
            })?;
            if let Some(ticket) = claimed {
                return Ok(Stage::Claims { ticket, take_over });
            }
            self.book.join(uuid, &claimant)
        };
        // Other hosts that share the volume may still come back.
        if claimant.mode == AccessMode::Exclusive {
            self.book.keep_no_longer(volume.index);
        }
        self.enter(session, (volume, &claimant, take_over), sessions, out, now);
        Ok(Stage::Granted(self.book.confirm(uuid, changed, out)))
    }

    /// A holder comes back after another host had the volume.
    fn refuse_return(
        &mut self,
        (volume, claimant): (&Volume, &Claimant),
        generation: Generation,
        (sessions, out): (&HostSessions, &mut Outbox),
        now: Instant,
    ) -> AdminAnswer {
        self.refused_returns += 1;
        let holders = self.book.holders();
        let writer = sessions.table().writer(volume.index);
        let text = match (writer, holders.record(&volume.uuid)) {
            (Some(holder), _) => held_by(holder, claimant.host),
            (None, _) if holders.is_replaced(&volume.uuid) => {
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
        if out.lines().may_write(PeerLine::OpenRefused, now) {
            tracing::warn!(
                volume = %volume.name,
                host = %claimant.host_name,
                named = generation.0,
                generation = holders.generation(&volume.uuid).0,
                text,
                "OPEN refused: fenced"
            );
        }
        let what = Occurrence::new(EventKind::Fence, format!("refused: the volume {text}"));
        let what = Occurrence { host: Some(claimant.host_name.to_string()), ..what };
        out.happened(what.of_volume(volume.name));
        refuse_saying(Status::Fenced, text)
    }

    /// Decides the next OPEN that waited for the claim of another session, in order of arrival.
    /// Returns false if there is none.
    pub(super) fn decide_waiting(
        &mut self,
        sessions: &mut HostSessions,
        out: &mut Outbox,
        now: Instant,
    ) -> bool {
        let book = &self.book;
        let undecided = self.openings.take_undecided(&self.exports, |openings, volume, request| {
            waits_for_claim((openings, book), volume, request, now)
        });
        let Some((at, mut open, request, volume)) = undecided else { return false };
        let (session, epoch) = (open.session, open.epoch);
        let stage = if sessions.table().get(session).is_some_and(|s| s.way(epoch).is_some()) {
            self.decide(session, (&volume, &request), (sessions, out), now)
        } else {
            Err(refuse(Status::Fenced))
        };
        match stage {
            Ok(stage) => {
                open.stage = stage;
                self.openings.put_back(at, open);
            }
            Err(AdminAnswer::Now(status, value, payload)) => {
                out.reply(open.from, open.tag, (status, value), payload);
            }
            Err(AdminAnswer::Later) => {}
        }
        true
    }
}

fn refuse_used(volume: &Volume, text: String, out: &mut Outbox, now: Instant) -> AdminAnswer {
    if out.lines().may_write(PeerLine::OpenRefused, now) {
        tracing::info!(volume = %volume.name, text, "OPEN refused: in use");
    }
    refuse_saying(Status::InUse, text)
}
