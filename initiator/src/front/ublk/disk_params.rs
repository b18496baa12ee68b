//! [`DiskParams`] and [`DeviceSpec`]: the properties of a disk and the structure of its device,
//! checked before the kernel sees them, so that a refusal names the field.

use super::abi;
use rblk_protocol::width::{const_u32, narrow};

use super::error::{Result, UblkError};
use super::feature::Features;
use super::token::DeviceToken;

/// Largest logical block: the block layer's limit for ordinary drivers is a page, and 4096 is one
/// everywhere.
const MAX_BLOCK_BYTES: u32 = 4096;

/// The limits of discard and write-zeroes for the block layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiscardParams {
    /// Discards are multiples of this many bytes; a power of two, at least a logical block.
    pub granularity: u32,
    /// Longest discard in sectors of 512 bytes; 0 means none is sent.
    pub max_discard_sectors: u32,
    /// Longest write-zeroes in sectors of 512 bytes; 0 makes the kernel write zero pages instead.
    pub max_write_zeroes_sectors: u32,
}

/// The properties of a disk for its users. Lengths are bytes unless the name says sectors of 512
/// bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskParams {
    /// Capacity in sectors of 512 bytes.
    pub sectors: u64,
    /// Smallest unit of I/O: 512 to 4096, a power of two.
    pub logical_block: u32,
    /// Unit that is written whole without read-modify-write; at least a logical block, a power of
    /// two.
    pub physical_block: u32,
    /// Smallest efficient I/O, a power of two.
    pub io_min: u32,
    /// Best I/O size, a power of two.
    pub io_opt: u32,
    /// Longest read or write; at most the I/O buffer, at least 4096.
    pub max_io_bytes: u32,
    /// Requests never cross a multiple of this many sectors; 0 means there is no such border.
    pub chunk_sectors: u32,
    /// Refuse writes.
    pub read_only: bool,
    /// A completed write may be lost until a flush. Without it the kernel sends neither FLUSH nor
    /// FUA.
    pub volatile_cache: bool,
    /// FUA is understood. The kernel heeds it only together with `volatile_cache`.
    pub fua: bool,
    /// Discard and write-zeroes; `None` means neither.
    pub discard: Option<DiscardParams>,
}

impl DiskParams {
    /// A writable disk of `sectors` with one block size, requests of at most `max_io_bytes`, no
    /// volatile cache and no discard.
    #[must_use]
    pub fn new(sectors: u64, block: u32, max_io_bytes: u32) -> Self {
        Self {
            sectors,
            logical_block: block,
            physical_block: block,
            io_min: block,
            io_opt: block,
            max_io_bytes,
            chunk_sectors: 0,
            read_only: false,
            volatile_cache: false,
            fua: false,
            discard: None,
        }
    }

    /// The kernel's form, checked.
    ///
    /// # Errors
    /// A field outside its rule.
    pub(crate) fn to_abi(self) -> Result<abi::Params> {
        let logical = shift("logical_block", self.logical_block, 512, MAX_BLOCK_BYTES)?;
        let physical = shift("physical_block", self.physical_block, self.logical_block, 1 << 30)?;
        let io_min = shift("io_min", self.io_min, self.logical_block, 1 << 30)?;
        let io_opt = shift("io_opt", self.io_opt, self.logical_block, 1 << 30)?;
        check(
            self.max_io_bytes >= 4096
                && self.max_io_bytes <= abi::MAX_IO_BYTES
                && self.max_io_bytes.is_multiple_of(self.logical_block),
            "max_io_bytes",
            self.max_io_bytes.into(),
            "must be a multiple of the logical block from 4096 to 33554432",
        )?;
        check(
            self.sectors > 0
                && self.sectors <= i64::MAX.cast_unsigned() >> abi::SECTOR_SHIFT
                && self.sectors.is_multiple_of(u64::from(self.logical_block >> abi::SECTOR_SHIFT)),
            "sectors",
            self.sectors,
            "must be a whole number of logical blocks, above 0 and below 2^54",
        )?;
        check(
            self.chunk_sectors.is_multiple_of(self.logical_block >> abi::SECTOR_SHIFT),
            "chunk_sectors",
            self.chunk_sectors.into(),
            "must be a whole number of logical blocks",
        )?;
        let mut attrs = 0;
        for (set, bit) in [
            (self.read_only, abi::ATTR_READ_ONLY),
            (self.volatile_cache, abi::ATTR_VOLATILE_CACHE),
            (self.fua, abi::ATTR_FUA),
        ] {
            attrs |= if set { bit } else { 0 };
        }
        let mut params = abi::Params {
            len: PARAMS_LEN,
            types: abi::PARAM_BASIC,
            basic: abi::ParamBasic {
                attrs,
                logical_bs_shift: logical,
                physical_bs_shift: physical,
                io_opt_shift: io_opt,
                io_min_shift: io_min,
                max_sectors: self.max_io_bytes >> abi::SECTOR_SHIFT,
                chunk_sectors: self.chunk_sectors,
                dev_sectors: self.sectors,
                virt_boundary_mask: 0,
            },
            ..abi::Params::default()
        };
        if let Some(discard) = self.discard {
            shift("discard.granularity", discard.granularity, self.logical_block, 1 << 31)?;
            params.types |= abi::PARAM_DISCARD;
            params.discard = abi::ParamDiscard {
                discard_alignment: 0,
                discard_granularity: discard.granularity,
                max_discard_sectors: discard.max_discard_sectors,
                max_write_zeroes_sectors: discard.max_write_zeroes_sectors,
                // The driver takes no other number: a request has one range.
                max_discard_segments: u16::from(discard.max_discard_sectors > 0),
                reserved: 0,
            };
        }
        Ok(params)
    }

    /// From the kernel's form, as GET_PARAMS gives it.
    #[must_use]
    pub(crate) fn from_abi(params: &abi::Params) -> Self {
        let basic = &params.basic;
        let bytes = |shift: u8| 1_u32.checked_shl(shift.into()).unwrap_or(0);
        Self {
            sectors: basic.dev_sectors,
            logical_block: bytes(basic.logical_bs_shift),
            physical_block: bytes(basic.physical_bs_shift),
            io_min: bytes(basic.io_min_shift),
            io_opt: bytes(basic.io_opt_shift),
            max_io_bytes: basic.max_sectors.saturating_mul(abi::SECTOR_BYTES),
            chunk_sectors: basic.chunk_sectors,
            read_only: basic.attrs & abi::ATTR_READ_ONLY != 0,
            volatile_cache: basic.attrs & abi::ATTR_VOLATILE_CACHE != 0,
            fua: basic.attrs & abi::ATTR_FUA != 0,
            discard: (params.types & abi::PARAM_DISCARD != 0).then_some(DiscardParams {
                granularity: params.discard.discard_granularity,
                max_discard_sectors: params.discard.max_discard_sectors,
                max_write_zeroes_sectors: params.discard.max_write_zeroes_sectors,
            }),
        }
    }
}

/// Bytes of the parameters that are sent: the driver of every kernel from 6.4 on knows this much.
pub(super) const PARAMS_LEN: u32 = const_u32(size_of::<abi::Params>());

/// The fate of requests when the server dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Recovery {
    /// The disk goes away and requests fail.
    Never,
    /// New requests wait for the next server; requests of the dead server fail.
    FailHeld,
    /// New requests wait, and requests of the dead server are sent again: the back end may see a
    /// request twice.
    #[default]
    Reissue,
    /// All requests fail until the next server serves (6.13).
    FailAll,
}

impl Recovery {
    /// Its feature bits.
    #[must_use]
    pub(crate) fn features(self) -> Features {
        match self {
            Self::Never => Features::NONE,
            Self::FailHeld => Features::USER_RECOVERY,
            Self::Reissue => Features::USER_RECOVERY | Features::USER_RECOVERY_REISSUE,
            Self::FailAll => Features::USER_RECOVERY | Features::USER_RECOVERY_FAIL_IO,
        }
    }
}

/// The structure of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceSpec {
    /// Id, the N of `/dev/ublkbN`; `None` takes the lowest free one.
    pub id: Option<u32>,
    /// Hardware queues. The driver cuts this to the number of possible CPUs: read the answer.
    pub queues: u16,
    /// Tags of each queue: 1 to 4096.
    pub depth: u16,
    /// Size of each tag's buffer: whole pages, up to 32 MiB. The driver rounds down to pages.
    pub max_io_bytes: u32,
    /// The fate of requests when the server dies.
    pub recovery: Recovery,
    /// Features to use where the kernel has them.
    pub want: Features,
    /// Features that the device needs.
    pub need: Features,
    /// The token by which its server recognises the device.
    pub token: Option<DeviceToken>,
}

impl DeviceSpec {
    /// Any id, reissue on recovery, and the features a live upgrade and a resize use where they
    /// exist.
    #[must_use]
    pub fn new(queues: u16, depth: u16, max_io_bytes: u32) -> Self {
        Self {
            id: None,
            queues,
            depth,
            max_io_bytes,
            recovery: Recovery::default(),
            want: Features::QUIESCE | Features::UPDATE_SIZE,
            need: Features::NONE,
            token: None,
        }
    }

    /// The kernel's form, checked, for a kernel with `offered`.
    ///
    /// # Errors
    /// A field outside its rule.
    pub(super) fn to_abi(self, offered: Features, pid: i32) -> Result<abi::DevInfo> {
        check(
            (1..=abi::MAX_QUEUES).contains(&self.queues),
            "queues",
            self.queues.into(),
            "must be 1 to 4096",
        )?;
        check(
            (1..=abi::MAX_QUEUE_DEPTH).contains(&self.depth),
            "depth",
            self.depth.into(),
            "must be 1 to 4096",
        )?;
        check(
            self.max_io_bytes.is_multiple_of(4096)
                && (4096..=abi::MAX_IO_BYTES).contains(&self.max_io_bytes),
            "max_io_bytes",
            self.max_io_bytes.into(),
            "must be whole pages, from 4096 to 33554432",
        )?;
        if let Some(id) = self.id {
            check(id < abi::MAX_DEVICE_ID, "id", id.into(), "must be below 1048576")?;
        }
        let mut flags = self.need | (self.want & offered) | self.recovery.features();
        if self.recovery == Recovery::Never {
            flags = flags.without(Features::QUIESCE); // The driver refuses it without recovery.
        }
        Ok(abi::DevInfo {
            nr_hw_queues: self.queues,
            queue_depth: self.depth,
            max_io_buf_bytes: self.max_io_bytes,
            dev_id: self.id.unwrap_or(abi::ANY_DEVICE),
            ublksrv_pid: pid,
            flags: (flags | Features::CMD_IOCTL_ENCODE).bits(),
            ublksrv_flags: self.token.map_or(0, DeviceToken::word),
            ..abi::DevInfo::default()
        })
    }
}

/// Exponent of a power of two within bounds.
fn shift(name: &'static str, value: u32, min: u32, max: u32) -> Result<u8> {
    check(
        value.is_power_of_two() && value >= min && value <= max,
        name,
        value.into(),
        "must be a power of two, at least the logical block (which is 512 to 4096)",
    )?;
    Ok(narrow(value.trailing_zeros()))
}

fn check(good: bool, name: &'static str, value: u64, rule: &'static str) -> Result<()> {
    if good { Ok(()) } else { Err(UblkError::Invalid { name, value, rule }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> DiskParams {
        DiskParams {
            io_opt: 65_536,
            volatile_cache: true,
            fua: true,
            discard: Some(DiscardParams {
                granularity: 4096,
                max_discard_sectors: 1 << 20,
                max_write_zeroes_sectors: 1 << 10,
            }),
            ..DiskParams::new(1 << 21, 4096, 1 << 20)
        }
    }

    #[test]
    fn parameters_survive_the_kernels_form() {
        let params = disk().to_abi().unwrap();
        assert_eq!(params.len, 152);
        assert_eq!(params.types, 3);
        assert_eq!(params.basic.attrs, 0b1100);
        assert_eq!(params.basic.max_sectors, 2048);
        assert_eq!(params.basic.io_opt_shift, 16);
        assert_eq!(params.discard.max_discard_segments, 1);
        assert_eq!(DiskParams::from_abi(&params), disk());
    }

    #[test]
    fn refusals_name_the_field() {
        let name = |params: DiskParams| match params.to_abi() {
            Err(UblkError::Invalid { name, .. }) => name,
            other => panic!("{other:?}"),
        };
        assert_eq!(name(DiskParams { logical_block: 256, ..disk() }), "logical_block");
        assert_eq!(name(DiskParams { logical_block: 8192, ..disk() }), "logical_block");
        assert_eq!(name(DiskParams { physical_block: 512, ..disk() }), "physical_block");
        assert_eq!(name(DiskParams { io_opt: 0, ..disk() }), "io_opt");
        assert_eq!(name(DiskParams { sectors: 0, ..disk() }), "sectors");
        assert_eq!(name(DiskParams { sectors: 9, ..disk() }), "sectors");
        assert_eq!(name(DiskParams { sectors: u64::MAX, ..disk() }), "sectors");
        assert_eq!(name(DiskParams { max_io_bytes: 6000, ..disk() }), "max_io_bytes");
        let discard = DiscardParams { granularity: 0, ..disk().discard.unwrap() };
        assert_eq!(name(DiskParams { discard: Some(discard), ..disk() }), "discard.granularity");
    }

    #[test]
    fn garbage_from_the_kernel_is_no_panic() {
        let mut params = abi::Params::default();
        params.basic.logical_bs_shift = 255;
        params.basic.max_sectors = u32::MAX;
        assert_eq!(DiskParams::from_abi(&params).logical_block, 0);
    }

    #[test]
    fn features_follow_recovery_and_offer() {
        let spec = DeviceSpec::new(2, 64, 1 << 20);
        let info = spec.to_abi(Features::OF_6_4, 7).unwrap();
        assert_eq!(info.flags, 0b101_1000);
        assert_eq!((info.dev_id, info.ublksrv_pid), (u32::MAX, 7));
        let info = spec.to_abi(Features::from_bits(u64::MAX), 7).unwrap();
        assert_eq!(info.flags, 0x1458);
        assert_eq!(info.ublksrv_flags, 0);
        let token = DeviceToken::new(5);
        let marked = DeviceSpec { token: Some(token), ..spec };
        let info = marked.to_abi(Features::NONE, 7).unwrap();
        assert_eq!(info.ublksrv_flags, token.word());
        let never = DeviceSpec { recovery: Recovery::Never, ..spec };
        assert_eq!(never.to_abi(Features::from_bits(u64::MAX), 7).unwrap().flags, 0x440);
        assert!(DeviceSpec { depth: 4097, ..spec }.to_abi(Features::NONE, 1).is_err());
        assert!(DeviceSpec { queues: 0, ..spec }.to_abi(Features::NONE, 1).is_err());
        assert!(DeviceSpec { max_io_bytes: 5000, ..spec }.to_abi(Features::NONE, 1).is_err());
        assert!(DeviceSpec { id: Some(1 << 20), ..spec }.to_abi(Features::NONE, 1).is_err());
    }
}
