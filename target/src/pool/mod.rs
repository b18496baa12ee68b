//! Where volumes come from: the files and devices of a configuration, and clones of files.

pub mod exports;
pub(crate) mod image;
pub(crate) mod reflink;
