//! Measures rblk; never asserts correctness.
//!
//! | module | what is in it |
//! |---|---|
//! | [`compare`] | fio on rblk and on its peers, round by round |
//! | [`peer`] | each of those systems set up and taken down |
//! | [`fabric`] | what the transports cost by themselves |
//! | [`hw_check`] | what a card that nobody has tried does with what rblk asks of it |
//! | [`cost`] | what one I/O costs: messages, completions, doorbells, copies, instructions |
//! | [`scale`] | how cost grows with the work |
//! | [`report`] | all of it drawn: one HTML file, plots, tables |
//! | [`trend`] | the figures that decide, from run to run |
//! | [`result`] | the data between those who measure and those who tell |
//! | [`folder`] | the directory of a run |
//! | [`place`] | where a run ran |
//! | [`histogram`] | distributions of latencies |
//! | [`keys`] | the keys of both ends |
//! | [`args`] | the command line |

#![forbid(unsafe_code)]

pub mod args;
pub mod child;
pub mod compare;
pub mod cost;
pub mod fabric;
pub mod folder;
pub mod histogram;
pub mod hw_check;
pub mod interrupt;
pub mod keys;
pub mod output;
pub mod peer;
pub mod place;
pub mod report;
pub mod result;
pub mod scale;
pub mod trend;
