//! [`PathTerms`]: the common properties of a path's lanes: its memory and the agreed values.

use rblk_fabric::{Poller, Sge};
use rblk_protocol::limits::{LIST_DATA_MAX, LIST_MAX};
use rblk_protocol::{
    CommandCapsule, Epoch, Features, HelloAccept, KeyedDescriptor, Opcode, Sequence, Tag,
    VolumeHandle,
};

use super::digests::TRAILER_LEN;
use super::io::{Io, IoOp};
use super::path::{DataMemory, DataPlace, Path, PathLayout, PathMemory, Tested};
use super::ways::WayIndex;
use super::ways::choice::WayTerms;

/// The properties of a path. They do not change.
pub(super) struct PathTerms {
    memory: PathMemory,
    accept: HelloAccept,
    epoch: Epoch,
    volume: VolumeHandle,
    layout: PathLayout,
    lane_bytes: u32,
    with_imm: bool,
    with_lists: bool,
    with_digests: bool,
    data_first: bool,
    // Bytes behind the data of a READ.
    trailer_len: u32,
    lists: MessageRoom,
    way: WayIndex,
    way_terms: WayTerms,
}

/// The agreed bounds of a message.
#[derive(Clone, Copy)]
struct MessageRoom {
    commands: usize,
    // Commands with data.
    data: usize,
    // Bytes of their data, without that of the last command.
    data_bytes: u32,
}

impl MessageRoom {
    fn of(accept: &HelloAccept) -> Self {
        let lists = accept.features.has(Features::CAPSULE_LISTS);
        let data_lists = accept.features.has(Features::DATA_LISTS);
        let rest = accept.message_data_bytes().saturating_sub(accept.in_capsule_bytes);
        Self {
            commands: if lists { LIST_MAX } else { 1 },
            data: if data_lists { LIST_DATA_MAX } else { 1 },
            data_bytes: if data_lists { rest } else { u32::MAX },
        }
    }
}

impl PathTerms {
    pub(super) fn new(
        memory: PathMemory,
        accept: HelloAccept,
        epoch: Epoch,
        volume: VolumeHandle,
        lane_bytes: u32,
    ) -> Self {
        let with_digests = accept.features.has(Features::DIGEST);
        Self {
            memory,
            with_imm: accept.features.has(Features::WRITE_WITH_IMM),
            with_lists: accept.features.has(Features::CAPSULE_LISTS),
            with_digests,
            data_first: accept.features.has(Features::DATA_FIRST),
            trailer_len: if with_digests { TRAILER_LEN } else { 0 },
            layout: PathLayout { depth: accept.depth },
            lists: MessageRoom::of(&accept),
            accept,
            epoch,
            volume,
            lane_bytes,
            way: WayIndex::FIRST,
            way_terms: WayTerms::default(),
        }
    }

    /// These terms, for a path of that way.
    pub(super) fn of_way(self, way: WayIndex, way_terms: WayTerms) -> Self {
        Self { way, way_terms, ..self }
    }

    /// The way of the path.
    #[inline]
    pub(super) fn way(&self) -> WayIndex {
        self.way
    }

    /// What is known of the way.
    pub(super) fn way_terms(&self) -> WayTerms {
        self.way_terms
    }

    pub(super) fn memory(&self) -> &PathMemory {
        &self.memory
    }

    /// The path with these terms and the lanes of the poller.
    pub(super) fn into_path(self, poller: Box<dyn Poller>, tested: Tested) -> Path {
        let Self { memory, accept, epoch, volume, lane_bytes, way, way_terms, .. } = self;
        Path {
            poller,
            connections: Vec::new(),
            proofs: Vec::new(),
            tested: Some(tested),
            memory,
            accept,
            epoch,
            volume,
            lane_bytes,
            way,
            way_terms,
        }
    }

    pub(super) fn into_memory(self) -> PathMemory {
        self.memory
    }

    #[inline]
    pub(super) fn layout(&self) -> PathLayout {
        self.layout
    }

    /// Whether READs are answered by WRITE_WITH_IMM.
    #[inline]
    pub(super) fn with_imm(&self) -> bool {
        self.with_imm
    }

    /// Whether messages may hold several capsules.
    #[inline]
    pub(super) fn with_lists(&self) -> bool {
        self.with_lists
    }

    /// Whether data comes before the capsules of a message.
    #[inline]
    pub(super) fn data_first(&self) -> bool {
        self.data_first
    }

    /// Whether capsules and data have digests.
    #[inline]
    pub(super) fn with_digests(&self) -> bool {
        self.with_digests
    }

    /// Whether a request can be a READ that ended with a WRITE of so many bytes: some of the data,
    /// or the trailer with or without data. There may have been other WRITEs before.
    #[inline]
    pub(super) fn may_end_read(&self, io: &Io, written: u32) -> bool {
        let least = self.trailer_len.max(1);
        io.op == IoOp::Read && (least..=io.data_bytes + self.trailer_len).contains(&written)
    }

    /// The tag of the connection's own commands.
    #[inline]
    pub(super) fn connection_tag(&self) -> Tag {
        self.layout.depth.connection_tag()
    }

    /// Whether data of this size goes by the lane with the least data under way. Smaller data goes
    /// by the first lane.
    #[inline]
    pub(super) fn shares_lanes(&self, keyed_bytes: u32) -> bool {
        keyed_bytes >= self.lane_bytes
    }

    /// Whether data of this size may travel in the command.
    #[inline]
    pub(super) fn fits_capsule(&self, data_bytes: u32) -> bool {
        data_bytes <= self.accept.in_capsule_bytes
    }

    /// A command of the connection's own, under its tag.
    pub(super) fn own_command(&self, opcode: Opcode, sequence: Sequence) -> CommandCapsule {
        let mut command = CommandCapsule::new(opcode, self.connection_tag(), self.epoch, sequence);
        command.flags.digest = self.with_digests;
        command
    }

    /// A command for the volume, without a range.
    #[inline]
    pub(super) fn volume_command(&self, opcode: Opcode, tag: Tag) -> CommandCapsule {
        let mut command = CommandCapsule::new(opcode, tag, self.epoch, Sequence(0));
        command.volume = self.volume;
        command
    }

    /// Puts a request with its data at `place` into its command. Returns the data that travels in
    /// the command, if any.
    #[inline]
    pub(super) fn describe(
        &self,
        command: &mut CommandCapsule,
        io: &Io,
        in_capsule: bool,
        place: DataPlace,
    ) -> Option<Sge> {
        command.flags = io.flags();
        command.lba = io.lba;
        command.count = io.count;
        if io.data_bytes == 0 {
            return None;
        }
        let DataMemory { sinks, sources } = self.memory.data(place.memory);
        if in_capsule {
            command.in_capsule_bytes = io.data_bytes;
            return sources.sge(place.offset, io.data_bytes);
        }
        let mr = if io.op == IoOp::Read { sinks } else { sources };
        let remote = mr.remote(place.offset);
        command.buffer = Some(KeyedDescriptor {
            address: remote.addr,
            length: io.data_bytes,
            rkey: remote.rkey.0,
        });
        None
    }

    /// Whether a request's data travels in the command.
    #[inline]
    pub(super) fn is_in_capsule(&self, io: &Io) -> bool {
        io.op == IoOp::Write && self.fits_capsule(io.data_bytes)
    }

    /// Whether a message with so much content has room for any other command, within the agreed
    /// bounds.
    #[inline]
    pub(super) fn message_has_room(&self, commands: usize, data: usize, data_bytes: u32) -> bool {
        let most = &self.lists;
        commands < most.commands && data < most.data && data_bytes <= most.data_bytes
    }
}
