//! [`Tag`] and [`QueueDepth`]: the number that names an I/O at both ends.

use crate::limits;

/// Names one command of one queue. The same number is the ublk tag, the tag in the capsule, the
/// index of the buffer and the credit. [`QueueDepth::check`] checks that it is within the depth.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Tag(pub u16);

impl Tag {
    /// As an index.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Commands a queue may have outstanding: 1 to [`limits::QUEUE_DEPTH_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct QueueDepth(u16);

impl QueueDepth {
    /// A depth within the bounds.
    #[must_use]
    pub fn new(depth: u16) -> Option<Self> {
        (1..=limits::QUEUE_DEPTH_MAX).contains(&depth).then_some(Self(depth))
    }

    /// The number.
    #[must_use]
    pub fn get(self) -> u16 {
        self.0
    }

    /// A tag from a peer, if it is valid. One tag more than the depth is valid: it belongs to the
    /// connection itself (self-test, keep-alive) and never to a block request.
    #[must_use]
    #[inline]
    pub fn check(self, tag: u16) -> Option<Tag> {
        (tag <= self.0).then_some(Tag(tag))
    }

    /// The tag of the connection itself.
    #[must_use]
    pub fn connection_tag(self) -> Tag {
        Tag(self.0)
    }

    /// How many tags there are, the connection's own included.
    #[must_use]
    pub fn tags(self) -> usize {
        usize::from(self.0) + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_bounds_and_tags() {
        assert_eq!(QueueDepth::new(0), None);
        assert_eq!(QueueDepth::new(1025), None);
        let depth = QueueDepth::new(4).unwrap();
        assert_eq!(depth.check(3), Some(Tag(3)));
        assert_eq!(depth.check(4), Some(depth.connection_tag()));
        assert_eq!(depth.check(5), None);
        assert_eq!(depth.tags(), 5);
    }
}
