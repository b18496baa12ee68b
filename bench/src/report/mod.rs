//! A run told to people: tables for a terminal, drawings, and one HTML file that holds all of it.
//!
//! | module | what is in it |
//! |---|---|
//! | [`goals`] | what the run says of each goal |
//! | [`table`] | the run as text |
//! | [`chart`], [`axis`], [`svg`] | plots: what is shown, where, and with what |
//! | [`html`], [`style`] | pages and their looks |
//! | [`number`] | numbers as people read them |
//! | [`notes`] | what a person adds to a run |
//! | `page` | the order of the report |
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
mod transports;

use anyhow::{Context, Result};

use crate::folder::RunFolder;
use crate::result::Run;
use notes::Notes;

/// Name of the report in a run's folder.
pub const FILE: &str = "report.html";

/// Draws a run: [`FILE`] and one SVG file per plot, with the notes that are in its folder.
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
    let (page, drawings) = page::write(run, &notes);
    for (name, svg) in drawings {
        folder.write(&format!("{}.svg", file_name(&name)), svg.standalone().as_bytes())?;
    }
    folder.write(FILE, page.as_bytes())
}

/// A name that is one file's: names of systems come from the command line.
fn file_name(name: &str) -> String {
    let keep = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' };
    name.chars().map(keep).collect::<String>().trim_start_matches('.').to_owned()
}

#[cfg(test)]
mod tests;
