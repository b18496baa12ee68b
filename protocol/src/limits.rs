//! Every limit of the protocol, with its reason. Relations between limits are asserted at compile
//! time.

/// Bytes of a command capsule, without in-capsule data. One cache line. It has room for a 64-bit
/// LBA, one keyed descriptor, and the epoch, sequence and digest that make replay safe.
pub const COMMAND_BYTES: usize = 64;

/// Bytes of a response capsule.
pub const RESPONSE_BYTES: usize = 16;

/// Most capsules of one message, if [lists](crate::CommandList) were agreed. So many commands share
/// the cost of a message, and the receive buffers for lists stay small.
pub const LIST_MAX: usize = 16;

/// Most commands of one message that may have in-capsule data, if
/// [`DATA_LISTS`](crate::Features::DATA_LISTS) was agreed. Their SEND gathers one piece for the
/// capsules and one for each data: four, which every device supports that supports more than two.
pub const LIST_DATA_MAX: usize = 3;

/// Bytes of the longest list of commands, without the data behind it.
pub const COMMAND_LIST_BYTES: usize = LIST_MAX * COMMAND_BYTES;

/// Bytes of the longest list of responses.
pub const RESPONSE_LIST_BYTES: usize = LIST_MAX * RESPONSE_BYTES;

/// Bytes behind the data of a READ where digests were agreed: [`ReadTrailer`](crate::ReadTrailer).
pub const READ_TRAILER_BYTES: usize = 8;

/// Stripes of a volume for the digests of its data: [`DataDigests`](crate::DataDigests). A target
/// commits the data of a WRITE in pieces that are no smaller.
pub const DIGEST_STRIPE_BYTES: u64 = 1 << 20;

/// Most data of one command where digests are agreed: a capsule has room for the CRCs of two
/// stripes.
pub const DIGEST_IO_MAX_BYTES: u32 = 1 << 20;

/// Bytes of a keyed descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;

/// Bytes of the proof in a self-test, where the ends prove their keys: a nonce and a MAC.
pub const QUEUE_PROOF_BYTES: usize = 48;

/// Bytes of the hello of a request in CM private data. rdma_cm leaves 56 bytes of an IB request to
/// its user.
pub const HELLO_BYTES: usize = 48;

/// Bytes of the hello of an accept in CM private data.
pub const ACCEPT_BYTES: usize = 64;

/// Private data that every CM carries in a request.
pub const CM_REQUEST_BYTES: usize = 56;

/// Private data that every CM carries in an accept: as much as in a rejection, and on IB more.
pub const CM_ACCEPT_BYTES: usize = CM_REJECT_BYTES;

/// Private data that every CM carries in a rejection (148 on IB).
pub const CM_REJECT_BYTES: usize = 148;

/// In-capsule data offered by default. A 4 KiB write then takes two messages and exposes no key.
pub const IN_CAPSULE_DEFAULT_BYTES: u32 = 4096;

/// Most in-capsule data. Each receive buffer of each queue has room for it (depth x this).
pub const IN_CAPSULE_MAX_BYTES: u32 = 16 << 10;

/// Most commands that one I/O queue may have outstanding. Tags have 16 bits, and immediates carry
/// them with a 16-bit check, so the limit is memory: depth x (receive buffer + buffer).
pub const QUEUE_DEPTH_MAX: u16 = 1024;

/// Default depth of an I/O queue, the same as of nvme-rdma.
pub const QUEUE_DEPTH_DEFAULT: u16 = 128;

/// The deepest I/O queue that a target grants by default, to an initiator that asks for more than
/// [`QUEUE_DEPTH_DEFAULT`].
pub const QUEUE_DEPTH_GRANTED_DEFAULT: u16 = 512;

/// Depth of the admin queue: a few commands and one parked ASYNC_EVENT.
pub const ADMIN_DEPTH: u16 = 16;

/// I/O queues of one session.
pub const QUEUES_MAX: u16 = 64;

/// Most QPs of the queues of one mount, all lanes together. They are numbered from 0. The last
/// number of a session is reserved for the connection by which an initiator replays writes that a
/// target lost.
pub const MOUNT_QPS_MAX: u16 = QUEUES_MAX - 1;

/// Ways of one mount to its target: so many epochs of a session live at a time, each with an admin
/// connection. The queues of all ways together are [`MOUNT_QPS_MAX`] at most.
pub const WAYS_MAX: u16 = 8;

/// Most QPs (lanes) of one hardware queue of an initiator. For the target each is a queue.
pub const LANES_MAX: u16 = 4;

/// From this size on, an initiator with several lanes may send a request by any lane, so a target
/// sees only a part of the requests of a sequential reader on each. Smaller requests share a
/// message, which saves more.
pub const LANE_BYTES: u32 = 32 << 10;

/// Most data of one READ or WRITE.
pub const IO_MAX_BYTES: u32 = 4 << 20;

/// Smallest value of [`IO_MAX_BYTES`] that an end may offer: one page.
pub const IO_MIN_BYTES: u32 = 4096;

/// Most data of one admin reply.
pub const ADMIN_REPLY_MAX_BYTES: u32 = 64 << 10;

/// Most volumes that an initiator takes of a LIST. A target that says that it has more is not
/// believed.
pub const LIST_ENTRIES_MAX: u32 = 65_536;

/// Bytes of a name on the wire: volumes, hosts and targets. Padded with zeros.
pub const NAME_BYTES: usize = 64;

/// Bytes of text in a rejection.
pub const REJECT_TEXT_BYTES: usize = 96;

/// Smallest block. Linux block devices accept it on every supported kernel, and
/// [`BLOCK_MAX_BYTES`].
pub const BLOCK_MIN_BYTES: u32 = 512;
/// Largest block. See [`BLOCK_MIN_BYTES`].
pub const BLOCK_MAX_BYTES: u32 = 4096;

/// Most bytes of a volume. Offsets stay positive in `i64`, the type of file offsets in the kernel.
pub const VOLUME_MAX_BYTES: u64 = i64::MAX as u64;

const _: () = {
    assert!(HELLO_BYTES <= CM_REQUEST_BYTES);
    assert!(ACCEPT_BYTES <= CM_ACCEPT_BYTES);
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
