//! The parts that `rblk-target` and `rblk-initiator` have in common.

pub(crate) mod command_line;
pub(crate) mod daemon;
pub(crate) mod key;
pub mod shell_answers;
pub(crate) mod top;
