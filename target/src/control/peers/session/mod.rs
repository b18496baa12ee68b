//! [`SessionTable`]: the sessions, their connections and epochs, and the volumes that they hold.
//! Pure: the clock and all I/O are the caller's.
//!
//! Rules:
//! - A session begins with an accepted LOGIN, so every session has a host. A connection without a
//!   LOGIN belongs to no session, whatever session it names.
//! - A session has a set of live epochs, one for each [way](Way) of its host to the target. A host
//!   without ways has one. A LOGIN names a higher epoch than every LOGIN and DROP before it.
//! - A LOGIN that resumes the session ends all older epochs; one that joins it ends at most the
//!   last epoch of its own way; a DROP ends those that it names. All of them are answered only when
//!   every connection of the epochs that they end is gone: no command, no RDMA, no store I/O of
//!   these can follow. An epoch that ended never lives again.
//! - One writer per volume: an exclusive opener excludes every other writer. Readers are never
//!   excluded.
//! - A session without connections keeps its volumes for the lease, so that a short loss of the
//!   path does not give the volume to another host. A session without volumes ends at once: its
//!   host loses nothing, and logs in again. A host may take its own volume back at once: its old
//!   process has no connections left.
//! - A writer that closed a volume, or lost it to another, is *leaving* it while it still has
//!   connections of that time: commands on those may still change the volume. The next writer waits
//!   until they are gone.

mod ended_epochs;
mod live_connections;
mod way;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rblk_protocol::limits::WAYS_MAX;
use rblk_protocol::width::wide;
use rblk_protocol::{
    AccessMode, DropRequest, Epoch, HostId, Join, Mutation, Name, RejectReason, SessionId, Status,
};

use crate::control::peers::account::Payer;
use crate::volume::ids::{SessionIndex, VolumeIndex};
pub(crate) use ended_epochs::EndedEpochs;
use live_connections::{Live, SessionConnections};
pub(crate) use way::Way;

/// One session.
#[derive(Debug)]
pub struct Session {
    /// The public handle by which connections name the session.
    pub id: SessionId,
    /// The session's index in the tables of the poll groups.
    pub index: SessionIndex,
    /// The highest epoch of a LOGIN that was accepted, or of a DROP.
    pub newest: Epoch,
    /// The epoch of the last LOGIN that joined nothing: it ended all before.
    pub base: Epoch,
    /// Its host.
    pub host: HostId,
    /// The account that is charged for the session's resources.
    pub(crate) account: Payer,
    /// The name of the host, for people.
    pub host_name: Name,
    /// The session's number among the sessions of its host: the lowest that was free. Metrics name
    /// the session by it, so a host that comes and goes makes no new series.
    pub place: u32,
    /// The time within which the host wants a dead path detected.
    pub detect: Duration,
    /// The address of the initiator at the last LOGIN, for people.
    pub peer: String,
    /// Whether the latest I/O connection has digests, for people.
    pub digest: bool,
    // The epochs that were not ended, with or without connections.
    ways: BTreeMap<Epoch, Way>,
    volumes: SessionVolumes,
    connections: SessionConnections,
    // The reason why the session will end with its last connection, if it will.
    leave: Option<Leave>,
}

/// The volumes of one session. Invariant: every admitted volume is opened.
#[derive(Debug, Default)]
struct SessionVolumes {
    // Volumes that the session opened, including those that it still waits for.
    opened: BTreeMap<VolumeIndex, AccessMode>,
    // Volumes for which the session may send commands.
    admitted: BTreeSet<VolumeIndex>,
    // Volumes that the session had opened for writing, the mode, and the last epoch in which it
    // had: while connections up to that epoch exist, commands may still change the volume.
    leaving: BTreeMap<VolumeIndex, (AccessMode, Epoch)>,
}

/// The reason why a session ends while it has connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Leave {
    /// The session logged out.
    LoggedOut,
    /// Another session took over a volume that this one held.
    Fenced,
    /// The host lost its permission.
    Revoked,
}

impl Session {
    /// The mode in which the session opened, or asked to open, a volume; `None` if it did not.
    #[must_use]
    pub(crate) fn mode_of(&self, volume: VolumeIndex) -> Option<AccessMode> {
        self.volumes.opened.get(&volume).copied()
    }

    /// The volumes that the session opened, including those that it still waits for.
    pub(crate) fn opened(&self) -> impl Iterator<Item = (VolumeIndex, AccessMode)> {
        self.volumes.opened.iter().map(|(volume, mode)| (*volume, *mode))
    }

    /// Number of live connections that have proven themselves or need no proof.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.connections.proven()
    }

    /// Number of all connections that are not gone.
    #[must_use]
    pub(crate) fn all_connections(&self) -> usize {
        self.connections.len()
    }

    /// Whether the session has the admin connection of that epoch.
    #[must_use]
    pub(crate) fn has_admin(&self, epoch: Epoch) -> bool {
        self.connections.has_admin(epoch)
    }

    /// Whether the session has the admin connection of a live epoch other than that.
    #[must_use]
    pub(crate) fn has_other_admin(&self, epoch: Epoch) -> bool {
        self.live_epochs().any(|other| other != epoch && self.has_admin(other))
    }

    /// The way of an epoch. `None` for an epoch that ended or never began.
    #[must_use]
    pub(crate) fn way(&self, epoch: Epoch) -> Option<&Way> {
        self.ways.get(&epoch)
    }

    /// The epochs that were not ended, in rising order.
    pub(crate) fn live_epochs(&self) -> impl Iterator<Item = Epoch> {
        self.ways.keys().copied()
    }

    /// The addresses of its live epochs.
    pub(crate) fn peers(&self) -> impl Iterator<Item = &str> {
        self.ways.values().map(|way| way.peer.as_str())
    }

    /// Whether LOGIN was answered in that epoch, and the epoch was not ended.
    #[must_use]
    pub(crate) fn is_in(&self, epoch: Epoch) -> bool {
        self.way(epoch).is_some_and(|way| way.logged_in)
    }

    /// Notes that the LOGIN of an epoch is answered. `None`: the epoch has ended.
    pub(crate) fn let_in(&mut self, epoch: Epoch) -> Option<()> {
        self.ways.get_mut(&epoch)?.logged_in = true;
        Some(())
    }

    /// Memory of the connections that have proven themselves or need no proof, in bytes.
    #[must_use]
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.connections.memory_bytes
    }

    /// Whether a connection of these epochs is not gone.
    #[must_use]
    pub(crate) fn has_connections_of(&self, ended: &EndedEpochs) -> bool {
        self.connections.has_any_of(ended)
    }

    /// Ends epochs: nothing joins them any more. Their connections are the caller's.
    fn end_epochs(&mut self, ended: &EndedEpochs) {
        self.ways.retain(|epoch, _| !ended.has(*epoch));
    }

    /// A LOGIN was accepted in that epoch, which is the newest now.
    fn begin_epoch(&mut self, epoch: Epoch, ends: EndedEpochs, login: LoggingIn) {
        let LoggingIn { detect, peer, has_ways, .. } = login;
        self.newest = epoch;
        (self.detect, self.peer) = (detect, peer.clone());
        self.ways.insert(epoch, Way { peer, ends, has_ways, logged_in: false });
    }

    /// The reason why the session will end with its last connection, if it will.
    #[must_use]
    pub(crate) fn leave(&self) -> Option<Leave> {
        self.leave
    }

    /// Whether the session can end without a loss: it holds no volume, its commands can change
    /// none, and it has no proven connection.
    fn is_empty(&self) -> bool {
        self.connections() == 0 && self.volumes.opened.is_empty() && self.volumes.leaving.is_empty()
    }

    /// The session closed the volume, or lost it.
    fn give_up(&mut self, volume: VolumeIndex) -> Option<AccessMode> {
        let mode = self.volumes.opened.remove(&volume)?;
        let admitted = self.volumes.admitted.remove(&volume);
        if admitted && mode != AccessMode::ReadOnly && self.all_connections() > 0 {
            self.volumes.leaving.insert(volume, (mode, self.newest));
        }
        Some(mode)
    }

    /// The session loses all its volumes, and ends with its last connection.
    fn give_up_all(&mut self, why: Leave) -> Vec<(VolumeIndex, AccessMode)> {
        self.leave = Some(why);
        let held: Vec<_> = self.opened().collect();
        for (volume, _) in &held {
            self.give_up(*volume);
        }
        held
    }

    /// Lets the session send commands for a volume that it opened.
    fn admit(&mut self, volume: VolumeIndex) {
        let SessionVolumes { opened, admitted, leaving } = &mut self.volumes;
        let Some(mode) = opened.get(&volume).copied() else { return };
        admitted.insert(volume);
        // The session holds the volume in its old mode, and so excludes the same sessions as then.
        if leaving.get(&volume).is_some_and(|(then, _)| *then == mode) {
            leaving.remove(&volume);
        }
    }

    /// A connection is gone. Volumes that waited for it are no longer leaving.
    fn connection_gone(&mut self, live: Live, memory_bytes: u64, now: Instant) {
        let Self { connections, volumes, .. } = self;
        connections.remove(live, memory_bytes, now);
        volumes.leaving.retain(|_, (_, until)| connections.has_up_to(*until));
    }
}

/// The effect of a connection's end on its session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum After {
    /// The session lives.
    Lives,
    /// The last connection of an epoch that had ended is gone: it may be the last that a LOGIN or a
    /// DROP waited for.
    Quiesced,
    /// The session ended. Another session may have its index when the poll groups have forgotten
    /// it.
    Ended,
}

/// Whether two sessions that open a volume in these modes exclude each other.
fn excludes(mode: AccessMode, theirs: AccessMode) -> bool {
    match (mode, theirs) {
        (AccessMode::ReadOnly, _) | (_, AccessMode::ReadOnly) => false,
        (AccessMode::Shared, AccessMode::Shared) => false,
        (AccessMode::Exclusive | AccessMode::Shared, _) => true,
    }
}

/// The facts of an accepted LOGIN.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct LoggingIn {
    /// The host.
    pub(crate) host: HostId,
    /// The account that is charged for its resources.
    pub(crate) account: Payer,
    /// The host's name.
    pub(crate) host_name: Name,
    /// The time within which the host wants a dead path detected.
    pub(crate) detect: Duration,
    /// The address of the initiator.
    pub(crate) peer: String,
    /// Both ends know [`WAYS`](rblk_protocol::Features::WAYS).
    pub(crate) has_ways: bool,
}

/// All sessions.
#[derive(Debug)]
pub struct SessionTable {
    by_index: Vec<Option<Session>>,
    by_id: BTreeMap<SessionId, SessionIndex>,
    // Number of sessions begun so far.
    lives: u32,
    max: usize,
    lease: Duration,
}

impl SessionTable {
    /// A table for at most `max` sessions. A session without connections keeps its volumes for
    /// `lease`.
    #[must_use]
    pub(crate) fn new(max: u32, lease: Duration) -> Self {
        let max = wide(max).min(usize::from(u16::MAX));
        Self { by_index: Vec::new(), by_id: BTreeMap::new(), lives: 0, max, lease }
    }

    /// Limit of sessions at a time.
    #[must_use]
    pub(crate) fn max(&self) -> usize {
        self.max
    }

    /// Time for which a session without connections keeps its volumes.
    #[must_use]
    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    /// All sessions.
    pub fn iter(&self) -> impl Iterator<Item = &Session> {
        self.by_index.iter().flatten()
    }

    /// The session of this index.
    #[must_use]
    pub(crate) fn get(&self, index: SessionIndex) -> Option<&Session> {
        let session = self.by_index.get(usize::from(index.index)).and_then(Option::as_ref);
        session.filter(|session| session.index == index)
    }

    /// The session of this index.
    pub(crate) fn get_mut(&mut self, index: SessionIndex) -> Option<&mut Session> {
        let session = self.by_index.get_mut(usize::from(index.index)).and_then(Option::as_mut);
        session.filter(|session| session.index == index)
    }

    /// Whether the table is full.
    #[must_use]
    pub(crate) fn is_full(&self) -> bool {
        self.by_index.len() >= self.max && self.by_index.iter().all(Option::is_some)
    }

    /// Begins a session for a LOGIN that names none, with the given random id.
    ///
    /// # Errors
    /// The table is full.
    pub(crate) fn begin(
        &mut self,
        id: SessionId,
        login: LoggingIn,
        now: Instant,
    ) -> Result<SessionIndex, RejectReason> {
        let free = self.by_index.iter().position(Option::is_none);
        let at = match free {
            Some(at) => at,
            None if self.by_index.len() < self.max => {
                self.by_index.push(None);
                self.by_index.len() - 1
            }
            None => return Err(RejectReason::LimitReached),
        };
        self.lives = self.lives.wrapping_add(1);
        let index = u16::try_from(at).map_err(|_| RejectReason::LimitReached)?;
        let index = SessionIndex { index, life: self.lives };
        let mut session = Session {
            id,
            index,
            newest: Epoch(1),
            base: Epoch(1),
            host: login.host,
            account: login.account.clone(),
            host_name: login.host_name,
            place: self.free_place(login.host_name),
            detect: login.detect,
            peer: login.peer.clone(),
            digest: false,
            ways: BTreeMap::new(),
            volumes: SessionVolumes::default(),
            connections: SessionConnections::none(now),
            leave: None,
        };
        session.begin_epoch(Epoch(1), EndedEpochs::Below(Epoch(1)), login);
        self.by_index[at] = Some(session);
        self.by_id.insert(id, index);
        Ok(index)
    }

    /// The lowest number that no session of a host has.
    fn free_place(&self, host: Name) -> u32 {
        let taken: BTreeSet<u32> =
            self.iter().filter(|s| s.host_name == host).map(|s| s.place).collect();
        let gap = (0..).zip(&taken).find(|(place, other)| place != *other);
        gap.map_or_else(|| u32::try_from(taken.len()).unwrap_or(u32::MAX), |(place, _)| place)
    }

    /// The session that an admin connection may resume in this epoch, after its LOGIN has proved
    /// its host. Changes nothing.
    ///
    /// # Errors
    /// Unknown session, an epoch that is not above all before, or the highest epoch: no newer epoch
    /// could ever end its connections.
    pub(crate) fn resumable(
        &self,
        id: SessionId,
        epoch: Epoch,
    ) -> Result<SessionIndex, RejectReason> {
        let index = *self.by_id.get(&id).ok_or(RejectReason::NoSuchSession)?;
        let session = self.get(index).ok_or(RejectReason::NoSuchSession)?;
        if session.leave.is_some() || epoch.next().is_none() {
            return Err(RejectReason::NoSuchSession);
        }
        if epoch <= session.newest && !Mutation::WayLateLogin.is_on() {
            return Err(RejectReason::StaleEpoch);
        }
        Ok(index)
    }

    /// Resumes a session in a higher epoch, for a LOGIN. The caller must now end the older
    /// connections.
    ///
    /// # Errors
    /// As for [`Self::resumable`]; [`RejectReason::NoSuchSession`] if the session belongs to
    /// another host.
    pub(crate) fn resume(
        &mut self,
        id: SessionId,
        epoch: Epoch,
        login: LoggingIn,
    ) -> Result<SessionIndex, RejectReason> {
        let free_place = self.free_place(login.host_name);
        let session = self.resumable_by(id, epoch, login.host)?;
        let ends = match Mutation::WayResumeKeeps.is_on() {
            true => EndedEpochs::None,
            false => EndedEpochs::Below(epoch),
        };
        session.end_epochs(&ends);
        if session.host_name != login.host_name {
            (session.host_name, session.place) = (login.host_name, free_place);
        }
        session.account = login.account.clone();
        session.base = epoch;
        session.begin_epoch(epoch, ends, login);
        Ok(session.index)
    }

    /// Adds an epoch to a session, for a LOGIN that joins. The caller must now end the connections
    /// of the epoch that it ends.
    ///
    /// # Errors
    /// As for [`Self::resume`]; [`RejectReason::NoSuchSession`] if the epoch beside it is of a
    /// process that was superseded; [`RejectReason::LimitReached`] if the session has too many.
    pub(crate) fn add_way(
        &mut self,
        id: SessionId,
        epoch: Epoch,
        join: Join,
        login: LoggingIn,
    ) -> Result<SessionIndex, RejectReason> {
        let session = self.resumable_by(id, epoch, login.host)?;
        // An epoch that a DROP has ended will do: the LOGIN may have been on its way before. But
        // another process of the host may have come and ended them all.
        if join.beside < session.base || join.beside > session.newest {
            return Err(RejectReason::NoSuchSession);
        }
        let ends = join.ends.map_or(EndedEpochs::None, EndedEpochs::One);
        let stay = session.live_epochs().filter(|live| !ends.has(*live)).count();
        if stay >= usize::from(WAYS_MAX) {
            return Err(RejectReason::LimitReached);
        }
        session.end_epochs(&ends);
        session.begin_epoch(epoch, ends, login);
        Ok(session.index)
    }

    fn resumable_by(
        &mut self,
        id: SessionId,
        epoch: Epoch,
        host: HostId,
    ) -> Result<&mut Session, RejectReason> {
        let index = self.resumable(id, epoch)?;
        let session = self.get_mut(index).ok_or(RejectReason::NoSuchSession)?;
        // Otherwise another host has learned the id of this session.
        if session.host == host { Ok(session) } else { Err(RejectReason::NoSuchSession) }
    }

    /// Ends epochs of a session, also those that no LOGIN was accepted in. The caller must now end
    /// their connections.
    pub(crate) fn drop_epochs(&mut self, index: SessionIndex, request: &DropRequest) {
        let Some(session) = self.get_mut(index) else { return };
        session.end_epochs(&EndedEpochs::Of(*request));
        session.newest = session.newest.max(request.highest());
    }

    /// An I/O connection joins its session.
    ///
    /// # Errors
    /// The session or its epoch is unknown, or not logged in, or the queue exists.
    pub(crate) fn join(
        &self,
        id: SessionId,
        epoch: Epoch,
        queue: u16,
    ) -> Result<SessionIndex, RejectReason> {
        let index = *self.by_id.get(&id).ok_or(RejectReason::NoSuchSession)?;
        let session = self.get(index).ok_or(RejectReason::NoSuchSession)?;
        let way = session.way(epoch).ok_or(RejectReason::StaleEpoch)?;
        if !way.logged_in || session.leave.is_some() {
            return Err(RejectReason::NoSuchSession);
        }
        if session.connections.has(epoch, queue) {
            return Err(RejectReason::DuplicateQueue);
        }
        Ok(index)
    }

    /// A connection was handed to a poll group; `queue` is `None` for admin. An unproven connection
    /// is proven later, by [`Self::connection_proved`].
    pub(crate) fn connection_added(
        &mut self,
        index: SessionIndex,
        (epoch, queue, is_proven): (Epoch, Option<u16>, bool),
        memory_bytes: u64,
    ) {
        let session = self.get_mut(index);
        debug_assert!(session.is_some(), "a connection of {index:?} that does not exist");
        if let Some(session) = session {
            session.connections.add(Live { epoch, queue, is_proven }, memory_bytes);
        }
    }

    /// A connection with this epoch, queue and memory proved that it belongs to the session. False:
    /// another connection has its queue number.
    pub(crate) fn connection_proved(
        &mut self,
        index: SessionIndex,
        connection: (Epoch, u16, u64),
    ) -> bool {
        self.get_mut(index).is_some_and(|session| session.connections.prove(connection))
    }

    /// A poll group reports that no resource of a connection is in use any more. `is_proven` is the
    /// state from [`Self::connection_added`] or [`Self::connection_proved`].
    pub(crate) fn connection_gone(
        &mut self,
        index: SessionIndex,
        (epoch, queue, is_proven): (Epoch, Option<u16>, bool),
        memory_bytes: u64,
        now: Instant,
    ) -> After {
        // A session that ended had no connection that could keep it.
        let Some(session) = self.get_mut(index) else { return After::Lives };
        session.connection_gone(Live { epoch, queue, is_proven }, memory_bytes, now);
        let has_left = session.all_connections() == 0 && session.leave.is_some();
        if has_left || session.leave.is_none() && session.is_empty() {
            self.end(index);
            return After::Ended;
        }
        let Some(session) = self.get(index) else { return After::Ended };
        let has_ended = session.way(epoch).is_none();
        if has_ended && !session.has_connections_of(&EndedEpochs::One(epoch)) {
            After::Quiesced
        } else {
            After::Lives
        }
    }

    /// The session logged out: it loses its volumes, and ends with its last connection. Returns the
    /// volumes that it held.
    pub(crate) fn logout(&mut self, index: SessionIndex) -> Vec<(VolumeIndex, AccessMode)> {
        self.get_mut(index).map(|s| s.give_up_all(Leave::LoggedOut)).unwrap_or_default()
    }

    /// Another session takes over. This session can no longer be resumed or joined, and loses its
    /// volumes. It ends with its last connection, which the caller must end, or at once if it has
    /// none. Returns the volumes that it held, and whether it ended.
    pub(crate) fn fence(&mut self, index: SessionIndex) -> (Vec<(VolumeIndex, AccessMode)>, bool) {
        self.expel(index, Leave::Fenced)
    }

    /// The host of the session lost its permission. Otherwise like [`Self::fence`].
    pub(crate) fn revoke(&mut self, index: SessionIndex) -> (Vec<(VolumeIndex, AccessMode)>, bool) {
        self.expel(index, Leave::Revoked)
    }

    fn expel(&mut self, index: SessionIndex, why: Leave) -> (Vec<(VolumeIndex, AccessMode)>, bool) {
        let Some(session) = self.get_mut(index) else { return (Vec::new(), false) };
        let held = session.give_up_all(why);
        let ended = session.all_connections() == 0;
        if ended {
            self.end(index);
        }
        (held, ended)
    }

    /// The session closed a volume. `None` if it had not opened the volume.
    pub(crate) fn close(&mut self, index: SessionIndex, volume: VolumeIndex) -> Option<AccessMode> {
        self.get_mut(index)?.give_up(volume)
    }

    /// Lets the session send commands for a volume that it opened.
    pub(crate) fn admit(&mut self, index: SessionIndex, volume: VolumeIndex) {
        if let Some(session) = self.get_mut(index) {
            session.admit(volume);
        }
    }

    /// Other sessions that held a volume in a mode that excludes `mode`, do not hold it any more,
    /// but have commands that may still change it. With each, the epoch up to which its connections
    /// must end.
    pub(crate) fn leaving(
        &self,
        volume: VolumeIndex,
        except: SessionIndex,
        mode: AccessMode,
    ) -> impl Iterator<Item = (SessionIndex, Epoch)> {
        let others = self.iter().filter(move |s| s.index != except);
        others.filter_map(move |s| {
            let (theirs, until) = *s.volumes.leaving.get(&volume)?;
            excludes(mode, theirs).then_some((s.index, until))
        })
    }

    fn end(&mut self, index: SessionIndex) {
        if let Some(place) = self.by_index.get_mut(usize::from(index.index))
            && let Some(session) = place.take_if(|session| session.index == index)
        {
            self.by_id.remove(&session.id);
        }
    }

    /// Ends every session that lost its connections longer ago than the lease. Returns these
    /// sessions.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<SessionIndex> {
        let old: Vec<SessionIndex> = self
            .iter()
            .filter(|s| s.connections.are_lost_for(self.lease, now))
            .map(|s| s.index)
            .collect();
        for index in &old {
            self.end(*index);
        }
        old
    }

    /// Other sessions that hold a volume in a mode that excludes `mode`.
    #[must_use]
    pub(crate) fn excluders(
        &self,
        index: SessionIndex,
        volume: VolumeIndex,
        mode: AccessMode,
    ) -> Vec<SessionIndex> {
        let excludes = |theirs| excludes(mode, theirs);
        self.iter()
            .filter(|s| s.index != index && s.mode_of(volume).is_some_and(excludes))
            .map(|s| s.index)
            .collect()
    }

    /// Opens a volume for a session. Also returns the sessions of its host that ended, because they
    /// excluded it and had no connections.
    ///
    /// # Errors
    /// [`Status::InUse`] with the holder's name.
    pub(crate) fn open(
        &mut self,
        index: SessionIndex,
        volume: VolumeIndex,
        mode: AccessMode,
    ) -> Result<Vec<SessionIndex>, (Status, String)> {
        let host = self.get(index).map(|s| s.host);
        let ended = self.excluders(index, volume, mode);
        for other in ended.iter().filter_map(|other| self.get(*other)) {
            if host != Some(other.host) || other.all_connections() > 0 {
                return Err((Status::InUse, format!("{} ({})", other.host_name, other.peer)));
            }
        }
        for index in &ended {
            self.end(*index);
        }
        if let Some(session) = self.get_mut(index) {
            session.volumes.opened.insert(volume, mode);
        }
        Ok(ended)
    }

    /// Whether a session has the volume open.
    #[must_use]
    pub(crate) fn is_open(&self, volume: VolumeIndex) -> bool {
        self.iter().any(|s| s.mode_of(volume).is_some())
    }

    /// A session that holds the volume for writing, or waits for it.
    #[must_use]
    pub(crate) fn writer(&self, volume: VolumeIndex) -> Option<&Session> {
        self.iter().find(|s| s.mode_of(volume).is_some_and(|mode| mode != AccessMode::ReadOnly))
    }
}

#[cfg(test)]
mod tests;
