//! The rules of keys, and how files become values.

pub(crate) mod document;
pub(crate) mod faults;
pub(crate) mod rule;
pub(crate) mod word;
