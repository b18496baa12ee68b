//! The rules of keys, and how files become values.

pub(crate) mod document;
pub(crate) mod faults;
pub(crate) mod flag_layer;
pub(crate) mod key_table;
pub(crate) mod nearest;
pub(crate) mod rule;
pub(crate) mod text_rules;
pub(crate) mod word;
