//! Where volumes come from: the files and devices of a configuration, and clones of files.

pub(crate) mod image;
pub mod opening;
pub(crate) mod reflink;
