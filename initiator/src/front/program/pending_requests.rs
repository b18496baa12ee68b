//! [`PendingRequests`]: the requests of a queue that are under way, by tag. Pure.

use rblk_protocol::width::narrow;
use rblk_protocol::{QueueDepth, Tag};

use super::{Buffer, Completion};

#[derive(Debug)]
struct PendingRequest {
    token: u64,
    buffer: Option<Buffer>,
}

/// The requests of a queue that are under way. Their buffers are here, out of reach of the program.
#[derive(Debug)]
pub(super) struct PendingRequests {
    by_tag: Box<[Option<PendingRequest>]>,
    // The tag freed last is used first: its cache lines are warm.
    free: Vec<Tag>,
}

impl PendingRequests {
    /// No request is under way.
    pub(super) fn new(depth: QueueDepth) -> Self {
        let depth = usize::from(depth.get());
        let free = (0..depth).rev().map(|tag| Tag(narrow(tag))).collect();
        Self { by_tag: (0..depth).map(|_| None).collect(), free }
    }

    /// The depth of the queue.
    pub(super) fn depth(&self) -> usize {
        self.by_tag.len()
    }

    /// Requests that are under way.
    pub(super) fn len(&self) -> usize {
        self.by_tag.len() - self.free.len()
    }

    /// The tag for the next request, if there is one.
    #[inline]
    pub(super) fn next(&self) -> Option<Tag> {
        self.free.last().copied()
    }

    /// Records a request under the [next](Self::next) tag.
    #[inline]
    pub(super) fn put(&mut self, token: u64, buffer: Option<Buffer>) {
        let Some(tag) = self.free.pop() else {
            debug_assert!(false, "a request without a tag");
            return;
        };
        self.by_tag[tag.index()] = Some(PendingRequest { token, buffer });
    }

    /// Ends a request. `None` if there is none with that tag.
    #[inline]
    pub(super) fn take(&mut self, tag: Tag, result: i32) -> Option<Completion> {
        let PendingRequest { token, buffer } = self.by_tag.get_mut(tag.index())?.take()?;
        self.free.push(tag);
        Some(Completion::of(token, buffer, result))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tag_is_used_once_at_a_time() {
        let mut pending = PendingRequests::new(QueueDepth::new(2).unwrap());
        assert_eq!((pending.depth(), pending.len(), pending.next()), (2, 0, Some(Tag(0))));
        pending.put(10, None);
        assert_eq!(pending.next(), Some(Tag(1)));
        pending.put(11, None);
        assert_eq!((pending.len(), pending.next()), (2, None));
        let done = pending.take(Tag(0), -5).unwrap();
        assert_eq!((done.token, done.result.unwrap_err().errno()), (10, 5));
        assert!(pending.take(Tag(0), 0).is_none(), "answered once");
        assert!(pending.take(Tag(2), 0).is_none(), "no such tag");
        assert_eq!(pending.next(), Some(Tag(0)));
        let done = pending.take(Tag(1), 4096).unwrap();
        assert_eq!((done.token, done.result), (11, Ok(4096)));
        assert_eq!(pending.len(), 0);
    }
}
