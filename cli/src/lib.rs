//! The commands of both ends: `rblk-target` and `rblk-initiator`. This crate links no RDMA library.
//! `rblk-targetd` and `rblk-initiatord` open stores, devices and connections: a command that needs
//! one becomes its daemon by exec, or asks it.
//!
//! | room | holds |
//! | --- | --- |
//! | [`target`] | the commands of `rblk-target` |
//! | [`initiator`] | the commands of `rblk-initiator` |
//! | [`program`] | the parts that both programs have: become a daemon, `key`, `top` |
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![forbid(unsafe_code)]

pub mod initiator;
pub mod program;
pub mod target;
