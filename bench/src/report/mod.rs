//! A run for people: tables for a terminal, and one HTML file with all tables and drawings.
//!
//! | module | what is in it |
//! |---|---|
//! | [`goals`] | what the run says of each goal |
//! | [`table`] | the run as text |
//! | [`mod@chart`], [`axis`], [`svg`] | plots: what is shown, where, and with what |
//! | [`html`], [`style`] | pages and their looks |
//! | [`number`] | numbers as people read them |
//! | [`notes`] | what a person adds to a run |
//! | `page`, `whole` | a report that is being written; the order of its sections |
//! | `compared`, `latency`, `profiles`, `transports`, `costs`, `growth` | its sections |
//!
//! A report is drawn from the [`Run`] alone, so it can be drawn again, and of a run that has only
//! parts: what was not measured is said or left out, never drawn as nothing. The page needs no
//! network and no scripts.

pub mod axis;
pub mod chart;
mod compared;
mod costs;
pub mod goals;
mod growth;
pub mod html;
mod latency;
pub mod notes;
pub mod number;
mod page;
mod profiles;
pub mod style;
pub mod svg;
pub mod table;
mod text_width;
mod transports;
mod whole;

use anyhow::{Context, Result};

use crate::folder::RunFolder;
use crate::result::Run;
use notes::Notes;

/// Name of the report in a run's folder.
pub const FILE: &str = "report.html";

/// Draws a run as [`FILE`], with the notes that are in its folder.
///
/// # Errors
/// A file cannot be read or written.
pub fn draw(run: &Run, folder: &RunFolder) -> Result<()> {
    let file = folder.path().join(notes::FILE);
    let notes = match std::fs::read_to_string(&file) {
        Ok(text) => Notes::parse(&text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Notes::default(),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", file.display())),
    };
    folder.write(FILE, whole::write(run, &notes).as_bytes())
}

/// The chart of a run of `compare --engine direct`, as an SVG file.
///
/// # Errors
/// The run has no such chart.
pub fn chart(run: &Run) -> Result<String> {
    let chart = compared::against_best(run);
    let chart = chart.context("the run has nothing of `compare --engine direct`")?;
    Ok(chart.file(&style::drawing()))
}

#[cfg(test)]
mod tests;
