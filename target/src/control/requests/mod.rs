//! What people and programs ask of a target by its control socket, and how it is carried out.

pub mod control_socket;
pub(crate) mod departure;
pub(in crate::control) mod file_work;
pub(crate) mod orders;
pub(super) mod predecessor;
pub(crate) mod reconfigure;
pub(super) mod remembered;
pub(crate) mod reread;
pub(super) mod snapshot;
pub(super) mod trace_stream;
