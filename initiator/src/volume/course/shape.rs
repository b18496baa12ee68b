//! The properties of a volume that may change while it is mounted: size and read-only.
//!
//! The need for FLUSH does not change: data written while the volume was writable must be flushed,
//! even if the volume has become read-only.

use rblk_protocol::{OpenReply, VolumeEntry, VolumeFlags};

/// Takes the changeable flags from the target, and the others from the first OPEN.
fn merged(known: VolumeFlags, now: VolumeFlags) -> VolumeFlags {
    let without = VolumeFlags(known.0 & !VolumeFlags::READ_ONLY.0);
    without.with(VolumeFlags::READ_ONLY, now.has(VolumeFlags::READ_ONLY))
}

/// The volume after a later OPEN.
pub(super) fn reopened(known: &OpenReply, opened: OpenReply) -> OpenReply {
    let volatile = known.flags.has(VolumeFlags::VOLATILE_CACHE);
    OpenReply { flags: opened.flags.with(VolumeFlags::VOLATILE_CACHE, volatile), ..opened }
}

/// The volume after an entry from the target.
pub(super) fn changed(known: &OpenReply, entry: &VolumeEntry) -> OpenReply {
    OpenReply { blocks: entry.blocks, flags: merged(known.flags, entry.flags), ..*known }
}
