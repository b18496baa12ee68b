//! The commands of `rblk-target` that reach stores: `check`, `doctor` and `group`. `rblk-targetd`
//! carries them out.

#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod check;
pub mod doctor;
pub mod group_status;
pub mod review;
