//! [`Reception`]: the connections of the target as control has them: from the connect request to
//! the end of the last use of their resources.
//!
//! Core decides whether a connection is made. Reception finds the place for it: a device that has
//! registered the memory, a poll group, and entries of a CQ.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rblk_fabric::{
    AckTimeout, ConnectOptions, Connection, Device, Incoming, PollerHandle, ProtectionDomain,
};
use rblk_protocol::width::wide64;
use rblk_protocol::{Epoch, Features, HelloRequest, RejectReason, SessionId};
use tokio::sync::mpsc;

use super::admission::{self, Granted, House, log_refusal, no_room, refusal};
use super::cq_shares::{CqPlace, CqShares, NoEntries};
use super::destroy::{Destroyed, Destroyer};
use super::devices::Devices;
use super::file_room::FileRoom;
use super::host_places::HostPlaces;
use super::making::{Made, Making, PendingConnection};
use super::registration::{Registering, Registration};
use super::tally::{IoConnection, Tally};
use crate::control::core::{Admitted, ConnectRefusal, ConnectionRef, Core, Knock};
use crate::control::groups::Groups;
use crate::control::peers::account::{Origin, Payer};
use crate::control::peers::peer_lines::PeerLine;
use crate::data::connection::{EndedMemory, progress_max};
use crate::data::poll_group::{Notice, ToGroup};
use crate::memory::demand::FILES_BESIDES;
use crate::volume::ids::{AdmissionId, SessionIndex};

/// Work of reception that a thread has ended.
#[derive(Debug)]
pub(in crate::control) enum ReceptionNews {
    /// A device has registered the memory, or cannot.
    Registered(Registration),
    /// A connection was made, or cannot be.
    Made(Made),
    /// A connection or a QP was destroyed.
    Destroyed(Destroyed),
}

/// See the module.
#[derive(Debug)]
pub(in crate::control) struct Reception {
    house: House,
    // How long devices wait for an acknowledgement, if the configuration says so.
    ack_timeout: Option<Duration>,
    devices: Devices,
    registering: Registering,
    registered: mpsc::UnboundedReceiver<Registration>,
    making: Making,
    made: mpsc::UnboundedReceiver<Made>,
    shares: CqShares,
    host_places: HostPlaces,
    tally: Tally,
    files: FileRoom,
    destroyer: Destroyer,
    destroyed: mpsc::UnboundedReceiver<Destroyed>,
}

impl Reception {
    /// No connections yet.
    pub(in crate::control) fn new(
        house: House,
        ack_timeout: Option<Duration>,
        devices: Devices,
        files: FileRoom,
    ) -> Self {
        let (registering, registered) = Registering::new();
        let (making, made) = Making::new();
        let (destroyer, destroyed) = Destroyer::new();
        Self {
            house,
            ack_timeout,
            devices,
            registering,
            registered,
            making,
            made,
            shares: CqShares::default(),
            host_places: HostPlaces::default(),
            tally: Tally::default(),
            files,
            destroyer,
            destroyed,
        }
    }

    /// The devices.
    pub(in crate::control) fn devices(&self) -> &Devices {
        &self.devices
    }

    /// The devices, for a change of what they have registered.
    pub(in crate::control) fn devices_mut(&mut self) -> &mut Devices {
        &mut self.devices
    }

    /// The block commands of I/O connections.
    pub(in crate::control) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// How near the connections come to the limit of open files.
    #[cfg(test)]
    pub(in crate::control) fn files(&mut self) -> &mut FileRoom {
        &mut self.files
    }

    /// The next work that a thread has ended. Cancel safe.
    pub(in crate::control) async fn next(&mut self) -> Option<ReceptionNews> {
        tokio::select! {
            Some(done) = self.registered.recv() => Some(ReceptionNews::Registered(done)),
            Some(made) = self.made.recv() => Some(ReceptionNews::Made(made)),
            Some(destroyed) = self.destroyed.recv() => Some(ReceptionNews::Destroyed(destroyed)),
            else => None,
        }
    }

    /// A thread has ended work.
    pub(in crate::control) fn on_news(
        &mut self,
        news: ReceptionNews,
        core: &mut Core,
        groups: &mut Groups,
    ) {
        match news {
            ReceptionNews::Registered(done) => self.on_registered(done, core, groups),
            ReceptionNews::Made(made) => self.on_made(made, core, groups),
            ReceptionNews::Destroyed(Destroyed::Connection { admission }) => {
                self.gone(admission, core);
            }
            ReceptionNews::Destroyed(Destroyed::Qp { group, connection }) => {
                groups.qp_destroyed(group, connection);
            }
        }
    }

    /// Handles a connect request.
    pub(in crate::control) fn admit(
        &mut self,
        incoming: Incoming,
        core: &mut Core,
        groups: &mut Groups,
    ) {
        let peer = incoming.peer();
        let asked = match HelloRequest::from_wire(&incoming.hello().0) {
            Ok(asked) => asked,
            Err(error) => {
                let text = error.to_string();
                if core.lines().may_say(PeerLine::Refused, &peer, &text, Instant::now()) {
                    tracing::warn!(peer, error = text, "refused a connection");
                }
                return incoming.reject(&refusal(RejectReason::Malformed, &text));
            }
        };
        if self.devices.find(&incoming.device()).is_none() {
            return self.come_by_new_device(incoming, core);
        }
        match self.grant(&incoming, (&asked, &peer), core, groups) {
            Ok(granted) => self.connect(incoming, &asked, granted, (core, groups)),
            Err(refused) => {
                log_refusal(core.lines(), &asked, &peer, &refused);
                incoming.reject(&refusal(refused.reason, &refused.text));
            }
        }
    }

    /// Takes a peer that comes by a device that is not in use yet, if the target may serve by it.
    fn come_by_new_device(&mut self, incoming: Incoming, core: &mut Core) {
        let (device, peer) = (incoming.device(), incoming.peer());
        if !self.devices.may_serve(&device) {
            let name = &device.caps().name;
            if core.lines().may_say(PeerLine::Refused, &peer, name, Instant::now()) {
                tracing::warn!(peer, device = name, "refused a connection: see `devices`");
            }
            let text = format!("this target does not serve by {name}: `devices` does not name it");
            return incoming.reject(&refusal(RejectReason::LimitReached, &text));
        }
        self.registering.wait(incoming, || self.devices.shared().clone());
    }

    /// Serves by a device that has registered the memory, and answers the peers that waited.
    fn on_registered(&mut self, done: Registration, core: &mut Core, groups: &mut Groups) {
        let Registration { device, result } = done;
        let placed = result.and_then(|new| self.devices.take(new, groups));
        let peers = self.registering.end(&device);
        if let Err(error) = placed {
            if core.lines().may_write(PeerLine::Refused, Instant::now()) {
                tracing::error!(device = device.caps().name, %error, "cannot serve by this device");
            }
            let refused = no_room(error.to_string());
            for peer in peers {
                peer.reject(&refusal(refused.reason, &refused.text));
            }
            return;
        }
        for peer in peers {
            self.admit(peer, core, groups);
        }
    }

    /// Decides whether a connection is made. If so, it counts at once.
    fn grant(
        &mut self,
        incoming: &Incoming,
        (asked, peer): (&HelloRequest, &str),
        core: &mut Core,
        groups: &mut Groups,
    ) -> Result<Granted, ConnectRefusal> {
        let device = incoming.device();
        let accept = admission::agree(asked, &self.house, &device)?;
        let place = self.devices.place(&device, groups).map_err(|error| {
            // The line in the log about the refusal contains this.
            no_room(format!("cannot serve by this device: {error}"))
        })?;
        let mut fresh = [0; 16];
        getrandom::fill(&mut fresh).map_err(|error| no_room(error.to_string()))?;
        let knock = Knock {
            asked,
            introduction: admission::introduction(incoming, &accept)?,
            peer,
            memory_bytes: wide64(admission::memory_bytes(&accept, asked.kind, &device)),
            fresh: SessionId(fresh),
            is_encrypted: accept.features.has(Features::ENCRYPT),
            has_ways: accept.features.has(Features::WAYS),
        };
        let admitted = core.connect(&knock, Instant::now())?;
        if admitted.queue.is_some() {
            core.note_digest(admitted.session, accept.features.has(Features::DIGEST));
        }
        let group = groups.for_connection(admitted.session, admitted.queue);
        let entries = admission::cq_entries(&accept, asked.kind);
        let cq = CqPlace { device: place, group };
        let whose = payer(&admitted, peer, core);
        let made = admission::reads_out(incoming, asked).and_then(|reads_out| {
            Ok((reads_out, self.take_entries(&admitted, (cq, entries), whose, groups)?))
        });
        match made {
            Ok((reads_out, (pd, poller))) => {
                let ack_timeout = self.ack_timeout(admitted.session, core);
                let spares = admitted.queue.is_none().then(|| self.devices.spares(place));
                Ok(Granted {
                    accept,
                    admitted,
                    place,
                    group,
                    reads_out,
                    ack_timeout,
                    pd,
                    spares,
                    poller,
                })
            }
            Err(refused) => {
                self.gone(admitted.id, core);
                Err(refused)
            }
        }
    }

    /// Takes entries of a CQ for a connection, on that account.
    fn take_entries(
        &mut self,
        admitted: &Admitted,
        (cq, entries): (CqPlace, u32),
        whose: Payer,
        groups: &mut Groups,
    ) -> Result<(ProtectionDomain, PollerHandle), ConnectRefusal> {
        let capacity = self.devices.cq_entries(cq.device);
        let taken = match admitted.is_stranger {
            true => self.shares.take_for_stranger(admitted.id, cq, whose, entries, capacity),
            false => self.shares.take(admitted.id, cq, whose, entries, capacity),
        };
        taken.map_err(ConnectRefusal::from)?;
        self.devices.poller(cq.device, cq.group, groups).map_err(no_room)
    }

    /// How long a device waits for an acknowledgement of a host. On InfiniBand the kernel would
    /// take the subnet manager's value, for this end alone. Before LOGIN no `detect` of the host is
    /// known.
    fn ack_timeout(&self, session: SessionIndex, core: &Core) -> AckTimeout {
        if let Some(time) = self.ack_timeout {
            return AckTimeout::of(time);
        }
        let session = core.sessions().get(session);
        AckTimeout::within(session.map_or(ConnectOptions::default().detect, |s| s.detect))
    }

    /// Begins to make the QP of a granted connection.
    fn connect(
        &mut self,
        incoming: Incoming,
        asked: &HelloRequest,
        granted: Granted,
        (core, groups): (&Core, &mut Groups),
    ) {
        if granted.admitted.queue.is_none() {
            groups.took_admin();
        }
        let detect = core.sessions().get(granted.admitted.session).map(|s| s.detect);
        self.making.begin(incoming, asked, granted, progress_max(detect));
    }

    /// Hands a connection that was made to its poll group, unless it was ended meanwhile.
    fn on_made(&mut self, made: Made, core: &mut Core, groups: &Groups) {
        let Some(way) = self.making.end(made.id) else { return };
        let PendingConnection { admitted, asked, cq, peer, device, is_wanted } = way;
        let Admitted { id, session, epoch, queue, .. } = admitted;
        let is_wanted = is_wanted.load(Ordering::Relaxed);
        let (connection, params, accept) = match made.result {
            Ok(prepared) => prepared,
            Err(text) => {
                self.gone(id, core);
                if is_wanted {
                    log_refusal(core.lines(), &asked, &peer, &no_room(text));
                }
                return;
            }
        };
        if !is_wanted {
            tracing::debug!(peer, kind = %asked.kind, "a connection ended while it was made");
            let gone = Destroyed::Connection { admission: id };
            return self.destroyer.destroy(Some(connection), params, gone);
        }
        let CqPlace { device: poller, group } = cq;
        if let Some(queue) = queue {
            let io = Arc::clone(&params.io);
            self.tally.add(id, IoConnection { session, queue, group, device, io });
        }
        let epoch = epoch.0;
        if core.lines().may_write(PeerLine::Connection, Instant::now()) {
            tracing::info!(peer, kind = %asked.kind, epoch, group, "connection");
        }
        self.hand_over(
            group,
            ToGroup::AddConnection { poller, connection, params, accept },
            groups,
        );
    }

    /// Hands a connection to its poll group. If the poll group does not take it, it is destroyed
    /// and reported as ended: its session must not wait for it.
    pub(in crate::control) fn hand_over(&self, group: usize, connection: ToGroup, groups: &Groups) {
        if let Some(ToGroup::AddConnection { connection, params, .. }) =
            groups.try_send(group, connection)
        {
            let gone = Destroyed::Connection { admission: params.admission };
            self.destroyer.destroy(Some(connection), params, gone);
        }
    }

    /// The LOGIN of an admin connection was accepted: books it on its host, and tells the poll
    /// groups that host.
    pub(in crate::control) fn adopted(
        &mut self,
        session: SessionIndex,
        admission: AdmissionId,
        core: &Core,
        groups: &mut Groups,
    ) {
        if let Some(whose) = core.sessions().get(session).map(|s| s.account.clone())
            && let Some(host) = self.host_places.put(session, whose)
        {
            groups.notify(Notice::Host { session, host });
        }
        // An admin connection is small, and its host may log in: if the host has no room in the CQ,
        // the connection stays booked on its address.
        let _ = self.book(admission, session, core);
        self.look_at_file_room(core);
    }

    /// An I/O connection has proven itself: books its CQ entries on its host, or ends it.
    pub(in crate::control) fn proven(
        &mut self,
        from: ConnectionRef,
        admission: AdmissionId,
        core: &mut Core,
        groups: &mut Groups,
    ) {
        let Some(session) = core.proved(from, admission, Instant::now()) else { return };
        if let Err(why) = self.book(admission, session, core) {
            end_too_much(from, session, &why, (core, groups));
        }
    }

    /// Books the CQ entries of a connection on the host that it has proven.
    ///
    /// # Errors
    /// The host has no room in the CQ: the entries stay booked on the address.
    fn book(
        &mut self,
        id: AdmissionId,
        session: SessionIndex,
        core: &Core,
    ) -> Result<(), NoEntries> {
        let Some(session) = core.sessions().get(session) else { return Ok(()) };
        let devices = &self.devices;
        let capacity = |cq: CqPlace| devices.cq_entries(cq.device);
        self.shares.book_on(id, session.account.clone(), capacity)
    }

    /// Warns if sessions leave few files to be opened.
    fn look_at_file_room(&mut self, core: &Core) {
        let connections = core.sessions().iter().map(|session| session.connections());
        let files = connections.map(wide64).sum::<u64>().saturating_add(FILES_BESIDES);
        if let Some(warning) = self.files.look(files) {
            tracing::warn!("{warning}");
        }
    }

    /// Ends a connection that lost its place to another one.
    pub(in crate::control) fn evict(&mut self, admission: AdmissionId, groups: &mut Groups) {
        if self.making.end_one(admission) {
            return;
        }
        if let Some(CqPlace { group, .. }) = self.shares.cq_of(admission) {
            groups.send(group, ToGroup::Evict { admission });
        }
    }

    /// Connections of some epochs of a session end: those that are being made, too.
    pub(in crate::control) fn end_connections(
        &mut self,
        session: SessionIndex,
        ends: impl Fn(Epoch) -> bool,
    ) {
        self.making.end_connections(session, ends);
    }

    /// All connections end: those that are being made, too.
    pub(in crate::control) fn end_all(&mut self) {
        self.making.end_all();
    }

    /// A session has ended.
    pub(in crate::control) fn session_ended(&mut self, session: SessionIndex) {
        self.host_places.end(session);
    }

    /// A poll group uses a connection no more: destroys it with its memory.
    pub(in crate::control) fn connection_gone(
        &self,
        admission: AdmissionId,
        connection: Option<Connection>,
        memory: Box<EndedMemory>,
    ) {
        self.destroyer.destroy(connection, memory, Destroyed::Connection { admission });
    }

    /// A connection ended: destroys its QP, for which its poll group waits.
    pub(in crate::control) fn destroy_qp(&self, from: ConnectionRef, qp: Option<Connection>) {
        let ConnectionRef { group, connection } = from;
        self.destroyer.destroy(qp, (), Destroyed::Qp { group, connection });
    }

    /// The CQ of a device broke in a poll group: ends the connections that are being made there.
    /// Returns the name of the device.
    pub(in crate::control) fn poller_broke(&mut self, group: usize, place: usize) -> String {
        let device = self.devices.at(place);
        let name = device.map_or_else(|| "a device".to_owned(), |d: &Device| d.caps().name.clone());
        self.devices.poller_broke(group, place);
        self.making.end_by(CqPlace { device: place, group });
        name
    }

    /// Removes a connection after the last use of its resources.
    fn gone(&mut self, id: AdmissionId, core: &mut Core) {
        self.shares.gone(id);
        core.gone(id, Instant::now());
        let sessions = core.sessions();
        self.tally.ended(id, |session| sessions.get(session).is_some());
    }
}

/// The account for the CQ entries of a new connection: the address that it comes from, as long as
/// it has not proven its session.
fn payer(admitted: &Admitted, peer: &str, core: &Core) -> Payer {
    let session = core.sessions().get(admitted.session);
    let account = session.filter(|_| admitted.secret.is_none()).map(|s| s.account.clone());
    account.unwrap_or_else(|| Payer::Origin(Origin::of(peer)))
}

/// Ends a proven connection because its host has no room for it in the CQ.
fn end_too_much(
    connection: ConnectionRef,
    session: SessionIndex,
    why: &NoEntries,
    (core, groups): (&mut Core, &mut Groups),
) {
    let session = core.sessions().get(session);
    let (host, peer) = session.map(|session| (session.host_name, session.peer.clone())).unzip();
    let (of, text) = (peer.as_deref().unwrap_or_default(), why.text());
    if core.lines().may_say(PeerLine::Refused, of, text, Instant::now()) {
        let host = host.map(tracing::field::display);
        tracing::warn!(host, peer, text, "ending a connection that its host may not have");
    }
    groups.send(connection.group, ToGroup::Expel { connection: connection.connection });
}
