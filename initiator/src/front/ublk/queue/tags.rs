//! [`Tags`]: the holder of each tag of a queue. Pure.
//!
//! A tag is with the kernel (a fetch is queued or pending), with the caller (a request was
//! delivered and is not completed), or lost (never fetched, aborted, or refused by the driver).

/// The holder of a tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TagHolder {
    /// The driver takes no command for the tag.
    Lost,
    Kernel,
    Caller(TagRequest),
}

/// The properties of a tag's request that its result depends on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct TagRequest {
    /// Bytes of data; 0 for a request without data.
    pub(super) data_len: u32,
    /// The request moves data.
    pub(super) has_data: bool,
}

/// The tags of a queue. Invariant: `with_kernel` and `with_caller` count the holders.
#[derive(Debug)]
pub(super) struct Tags {
    holders: Box<[TagHolder]>,
    with_kernel: u16,
    with_caller: u16,
}

impl Tags {
    /// A table of `depth` tags, none of them fetched.
    pub(super) fn new(depth: u16) -> Self {
        let holders = vec![TagHolder::Lost; usize::from(depth)].into_boxed_slice();
        Self { holders, with_kernel: 0, with_caller: 0 }
    }

    /// Tags with the caller.
    pub(super) fn with_caller(&self) -> u16 {
        self.with_caller
    }

    /// Gives every tag to the kernel. Returns false, and changes nothing, if one is in use.
    pub(super) fn fetch_all(&mut self, depth: u16) -> bool {
        if self.with_kernel + self.with_caller > 0 {
            return false;
        }
        self.holders.fill(TagHolder::Kernel);
        self.with_kernel = depth;
        true
    }

    /// Whether the kernel has a tag: only then may a completion bring a request for it.
    #[inline]
    pub(super) fn is_with_kernel(&self, tag: u16) -> bool {
        self.holders.get(usize::from(tag)) == Some(&TagHolder::Kernel)
    }

    /// The kernel delivered a request: the tag, which was the kernel's, is the caller's.
    #[inline]
    pub(super) fn deliver(&mut self, tag: u16, asked: TagRequest) {
        debug_assert!(self.is_with_kernel(tag), "tag {tag} was delivered without a fetch");
        self.holders[usize::from(tag)] = TagHolder::Caller(asked);
        self.with_kernel -= 1;
        self.with_caller += 1;
    }

    /// Gives a tag of the caller back to the kernel. Returns `None`, and changes nothing, if the
    /// caller does not have it.
    #[inline]
    pub(super) fn give_back(&mut self, tag: u16) -> Option<TagRequest> {
        let holder = self.holders.get_mut(usize::from(tag))?;
        let TagHolder::Caller(asked) = *holder else { return None };
        *holder = TagHolder::Kernel;
        self.with_caller -= 1;
        self.with_kernel += 1;
        Some(asked)
    }

    /// The driver ended the fetch of a tag that was the kernel's.
    pub(super) fn lose(&mut self, tag: u16) {
        debug_assert!(self.is_with_kernel(tag), "tag {tag} was lost without a fetch");
        self.holders[usize::from(tag)] = TagHolder::Lost;
        self.with_kernel -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_has_one_holder() {
        let read = TagRequest { data_len: 4096, has_data: true };
        let mut tags = Tags::new(2);
        assert!(!tags.is_with_kernel(0), "not fetched");
        assert!(tags.fetch_all(2));
        assert!(!tags.fetch_all(2), "once");
        assert_eq!(tags.give_back(0), None, "the kernel has it");
        tags.deliver(0, read);
        assert_eq!((tags.with_kernel, tags.with_caller), (1, 1));
        assert!(!tags.is_with_kernel(0));
        assert_eq!(tags.give_back(0), Some(read));
        assert_eq!(tags.give_back(0), None, "answered twice");
        tags.lose(1);
        assert_eq!((tags.with_kernel, tags.with_caller), (1, 0));
        assert!(!tags.is_with_kernel(1));
        assert_eq!(tags.give_back(2), None, "out of bounds");
        assert!(!tags.is_with_kernel(2));
    }
}
