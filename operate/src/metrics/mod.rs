//! Metrics in the formats of other programs.

pub mod exposition;
