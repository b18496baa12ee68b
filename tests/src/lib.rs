//! Code that the tests across crates share.

#![forbid(unsafe_code)]

pub mod bed;
pub mod browser;
pub mod built;
pub mod exerciser;
pub mod group;
pub mod guest;
pub mod guest_disk;
pub mod guide;
pub mod hostile;
pub mod http;
pub mod lab;
pub mod long;
pub mod nobody;
pub mod oracle;
pub mod program;
pub mod raw;
pub mod relay;
pub mod runs;
pub mod several_ways;
pub mod sim;
pub mod storm;
pub mod two_volumes;
