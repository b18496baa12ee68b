//! LIST: a page of the volumes, or one volume that the session has open.

use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{
    AccessMode, CommandCapsule, Status, VolumeEntry, VolumeFlags, VolumeHandle, VolumeListHeader,
};

use super::{AdminAnswer, ConnectionRef, Core, refuse};
use crate::data::connection::REPLY_AREA_BYTES;
use crate::volume::Volume;
use crate::volume::ids::SessionIndex;

impl Core {
    /// As many volumes as the command has room for, from the one that its block number counts. The
    /// host sees only volumes that it has a right to.
    ///
    /// A command that names a volume is answered with this volume alone, as the session has it now.
    pub(super) fn list(
        &self,
        from: ConnectionRef,
        session: SessionIndex,
        command: &CommandCapsule,
    ) -> AdminAnswer {
        let room = command.buffer.map_or(0, |b| wide(b.length)).min(REPLY_AREA_BYTES);
        let room = room.saturating_sub(self.seals.overhead(from));
        if command.volume != VolumeHandle(0) {
            return self.list_opened(session, command.volume, room);
        }
        let fit = room.saturating_sub(VolumeListHeader::BYTES) / VolumeEntry::BYTES;
        let first = wide(command.lba.0);
        let rights = self.rights(session);
        let all = self.exports.volumes().iter().map(AsRef::as_ref);
        let volumes: Vec<&Volume> = all.filter(|v: &&Volume| rights.may_see(v.name)).collect();
        let page: Vec<&Volume> = volumes.iter().copied().skip(first).take(fit).collect();
        let header = VolumeListHeader { entries: narrow(page.len()), total: narrow(volumes.len()) };
        let mut payload = header.to_wire().to_vec();
        for volume in page {
            payload.extend(self.entry(volume, AccessMode::Exclusive).to_wire());
        }
        AdminAnswer::Now(Status::Ok, narrow(payload.len()), payload)
    }

    /// One volume, as a session that has it open sees it now.
    fn list_opened(&self, session: SessionIndex, handle: VolumeHandle, room: usize) -> AdminAnswer {
        let opened = Volume::index_of(handle).and_then(|index| {
            let mode = self.sessions.get(session)?.mode_of(index)?;
            Some((self.exports.volume(index)?, mode))
        });
        let Some((volume, mode)) = opened else { return refuse(Status::VolumeGone) };
        if room < VolumeListHeader::BYTES + VolumeEntry::BYTES {
            return refuse(Status::BadLength);
        }
        let mut payload = VolumeListHeader { entries: 1, total: 1 }.to_wire().to_vec();
        payload.extend(self.entry(volume, mode).to_wire());
        AdminAnswer::Now(Status::Ok, narrow(payload.len()), payload)
    }

    /// The entry of a volume for a session that opens it in that mode.
    fn entry(&self, volume: &Volume, mode: AccessMode) -> VolumeEntry {
        VolumeEntry {
            name: volume.name,
            flags: volume
                .flags(mode)
                .with(VolumeFlags::IN_USE, self.sessions.is_open(volume.index)),
            block_size: volume.block_size,
            blocks: volume.blocks,
            uuid: volume.uuid,
        }
    }
}
