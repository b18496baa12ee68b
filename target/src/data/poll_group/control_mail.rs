//! Orders of control: devices, volumes, connections, and the end.

use std::sync::Arc;
use std::time::Instant;

use rblk_fabric::{MemoryRegion, Transport};
use rblk_protocol::Mutation;
use rblk_protocol::width::{wide, wide64};
use rblk_runtime::Moment;

use super::access::Opened;
use super::log_lines::LogLine;
use super::{FromGroup, Notice, PollGroup, ToGroup};
use crate::cache::{SLOT_BYTES, Shard};
use crate::data::connection::{Connection, ConnectionParams, Landing, QpPlace};
use crate::data::poll_group::command::admin;
use crate::store::Store;
use crate::volume::{Placement, Volume};
use rblk_operate::target::volume_counts::VolumeStats;

impl<S: Store> PollGroup<S> {
    /// Carries out one message of control.
    pub fn take_mail(&mut self, mail: ToGroup, now: Instant) {
        // Commands may start now. The time of the last look at the CQs stays as it was.
        let looked = self.state.time.us;
        self.state.tick(Moment::from(now));
        self.expect_rare_work();
        self.carry_out(mail);
        self.state.time.us = looked;
        self.post_all();
    }

    fn carry_out(&mut self, mail: ToGroup) {
        match mail {
            ToGroup::AddPoller { place, poller, memory } => {
                let put = self.state.pollers.put(place, poller, memory);
                debug_assert!(put, "control filled place {place} twice");
            }
            ToGroup::AddVolume { volume, backing: _, stats, registered: _, step: None } => {
                self.add_to_shard(&volume, Arc::clone(&stats));
                self.state.access.add(volume, stats);
            }
            ToGroup::AddVolume { volume, backing: _, stats, registered, step: Some(ticket) } => {
                self.add_by_step(ticket, &volume, stats, registered);
            }
            ToGroup::Step { ticket, volume, step } => self.take_step(ticket, volume, step),
            ToGroup::Lost(volume) => self.lose(volume),
            ToGroup::LetGo(volume) => self.state.shard.store_mut().let_go(volume),
            ToGroup::Settle { ticket, volume } => self.settle(ticket, volume),
            ToGroup::AddConnection { poller, connection, params, accept } => {
                self.add_connection(poller, connection, *params, &accept);
            }
            ToGroup::Trace(ring) => self.state.told.slow.trace(ring),
            ToGroup::Notice(notice) => self.take_notice(notice),
            ToGroup::Destroyed { connection } => self.on_destroyed(connection),
            ToGroup::Adopt { connection: id, session, epoch, silence }
                if self.connections.has(id) =>
            {
                self.state.access.begin(session);
                self.serve(wide(id.index), |connection, group| {
                    connection.adopt(session, epoch, silence);
                    let poller = &mut group.pollers[connection.poller()].poller;
                    poller.set_owner(connection.qp(), session.owner());
                    Ok(())
                });
            }
            ToGroup::LimitHost { session, limits } => {
                self.limits_change(None, Some(session));
                self.state.access.set_limits(session, limits);
            }
            ToGroup::Expel { connection: id } if self.connections.has(id) => {
                self.serve(wide(id.index), |connection, group| {
                    connection.expel(group.time.now);
                    Ok(())
                });
            }
            ToGroup::Evict { admission } => {
                self.end_all("its place went to a newer connection", |connection| {
                    connection.params().admission == admission
                });
            }
            ToGroup::Reply { connection: id, tag, status, value, payload }
                if self.connections.has(id) =>
            {
                self.serve(wide(id.index), |connection, group| {
                    admin::reply(connection, group, tag, (status, value, &payload));
                    Ok(())
                });
            }
            // Control may name a connection that has ended meanwhile.
            ToGroup::Adopt { .. } | ToGroup::Expel { .. } | ToGroup::Reply { .. } => {}
            ToGroup::Stop => {
                self.stopping.began = true;
                self.end_all("the target stops", |_| true);
            }
        }
    }

    /// Makes the shard serve a volume, if the volume has a store.
    pub(super) fn add_to_shard(&mut self, volume: &Volume, stats: Arc<VolumeStats>) {
        if matches!(volume.placement, Placement::Store) {
            let Volume { index, cache, read_only, .. } = *volume;
            self.state.shard.add_volume(index, cache, volume.size_bytes(), read_only, stats);
            self.bound_cache(volume);
        }
    }

    /// Sets this shard's part of a volume's cache minimum and maximum.
    pub(super) fn bound_cache(&mut self, volume: &Volume) {
        let groups = wide64(self.state.groups());
        let part = |bytes: u64| u32::try_from(bytes / groups / wide64(SLOT_BYTES));
        let slots = |bytes| part(bytes).unwrap_or(u32::MAX);
        self.state.shard.set_cache_min(volume.index, slots(volume.cache_min_bytes));
        let most = volume.cache_max_bytes.map(|bytes| slots(bytes).max(1));
        self.state.shard.set_cache_max(volume.index, most);
    }

    fn take_notice(&mut self, notice: Notice) {
        let access = &mut self.state.access;
        match notice {
            Notice::Open { session, volume, mode } => {
                access.set(session, volume, Opened::Mode(mode));
            }
            Notice::Close { session, volume, refusal } => {
                access.set(session, volume, Opened::Refused(refusal));
            }
            Notice::EndConnections { session, before } => {
                self.end_all("superseded by a newer epoch", |connection| {
                    let params = connection.params();
                    params.session == session && params.epoch < before
                });
            }
            Notice::EndEpoch { .. }
                if Mutation::WayDropForgetsGroup.is_on() && self.state.index > 0 => {}
            Notice::EndEpoch { session, epoch } => {
                self.end_all("its way to the target is lost", |connection| {
                    let params = connection.params();
                    (params.session, params.epoch) == (session, epoch)
                });
            }
            Notice::Host { session, host } => self.state.shard.set_host(session, host),
            Notice::ForgetSession { session } => access.forget(session),
        }
    }

    fn add_connection(
        &mut self,
        poller: usize,
        connection: rblk_fabric::Connection,
        params: ConnectionParams,
        accept: &rblk_fabric::AcceptParams,
    ) {
        let group = &mut self.state;
        let session = params.session;
        group.access.begin(session);
        let gone = |params: ConnectionParams, connection, reason| FromGroup::ConnectionGone {
            admission: params.admission,
            session: params.session,
            kind: params.kind,
            epoch: params.epoch,
            connection,
            memory: Box::new(params.into()),
            reason,
        };
        let Some(entry) = group.pollers.working(poller) else {
            group.told.outbox.push(gone(
                params,
                Some(connection),
                "the completion queue is broken",
            ));
            return;
        };
        let sends_free = entry.poller.caps().transport != Transport::Iwarp;
        let qp = match entry.poller.attach(connection) {
            Ok(qp) => qp,
            Err(error) => {
                if group.told.lines.may_write(LogLine::Refused, group.time.now) {
                    tracing::warn!(peer = params.peer, %error, "cannot take a connection");
                }
                group.told.outbox.push(gone(params, None, "the QP could not be attached"));
                return;
            }
        };
        let Some(id) = self.connections.next_id() else {
            let connection = entry.poller.detach(qp);
            group.told.outbox.push(gone(params, connection, "too many connections"));
            return;
        };
        let place = QpPlace { id, poller, qp };
        let arena = entry.memory.as_ref().map(|memory| &memory.arena);
        let arena = arena.filter(|_| group.access.writes_to_store(session));
        let landing = arena.and_then(|arena| landing_of(&params, &mut group.shard, arena));
        let mut connection = Connection::new(place, params, landing, sends_free, group.time.now);
        let posted = entry.poller.post_recvs(qp, connection.posts().0);
        connection.posted();
        let accepted = posted
            .map_err(|error| error.to_string())
            .and_then(|()| entry.poller.accept(qp, accept).map_err(|error| error.to_string()));
        entry.poller.set_owner(qp, session.owner());
        group.pollers.attached(poller, qp, id.index);
        self.connections.add(connection);
        if let Err(error) = accepted {
            if group.may_log(LogLine::Refused) {
                tracing::warn!(%error, "cannot accept a connection");
            }
            self.end(wide(id.index), "it could not be accepted");
        } else if self.stopping.began {
            self.end(wide(id.index), "the target stops");
        }
    }
}

/// Slots in which the messages of a connection land, if its session writes to a store. `None`: too
/// few slots are free, or the connection gets none.
fn landing_of<S: Store>(
    params: &ConnectionParams,
    shard: &mut Shard<S>,
    arena: &Arc<MemoryRegion>,
) -> Option<Landing> {
    let each = params.landing_slots;
    if each == 0 {
        return None;
    }
    let slots = shard.take_landing(wide(each) * wide(params.memory.layout().recv_buffers()))?;
    Some(Landing::new(Arc::clone(arena), slots, each))
}
