//! [`Opcode`]: the operation of a command.

/// Operation of a command.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Opcode {
    /// Data from the volume into the descriptor's buffer, by RDMA WRITE.
    Read = 0x01,
    /// Data into the volume: from the capsule, or from the descriptor's buffer by RDMA READ.
    Write = 0x02,
    /// Everything acknowledged on any queue of the session is durable when this is answered.
    Flush = 0x03,
    /// The content of the range is no longer needed. It reads as zeros or as before.
    Discard = 0x04,
    /// The range reads as zeros when this is answered.
    WriteZeroes = 0x05,
    /// First command on an I/O queue. The target answers with the optional verbs that were agreed,
    /// so that a device with a false claim is found before it carries data.
    SelfTest = 0x10,
    /// Opens or resumes a session. In: [`crate::LoginRequest`]. Out: [`crate::LoginReply`].
    Login = 0x20,
    /// Lists volumes from index `lba` on. Out: [`crate::VolumeListHeader`] and entries.
    ListVolumes = 0x21,
    /// Opens a volume. In: [`crate::OpenRequest`]. Out: [`crate::OpenReply`].
    OpenVolume = 0x22,
    /// Closes a volume.
    CloseVolume = 0x23,
    /// Shows that the data threads of the target are alive.
    KeepAlive = 0x24,
    /// The target answers it when it has something to tell ([`crate::AsyncEvent`]).
    AsyncEvent = 0x25,
    /// Ends the session.
    Logout = 0x26,
    /// First command on an admin connection whose ends prove their keys. In and out: the first two
    /// messages of the handshake ([`crate::auth`]).
    Authenticate = 0x27,
    /// Ends epochs of the session. In: [`crate::DropRequest`]. The target answers it when no
    /// connection of these epochs is left: nothing that was sent by them has an effect any more.
    /// Only where [`crate::Features::WAYS`] was agreed.
    Drop = 0x28,
}

impl Opcode {
    /// All of them, for tests and tables.
    pub const ALL: [Self; 15] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Discard,
        Self::WriteZeroes,
        Self::SelfTest,
        Self::Login,
        Self::ListVolumes,
        Self::OpenVolume,
        Self::CloseVolume,
        Self::KeepAlive,
        Self::AsyncEvent,
        Self::Logout,
        Self::Authenticate,
        Self::Drop,
    ];

    /// From the wire.
    #[must_use]
    #[inline]
    pub fn from_wire(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|opcode| *opcode as u8 == byte)
    }

    /// Whether it is an operation on blocks of a volume.
    #[must_use]
    #[inline]
    pub fn is_block(self) -> bool {
        self as u8 <= Self::WriteZeroes as u8
    }

    /// Whether it belongs on the admin connection.
    #[must_use]
    #[inline]
    pub fn is_admin(self) -> bool {
        self as u8 >= Self::Login as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wire_bytes_are_frozen() {
        let bytes: Vec<u8> = Opcode::ALL.iter().map(|o| *o as u8).collect();
        assert_eq!(bytes[..6], [1, 2, 3, 4, 5, 0x10]);
        assert_eq!(bytes[6..], [0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28]);
        let known = (0..=255u8).filter_map(Opcode::from_wire).count();
        let blocks = Opcode::ALL.into_iter().filter(|o| o.is_block());
        assert!(blocks.eq([
            Opcode::Read,
            Opcode::Write,
            Opcode::Flush,
            Opcode::Discard,
            Opcode::WriteZeroes
        ]));
        assert_eq!(known, Opcode::ALL.len());
    }
}
