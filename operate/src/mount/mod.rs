//! The interface between a mount and the commands of its host: flags, status, orders, the lock and
//! the log of a mount. Plain data, and sentences for people.

pub mod child;
pub mod configured;
pub mod disk_names;
pub mod flags;
pub mod guest_keys;
pub mod image;
pub mod left;
pub mod lock;
pub mod log_file;
pub mod mount_ask;
pub mod mount_status;
pub mod mount_times;
pub mod not_there;
pub mod path_status;
pub mod probe_result;
pub mod queue_counts;
pub mod run_dir;
