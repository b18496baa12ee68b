//! [`GroupMember`]: a target in a group, as it claims an image.

use super::image_claim::Wish;

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
}
