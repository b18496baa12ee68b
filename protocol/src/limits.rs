//! Every bound of the protocol, with its reason. Relations between them are asserted at compile
//! time.

/// Bytes of a command capsule, without in-capsule data. One cache line: the floor for a 64-bit LBA,
/// one keyed descriptor, and the epoch, sequence and digest that make replay safe.
pub const COMMAND_BYTES: usize = 64;

/// Bytes of a response capsule.
pub const RESPONSE_BYTES: usize = 16;

/// Most capsules of one message, where [lists](crate::CommandList) were agreed: what the messages
/// of a busy queue cost is then shared by so many, and the slots that lists land in stay small.
pub const LIST_MAX: usize = 16;

/// Most commands of one message that may have in-capsule data, where
/// [`DATA_LISTS`](crate::Features::DATA_LISTS) was agreed. Their SEND gathers a piece for each and
/// one for the capsules: four, which every device has that has more than two.
pub const LIST_DATA_MAX: usize = 3;

/// Bytes of the longest list of commands, without the data behind it.
pub const COMMAND_LIST_BYTES: usize = LIST_MAX * COMMAND_BYTES;

/// Bytes of the longest list of responses.
pub const RESPONSE_LIST_BYTES: usize = LIST_MAX * RESPONSE_BYTES;

/// Bytes of a keyed descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;

/// Bytes of the hello in CM private data. rdma_cm leaves 56 bytes of an IB request to its user.
pub const HELLO_BYTES: usize = 48;

/// Private data that every CM carries in a request.
pub const CM_REQUEST_BYTES: usize = 56;

/// Private data that every CM carries in a rejection (148 on IB).
pub const CM_REJECT_BYTES: usize = 148;

/// In-capsule data offered by default: a 4 KiB write is then two messages and exposes no key.
pub const IN_CAPSULE_DEFAULT_BYTES: u32 = 4096;

/// Most in-capsule data: each receive slot of each queue pays for it (depth x this).
pub const IN_CAPSULE_MAX_BYTES: u32 = 16 << 10;

/// Commands one I/O queue may have outstanding, at most. Tags are 16 bits and immediates carry them
/// with a 16-bit check, so the bound is memory: depth x (receive slot + buffer).
pub const QUEUE_DEPTH_MAX: u16 = 1024;

/// Default depth of an I/O queue, that of nvme-rdma.
pub const QUEUE_DEPTH_DEFAULT: u16 = 128;

/// The deepest I/O queue that a target grants unless it is told otherwise: for those who ask for
/// more than the default.
pub const QUEUE_DEPTH_GRANTED_DEFAULT: u16 = 512;

/// Depth of the admin queue: a few commands and one parked ASYNC_EVENT.
pub const ADMIN_DEPTH: u16 = 16;

/// I/O queues of one session.
pub const QUEUES_MAX: u16 = 64;

/// Most QPs of the queues of one mount, all lanes together: they are numbered from 0, and the last
/// number of a session is kept for the connection by which an initiator writes again what a target
/// lost.
pub const MOUNT_QPS_MAX: u16 = QUEUES_MAX - 1;

/// Most QPs, or lanes, that an initiator gives one of its hardware queues. To the target each is a
/// queue.
pub const LANES_MAX: u16 = 4;

/// From this size on, an initiator with several lanes may send a request by any of them, and a
/// target sees only a part of a sequential reader's requests on each. What is smaller is worth more
/// in one message with others.
pub const LANE_BYTES: u32 = 32 << 10;

/// Most data of one READ or WRITE.
pub const IO_MAX_BYTES: u32 = 4 << 20;

/// Least maximum an end may offer: one page.
pub const IO_MIN_BYTES: u32 = 4096;

/// Most data of one admin reply.
pub const ADMIN_REPLY_MAX_BYTES: u32 = 64 << 10;

/// Bytes of a name on the wire: volumes, hosts and targets. Padded with zeros.
pub const NAME_BYTES: usize = 64;

/// Bytes of text in a rejection.
pub const REJECT_TEXT_BYTES: usize = 96;

/// Smallest and largest block: what Linux block devices accept on every kernel we support.
pub const BLOCK_MIN_BYTES: u32 = 512;
/// See [`BLOCK_MIN_BYTES`].
pub const BLOCK_MAX_BYTES: u32 = 4096;

/// Most bytes of a volume: offsets stay positive in `i64`, which is what the kernel's files have.
pub const VOLUME_MAX_BYTES: u64 = i64::MAX as u64;

const _: () = {
    assert!(HELLO_BYTES <= CM_REQUEST_BYTES);
    assert!(16 + REJECT_TEXT_BYTES <= CM_REJECT_BYTES);
    assert!(IN_CAPSULE_DEFAULT_BYTES <= IN_CAPSULE_MAX_BYTES);
    assert!(IN_CAPSULE_DEFAULT_BYTES >= BLOCK_MAX_BYTES, "a block fits a capsule");
    assert!(LIST_DATA_MAX <= LIST_MAX);
    assert!(LANES_MAX <= MOUNT_QPS_MAX);
    assert!(QUEUE_DEPTH_DEFAULT <= QUEUE_DEPTH_GRANTED_DEFAULT);
    assert!(QUEUE_DEPTH_GRANTED_DEFAULT <= QUEUE_DEPTH_MAX);
    assert!(QUEUE_DEPTH_MAX < u16::MAX, "one tag more is used by the self-test");
    assert!(IO_MIN_BYTES >= BLOCK_MAX_BYTES && IO_MIN_BYTES <= IO_MAX_BYTES);
    assert!(BLOCK_MIN_BYTES.is_power_of_two() && BLOCK_MAX_BYTES.is_power_of_two());
};
