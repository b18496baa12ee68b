//! Admin commands: LOGIN, LIST, OPEN, CLOSE, ASYNC_EVENT, LOGOUT.

use std::time::{Duration, Instant};

use rblk_protocol::{
    AccessMode, CommandCapsule, LoginReply, LoginRequest, Opcode, OpenReply, OpenRequest, Status,
    VolumeEntry, VolumeFlags, VolumeListHeader, limits,
};

use super::{Control, Parked, WaitingLogin};
use crate::connection::{ConnectionId, REPLY_AREA_BYTES, SessionSlot};
use crate::poll_group::ToGroup;
use crate::volume::Volume;

/// Silence that every initiator is granted.
const SILENCE_MIN: Duration = Duration::from_secs(2);
/// ASYNC_EVENTs one session may park.
const PARKED_PER_SESSION: usize = 4;

pub(super) enum Answer {
    Now(Status, u32, Vec<u8>),
    Later,
}

fn refuse(status: Status) -> Answer {
    Answer::Now(status, 0, Vec::new())
}

impl Control {
    pub(super) fn admin(
        &mut self,
        group: usize,
        connection: ConnectionId,
        session: SessionSlot,
        command: &CommandCapsule,
        body: &[u8],
    ) -> Answer {
        let Some(state) = self.sessions.get(session) else { return refuse(Status::NoSuchSession) };
        if command.epoch < state.epoch {
            return refuse(Status::Fenced);
        }
        if !state.logged_in && command.opcode != Opcode::Login {
            return refuse(Status::NotReady);
        }
        match command.opcode {
            Opcode::Login => self.login(group, connection, session, command, body),
            Opcode::ListVolumes => self.list(command),
            Opcode::OpenVolume => self.open(session, body),
            Opcode::CloseVolume => self.close(session, command),
            Opcode::AsyncEvent => {
                if self.parked.iter().filter(|p| p.session == session).count() >= PARKED_PER_SESSION
                {
                    return refuse(Status::LimitReached);
                }
                if self.draining.is_some() {
                    return Answer::Now(Status::Ok, super::event_number(), Vec::new());
                }
                self.parked.push(Parked { group, connection, tag: command.tag, session });
                Answer::Later
            }
            Opcode::Logout => {
                self.sessions.logout(session);
                for volume in &self.volumes {
                    let volume = volume.index;
                    self.send_all(|| ToGroup::Close {
                        session,
                        volume,
                        refusal: Status::NoSuchVolume,
                    });
                }
                Answer::Now(Status::Ok, 0, Vec::new())
            }
            _ => refuse(Status::InvalidOpcode),
        }
    }

    fn login(
        &mut self,
        group: usize,
        connection: ConnectionId,
        slot: SessionSlot,
        command: &CommandCapsule,
        body: &[u8],
    ) -> Answer {
        let request = match LoginRequest::from_wire(body) {
            Ok(request) => request,
            Err(error) => {
                tracing::warn!(error, "bad LOGIN");
                return refuse(Status::InvalidField);
            }
        };
        let Some(session) = self.sessions.get_mut(slot) else {
            return refuse(Status::NoSuchSession);
        };
        if session.logged_in {
            return refuse(Status::NotReady);
        }
        if session.host.is_some_and(|(host, _)| host != request.host) {
            // Somebody learned the id of another host's session.
            return refuse(Status::NoSuchSession);
        }
        session.host = Some((request.host, request.host_name));
        // Four times what it promised, and time for a busy host.
        let silence = Duration::from_millis(u64::from(request.keep_alive_ms)) * 4 + SILENCE_MIN;
        let login = WaitingLogin {
            group,
            connection,
            tag: command.tag,
            epoch: command.epoch,
            since: Instant::now(),
        };
        let wait = session.has_older_connections();
        self.send(group, ToGroup::Watch { connection, silence });
        self.waiting_logins.insert(slot, login);
        if wait {
            tracing::info!(
                session = slot.0,
                epoch = command.epoch.0,
                "waiting for the commands of older epochs"
            );
        } else {
            self.finish_login(slot);
        }
        Answer::Later
    }

    /// Nothing of an older epoch is left: the new one may begin.
    pub(super) fn finish_login(&mut self, slot: SessionSlot) {
        let Some(login) = self.waiting_logins.remove(&slot) else { return };
        let Some(session) = self.sessions.get_mut(slot) else { return };
        if session.epoch != login.epoch {
            return self.reply(
                login.group,
                login.connection,
                login.tag,
                Status::Fenced,
                0,
                Vec::new(),
            );
        }
        session.logged_in = true;
        let reply = LoginReply {
            session: session.id,
            epoch: session.epoch,
            instance: self.instance,
            queues_max: limits::QUEUES_MAX,
            target_name: self.name,
        };
        tracing::info!(
            session = slot.0,
            host = session.host_name(),
            peer = session.peer,
            epoch = session.epoch.0,
            "login"
        );
        self.reply(
            login.group,
            login.connection,
            login.tag,
            Status::Ok,
            0,
            reply.to_wire().to_vec(),
        );
    }

    fn list(&self, command: &CommandCapsule) -> Answer {
        let room = command.buffer.map_or(0, |b| b.length as usize).min(REPLY_AREA_BYTES);
        let fit = room.saturating_sub(VolumeListHeader::BYTES) / VolumeEntry::BYTES;
        let from = usize::try_from(command.lba.0).unwrap_or(usize::MAX);
        let page: Vec<&Volume> =
            self.volumes.iter().map(AsRef::as_ref).skip(from).take(fit).collect();
        let header = VolumeListHeader {
            entries: u32::try_from(page.len()).unwrap_or(0),
            total: u32::try_from(self.volumes.len()).unwrap_or(u32::MAX),
        };
        let mut payload = header.to_wire().to_vec();
        for volume in page {
            let entry = VolumeEntry {
                name: volume.name,
                flags: volume
                    .flags(AccessMode::Exclusive)
                    .with(VolumeFlags::IN_USE, self.sessions.is_open(volume.index)),
                block_size: volume.block_size,
                blocks: volume.blocks,
                uuid: volume.uuid,
            };
            payload.extend(entry.to_wire());
        }
        let len = u32::try_from(payload.len()).unwrap_or(0);
        Answer::Now(Status::Ok, len, payload)
    }

    fn open(&mut self, session: SessionSlot, body: &[u8]) -> Answer {
        let request = match OpenRequest::from_wire(body) {
            Ok(request) => request,
            Err(error) => {
                tracing::warn!(error, "bad OPEN");
                return refuse(Status::InvalidField);
            }
        };
        if request.take_over {
            return refuse(Status::NotSupported);
        }
        let Some(volume) = self.volumes.iter().find(|v| v.name == request.name).cloned() else {
            return refuse(Status::NoSuchVolume);
        };
        if volume.read_only && request.mode != AccessMode::ReadOnly {
            return refuse(Status::ReadOnly);
        }
        match self.sessions.open(session, volume.index, request.mode) {
            Ok(ended) => {
                for session in ended {
                    self.send_all(|| ToGroup::ForgetSession { session });
                }
            }
            Err((status, holder)) => {
                tracing::info!(volume = %volume.name, holder, "OPEN refused: in use");
                // So that the one refused knows whom to ask.
                let text = format!("held by {holder}").into_bytes();
                return Answer::Now(status, u32::try_from(text.len()).unwrap_or(0), text);
            }
        }
        let (index, mode) = (volume.index, request.mode);
        self.send_all(|| ToGroup::Open { session, volume: index, mode });
        tracing::info!(session = session.0, volume = %volume.name, ?mode, "open");
        let reply = OpenReply {
            handle: volume.handle(),
            flags: volume.flags(mode),
            block_size: volume.block_size,
            blocks: volume.blocks,
            discard_granularity_bytes: volume.discard_granularity_bytes,
            uuid: volume.uuid,
            verifier: self.lineage.verifier_for(&volume, self.instance),
        };
        Answer::Now(Status::Ok, 0, reply.to_wire().to_vec())
    }

    fn close(&mut self, session: SessionSlot, command: &CommandCapsule) -> Answer {
        let Some(volume) = Volume::index_of(command.volume) else {
            return refuse(Status::NoSuchVolume);
        };
        let Some(state) = self.sessions.get_mut(session) else {
            return refuse(Status::NoSuchSession);
        };
        if state.opened.remove(&volume).is_none() {
            return refuse(Status::NoSuchVolume);
        }
        self.send_all(|| ToGroup::Close { session, volume, refusal: Status::NoSuchVolume });
        Answer::Now(Status::Ok, 0, Vec::new())
    }
}
