//! The one submission entry that the io_uring crate has no builder for: a driver's command that
//! completes many times and takes a buffer of a group for each completion.

use std::mem::{offset_of, size_of};

use io_uring::{opcode, squeue, types};

/// `IORING_URING_CMD_MULTISHOT`
const URING_CMD_MULTISHOT: u32 = 1 << 1;

/// A submission entry of 64 bytes, as `linux/io_uring.h` lays it out for `IORING_OP_URING_CMD`.
#[repr(C)]
struct UringCmd {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    cmd_op: u32,
    pad: u32,
    addr: u64,
    len: u32,
    uring_cmd_flags: u32,
    user_data: u64,
    buf_group: u16,
    personality: u16,
    file_index: u32,
    cmd: [u8; 16],
}

const _: () = {
    assert!(size_of::<UringCmd>() == 64 && size_of::<squeue::Entry>() == 64);
    assert!(align_of::<UringCmd>() == align_of::<squeue::Entry>());
    assert!(offset_of!(UringCmd, cmd_op) == 8 && offset_of!(UringCmd, addr) == 16);
    assert!(offset_of!(UringCmd, uring_cmd_flags) == 28 && offset_of!(UringCmd, buf_group) == 40);
    assert!(offset_of!(UringCmd, cmd) == 48);
};

/// A command to `file` of the ring's table, which completes until it is over, each time with a
/// buffer of `buf_group`.
pub(super) fn multishot(
    file: types::Fixed,
    cmd_op: u32,
    cmd: [u8; 16],
    buf_group: u16,
    user_data: u64,
) -> squeue::Entry {
    let flags = squeue::Flags::FIXED_FILE | squeue::Flags::BUFFER_SELECT;
    let entry = UringCmd {
        opcode: opcode::UringCmd16::CODE,
        flags: flags.bits(),
        ioprio: 0,
        fd: file.0.cast_signed(),
        cmd_op,
        pad: 0,
        addr: 0,
        len: 0,
        uring_cmd_flags: URING_CMD_MULTISHOT,
        user_data,
        buf_group,
        personality: 0,
        file_index: 0,
        cmd,
    };
    // SAFETY: `squeue::Entry` is `repr(C)` around the kernel's `io_uring_sqe`: 64 bytes of integers
    // and unions of integers, for which every bit pattern is valid; size and alignment are asserted
    // above. All 64 bytes are set.
    unsafe { std::mem::transmute::<UringCmd, squeue::Entry>(entry) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_flags_and_group_differ_from_the_crates_own_command() {
        // SAFETY: as in `multishot`, the other way round; the crate's builder starts from 64
        // zeroes.
        let bytes = |entry| unsafe { std::mem::transmute::<squeue::Entry, [u8; 64]>(entry) };
        let ours = bytes(multishot(types::Fixed(0), 0xc010_7527, [7; 16], 0x0201, 42));
        let theirs = opcode::UringCmd16::new(types::Fixed(0), 0xc010_7527)
            .cmd([7; 16])
            .build()
            .user_data(42);
        let theirs = bytes(theirs);
        let differ: Vec<usize> = (0..64).filter(|i| ours[*i] != theirs[*i]).collect();
        assert_eq!(differ, [1, 28, 40, 41]);
        assert_eq!((theirs[1], ours[1], ours[28]), (1, 1 | 1 << 5, 2));
        assert_eq!(ours[40..42], [1, 2]);
    }
}
