//! [`KeyedDescriptor`]: a buffer of the initiator, named by address, length and rkey.

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

impl KeyedDescriptor {
    /// 16 bytes: address, length, rkey.
    #[must_use]
    pub fn to_wire(self) -> [u8; DESCRIPTOR_BYTES] {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[12..].copy_from_slice(&self.rkey.to_le_bytes());
        bytes
    }

    /// Parses; length 0 means there is none, and then all must be zero.
    ///
    /// # Errors
    /// Which rule is broken.
    pub fn from_wire(bytes: &[u8; DESCRIPTOR_BYTES]) -> Result<Option<Self>, &'static str> {
        let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, k0, k1, k2, k3] = *bytes;
        let address = u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]);
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        let rkey = u32::from_le_bytes([k0, k1, k2, k3]);
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
