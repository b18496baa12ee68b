//! The report of a run: a text for a terminal, and one page for a browser.
//!
//! The page is `page.html` with the run in it: no network, no other file. Its script draws the
//! run; the verdicts on the goals and the notes are in it beside the run.

mod goals;
mod text;

use anyhow::{Context, Result};
use serde_json::json;

pub(crate) use self::text::text;
use crate::folder::{self, RunFolder};
use crate::result::{Run, system};

pub(crate) const FILE: &str = "report.html";
/// The name of the file with the remarks of a person: one on each line. `3: ...` is on goal 3.
const NOTES: &str = "notes.txt";

const PAGE: &str = include_str!("page.html");
/// Stands in the page for the run.
const PLACE: &str = "\"RUN\"";

pub(crate) fn draw(run: &Run, folder: &RunFolder) -> Result<()> {
    let notes = std::fs::read_to_string(folder.path().join(NOTES)).unwrap_or_default();
    folder.write(FILE, page(run, &notes)?.as_bytes())
}

fn page(run: &Run, notes: &str) -> Result<String> {
    let data = json!({
        "run": run,
        "titles": run.cells.iter().map(|cell| (&cell.key, cell.title())).collect::<Vec<_>>(),
        "order": system::all().collect::<Vec<_>>(),
        "goals": goals::GOALS,
        "verdicts": goals::verdicts(run),
        "began": folder::utc(run.began_unix),
        "notes": notes.lines().filter(|line| !line.trim().is_empty()).collect::<Vec<_>>(),
    });
    // A script ends at the first `</`, also within a string.
    let data = serde_json::to_string(&data)?.replace("</", "<\\/");
    let (before, after) = PAGE.split_once(PLACE).context("the page has no place for a run")?;
    Ok(format!("{before}{data}{after}"))
}

#[cfg(test)]
mod tests;
