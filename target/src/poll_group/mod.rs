//! [`PollGroup`]: the data thread's engine: connections of several devices, and a shard of the
//! cache.
//!
//! One owner, no locks, no clock of its own, no allocation per I/O. A turn is: take mail, reap
//! every CQ, the other poll groups' messages and the store, move requests forward, then post: one
//! list of RECVs and one list of send WRs per connection. A command is served by the poll group of
//! its connection; memory and store are a [`Shard`]'s, this group's or another's, and are asked for
//! in messages either way. The thread around it ([`thread`]) sleeps and wakes; tests and
//! simulations call [`PollGroup::turn`] themselves, with a store and a fabric of their own.
//!
//! Order of a command's memory: nothing is released while a device or the store may touch it.
//! Memory that a WRITE was sent from goes back to its shard when a later signaled WR of the QP
//! completed, whatever the peer does with the tag; on a dead connection when control has destroyed
//! the QP.

mod block;
mod completion;
mod death;
mod landing;
mod mail;
pub mod peers;
mod pollers;
mod respond;
pub mod thread;

pub use mail::{FromGroup, Notice, PollerMemory, ToGroup};
use peers::{PeerMail, Peers};
use pollers::Pollers;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_fabric::{Completion, Poller, Region, Transport};
use rblk_protocol::{AccessMode, CommandCapsule, CommandList, Status, Tag};

use crate::cache::{PartToken, Shard, ShardRequest};
use crate::connection::{Admitted, Connection, ConnectionId, ConnectionParams, SessionSlot};
use crate::request::State;
use crate::stats::Stats;
use crate::store::{Store, VolumeIndex};
use crate::volume::{Placement, Volume};

/// How often other groups are reminded of memory that a shard is short of.
const PROVE_INTERVAL: Duration = Duration::from_millis(1);
/// Completions taken at once.
const REAP: usize = 64;
/// Times that so many are taken from one device in a turn.
const REAP_ROUNDS: usize = 4;

struct Zeroing {
    connection: ConnectionId,
    tag: Tag,
    region: Arc<Region>,
    // Bytes left.
    range: std::ops::Range<usize>,
}

#[derive(Clone, Copy)]
enum Opened {
    Mode(AccessMode),
    Refused(Status),
}

#[derive(Default)]
struct SessionView {
    // By volume index.
    opened: Vec<Option<Opened>>,
}

/// The engine of one data thread.
pub struct PollGroup<S> {
    index: usize,
    pollers: Pollers,
    connections: Vec<Option<Box<Connection>>>,
    generation: u32,
    sessions: Vec<Option<SessionView>>,
    volumes: Vec<Option<Arc<Volume>>>,
    shard: Shard<S>,
    peers: Peers,
    // Ranges of memory volumes being zeroed, a step each turn.
    zeroing: VecDeque<Zeroing>,
    // Parts of writes that wait for the READ sink (iWARP).
    waiting_sink: VecDeque<(ConnectionId, Tag, u8)>,
    reminded: Option<Instant>,
    // Writes that our shard has done, while they are answered.
    written: Vec<PartToken>,
    dirty: Vec<u16>,
    // Where completions are reaped to.
    reaped: Box<[Completion; REAP]>,
    outbox: Vec<FromGroup>,
    // Something was done that clients wait for.
    io: bool,
    stats: Arc<Stats>,
    now: Instant,
    dying: usize,
    stopping: bool,
    // Others were told that nobody is connected here; how many told us.
    said_quiet: bool,
    quiet_peers: usize,
}

impl<S> std::fmt::Debug for PollGroup<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PollGroup")
            .field("index", &self.index)
            .field("pollers", &self.pollers.places())
            .field("connections", &self.connections.iter().flatten().count())
            .finish_non_exhaustive()
    }
}

impl<S: Store> PollGroup<S> {
    /// An engine without devices, volumes or connections.
    #[must_use]
    pub fn new(
        index: usize,
        shard: Shard<S>,
        peers: Peers,
        stats: Arc<Stats>,
        now: Instant,
    ) -> Self {
        Self {
            index,
            pollers: Pollers::default(),
            connections: Vec::new(),
            generation: 0,
            sessions: Vec::new(),
            volumes: Vec::new(),
            shard,
            peers,
            zeroing: VecDeque::new(),
            waiting_sink: VecDeque::with_capacity(256),
            reminded: None,
            written: Vec::with_capacity(256),
            dirty: Vec::with_capacity(256),
            reaped: Box::new([Completion::default(); REAP]),
            outbox: Vec::new(),
            io: false,
            stats,
            now,
            dying: 0,
            stopping: false,
            said_quiet: false,
            quiet_peers: 0,
        }
    }

    /// The store.
    pub fn store_mut(&mut self) -> &mut S {
        self.shard.store_mut()
    }

    /// Its shard of the cache.
    #[must_use]
    pub fn shard(&self) -> &Shard<S> {
        &self.shard
    }

    /// The other poll groups.
    pub fn peers_mut(&mut self) -> &mut Peers {
        &mut self.peers
    }

    /// The pollers whose CQ works, with their places: for sleeping.
    pub fn pollers_mut(&mut self) -> impl Iterator<Item = (usize, &mut (dyn Poller + 'static))> {
        self.pollers.all_working().map(|(place, entry)| (place, &mut *entry.poller))
    }

    /// Messages for control since the last call.
    pub fn take_outbox(&mut self) -> std::vec::Drain<'_, FromGroup> {
        self.outbox.drain(..)
    }

    /// Whether there is something for control.
    #[must_use]
    pub fn has_outbox(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Whether [`ToGroup::Stop`] was carried out: nobody is connected and every acknowledged write
    /// was brought to the store and made durable, or could not be (false).
    #[must_use]
    pub fn stopped(&self) -> Option<bool> {
        let over = self.stopping && !self.has_connections() && !self.peers.keeps();
        if over { self.shard.stopped() } else { None }
    }

    /// Whether [`ToGroup::Stop`] came.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.stopping
    }

    /// Its number.
    #[must_use]
    pub fn index(&self) -> usize {
        self.index
    }

    /// Whether anybody is connected.
    #[must_use]
    pub fn has_connections(&self) -> bool {
        self.connections.iter().any(Option::is_some)
    }

    /// Whether a deadline runs, so that the thread must not sleep for long.
    #[must_use]
    pub fn has_deadline(&self) -> bool {
        self.dying > 0 || self.shard.is_short()
    }

    /// Whether anything was done since the last call that clients wait for, and not only beats,
    /// words of control and sends that completed.
    pub fn take_io(&mut self) -> bool {
        std::mem::take(&mut self.io)
    }

    /// When the shard has something to do that nobody will wake the thread for.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Duration> {
        self.shard.next_deadline()
    }

    fn take_notice(&mut self, notice: Notice) {
        match notice {
            Notice::Open { session, volume, mode } => {
                self.set_opened(session, volume, Opened::Mode(mode))
            }
            Notice::Close { session, volume, refusal } => {
                self.set_opened(session, volume, Opened::Refused(refusal));
            }
            Notice::EndConnections { session, before } => {
                for slot in 0..self.connections.len() {
                    if let Some(c) = &self.connections[slot]
                        && c.params.session == session
                        && c.params.epoch < before
                    {
                        self.kill(slot, "superseded by a newer epoch");
                    }
                }
            }
            Notice::ForgetSession { session } => {
                if let Some(view) = self.sessions.get_mut(usize::from(session.0)) {
                    *view = None;
                }
            }
        }
    }

    /// One message of control.
    pub fn take_mail(&mut self, mail: ToGroup, now: Instant) {
        self.now = now;
        match mail {
            ToGroup::AddPoller { place, poller, memory } => {
                let put = self.pollers.put(place, poller, memory);
                debug_assert!(put, "control filled place {place} twice");
            }
            ToGroup::AddVolume { volume, backing: _, stats } => {
                let at = usize::from(volume.index.0);
                if self.volumes.len() <= at {
                    self.volumes.resize(at + 1, None);
                }
                if matches!(volume.placement, Placement::Store) {
                    let size = volume.blocks.bytes(volume.block_size).unwrap_or(0);
                    let (index, cache) = (volume.index, volume.cache);
                    self.shard.add_volume(index, cache, size, volume.read_only, stats);
                }
                self.volumes[at] = Some(volume);
            }
            ToGroup::AddConnection { poller, connection, params, accept } => {
                self.add_connection(poller, connection, *params, &accept);
            }
            ToGroup::Notice(notice) => self.take_notice(notice),
            ToGroup::Destroyed { connection } => self.on_destroyed(connection),
            ToGroup::Watch { connection, silence } => {
                if let Some(Some(c)) = self.connections.get_mut(usize::from(connection.slot))
                    && c.id == connection
                {
                    c.silence = Some(silence);
                }
            }
            ToGroup::Reply { connection, tag, status, value, payload } => {
                self.admin_reply(connection, tag, status, value, &payload);
            }
            ToGroup::Stop => {
                self.stopping = true;
                for slot in 0..self.connections.len() {
                    self.kill(slot, "the target stops");
                }
            }
        }
        self.finish_turn();
    }

    fn set_opened(&mut self, session: SessionSlot, volume: VolumeIndex, opened: Opened) {
        let (at, volume) = (usize::from(session.0), usize::from(volume.0));
        if self.sessions.len() <= at {
            self.sessions.resize_with(at + 1, || None);
        }
        let view = self.sessions[at].get_or_insert_default();
        if view.opened.len() <= volume {
            view.opened.resize(volume + 1, None);
        }
        view.opened[volume] = Some(opened);
    }

    fn add_connection(
        &mut self,
        poller: usize,
        connection: rblk_fabric::Connection,
        params: ConnectionParams,
        accept: &rblk_fabric::AcceptParams,
    ) {
        let gone = |params: ConnectionParams, connection, reason| FromGroup::ConnectionGone {
            session: params.session,
            kind: params.kind,
            epoch: params.epoch,
            connection,
            memory: params.memory,
            reason,
        };
        let Some(entry) = self.pollers.working(poller) else {
            self.outbox.push(gone(params, Some(connection), "the completion queue is broken"));
            return;
        };
        let qp = match entry.poller.attach(connection) {
            Ok(qp) => qp,
            Err(error) => {
                tracing::warn!(peer = %params.peer, %error, "cannot take a connection");
                self.outbox.push(gone(params, None, "the QP could not be attached"));
                return;
            }
        };
        let slot = self.connections.iter().position(Option::is_none).unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        let Ok(slot16) = u16::try_from(slot) else {
            let connection = entry.poller.detach(qp);
            self.outbox.push(gone(params, connection, "too many connections"));
            return;
        };
        self.generation = self.generation.wrapping_add(1);
        let at = usize::from(qp.0);
        if entry.qps.len() <= at {
            entry.qps.resize(at + 1, None);
        }
        entry.qps[at] = Some(slot16);
        let id = ConnectionId { slot: slot16, generation: self.generation };
        let mut connection = Connection::new(id, poller, qp, params, self.now);
        connection.sends_prove = entry.poller.caps().transport != Transport::Iwarp;
        for recv in 0..connection.params.layout.recv_slots() {
            connection.queue_recv(recv);
        }
        let posted = entry.poller.post_recv(qp, &connection.recvs);
        connection.recvs.clear();
        let accepted = posted
            .map_err(|e| e.to_string())
            .and_then(|()| entry.poller.accept(qp, accept).map_err(|e| e.to_string()));
        self.connections[slot] = Some(Box::new(connection));
        if let Err(error) = accepted {
            tracing::warn!(%error, "cannot accept a connection");
            self.kill(slot, "it could not be accepted");
        } else if self.stopping {
            self.kill(slot, "the target stops");
        }
    }

    /// Reaps and acts until nothing is left, at most a few rounds, then posts. Returns whether
    /// anything happened.
    pub fn turn(&mut self, now: Instant) -> bool {
        self.now = now;
        self.stats.turns.add(1);
        let mut busy = self.reap();
        if self.peers.groups() > 1 {
            busy |= self.take_peer_mail();
        }
        if self.shard.turn(now) {
            self.io = true;
            busy = true;
            self.deliver_written();
        }
        self.deliver();
        if !self.waiting_sink.is_empty() {
            self.retry_sink();
            self.deliver();
        }
        if self.shard.is_short() {
            self.seek_memory();
        }
        if !self.zeroing.is_empty() {
            busy |= self.zero_on();
        }
        if self.dying > 0 || self.pollers.has_broken() {
            busy |= self.check_dying();
        }
        if self.stopping && !self.has_connections() {
            self.end_shard();
        }
        self.finish_turn();
        busy | self.peers.flush()
    }

    /// Acts on what the devices completed. Returns whether there was anything.
    #[inline]
    fn reap(&mut self) -> bool {
        let (mut busy, mut poller, mut rounds) = (false, 0, 0);
        while poller < self.pollers.places() {
            let Some(entry) = self.pollers.working(poller) else {
                poller += 1;
                continue;
            };
            let reaped = match entry.poller.poll(&mut self.reaped[..]) {
                Ok(n) => n,
                Err(error) => {
                    self.kill_poller(poller, &error);
                    0
                }
            };
            if reaped > 0 {
                busy = true;
                self.on_completions(poller, reaped);
            }
            rounds += 1;
            // Bounded, so that one busy device cannot starve the store or the others.
            if reaped < REAP || rounds == REAP_ROUNDS {
                (poller, rounds) = (poller + 1, 0);
            }
        }
        busy
    }

    /// Nobody is connected any more. The shard ends when that is so everywhere: others may ask it
    /// until then.
    #[cold]
    fn end_shard(&mut self) {
        let others = self.peers.groups() - 1;
        if !self.said_quiet {
            self.said_quiet = true;
            for group in (0..=others).filter(|group| *group != self.index) {
                self.peers.send(group, PeerMail::Quiet);
            }
        }
        if self.quiet_peers >= others {
            self.shard.begin_stop();
            self.deliver();
        }
    }

    /// Something for a shard that it need not answer, or whose answer was counted.
    fn tell(&mut self, shard: usize, request: ShardRequest) {
        if shard == self.index {
            self.shard.request(request, self.now);
        } else {
            self.peers.send(shard, PeerMail::Request(request));
        }
    }

    #[inline(never)]
    fn take_peer_mail(&mut self) -> bool {
        let mut busy = false;
        // Bounded, so that talkative peers cannot starve the devices.
        for _ in 0..1024 {
            let Some(mail) = self.peers.receive() else { break };
            (busy, self.io) = (true, true);
            match mail {
                PeerMail::Request(request) => self.shard.request(request, self.now),
                PeerMail::Reply(reply) => self.on_reply(reply),
                PeerMail::Prove => self.prove_tails(),
                PeerMail::Quiet => self.quiet_peers += 1,
            }
        }
        busy
    }

    /// Hands out the shard's answers, which may lead to more of them.
    #[inline]
    fn deliver(&mut self) {
        if self.shard.has_reply() {
            self.deliver_all();
        }
    }

    /// Answers the writes that the store has done and that need no more than that.
    #[inline]
    fn deliver_written(&mut self) {
        self.shard.take_written(&mut self.written);
        let mut at = 0;
        while let Some(to) = self.written.get(at).copied() {
            at += 1;
            self.on_written(to);
        }
        self.written.clear();
    }

    #[inline(never)]
    fn deliver_all(&mut self) {
        while let Some(reply) = self.shard.take_reply() {
            let group = usize::from(reply.to().group);
            if group == self.index {
                self.on_reply(reply);
            } else {
                self.peers.send(group, PeerMail::Reply(reply));
            }
        }
    }

    /// The shard is short of memory: whoever sent from it sees to it that it comes back.
    #[cold]
    fn seek_memory(&mut self) {
        self.prove_tails();
        let due = |at| self.now.saturating_duration_since(at) >= PROVE_INTERVAL;
        if self.peers.groups() > 1 && self.reminded.is_none_or(due) {
            self.reminded = Some(self.now);
            for group in (0..self.peers.groups()).filter(|g| *g != self.index) {
                self.peers.send(group, PeerMail::Prove);
            }
        }
    }

    /// A message came: one command or, where that was agreed, several, each of which is served as
    /// if it had come alone.
    fn on_message(&mut self, slot: usize, recv: u16, message_bytes: usize) {
        let Some(mut connection) = self.connections[slot].as_deref_mut() else { return };
        connection.heard = self.now;
        let layout = &connection.params.layout;
        if recv >= layout.recv_slots() || message_bytes > layout.recv_bytes() {
            self.protocol_error(slot, "message longer than its slot");
            return;
        }
        let mut list = CommandList::new(message_bytes, connection.params.features, layout.depth);
        connection.messages += 1;
        connection.hold_recv(recv);
        let at = connection.recv_offset(recv);
        loop {
            let region = connection.region();
            match list.take(|from, bytes| region.read(at + from, bytes)) {
                None => {
                    // Every command was copied out. The data of some may have to wait.
                    if connection.release_recv(recv) {
                        mark_dirty(&mut self.dirty, connection);
                    }
                    return;
                }
                Some(Ok(command)) => {
                    let admitted = connection.admit(&command, recv, list.data_offset());
                    self.on_command(slot, &command, admitted);
                    let next = self.connections[slot].as_deref_mut().filter(|c| c.is_live());
                    let Some(next) = next else { return };
                    connection = next;
                }
                Some(Err(error)) => {
                    tracing::warn!(peer = %connection.params.peer, %error, "bad command");
                    return self.protocol_error(slot, "bad command");
                }
            }
        }
    }

    /// A command came, and was looked at.
    #[inline]
    fn on_command(
        &mut self,
        slot: usize,
        command: &CommandCapsule,
        admitted: Result<Admitted, &'static str>,
    ) {
        match admitted {
            Ok(Admitted::Block) => {
                self.io = true;
                self.start_block(slot, command.tag);
            }
            Ok(Admitted::Admin) => self.forward_admin(slot, command),
            Ok(Admitted::SelfTest) => self.self_test(slot, command),
            Ok(Admitted::Answer(status)) => self.finish(slot, command.tag, status),
            Err(reason) => self.protocol_error(slot, reason),
        }
    }

    fn forward_admin(&mut self, slot: usize, command: &CommandCapsule) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        let mut body = vec![0; command.in_capsule_bytes as usize];
        if let Some(data) = connection.data_offset(command.tag) {
            connection.region().read(data, &mut body);
        }
        connection.requests[command.tag.index()].state = State::Execute;
        let message = FromGroup::Admin {
            group: self.index,
            connection: connection.id,
            session: connection.params.session,
            command: *command,
            body,
        };
        self.outbox.push(message);
        self.repost_recv(slot, command.tag);
    }

    /// Releases the receive slot of a command's data, if it has one.
    fn repost_recv(&mut self, slot: usize, tag: Tag) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        connection.repost_recv(tag);
        mark_dirty(&mut self.dirty, connection);
    }

    fn mark_dirty(&mut self, slot: usize) {
        if let Some(connection) = self.connections[slot].as_deref_mut() {
            mark_dirty(&mut self.dirty, connection);
        }
    }

    /// Posts what the turn collected.
    #[inline]
    fn finish_turn(&mut self) {
        if !self.dirty.is_empty() {
            self.post_all();
        }
    }

    #[inline(never)]
    fn post_all(&mut self) {
        let mut at = 0;
        while let Some(slot) = self.dirty.get(at).copied() {
            at += 1;
            self.post(usize::from(slot));
        }
        self.dirty.clear();
    }

    fn post(&mut self, slot: usize) {
        let Some(connection) = self.connections[slot].as_deref_mut() else { return };
        connection.dirty = false;
        if !connection.is_live() {
            return;
        }
        respond::queue_responses(connection, &self.stats);
        let poller = &mut self.pollers[connection.poller].poller;
        let mut result = Ok(());
        // RECVs first: an answer lets the peer send the next command.
        if !connection.recvs.is_empty() {
            result = poller.post_recv(connection.qp, &connection.recvs);
            connection.recvs.clear();
        }
        if result.is_ok() && !connection.sends.is_empty() {
            result = poller.post_send(connection.qp, &connection.sends);
            connection.sends.clear();
        }
        if let Err(error) = result {
            tracing::error!(peer = %connection.params.peer, %error, "cannot post");
            self.kill(slot, "posting failed");
        }
    }

    /// Publishes all counters: before a sleep, and when somebody wants them now.
    pub fn publish_stats(&self) {
        self.publish_own();
        self.shard.publish_volumes();
    }

    /// Publishes the counters after a busy turn: those of the group, and of a few volumes in turn.
    pub fn publish_turn(&mut self) {
        self.publish_own();
        self.shard.publish_some_volumes();
    }

    fn publish_own(&self) {
        self.stats.set_fabric(&self.pollers.counters());
        let shard = &self.shard;
        self.stats.set_cache(&shard.counters(), shard.slots(), shard.dirty_max_bytes());
        self.stats.peer_messages.set(self.peers.sent());
    }
}

/// Something was queued for a connection: [`PollGroup::finish_turn`] posts it.
#[inline]
fn mark_dirty(dirty: &mut Vec<u16>, connection: &mut Connection) {
    if !connection.dirty {
        connection.dirty = true;
        dirty.push(connection.id.slot);
    }
}
