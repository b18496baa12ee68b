//! [`Holdings`]: the volumes that are served, the sessions that hold them, and the OPENs that wait:
//! OPEN, CLOSE, LOGOUT, and the take-over of a volume.
//!
//! An OPEN for writing is decided when it comes, or once no [claim](claim) to the volume is
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

mod changes;
mod claim;
mod elsewhere;
mod given_up;
mod holder_book;
mod image_proofs;
mod leave;
mod open;
mod open_settles;
mod openings;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use rblk_protocol::{Name, OpenReply, Status};

use super::Decisions;
use super::admin_command::{AdminAnswer, AdminCommand};
use super::effect::Ticket;
use super::exports::Exports;
use super::outbox::Outbox;
use super::sessions::HostSessions;
use crate::control::peers::peer_lines::PeerLine;
use crate::control::peers::session::Session;
use crate::data::poll_group::{Notice, SettleTicket};
use crate::record::holders::Holders;
use crate::volume::Volume;
use crate::volume::ids::{SessionIndex, VolumeIndex};

use elsewhere::{ClaimingOpen, Elsewhere};
pub(super) use holder_book::HolderBook;
use openings::{Openings, Stage, WaitingOpen};

/// The status of an OPEN that another member of the group may grant: its host tries its other
/// addresses, and comes back. Every version knows it.
const ELSEWHERE: Status = Status::ShuttingDown;
/// Why an OPEN at a member is refused that the cluster does not answer.
const UNPROVEN: &str =
    "the cluster does not say whether this member of the group still has the image";
const GIVEN_AWAY: &str = "another member of this target has the volume, or is about to";

/// See the module.
#[derive(Debug)]
pub(super) struct Holdings {
    exports: Exports,
    book: HolderBook,
    openings: Openings,
    elsewhere: Elsewhere,
    // Sessions that were fenced by a take-over.
    take_overs: u64,
    // OPENs that were refused because the volume had another holder meanwhile.
    refused_returns: u64,
}

impl Holdings {
    /// The volumes of a run that begins, and the holders that earlier runs left.
    pub(super) fn new(exports: Exports, holders: Holders) -> Self {
        let (book, openings) = (HolderBook::new(holders), Openings::default());
        let elsewhere = Elsewhere::default();
        Self { exports, book, openings, elsewhere, take_overs: 0, refused_returns: 0 }
    }

    /// The volumes that are served.
    pub(super) fn exports(&self) -> &Exports {
        &self.exports
    }

    /// The volumes that are served, to change which.
    pub(super) fn exports_mut(&mut self) -> &mut Exports {
        &mut self.exports
    }

    /// The last holders of the volumes.
    pub(super) fn book(&self) -> &HolderBook {
        &self.book
    }

    /// The last holders of the volumes, to change what is known of a volume.
    pub(super) fn book_mut(&mut self) -> &mut HolderBook {
        &mut self.book
    }

    /// The counters of decisions about holders.
    pub(super) fn decisions(&self, unproven: u64) -> Decisions {
        let Self { take_overs, refused_returns, .. } = *self;
        Decisions { take_overs, refused_returns, unproven }
    }

    /// Keeps every volume for its last holder until then.
    pub(super) fn keep_all(&mut self, until: Instant) {
        self.book.keep(self.exports.volumes().iter().map(AsRef::as_ref), until);
    }

    /// Until then, only the holder of the record may have a volume: see [`Self::open`].
    pub(super) fn keep_for_holder(&mut self, volume: VolumeIndex, until: Instant) {
        self.openings.keep_for_holder(volume, until);
    }

    /// A volume is served newly. It may have an earlier holder that may come back until then.
    pub(super) fn begin(&mut self, volume: Arc<Volume>, until: Instant) {
        self.elsewhere.begin(volume.name);
        self.book.keep([&*volume], until);
        self.exports.put(volume);
    }

    /// A volume is served no longer. The OPENs that wait for it are refused.
    pub(super) fn end(&mut self, volume: VolumeIndex, out: &mut Outbox) {
        let served = self.exports.volume(volume).cloned();
        let left = served.filter(|volume| self.elsewhere.has(volume.name));
        let is_elsewhere = left.is_some();
        self.exports.remove(volume);
        self.book.keep_no_longer(volume);
        self.book.prove_no_longer(volume);
        if let Some(left) = left {
            self.book.forget(&left.uuid);
        }
        self.openings.forget(volume);
        for open in self.openings.take(|open| open.volume == volume) {
            match is_elsewhere {
                true => out.reply_saying(open.from, open.tag, ELSEWHERE, GIVEN_AWAY.to_owned()),
                false => out.reply_status(open.from, open.tag, Status::NoSuchVolume),
            }
        }
    }

    /// A volume of the group that this member does not serve from now on: not yet, or no longer.
    /// `given_away`: another member is about to claim it.
    pub(super) fn leave_to_others(&mut self, name: Name, given_away: Option<Instant>) {
        self.elsewhere.put(name, given_away);
    }

    /// The volumes of the group that this member does not serve, by its configuration now.
    pub(super) fn configure_others(&mut self, names: &BTreeSet<Name>) {
        self.elsewhere.configure(names);
    }

    /// Whether another member of the group may serve the volume.
    pub(super) fn is_elsewhere(&self, name: Name) -> bool {
        self.elsewhere.has(name)
    }

    /// A claim has ended: this member serves the volume now, or not, for this reason.
    pub(super) fn claim_ended(
        &mut self,
        name: Name,
        result: &Result<(), String>,
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) {
        for open in self.elsewhere.claimed(name, result.is_ok()) {
            let ClaimingOpen { from, id, session, capsule, body, .. } = open;
            if let Err(text) = result {
                out.reply_saying(from, capsule.tag, ELSEWHERE, text.clone());
                continue;
            }
            let way = sessions.table().get(session).and_then(|session| session.way(capsule.epoch));
            if way.is_none() {
                out.reply_status(from, capsule.tag, Status::Fenced);
                continue;
            }
            let command = AdminCommand { from, id, capsule: &capsule, body: &body, now };
            if let AdminAnswer::Now(status, value, payload) =
                self.open(&command, session, sessions, out)
            {
                out.reply(from, capsule.tag, (status, value), payload);
            }
        }
        self.finish_opens(sessions, out, now);
    }

    /// The hosts that have a volume open, or may come back to it.
    pub(super) fn users(&self, volume: VolumeIndex, sessions: &HostSessions) -> Vec<String> {
        let name = |session: &Session| match session.connections() {
            0 => format!("{} ({}, away)", session.host_name, session.peer),
            _ => format!("{} ({})", session.host_name, session.peer),
        };
        let mut users: Vec<String> = sessions.users_of(volume).map(name).collect();
        if users.is_empty() && self.book.is_kept(volume) {
            let uuid = self.exports.volume(volume).map(|volume| volume.uuid);
            let record = uuid.and_then(|uuid| self.book.holders().record(&uuid));
            users.extend(record.map(|record| format!("{} (may come back)", record.host_name)));
        }
        users
    }

    /// Closes a volume to hosts that do not have it open, or opens it (false) to all again.
    pub(super) fn close_to_others(&mut self, volume: VolumeIndex, close: bool) {
        self.openings.close_to_others(volume, close);
    }

    /// The store of a volume is lost: its OPENs wait for the end of the volume, and are refused.
    pub(super) fn lose(&mut self, volume: VolumeIndex) {
        self.openings.lose(volume);
    }

    /// The volume that is closed while it changes, from this moment.
    pub(super) fn shut(&mut self, volume: Option<VolumeIndex>) {
        self.openings.shut(volume);
    }

    /// Whether the time alone may change something.
    pub(super) fn need_ticks(&self) -> bool {
        !self.openings.is_empty() || !self.elsewhere.is_empty() || self.book.needs_ticks()
    }

    /// A session ended.
    pub(super) fn forget(&mut self, session: SessionIndex) {
        // Its connections are gone: no reply would reach it.
        drop(self.openings.take(|open| open.session == session));
        self.elsewhere.forget(session);
    }

    /// Forgets a session that ended, here and among the sessions.
    fn forget_ended(
        &mut self,
        session: SessionIndex,
        sessions: &mut HostSessions,
        out: &mut Outbox,
    ) {
        self.forget(session);
        sessions.forget(session, out);
    }

    /// The record of a ticket is durable, or may not be durable for that reason.
    pub(super) fn persisted(
        &mut self,
        ticket: Ticket,
        result: &Result<(), String>,
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) {
        let claim = self.book.written(ticket, result);
        match result {
            Ok(()) => {
                if let Some(record) = claim {
                    self.claimed(record, ticket, (sessions, out), now);
                }
                self.openings.confirmed(ticket);
            }
            Err(error) => {
                for open in self.openings.take_waiting_for(ticket) {
                    let said = self.not_recorded(open.volume, error);
                    self.fail_open(&open, said, (sessions, out), now);
                }
                if let Some(record) = claim {
                    self.book.withdraw(&record.volume, out);
                }
            }
        }
    }

    /// Why an OPEN is refused whose record cannot be written. Another member may be able to.
    fn not_recorded(&self, volume: VolumeIndex, error: &str) -> (Status, String) {
        match self.is_shared(volume) {
            true => (
                ELSEWHERE,
                format!(
                    "this member of the group cannot write the record beside the image, so no host may write: {error}"
                ),
            ),
            false => (
                Status::StoreError,
                format!(
                    "the target cannot record the holder of the volume (state_dir), so no host may write: {error}"
                ),
            ),
        }
    }

    /// Whether the volume is of a group, and its record is beside its image.
    fn is_shared(&self, volume: VolumeIndex) -> bool {
        let volume = self.exports.volume(volume);
        volume.is_some_and(|volume| self.book.holders().is_shared(&volume.uuid))
    }

    /// The proof of a ticket is there: this member has the image of a volume.
    pub(super) fn proven(&mut self, which: (VolumeIndex, Ticket), out: &mut Outbox) {
        if self.book.proven(which, out) {
            self.openings.confirmed(which.1);
        }
    }

    /// The earlier writes to a volume are durable, or not all of them are, for this reason.
    pub(super) fn settled(
        &mut self,
        ticket: SettleTicket,
        result: &Result<(), String>,
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) {
        let failed = self.openings.settled(ticket, result.is_ok());
        let Err(error) = result else { return };
        for open in failed {
            let name = self.exports.volume(open.volume).map(|volume| volume.name);
            let name = name.map(tracing::field::display);
            tracing::error!(volume = name, error, "OPEN refused: its store fails");
            let text = format!(
                "not all that hosts wrote to it before can be made durable: {error}. Mend its store or make \
                 room there; if flushes go on failing, restart the target. It can be opened read-only"
            );
            self.fail_open(&open, (Status::StoreError, text), (sessions, out), now);
        }
    }

    /// Answers every OPEN that has nothing left to wait for.
    pub(super) fn finish_opens(
        &mut self,
        sessions: &mut HostSessions,
        out: &mut Outbox,
        now: Instant,
    ) {
        self.openings.begin_settles(sessions.table(), &self.exports, out);
        loop {
            if let Some(open) = self.openings.take_ready(sessions.table()) {
                self.finish_open(&open, sessions, out, now);
            } else if !self.decide_waiting(sessions, out, now) {
                return;
            }
        }
    }

    fn finish_open(
        &mut self,
        open: &WaitingOpen,
        sessions: &mut HostSessions,
        out: &mut Outbox,
        now: Instant,
    ) {
        let Some(volume) = self.exports.volume(open.volume).cloned() else {
            return out.reply_status(open.from, open.tag, Status::NoSuchVolume);
        };
        let (session, mode) = (open.session, open.mode);
        debug_assert_eq!(sessions.mode_of(session, volume.index), Some(mode), "it was granted");
        let generation = self.book.holders().generation(&volume.uuid);
        sessions.table_mut().admit(session, volume.index);
        out.tell_all(Notice::Open { session, volume: volume.index, mode });
        if out.lines().may_write(PeerLine::Open, now) {
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
        out.reply(open.from, open.tag, (Status::Ok, 0), reply.to_wire().to_vec());
    }

    /// Keeps no volume any more for a holder whose time is over.
    pub(super) fn expire(&mut self, now: Instant) {
        self.book.expire(now);
    }

    /// Writes the records of fences again that could not be written.
    pub(super) fn fence_again(&mut self, out: &mut Outbox) {
        self.book.fence_again(out);
    }

    /// A volume goes although its store misses writes of hosts.
    pub(super) fn fence_holders(&mut self, volume: &Volume, out: &mut Outbox) {
        self.book.fence(volume.uuid, out);
    }

    /// Refuses the OPENs that waited too long.
    pub(super) fn end_late_opens(
        &mut self,
        sessions: &mut HostSessions,
        out: &mut Outbox,
        now: Instant,
    ) {
        for open in self.elsewhere.take_late(now) {
            let text = "this member of the group cannot get the volume yet".to_owned();
            out.reply_saying(open.from, open.capsule.tag, ELSEWHERE, text);
        }
        for open in self.openings.take_late(now) {
            if self.openings.is_shut(open.volume) {
                let text =
                    "the volume is being changed, and that takes long: try again in a minute";
                tracing::warn!(
                    session = open.session.index,
                    volume = open.volume.0,
                    "OPEN: {text}"
                );
                self.fail_open(&open, (Status::TimedOut, text.to_owned()), (sessions, out), now);
                continue;
            }
            if self.is_shared(open.volume) && open.waits_for_ticket() {
                tracing::warn!(
                    session = open.session.index,
                    volume = open.volume.0,
                    "OPEN: {UNPROVEN}"
                );
                self.fail_open(&open, (ELSEWHERE, UNPROVEN.to_owned()), (sessions, out), now);
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
                Stage::Granted(None) if self.openings.is_settling(open.volume) => {
                    "its store does not answer: the earlier writes of hosts are not durable yet"
                }
                Stage::Granted(None) => "commands of the holder before do not end",
                _ => "the target's state directory does not keep up",
            };
            self.fail_open(&open, (Status::TimedOut, text.to_owned()), (sessions, out), now);
        }
    }

    /// Refuses an OPEN that waited, of a host that may have the volume.
    fn fail_open(
        &mut self,
        open: &WaitingOpen,
        (status, text): (Status, String),
        (sessions, out): (&mut HostSessions, &mut Outbox),
        now: Instant,
    ) {
        self.give_up_open(open, (sessions, out), now);
        out.reply_saying(open.from, open.tag, status, text);
    }
}
