//! [`Output`]: the form in which a command answers.

use clap::ValueEnum;

/// Form of the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Output {
    /// For people.
    Table,
    /// For programs: one JSON document.
    Json,
}
