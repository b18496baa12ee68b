//! The driver's binary interface: the subset of `linux/ublk_cmd.h` that rblk uses.
//!
//! Every structure is plain integers, its size and offsets are asserted at compile time, and every
//! bit pattern is valid, so that the kernel may fill one in place. Fields have the kernel's names.

use std::mem::{offset_of, size_of};

use rblk_protocol::width::const_u32;

#[cfg(not(all(target_os = "linux", target_endian = "little", target_pointer_width = "64")))]
compile_error!("ublk support is written for 64-bit little-endian Linux");
#[cfg(any(target_arch = "powerpc64", target_arch = "mips64", target_arch = "sparc64"))]
compile_error!("this architecture packs ioctl numbers differently");

/// Path of the driver's control node.
pub(crate) const CONTROL_PATH: &str = "/dev/ublk-control";
/// Largest queue depth the driver takes.
pub(crate) const MAX_QUEUE_DEPTH: u16 = 4096;
/// Largest number of hardware queues the driver takes (it also cuts to the number of possible
/// CPUs).
pub(crate) const MAX_QUEUES: u16 = 4096;
/// Largest I/O buffer that a user-copy offset can name; also our bound for the default mode.
pub(crate) const MAX_IO_BYTES: u32 = 32 << 20;
/// One past the largest device id (the driver's number of minors).
pub(crate) const MAX_DEVICE_ID: u32 = 1 << 20;
/// "Any free id" in ADD_DEV.
pub(crate) const ANY_DEVICE: u32 = u32::MAX;
/// `queue_id` of a command that is not about a queue.
pub(crate) const NO_QUEUE: u16 = u16::MAX;
/// Bytes in a sector, the unit of every length and position in this interface.
pub(crate) const SECTOR_BYTES: u32 = 512;
/// Shift between sectors and bytes.
pub(crate) const SECTOR_SHIFT: u32 = 9;

const READ: u32 = 2;
const WRITE: u32 = 1;

/// An ioctl number: direction, size of the argument, type, number.
const fn ioctl(direction: u32, number: u32, size: usize) -> u32 {
    assert!(size < 1 << 14 && number < 1 << 8);
    direction << 30 | const_u32(size) << 16 | (b'u' as u32) << 8 | number
}

const fn control_read(number: u32) -> u32 {
    ioctl(READ, number, size_of::<CtrlCmd>())
}

const fn control_write(number: u32) -> u32 {
    ioctl(READ | WRITE, number, size_of::<CtrlCmd>())
}

const fn io(number: u32) -> u32 {
    ioctl(READ | WRITE, number, size_of::<IoCmd>())
}

/// The CPUs that submit to a queue.
pub(crate) const CMD_GET_QUEUE_AFFINITY: u32 = control_read(0x01);
/// State, flags, sizes and owner, without a path.
pub(crate) const CMD_GET_DEV_INFO: u32 = control_read(0x02);
/// Create a device and its char node.
pub(crate) const CMD_ADD_DEV: u32 = control_write(0x04);
/// Delete a device; waits until the last user of the char node is gone.
pub(crate) const CMD_DEL_DEV: u32 = control_write(0x05);
/// Expose the disk; waits until every tag of every queue was fetched.
pub(crate) const CMD_START_DEV: u32 = control_write(0x06);
/// Take the disk away; waits for requests in flight.
pub(crate) const CMD_STOP_DEV: u32 = control_write(0x07);
/// Set block-layer parameters, before the start.
pub(crate) const CMD_SET_PARAMS: u32 = control_write(0x08);
/// Read them back.
pub(crate) const CMD_GET_PARAMS: u32 = control_read(0x09);
/// Forget the dead server, and accept a new one.
pub(crate) const CMD_START_USER_RECOVERY: u32 = control_write(0x10);
/// Hand the disk to the new server; waits like the start does.
pub(crate) const CMD_END_USER_RECOVERY: u32 = control_write(0x11);
/// State, flags, sizes and owner; carries the char node's path.
pub(crate) const CMD_GET_DEV_INFO2: u32 = control_read(0x12);
/// The kernel's features (6.5).
pub(crate) const CMD_GET_FEATURES: u32 = control_read(0x13);
/// Delete without waiting (6.9).
pub(crate) const CMD_DEL_DEV_ASYNC: u32 = control_read(0x14);

/// Give a live disk another capacity (6.16).
pub(crate) const CMD_UPDATE_SIZE: u32 = control_write(0x15);

/// Learn of memory that programs do direct I/O with (7.1). Answers with its index.
pub(crate) const CMD_REG_BUF: u32 = control_write(0x18);

/// First command for a tag: wait for a request.
pub(crate) const IO_FETCH_REQ: u32 = io(0x20);
/// Result of a request, and wait for the next one.
pub(crate) const IO_COMMIT_AND_FETCH_REQ: u32 = io(0x21);

/// Completion of a fetch: a request is in the descriptor.
pub(crate) const IO_RES_OK: i32 = 0;
/// Completion of a fetch: there will be no more requests for this tag.
pub(crate) const IO_RES_ABORT: i32 = -libc::ENODEV;

/// No disk: not started, or stopped.
pub(crate) const STATE_DEAD: u16 = 0;
/// Disk present and served.
pub(crate) const STATE_LIVE: u16 = 1;
/// Disk present, server gone, requests wait.
pub(crate) const STATE_QUIESCED: u16 = 2;
/// Disk present, server gone, requests fail.
pub(crate) const STATE_FAIL_IO: u16 = 3;

/// Read.
pub(crate) const OP_READ: u8 = 0;
/// Write.
pub(crate) const OP_WRITE: u8 = 1;
/// Flush the volatile cache.
pub(crate) const OP_FLUSH: u8 = 2;
/// Discard.
pub(crate) const OP_DISCARD: u8 = 3;
/// Write zeroes.
pub(crate) const OP_WRITE_ZEROES: u8 = 5;

/// Flag of a request, in the upper bits of `op_flags`: durable when completed.
pub(crate) const REQ_FUA: u32 = 1 << 13;
/// Flag of a request: write zeroes must not deallocate.
pub(crate) const REQ_NOUNMAP: u32 = 1 << 15;

/// Flag of a request: its data is in registered memory, and `addr` is not an address.
pub(crate) const IO_SHMEM_ZC: u32 = 1 << 19;
/// The layout of `addr` in this case: the offset below this bit, the index of the memory from it
/// on.
pub(crate) const SHMEM_INDEX_SHIFT: u32 = 32;

/// The disk refuses writes.
pub(crate) const ATTR_READ_ONLY: u32 = 1 << 0;
/// A completed write may be lost until a flush; without it the kernel sends no FLUSH and no FUA.
pub(crate) const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
/// FUA is understood (only together with a volatile cache).
pub(crate) const ATTR_FUA: u32 = 1 << 3;

/// [`Params::basic`] is set.
pub(crate) const PARAM_BASIC: u32 = 1 << 0;
/// [`Params::discard`] is set.
pub(crate) const PARAM_DISCARD: u32 = 1 << 1;

/// Header of a control command, in the SQE.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub(crate) struct CtrlCmd {
    pub dev_id: u32,
    pub queue_id: u16,
    pub len: u16,
    pub addr: u64,
    pub data: u64,
    pub dev_path_len: u16,
    pub pad: u16,
    pub reserved: u32,
}

impl CtrlCmd {
    /// The 80 bytes of command space in a 128-byte SQE.
    #[must_use]
    pub(crate) fn to_sqe_bytes(self) -> [u8; 80] {
        let mut bytes = [0; 80];
        bytes[0..4].copy_from_slice(&self.dev_id.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.queue_id.to_ne_bytes());
        bytes[6..8].copy_from_slice(&self.len.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.data.to_ne_bytes());
        bytes[24..26].copy_from_slice(&self.dev_path_len.to_ne_bytes());
        bytes
    }
}

/// A device, as ADD_DEV takes and GET_DEV_INFO gives it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub(crate) struct DevInfo {
    pub nr_hw_queues: u16,
    pub queue_depth: u16,
    pub state: u16,
    pub pad0: u16,
    pub max_io_buf_bytes: u32,
    pub dev_id: u32,
    pub ublksrv_pid: i32,
    pub pad1: u32,
    pub flags: u64,
    pub ublksrv_flags: u64,
    pub owner_uid: u32,
    pub owner_gid: u32,
    pub reserved: [u64; 2],
}

/// Buffer of GET_DEV_INFO2: the char node's path (zero-padded), then the answer.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub(crate) struct InfoExchange {
    pub path: [u8; INFO_PATH_BYTES],
    pub info: DevInfo,
}

/// Room for `/dev/ublkc` and ten digits, and a zero.
pub(crate) const INFO_PATH_BYTES: usize = 32;

/// Block-layer limits that every device sets.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub(crate) struct ParamBasic {
    pub attrs: u32,
    pub logical_bs_shift: u8,
    pub physical_bs_shift: u8,
    pub io_opt_shift: u8,
    pub io_min_shift: u8,
    pub max_sectors: u32,
    pub chunk_sectors: u32,
    pub dev_sectors: u64,
    pub virt_boundary_mask: u64,
}

/// Discard and write-zeroes limits.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub(crate) struct ParamDiscard {
    pub discard_alignment: u32,
    pub discard_granularity: u32,
    pub max_discard_sectors: u32,
    pub max_write_zeroes_sectors: u32,
    pub max_discard_segments: u16,
    pub reserved: u16,
}

/// Device numbers of the two nodes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub(crate) struct ParamDevt {
    pub char_major: u32,
    pub char_minor: u32,
    pub disk_major: u32,
    pub disk_minor: u32,
}

/// All parameters. The tail (zoned, alignment, segments, integrity) is laid out but not used.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub(crate) struct Params {
    pub len: u32,
    pub types: u32,
    pub basic: ParamBasic,
    pub discard: ParamDiscard,
    pub devt: ParamDevt,
    pub zoned: [u32; 8],
    pub dma_align: [u32; 2],
    pub gap: u32,
    pub segment: [u64; 2],
    pub integrity: [u64; 2],
}

/// A request, in the array the driver maps into the server.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub(crate) struct IoDesc {
    pub op_flags: u32,
    pub nr_sectors: u32,
    pub start_sector: u64,
    pub addr: u64,
}

/// Command of a tag, in the SQE.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub(crate) struct IoCmd {
    pub q_id: u16,
    pub tag: u16,
    pub result: i32,
    pub addr: u64,
}

impl IoCmd {
    /// The 16 bytes of command space in a 64-byte SQE.
    #[inline]
    #[must_use]
    pub(crate) fn to_sqe_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[0..2].copy_from_slice(&self.q_id.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.result.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_ne_bytes());
        bytes
    }
}

/// Bytes of one queue's descriptor array, as the driver sizes it: whole pages.
#[must_use]
pub(crate) fn descriptors_len(depth: u16, page: usize) -> usize {
    (usize::from(depth) * size_of::<IoDesc>()).next_multiple_of(page)
}

/// Offset of a queue's descriptor array in the char node: arrays are spaced for the largest depth.
#[must_use]
pub(crate) fn descriptors_offset(queue_id: u16, page: usize) -> usize {
    usize::from(queue_id) * descriptors_len(MAX_QUEUE_DEPTH, page)
}

/// Memory to register (`struct ublk_shmem_buf_reg`): whole pages, at most 4 GiB.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub(crate) struct ShmemBufReg {
    pub addr: u64,
    pub len: u64,
    pub flags: u32,
    pub reserved: u32,
}

/// CPUs, a bit each. The driver needs room for every CPU that the kernel may have (`nr_cpu_ids`),
/// in whole words.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuBits(pub [u64; CpuBits::WORDS]);

impl CpuBits {
    /// 8192 CPUs, which is the most that Linux can be built for.
    pub(crate) const WORDS: usize = 128;
    /// No CPU.
    pub(crate) const NONE: Self = Self([0; Self::WORDS]);
}

/// A type the kernel may read and fill behind a pointer: `repr(C)`, integers only, no padding.
///
/// # Safety
/// Every bit pattern is a valid value and no byte is padding.
pub(crate) unsafe trait Payload: Copy + 'static {}

// SAFETY: an integer.
unsafe impl Payload for u64 {}
// SAFETY: integers only; the assertions below leave no room for padding.
unsafe impl Payload for DevInfo {}
// SAFETY: integers only; the assertions below leave no room for padding.
unsafe impl Payload for ShmemBufReg {}
// SAFETY: an array of integers.
unsafe impl Payload for CpuBits {}
// SAFETY: bytes, then a Payload at an offset that is a multiple of its alignment (asserted below).
unsafe impl Payload for InfoExchange {}
// SAFETY: integers only; the kernel's one gap is the field `gap`, so no byte is padding.
unsafe impl Payload for Params {}

const _: () = {
    assert!(size_of::<CtrlCmd>() == 32);
    assert!(offset_of!(CtrlCmd, addr) == 8 && offset_of!(CtrlCmd, dev_path_len) == 24);
    assert!(size_of::<ShmemBufReg>() == 24);
    assert!(size_of::<DevInfo>() == 64);
    assert!(offset_of!(DevInfo, max_io_buf_bytes) == 8 && offset_of!(DevInfo, ublksrv_pid) == 16);
    assert!(offset_of!(DevInfo, flags) == 24 && offset_of!(DevInfo, owner_uid) == 40);
    assert!(size_of::<InfoExchange>() == INFO_PATH_BYTES + 64);
    assert!(size_of::<ParamBasic>() == 32 && offset_of!(ParamBasic, dev_sectors) == 16);
    assert!(
        size_of::<ParamDiscard>() == 20 && offset_of!(ParamDiscard, max_discard_segments) == 16
    );
    assert!(size_of::<ParamDevt>() == 16);
    assert!(offset_of!(Params, basic) == 8 && offset_of!(Params, discard) == 40);
    assert!(offset_of!(Params, devt) == 60 && offset_of!(Params, zoned) == 76);
    assert!(offset_of!(Params, dma_align) == 108 && offset_of!(Params, segment) == 120);
    assert!(offset_of!(Params, integrity) == 136 && size_of::<Params>() == 152);
    assert!(size_of::<IoDesc>() == 24 && offset_of!(IoDesc, start_sector) == 8);
    assert!(size_of::<IoCmd>() == 16 && offset_of!(IoCmd, addr) == 8);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_numbers_are_the_kernels() {
        assert_eq!(CMD_GET_QUEUE_AFFINITY, 0x8020_7501);
        assert_eq!(CMD_GET_DEV_INFO, 0x8020_7502);
        assert_eq!(CMD_ADD_DEV, 0xc020_7504);
        assert_eq!(CMD_DEL_DEV, 0xc020_7505);
        assert_eq!(CMD_START_DEV, 0xc020_7506);
        assert_eq!(CMD_STOP_DEV, 0xc020_7507);
        assert_eq!(CMD_SET_PARAMS, 0xc020_7508);
        assert_eq!(CMD_GET_PARAMS, 0x8020_7509);
        assert_eq!(CMD_START_USER_RECOVERY, 0xc020_7510);
        assert_eq!(CMD_END_USER_RECOVERY, 0xc020_7511);
        assert_eq!(CMD_GET_DEV_INFO2, 0x8020_7512);
        assert_eq!(CMD_GET_FEATURES, 0x8020_7513);
        assert_eq!(CMD_DEL_DEV_ASYNC, 0x8020_7514);
        assert_eq!(CMD_UPDATE_SIZE, 0xc020_7515);
        assert_eq!(CMD_REG_BUF, 0xc020_7518);
    }

    #[test]
    fn io_numbers_are_the_kernels() {
        assert_eq!(IO_FETCH_REQ, 0xc010_7520);
        assert_eq!(IO_COMMIT_AND_FETCH_REQ, 0xc010_7521);
        assert_eq!(IO_RES_ABORT, -19);
    }

    #[test]
    fn commands_are_laid_out_by_byte() {
        let bytes = CtrlCmd {
            dev_id: 0x0403_0201,
            queue_id: 0x0605,
            len: 0x0807,
            addr: 0x100f_0e0d_0c0b_0a09,
            data: 0x1817_1615_1413_1211,
            dev_path_len: 0x1a19,
            ..CtrlCmd::default()
        }
        .to_sqe_bytes();
        let expected: Vec<u8> = (1..=26).collect();
        assert_eq!(bytes[..26], expected);
        assert!(bytes[26..].iter().all(|b| *b == 0));

        let io = IoCmd { q_id: 0x0201, tag: 0x0403, result: -5, addr: 0x1122_3344_5566_7788 };
        let expected =
            [1, 2, 3, 4, 0xfb, 0xff, 0xff, 0xff, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11];
        assert_eq!(io.to_sqe_bytes(), expected);
    }

    #[test]
    fn descriptor_arrays_are_whole_pages_at_the_spacing_of_the_largest_depth() {
        assert_eq!(descriptors_len(1, 4096), 4096);
        assert_eq!(descriptors_len(170, 4096), 4096);
        assert_eq!(descriptors_len(171, 4096), 8192);
        assert_eq!(descriptors_len(4096, 4096), 98_304);
        assert_eq!(descriptors_offset(0, 4096), 0);
        assert_eq!(descriptors_offset(3, 4096), 294_912);
        assert_eq!(descriptors_offset(1, 65_536), 131_072);
    }
}
