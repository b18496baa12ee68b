//! The daemon `rblk-targetd`: builds a target, serves it, and takes it apart.

mod accept;
mod hang_up;
pub mod http;
pub mod process_signals;
pub mod serve;
