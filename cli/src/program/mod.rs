//! The parts that `rblk-target` and `rblk-initiator` have in common.

pub(crate) mod daemon;
pub(crate) mod key;
pub(crate) mod pipes;
pub(crate) mod top;
