//! The rules of keys, and how files become values.

pub(crate) mod document;
pub(crate) mod judge;
pub(crate) mod rule;
pub(crate) mod word;
