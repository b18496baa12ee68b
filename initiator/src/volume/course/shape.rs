//! What of a volume may change while it is mounted: its size, and whether it is read-only.
//!
//! Whether acknowledged writes may be lost without a FLUSH does not change: what was written while
//! the volume was writable has to be flushed, whatever the volume says since.

use rblk_protocol::{OpenReply, VolumeEntry, VolumeFlags};

/// Of the flags, those that follow the target. The others are those of the first OPEN.
fn merged(known: VolumeFlags, now: VolumeFlags) -> VolumeFlags {
    let without = VolumeFlags(known.0 & !VolumeFlags::READ_ONLY.0);
    without.with(VolumeFlags::READ_ONLY, now.has(VolumeFlags::READ_ONLY))
}

/// The volume after an OPEN of a mount that knows it.
pub(super) fn reopened(known: &OpenReply, opened: OpenReply) -> OpenReply {
    let volatile = known.flags.has(VolumeFlags::VOLATILE_CACHE);
    OpenReply { flags: opened.flags.with(VolumeFlags::VOLATILE_CACHE, volatile), ..opened }
}

/// The volume after news of it.
pub(super) fn changed(known: &OpenReply, entry: &VolumeEntry) -> OpenReply {
    OpenReply { blocks: entry.blocks, flags: merged(known.flags, entry.flags), ..*known }
}
