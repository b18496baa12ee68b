//! [`Volume`]: an exported volume, and the checks of commands against it. Pure: no I/O.

pub mod ids;
pub mod limits;
pub(crate) mod timing;

use std::sync::Arc;

use rblk_fabric::Region;
use rblk_protocol::limits::READ_TRAILER_BYTES;
use rblk_protocol::width::wide64;
use rblk_protocol::{
    AccessMode, BlockCount, BlockRange, BlockSize, CommandCapsule, Name, Opcode, Status,
    VolumeFlags, VolumeHandle,
};

use ids::VolumeIndex;
use limits::Limiter;

pub use rblk_config::CacheMode;

/// The place of a volume's bytes.
#[derive(Clone, Debug)]
pub enum Placement {
    /// In a file or block device, reached through the poll group's store.
    Store,
    /// In registered memory: RDMA moves data directly to and from it.
    Memory(Arc<Region>),
    /// Nowhere: reads are zeros, writes are dropped after their data was fetched.
    Null,
}

/// One exported volume. Control and the data threads share it. A value never changes; after a
/// change of the volume, every thread gets a new value.
#[derive(Clone, Debug)]
pub struct Volume {
    /// Index in the store's file table and in handles.
    pub index: VolumeIndex,
    /// Name.
    pub name: Name,
    /// Stable identity, derived from the names of the target and the volume.
    pub uuid: [u8; 16],
    /// Block size.
    pub block_size: BlockSize,
    /// Capacity.
    pub blocks: BlockCount,
    /// Writes are refused to every session.
    pub read_only: bool,
    /// The place of the bytes.
    pub placement: Placement,
    /// The cache mode; `None` unless the bytes are in the store.
    pub cache: CacheMode,
    /// Bytes of the cache that it keeps when others need memory.
    pub cache_min_bytes: u64,
    /// Most bytes of the cache that the volume may have; `None`: no limit.
    pub cache_max_bytes: Option<u64>,
    /// Most bytes to read ahead of a sequential reader.
    pub read_ahead_bytes: u32,
    /// DISCARD frees space.
    pub discard: bool,
    /// Granularity of useful discards in bytes; 0 when discards do nothing.
    pub discard_granularity_bytes: u32,
    /// A write that the store has done is durable, whatever happens to this machine.
    pub is_durable_at_once: bool,
    /// Limits of commands and bytes per second; `None`: no limits.
    pub limits: Option<Arc<Limiter>>,
}

impl Volume {
    /// Capacity in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.blocks.bytes(self.block_size).unwrap_or(0)
    }

    /// The handle by which sessions name the volume. 0 is never a handle.
    #[must_use]
    pub(crate) fn handle(&self) -> VolumeHandle {
        VolumeHandle(u32::from(self.index.0) + 1)
    }

    /// Index for a handle from the wire.
    #[must_use]
    #[inline]
    pub fn index_of(handle: VolumeHandle) -> Option<VolumeIndex> {
        handle.0.checked_sub(1).and_then(|i| u16::try_from(i).ok()).map(VolumeIndex)
    }

    /// Whether acknowledged writes may be lost unless a FLUSH or FUA follows. True for every
    /// writable volume of a store, in each cache mode: even without write-back, the kernel's page
    /// cache or the disk's own cache may still have the writes. False without writes, and for a
    /// volume that does not outlive the target.
    #[must_use]
    pub(crate) fn has_volatile_cache(&self) -> bool {
        matches!(self.placement, Placement::Store) && !self.read_only
    }

    /// Whether a session with this access mode may not change the volume.
    #[inline]
    pub(crate) fn is_read_only(&self, mode: AccessMode) -> bool {
        self.read_only || mode == AccessMode::ReadOnly
    }

    /// The flags for a session with this access mode.
    #[must_use]
    pub(crate) fn flags(&self, mode: AccessMode) -> VolumeFlags {
        VolumeFlags::default()
            .with(VolumeFlags::READ_ONLY, self.is_read_only(mode))
            .with(VolumeFlags::VOLATILE_CACHE, self.has_volatile_cache())
            .with(VolumeFlags::DISCARD, self.discard)
            .with(VolumeFlags::WRITE_ZEROES, true)
            .with(VolumeFlags::EPHEMERAL, !matches!(self.placement, Placement::Store))
    }

    /// Checks a block command against the volume and the session's access mode.
    ///
    /// `io_max_bytes` is the connection's agreed maximum. FLUSH has no range.
    ///
    /// # Errors
    /// The status for the response.
    #[inline]
    pub(crate) fn check(
        &self,
        command: &CommandCapsule,
        mode: AccessMode,
        io_max_bytes: u32,
    ) -> Result<Option<BlockRange>, Status> {
        let writes = !matches!(command.opcode, Opcode::Read | Opcode::Flush);
        if writes && self.is_read_only(mode) {
            return Err(Status::ReadOnly);
        }
        let flags = command.flags;
        // Most commands have neither flag.
        if flags.fua | flags.may_unmap
            && (flags.fua && command.opcode != Opcode::Write
                || flags.may_unmap && command.opcode != Opcode::WriteZeroes)
        {
            return Err(Status::InvalidField);
        }
        let data_bytes = match command.buffer {
            Some(buffer) => u64::from(buffer.length),
            None => u64::from(command.in_capsule_bytes),
        };
        if command.opcode == Opcode::Flush {
            let bare = data_bytes == 0 && command.lba.0 == 0 && command.count.0 == 0;
            return if bare { Ok(None) } else { Err(Status::InvalidField) };
        }
        let range = BlockRange::new(command.lba, command.count, self.blocks, self.block_size)
            .ok_or(if command.count.0 == 0 { Status::InvalidField } else { Status::OutOfRange })?;
        match command.opcode {
            Opcode::Read | Opcode::Write => {
                let is_read = command.opcode == Opcode::Read;
                // With digests, the buffer of a READ has room for the trailer.
                let trailer = wide64(READ_TRAILER_BYTES);
                let behind = if flags.digest && is_read { trailer } else { 0 };
                if is_read && command.buffer.is_none()
                    || data_bytes != range.len_bytes() + behind
                    || range.len_bytes() > u64::from(io_max_bytes)
                {
                    return Err(Status::BadLength);
                }
            }
            _ if data_bytes != 0 => return Err(Status::BadLength),
            _ => {}
        }
        Ok(Some(range))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use super::*;
    use rblk_protocol::{CommandFlags, Epoch, KeyedDescriptor, Lba, Sequence, Tag};

    pub(crate) fn volume() -> Volume {
        Volume {
            index: VolumeIndex(0),
            name: Name::new("v").unwrap(),
            uuid: [0; 16],
            block_size: BlockSize::new(512).unwrap(),
            blocks: BlockCount(100),
            read_only: false,
            placement: Placement::Null,
            cache: CacheMode::None,
            cache_min_bytes: 0,
            cache_max_bytes: None,
            read_ahead_bytes: 0,
            discard: true,
            discard_granularity_bytes: 512,
            is_durable_at_once: false,
            limits: None,
        }
    }

    /// A volume of one block on a store.
    pub(crate) fn stored_block() -> Arc<Volume> {
        Arc::new(Volume {
            uuid: [1; 16],
            blocks: BlockCount(1),
            placement: Placement::Store,
            ..volume()
        })
    }

    fn command(opcode: Opcode, lba: u64, count: u64, data: u32) -> CommandCapsule {
        CommandCapsule {
            lba: Lba(lba),
            count: BlockCount(count),
            buffer: (data != 0).then_some(KeyedDescriptor { address: 0, length: data, rkey: 0 }),
            ..CommandCapsule::new(opcode, Tag(0), Epoch(1), Sequence(1))
        }
    }

    #[test]
    fn volumes_that_can_lose_acknowledged_writes_have_the_flag() {
        let memory = Region::allocate(4096, rblk_fabric::PageKind::Normal).unwrap();
        for cache in [CacheMode::None, CacheMode::WriteThrough, CacheMode::WriteBack] {
            for read_only in [false, true] {
                let of = |placement| Volume { placement, cache, read_only, ..volume() };
                let told =
                    |v: &Volume| v.flags(AccessMode::Shared).has(VolumeFlags::VOLATILE_CACHE);
                assert_eq!(told(&of(Placement::Store)), !read_only, "{cache:?}");
                assert!(!told(&of(Placement::Memory(Arc::clone(&memory)))));
                assert!(!told(&of(Placement::Null)));
            }
        }
    }

    #[test]
    fn each_rule() {
        let v = volume();
        let check = |c: CommandCapsule| {
            v.check(&c, AccessMode::Exclusive, 4096).map(|r| r.map(|r| r.offset_bytes()))
        };
        assert_eq!(check(command(Opcode::Read, 99, 1, 512)), Ok(Some(99 * 512)));
        assert_eq!(check(command(Opcode::Read, 99, 2, 1024)), Err(Status::OutOfRange));
        assert_eq!(check(command(Opcode::Read, u64::MAX, 2, 1024)), Err(Status::OutOfRange));
        assert_eq!(check(command(Opcode::Read, 0, 0, 512)), Err(Status::InvalidField));
        assert_eq!(check(command(Opcode::Read, 0, 1, 0)), Err(Status::BadLength));
        assert_eq!(check(command(Opcode::Write, 0, 1, 1024)), Err(Status::BadLength));
        assert_eq!(check(command(Opcode::Write, 0, 16, 8192)), Err(Status::BadLength));
        assert_eq!(check(command(Opcode::Discard, 0, 100, 0)), Ok(Some(0)));
        assert_eq!(check(command(Opcode::Discard, 0, 100, 512)), Err(Status::BadLength));
        assert_eq!(check(command(Opcode::Flush, 0, 0, 0)), Ok(None));
        assert_eq!(check(command(Opcode::Flush, 0, 1, 0)), Err(Status::InvalidField));
        let digest = |opcode, data| CommandCapsule {
            flags: CommandFlags { digest: true, ..Default::default() },
            ..command(opcode, 0, 8, data)
        };
        assert_eq!(check(digest(Opcode::Read, 4096 + 8)), Ok(Some(0)), "data and trailer");
        assert_eq!(check(digest(Opcode::Read, 4096)), Err(Status::BadLength));
        assert_eq!(check(digest(Opcode::Write, 4096)), Ok(Some(0)));
        assert_eq!(check(digest(Opcode::Write, 4096 + 8)), Err(Status::BadLength));
        assert_eq!(check(command(Opcode::Read, 0, 8, 4096 + 8)), Err(Status::BadLength));
        let fua_read = CommandCapsule {
            flags: CommandFlags { fua: true, ..Default::default() },
            ..command(Opcode::Read, 0, 1, 512)
        };
        assert_eq!(check(fua_read), Err(Status::InvalidField));
        assert_eq!(
            v.check(&command(Opcode::Write, 0, 1, 512), AccessMode::ReadOnly, 4096),
            Err(Status::ReadOnly)
        );
        let frozen = Volume { read_only: true, ..v.clone() };
        assert_eq!(
            frozen.check(&command(Opcode::WriteZeroes, 0, 1, 0), AccessMode::Exclusive, 4096),
            Err(Status::ReadOnly)
        );
        assert_eq!(Volume::index_of(v.handle()), Some(v.index));
        assert_eq!(Volume::index_of(VolumeHandle(0)), None);
        assert_eq!(Volume::index_of(VolumeHandle(u32::MAX)), None);
    }
}
