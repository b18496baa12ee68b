//! [`GroupMember`]: a target in a group, as it claims an image.

use std::sync::{Arc, Mutex, PoisonError};

use super::image_claim::Wish;

/// The wishes of hosts that come while a claim is under way. Copies are of one list.
#[derive(Clone, Debug, Default)]
pub(crate) struct MoreWishes(Arc<Mutex<Vec<Wish>>>);

impl MoreWishes {
    /// Another host asks for the volume.
    pub(crate) fn push(&self, wish: Wish) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(wish);
    }

    /// Those since the last call.
    pub(super) fn take(&self) -> Vec<Wish> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl PartialEq for MoreWishes {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for MoreWishes {}

/// See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct GroupMember {
    /// Its name in the group.
    pub name: String,
    /// The addresses that it listens on.
    pub addresses: Vec<String>,
    /// Why it claims an image.
    pub wish: Wish,
    /// Whether it may fence an owner that does not answer.
    pub may_break: bool,
    /// Wishes that may be added while it claims the image.
    pub more: MoreWishes,
}
