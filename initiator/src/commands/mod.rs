//! `umount` and `doctor`: the commands of `rblk-initiator` that open devices and read notes.
//! `rblk-initiatord` carries them out.

#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod doctor;
pub mod umount;
