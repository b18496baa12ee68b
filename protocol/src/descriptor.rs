//! [`KeyedDescriptor`]: a buffer of the initiator, named by address, length and rkey.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::limits::DESCRIPTOR_BYTES;

/// Memory of the initiator that the target may reach for one command. The length is never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KeyedDescriptor {
    /// Address in the initiator's MR.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// The initiator's key, as the fabric knows it.
    pub rkey: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireDescriptor {
    address: U64,
    length: U32,
    rkey: U32,
}

const _: () = assert!(size_of::<WireDescriptor>() == DESCRIPTOR_BYTES);

impl KeyedDescriptor {
    /// 16 bytes: address, length, rkey.
    #[must_use]
    pub fn to_wire(self) -> [u8; DESCRIPTOR_BYTES] {
        zerocopy::transmute!(WireDescriptor {
            address: self.address.into(),
            length: self.length.into(),
            rkey: self.rkey.into(),
        })
    }

    /// Parses; length 0 means there is none, and then all must be zero.
    ///
    /// # Errors
    /// Which rule is broken.
    #[inline]
    pub fn from_wire(bytes: &[u8; DESCRIPTOR_BYTES]) -> Result<Option<Self>, &'static str> {
        let wire: WireDescriptor = zerocopy::transmute!(*bytes);
        let (address, length, rkey) = (wire.address.get(), wire.length.get(), wire.rkey.get());
        if length == 0 {
            return if address == 0 && rkey == 0 {
                Ok(None)
            } else {
                Err("descriptor of length 0")
            };
        }
        if address.checked_add(u64::from(length)).is_none() {
            return Err("descriptor wraps around");
        }
        Ok(Some(Self { address, length, rkey }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden() {
        let d = KeyedDescriptor {
            address: 0x1122_3344_5566_7788,
            length: 0x99aa_bbcc,
            rkey: 0xddee_ff01,
        };
        let wire = [
            0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0xcc, 0xbb, 0xaa, 0x99, 0x01, 0xff,
            0xee, 0xdd,
        ];
        assert_eq!(d.to_wire(), wire);
        assert_eq!(KeyedDescriptor::from_wire(&wire), Ok(Some(d)));
    }

    #[test]
    fn refuses() {
        assert_eq!(KeyedDescriptor::from_wire(&[0; 16]), Ok(None));
        let stray = KeyedDescriptor { address: 1, length: 0, rkey: 0 };
        assert!(KeyedDescriptor::from_wire(&stray.to_wire()).is_err());
        let wraps = KeyedDescriptor { address: u64::MAX, length: 1, rkey: 0 };
        assert!(KeyedDescriptor::from_wire(&wraps.to_wire()).is_err());
    }
}
