//! The ways of a mount, as one queue has them: which requests of a dead way may go by another, and
//! the way of each request. Pure: no I/O, no clock, and no state that threads share. The design is
//! in docs/internals/ways.md.
//!
//! A way has a *place* in the queue, [`WayIndex`]. The place is empty, has a live path, or is in
//! [limbo](limbo): its path died, and some requests that were under way on it must wait.

pub mod choice;
pub mod limbo;
pub mod way_set;

use rblk_protocol::limits::WAYS_MAX;

/// The number of places.
pub(crate) const PLACES: usize = WAYS_MAX as usize;

/// The place of a way in the queues of its mount, below [`WAYS_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WayIndex(u8);

impl WayIndex {
    /// The way of a mount that uses one at a time.
    pub const FIRST: Self = Self(0);

    /// The place with this number. `None`: a mount has fewer.
    #[must_use]
    pub fn new(place: usize) -> Option<Self> {
        let place = u8::try_from(place).ok()?;
        (u16::from(place) < WAYS_MAX).then_some(Self(place))
    }

    /// Its number.
    #[must_use]
    #[inline]
    pub fn get(self) -> usize {
        usize::from(self.0)
    }
}
