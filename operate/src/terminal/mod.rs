//! The answers of commands: text for people, and JSON documents.

pub(crate) mod exit_of;
pub mod figures;
pub(crate) mod output;
pub(crate) mod said_once;
pub mod screen;
pub mod table;
