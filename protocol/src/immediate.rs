//! The 32 bits of a WRITE_WITH_IMM response: "the read with this tag is done".

use crate::identifiers::Sequence;
use crate::tag::Tag;

/// Immediate data of a successful READ: the tag, and the low half of the sequence of the command,
/// so that a stale or forged immediate cannot complete another command.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Immediate {
    /// The command that is answered.
    pub tag: Tag,
    /// [`Sequence::check`] of the command.
    pub check: u16,
}

impl Immediate {
    /// For a command.
    #[must_use]
    pub fn new(tag: Tag, sequence: Sequence) -> Self {
        Self { tag, check: sequence.check() }
    }

    /// Whether it answers the command with that sequence.
    #[must_use]
    pub fn answers(self, sequence: Sequence) -> bool {
        self.check == sequence.check()
    }

    /// As 32 bits in host order (the fabric puts them on the wire).
    #[must_use]
    pub fn to_bits(self) -> u32 {
        (u32::from(self.check) << 16) | u32::from(self.tag.0)
    }

    /// From 32 bits. The tag is not checked.
    #[must_use]
    pub fn from_bits(bits: u32) -> Self {
        Self { tag: Tag((bits & 0xffff) as u16), check: (bits >> 16) as u16 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_frozen() {
        let imm = Immediate::new(Tag(0x1234), Sequence(0xdead_beef));
        assert_eq!(imm.to_bits(), 0xbeef_1234);
        assert_eq!(Immediate::from_bits(0xbeef_1234), imm);
        assert!(imm.answers(Sequence(0x0000_beef)));
        assert!(!imm.answers(Sequence(0xdead_bee0)));
    }
}
