//! LIST: a page of the volumes.

use rblk_protocol::width::{narrow, wide};
use rblk_protocol::{
    AccessMode, CommandCapsule, Status, VolumeEntry, VolumeFlags, VolumeListHeader,
};

use super::{Answer, Core};
use crate::connection::REPLY_AREA_BYTES;
use crate::volume::Volume;

impl Core {
    /// As many volumes as the command has room for, from the one that its block number counts.
    pub(super) fn list(&self, command: &CommandCapsule) -> Answer {
        let room = command.buffer.map_or(0, |b| wide(b.length)).min(REPLY_AREA_BYTES);
        let fit = room.saturating_sub(VolumeListHeader::BYTES) / VolumeEntry::BYTES;
        let from = wide(command.lba.0);
        let volumes = self.exports.volumes();
        let page: Vec<&Volume> = volumes.iter().map(AsRef::as_ref).skip(from).take(fit).collect();
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
