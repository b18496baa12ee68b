//! LIST: a page of the volumes, or one volume that the session has open.

use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{
    AccessMode, CommandCapsule, Status, VolumeEntry, VolumeFlags, VolumeHandle, VolumeListHeader,
};

use super::admin_command::{AdminAnswer, refuse};
use super::exports::Exports;
use super::sessions::HostSessions;
use crate::data::connection::REPLY_AREA_BYTES;
use crate::volume::Volume;
use crate::volume::ids::SessionIndex;

/// As many volumes as the command has room for, from the one that its block number counts. The host
/// sees only volumes that it has a right to. `overhead`: the bytes of the seal of the reply.
///
/// A command that names a volume is answered with this volume alone, as the session has it now.
pub(super) fn list(
    command: &CommandCapsule,
    overhead: usize,
    session: SessionIndex,
    (sessions, exports): (&HostSessions, &Exports),
) -> AdminAnswer {
    let room = command.buffer.map_or(0, |b| wide(b.length)).min(REPLY_AREA_BYTES);
    let room = room.saturating_sub(overhead);
    if command.volume != VolumeHandle(0) {
        return list_opened(command.volume, room, session, (sessions, exports));
    }
    let fit = room.saturating_sub(VolumeListHeader::BYTES) / VolumeEntry::BYTES;
    let first = wide(command.lba.0);
    let rights = sessions.proofs().rights(session);
    let all = exports.volumes().iter().map(AsRef::as_ref);
    let volumes: Vec<&Volume> = all.filter(|v: &&Volume| rights.may_see(v.name)).collect();
    let page: Vec<&Volume> = volumes.iter().copied().skip(first).take(fit).collect();
    let header = VolumeListHeader { entries: narrow(page.len()), total: narrow(volumes.len()) };
    let mut payload = header.to_wire().to_vec();
    for volume in page {
        payload.extend(entry(volume, AccessMode::Exclusive, sessions).to_wire());
    }
    AdminAnswer::Now(Status::Ok, narrow(payload.len()), payload)
}

/// One volume, as a session that has it open sees it now.
fn list_opened(
    handle: VolumeHandle,
    room: usize,
    session: SessionIndex,
    (sessions, exports): (&HostSessions, &Exports),
) -> AdminAnswer {
    let opened = Volume::index_of(handle).and_then(|index| {
        let mode = sessions.mode_of(session, index)?;
        Some((exports.volume(index)?, mode))
    });
    let Some((volume, mode)) = opened else { return refuse(Status::VolumeGone) };
    if room < VolumeListHeader::BYTES + VolumeEntry::BYTES {
        return refuse(Status::BadLength);
    }
    let mut payload = VolumeListHeader { entries: 1, total: 1 }.to_wire().to_vec();
    payload.extend(entry(volume, mode, sessions).to_wire());
    AdminAnswer::Now(Status::Ok, narrow(payload.len()), payload)
}

/// The entry of a volume for a session that opens it in that mode.
fn entry(volume: &Volume, mode: AccessMode, sessions: &HostSessions) -> VolumeEntry {
    let is_open = sessions.table().is_open(volume.index);
    VolumeEntry {
        name: volume.name,
        flags: volume.flags(mode).with(VolumeFlags::IN_USE, is_open),
        block_size: volume.block_size,
        blocks: volume.blocks,
        uuid: volume.uuid,
    }
}
