//! LIST: a page of the volumes.

use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{
    AccessMode, CommandCapsule, Status, VolumeEntry, VolumeFlags, VolumeListHeader,
};

use super::{Answer, ConnectionRef, Core};
use crate::connection::REPLY_AREA_BYTES;
use crate::identity::SessionIndex;
use crate::volume::Volume;

impl Core {
    /// As many volumes as the command has room for, from the one that its block number counts. The
    /// host sees only volumes that it has a right to.
    pub(super) fn list(
        &self,
        from: ConnectionRef,
        session: SessionIndex,
        command: &CommandCapsule,
    ) -> Answer {
        let room = command.buffer.map_or(0, |b| wide(b.length)).min(REPLY_AREA_BYTES);
        let room = room.saturating_sub(self.seals.overhead(from));
        let fit = room.saturating_sub(VolumeListHeader::BYTES) / VolumeEntry::BYTES;
        let first = wide(command.lba.0);
        let rights = self.rights(session);
        let all = self.exports.volumes().iter().map(AsRef::as_ref);
        let volumes: Vec<&Volume> = all.filter(|v: &&Volume| rights.may_see(v.name)).collect();
        let page: Vec<&Volume> = volumes.iter().copied().skip(first).take(fit).collect();
        let header = VolumeListHeader { entries: narrow(page.len()), total: narrow(volumes.len()) };
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
        Answer::Now(Status::Ok, narrow(payload.len()), payload)
    }
}
