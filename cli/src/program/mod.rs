//! The parts that `rblk-target` and `rblk-initiator` have in common.

pub(crate) mod command_line;
pub mod completion;
pub(crate) mod daemon;
pub(crate) mod key;
pub(crate) mod top;
