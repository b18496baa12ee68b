//! The commands of `rblk-target` that `rblk-targetd` carries out, because they open stores: `check`
//! and `doctor`.

#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod check;
pub mod doctor;
pub mod review;
