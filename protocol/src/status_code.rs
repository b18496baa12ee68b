//! Outcome of a command, and its errno.

/// Status carried in a response. 0 is success.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// Opcode unknown, or not for this kind of connection.
    InvalidOpcode = 1,
    /// A field has a value the command does not allow.
    InvalidField = 2,
    /// The range is not inside the volume.
    OutOfRange = 3,
    /// The data is larger than negotiated, or does not match the range.
    BadLength = 4,
    /// The volume is read-only, or was opened so.
    ReadOnly = 5,
    /// No volume of that name or handle.
    NoSuchVolume = 6,
    /// Another initiator holds the volume.
    InUse = 7,
    /// A newer epoch or holder has taken over.
    Fenced = 8,
    /// The session or its epoch is unknown to this target.
    NoSuchSession = 9,
    /// The store failed (EIO).
    StoreError = 10,
    /// The store is full.
    NoSpace = 11,
    /// The store or volume cannot do that.
    NotSupported = 12,
    /// Data did not match its digest.
    DigestMismatch = 13,
    /// RDMA READ or WRITE of the data failed.
    TransferFailed = 14,
    /// The target is stopping. Connect again later.
    ShuttingDown = 15,
    /// A limit of the target is reached (sessions, queues, memory).
    LimitReached = 16,
    /// The command waited too long in the target. It had no effect.
    TimedOut = 17,
    /// The backing store of the volume is gone.
    VolumeGone = 18,
    /// The command came out of order: before LOGIN, OPEN or SELF_TEST.
    NotReady = 19,
    /// The target has a bug.
    Internal = 20,
    /// The host may not do that: its key is in no entry of the target, or its entry does not allow
    /// it.
    NotAllowed = 21,
}

impl Status {
    /// All of them, in order of their numbers.
    pub const ALL: [Self; 22] = [
        Self::Ok,
        Self::InvalidOpcode,
        Self::InvalidField,
        Self::OutOfRange,
        Self::BadLength,
        Self::ReadOnly,
        Self::NoSuchVolume,
        Self::InUse,
        Self::Fenced,
        Self::NoSuchSession,
        Self::StoreError,
        Self::NoSpace,
        Self::NotSupported,
        Self::DigestMismatch,
        Self::TransferFailed,
        Self::ShuttingDown,
        Self::LimitReached,
        Self::TimedOut,
        Self::VolumeGone,
        Self::NotReady,
        Self::Internal,
        Self::NotAllowed,
    ];

    /// From the wire. `None` for a number that this version does not know. Treat it as an I/O
    /// error.
    #[must_use]
    pub fn from_wire(number: u16) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The errno that an application gets, positive; 0 for success. The numbers are those of Linux
    /// (errno(3)).
    #[must_use]
    pub fn errno(self) -> i32 {
        const EIO: i32 = 5;
        const EACCES: i32 = 13;
        const EBUSY: i32 = 16;
        const ENODEV: i32 = 19;
        const EINVAL: i32 = 22;
        const ENOSPC: i32 = 28;
        const EROFS: i32 = 30;
        const EBADE: i32 = 52;
        const EOPNOTSUPP: i32 = 95;
        const ESHUTDOWN: i32 = 108;
        const ETIMEDOUT: i32 = 110;
        const ESTALE: i32 = 116;
        match self {
            Self::Ok => 0,
            Self::InvalidOpcode | Self::NotSupported => EOPNOTSUPP,
            Self::InvalidField | Self::OutOfRange | Self::BadLength => EINVAL,
            Self::ReadOnly => EROFS,
            Self::NoSuchVolume | Self::VolumeGone => ENODEV,
            Self::InUse | Self::LimitReached => EBUSY,
            // ext4 and other file systems become read-only on EBADE as on EIO. The text in the log
            // differs.
            Self::Fenced => EBADE,
            Self::NoSuchSession => ESTALE,
            Self::StoreError
            | Self::DigestMismatch
            | Self::TransferFailed
            | Self::NotReady
            | Self::Internal => EIO,
            Self::NoSpace => ENOSPC,
            Self::ShuttingDown => ESHUTDOWN,
            Self::TimedOut => ETIMEDOUT,
            Self::NotAllowed => EACCES,
        }
    }

    /// The status for an errno of a store.
    #[must_use]
    pub fn from_store_errno(errno: i32) -> Self {
        match errno {
            28 | 122 => Self::NoSpace,
            95 => Self::NotSupported,
            30 => Self::ReadOnly,
            6 | 19 => Self::VolumeGone,
            _ => Self::StoreError,
        }
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok",
            Self::InvalidOpcode => "unknown operation",
            Self::InvalidField => "a field has a bad value",
            Self::OutOfRange => "range outside the volume",
            Self::BadLength => "length does not match",
            Self::ReadOnly => "volume is read-only",
            Self::NoSuchVolume => "no such volume",
            Self::InUse => "volume is in use by another initiator",
            Self::Fenced => "fenced: another initiator took over",
            Self::NoSuchSession => "session unknown to the target",
            Self::StoreError => "I/O error of the backing store",
            Self::NoSpace => "backing store is full",
            Self::NotSupported => "not supported by the volume",
            Self::DigestMismatch => "data digest mismatch",
            Self::TransferFailed => "RDMA transfer failed",
            Self::ShuttingDown => "target is shutting down",
            Self::LimitReached => "a limit of the target is reached",
            Self::TimedOut => "timed out in the target",
            Self::VolumeGone => "backing store is gone",
            Self::NotReady => "command out of order",
            Self::Internal => "internal error of the target",
            Self::NotAllowed => "this host is not allowed to",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_frozen_and_dense() {
        for (number, status) in Status::ALL.into_iter().enumerate() {
            assert_eq!(status as usize, number);
            assert_eq!(Status::from_wire(u16::try_from(number).unwrap()), Some(status));
            assert_eq!(status.errno() == 0, status == Status::Ok);
        }
        assert_eq!(Status::from_wire(22), None);
        assert_eq!(Status::from_wire(u16::MAX), None);
    }

    #[test]
    fn errnos_are_literal() {
        assert_eq!(Status::OutOfRange.errno(), 22);
        assert_eq!(Status::StoreError.errno(), 5);
        assert_eq!(Status::NoSpace.errno(), 28);
        assert_eq!(Status::ReadOnly.errno(), 30);
        assert_eq!(Status::NotAllowed.errno(), 13);
        assert_eq!(Status::from_store_errno(28), Status::NoSpace);
        assert_eq!(Status::from_store_errno(5), Status::StoreError);
        assert_eq!(Status::from_store_errno(-1), Status::StoreError);
    }
}
