//! Measures rblk; never asserts correctness.
//!
//! | module | contents |
//! |---|---|
//! | `compare` | fio on rblk and on its peers, round by round |
//! | `peer` | each of those systems set up and taken down |
//! | `hw_check` | a check of a network card, by the verbs that rblk uses |
//! | [`cost`] | the cost of one I/O: messages, completions, doorbells, copies, instructions |
//! | `scale` | many hosts and mounts of one target |
//! | [`result`], [`folder`] | the data of a run, and its directory |
//! | `report` | a run as text, and as one page for a browser |
//! | [`args`], [`output`], `command` | the command line, and its commands |

#![forbid(unsafe_code)]

pub mod args;
mod child;
mod command;
mod compare;
pub mod cost;
pub mod folder;
mod histogram;
mod hw_check;
mod interrupt;
mod keys;
pub mod output;
mod peer;
mod place;
mod report;
pub mod result;
mod scale;
mod sysfs;

pub use self::child::TAG;
pub use self::command::run;
pub use self::peer::undo::DIR as JOURNALS;
