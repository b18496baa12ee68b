//! [`DropRequest`]: the in-capsule data of DROP: the epochs that end.

use std::fmt;

use crate::identifiers::Epoch;
use crate::limits::WAYS_MAX;
use crate::width::wide;

/// Epochs of one request.
const EPOCHS_MAX: usize = WAYS_MAX as usize;

/// In-capsule data of DROP: one epoch to as many as a session has ways, in rising order. On the
/// wire the rest is zero, so a set of epochs has one form.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DropRequest {
    // Behind `count` all are 0.
    epochs: [Epoch; EPOCHS_MAX],
    count: u8,
}

impl DropRequest {
    /// Length on the wire.
    pub const BYTES: usize = 4 * EPOCHS_MAX;

    /// A request for these epochs, in any order. `None` without an epoch, with too many, with the
    /// number 0, which is no epoch, or with the last number: no LOGIN could follow.
    #[must_use]
    pub fn new(epochs: &[Epoch]) -> Option<Self> {
        let mut all = epochs.to_vec();
        all.sort_unstable();
        all.dedup();
        let count = u8::try_from(all.len()).ok().filter(|count| wide(*count) <= EPOCHS_MAX)?;
        let (first, last) = (all.first()?, all.last()?);
        if *first == Epoch(0) || last.next().is_none() {
            return None;
        }
        let mut request = Self { epochs: [Epoch(0); EPOCHS_MAX], count };
        request.epochs[..all.len()].copy_from_slice(&all);
        Some(request)
    }

    /// The epochs, in rising order; at least one.
    #[must_use]
    pub fn epochs(&self) -> &[Epoch] {
        &self.epochs[..usize::from(self.count)]
    }

    /// The highest of them.
    #[must_use]
    pub fn highest(&self) -> Epoch {
        self.epochs().last().copied().unwrap_or_default()
    }

    /// The bytes.
    #[must_use]
    pub fn to_wire(&self) -> [u8; Self::BYTES] {
        let mut wire = [0; Self::BYTES];
        for (bytes, epoch) in wire.chunks_exact_mut(4).zip(self.epochs()) {
            bytes.copy_from_slice(&epoch.0.to_le_bytes());
        }
        wire
    }

    /// Parses.
    ///
    /// # Errors
    /// The rule that is broken.
    pub fn from_wire(bytes: &[u8]) -> Result<Self, &'static str> {
        let wire: &[u8; Self::BYTES] = bytes.try_into().map_err(|_| "body of a wrong length")?;
        let mut request = Self { epochs: [Epoch(0); EPOCHS_MAX], count: 0 };
        let mut is_over = false;
        for (place, bytes) in request.epochs.iter_mut().zip(wire.chunks_exact(4)) {
            let epoch = Epoch(bytes.try_into().map_or(0, u32::from_le_bytes));
            is_over |= epoch == Epoch(0);
            if is_over && epoch != Epoch(0) {
                return Err("an epoch behind the last");
            }
            *place = epoch;
            request.count += u8::from(!is_over);
        }
        let epochs = request.epochs();
        if epochs.is_empty() {
            return Err("a DROP of nothing");
        }
        if !epochs.is_sorted_by(|one, next| one < next) {
            return Err("epochs that do not rise");
        }
        if request.highest().next().is_none() {
            return Err("the last epoch");
        }
        Ok(request)
    }
}

impl fmt::Debug for DropRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DropRequest").field(&self.epochs()).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn golden_bytes() {
        let request = DropRequest::new(&[Epoch(0x0304), Epoch(2), Epoch(0x0304)]).unwrap();
        assert_eq!(request.epochs(), [Epoch(2), Epoch(0x0304)]);
        assert_eq!(request.highest(), Epoch(0x0304));
        let mut golden = vec![2, 0, 0, 0, 4, 3, 0, 0];
        golden.extend([0; 24]);
        assert_eq!(request.to_wire().as_slice(), golden);
        assert_eq!(DropRequest::from_wire(&golden), Ok(request));
        golden[0] = 0;
        assert_eq!(DropRequest::from_wire(&golden), Err("an epoch behind the last"));
        golden[..8].copy_from_slice(&[4, 0, 0, 0, 4, 0, 0, 0]);
        assert_eq!(DropRequest::from_wire(&golden), Err("epochs that do not rise"));
        golden[4..8].copy_from_slice(&[0xff; 4]);
        assert_eq!(DropRequest::from_wire(&golden), Err("the last epoch"));
        assert_eq!(DropRequest::from_wire(&[0; 32]), Err("a DROP of nothing"));
        assert!(DropRequest::from_wire(&golden[..28]).is_err());
    }

    #[test]
    fn bounds() {
        assert_eq!(DropRequest::new(&[]), None);
        assert_eq!(DropRequest::new(&[Epoch(0), Epoch(1)]), None);
        assert_eq!(DropRequest::new(&[Epoch(u32::MAX)]), None);
        let nine: Vec<Epoch> = (1..=9).map(Epoch).collect();
        assert_eq!(DropRequest::new(&nine), None);
        let eight = DropRequest::new(&nine[..8]).unwrap();
        assert_eq!(DropRequest::from_wire(&eight.to_wire()), Ok(eight));
    }

    proptest! {
        /// A set of epochs has one form, and only sets are accepted.
        #[test]
        fn a_set_and_its_bytes(epochs in proptest::collection::vec(0u32..12, 0..10)) {
            let epochs: Vec<Epoch> = epochs.into_iter().map(Epoch).collect();
            let set: std::collections::BTreeSet<Epoch> = epochs.iter().copied().collect();
            let may = (1..=8).contains(&set.len()) && !set.contains(&Epoch(0));
            let request = DropRequest::new(&epochs);
            prop_assert_eq!(request.is_some(), may);
            if let Some(request) = request {
                prop_assert!(request.epochs().iter().eq(&set));
                prop_assert_eq!(DropRequest::from_wire(&request.to_wire()), Ok(request));
            }
        }

        #[test]
        fn any_bytes_are_survived(
            bytes in proptest::collection::vec(prop_oneof![4 => Just(0u8), 1 => any::<u8>()], 28..36),
        ) {
            if let Ok(request) = DropRequest::from_wire(&bytes) {
                prop_assert_eq!(request.to_wire().to_vec(), bytes);
                prop_assert_eq!(DropRequest::new(request.epochs()), Some(request));
            }
        }
    }
}
