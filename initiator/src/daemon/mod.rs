//! What belongs to the process `rblk-initiatord` rather than to its mount: its log, its privileges
//! and the probe of a target.

pub mod log_file;
pub mod mount_journal;
#[allow(unsafe_code)] // capabilities have no safe call
pub mod privileges;
pub mod probe;
