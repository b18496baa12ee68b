//! What belongs to the process `rblk-initiatord` rather than to its mount: its log, its privileges,
//! its exit code, the probe of a target, and its answers about dead mounts.

pub mod dead_mounts;
pub mod flag_credentials;
pub mod initiatord_exit;
pub mod mount_journal;
#[allow(unsafe_code)] // capabilities have no safe call
pub mod privileges;
pub mod probe;
