//! [`Table`]: columns for people, in at most [`WIDTH`] columns of a terminal, with every name
//! whole.
//!
//! Columns are as wide as their cells. Where that is too much, the widest columns of
//! [names](Column::name) give way. A name that is wider than its column stands apart: that of the
//! first column on a line before the row, any other behind the row, with the name of its column.

use std::fmt::Write;

/// Columns of a terminal that output for people may take.
pub const WIDTH: usize = 100;
const GAP: usize = 2;
const INDENT: &str = "    ";

/// Where a cell stands in its column.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ColumnKind {
    /// At its left.
    Word,
    /// At its right.
    Figure,
    /// At its left, and it may stand apart.
    Name,
}

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    header: &'static str,
    kind: ColumnKind,
}

impl Column {
    /// Of short words.
    #[must_use]
    pub const fn word(header: &'static str) -> Self {
        Self { header, kind: ColumnKind::Word }
    }

    /// Of figures.
    #[must_use]
    pub const fn figure(header: &'static str) -> Self {
        Self { header, kind: ColumnKind::Figure }
    }

    /// Of names, addresses or other text that may be long.
    #[must_use]
    pub const fn name(header: &'static str) -> Self {
        Self { header, kind: ColumnKind::Name }
    }
}

/// Rows under headers. See the module.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    #[must_use]
    pub fn new(columns: impl IntoIterator<Item = Column>) -> Self {
        Self { columns: columns.into_iter().collect(), rows: Vec::new() }
    }

    /// One more row: a cell for each column. Cells that are missing are empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut row: Vec<String> = cells.into_iter().collect();
        row.resize(self.columns.len(), String::new());
        self.rows.push(row);
    }

    /// Whether there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    // How wide each column is.
    fn widths(&self) -> Vec<usize> {
        let natural = |at: usize, column: &Column| {
            let cells = self.rows.iter().map(|row| length(&row[at]));
            cells.max().unwrap_or(0).max(length(column.header))
        };
        let mut widths: Vec<usize> =
            self.columns.iter().enumerate().map(|(at, column)| natural(at, column)).collect();
        let gaps = GAP * widths.len().saturating_sub(1);
        loop {
            let names = (0..widths.len()).filter(|at| self.columns[*at].kind == ColumnKind::Name);
            let wider = names.filter(|at| widths[*at] > length(self.columns[*at].header));
            let Some(widest) = wider.max_by_key(|at| widths[*at]) else { return widths };
            if widths.iter().sum::<usize>() + gaps <= WIDTH {
                return widths;
            }
            // To the widest cell below, so that the names that stand in the column stand close.
            let below = self.rows.iter().map(|row| length(&row[widest]));
            let below = below.filter(|width| *width < widths[widest]).max().unwrap_or(0);
            widths[widest] = below.max(length(self.columns[widest].header));
        }
    }

    fn line(&self, widths: &[usize], cells: &[&str]) -> String {
        let mut line = String::new();
        for (at, (cell, width)) in cells.iter().zip(widths).enumerate() {
            let blank = " ".repeat(width.saturating_sub(length(cell)));
            let (before, after) = match self.columns[at].kind {
                ColumnKind::Figure => (blank.as_str(), ""),
                ColumnKind::Word | ColumnKind::Name => ("", blank.as_str()),
            };
            line += &format!("{before}{cell}{after}{}", " ".repeat(GAP));
        }
        line.truncate(line.trim_end().len());
        line
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let widths = self.widths();
        let headers: Vec<&str> = self.columns.iter().map(|column| column.header).collect();
        writeln!(f, "{}", self.line(&widths, &headers))?;
        for row in &self.rows {
            let fits = |at: usize| length(&row[at]) <= widths[at];
            if !row.is_empty() && !fits(0) {
                writeln!(f, "{}", row[0])?;
            }
            let shown = |at: usize| if fits(at) { row[at].as_str() } else { "" };
            let cells: Vec<&str> = (0..row.len()).map(shown).collect();
            writeln!(f, "{}", self.line(&widths, &cells))?;
            for at in (1..row.len()).filter(|at| !fits(*at)) {
                let text = format!("{}: {}", self.columns[at].header.to_lowercase(), row[at]);
                write!(f, "{}", wrapped(&text, INDENT))?;
            }
        }
        Ok(())
    }
}

fn length(text: &str) -> usize {
    text.chars().count()
}

/// Text in lines of at most [`WIDTH`] columns, all of them behind an indent. A word that is longer
/// has a line of its own.
#[must_use]
pub fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = String::new();
    let mut line = String::new();
    for word in text.split(' ') {
        if !line.is_empty() && length(indent) + length(&line) + 1 + length(word) > WIDTH {
            // Writing to a String cannot fail.
            let _ = writeln!(lines, "{indent}{line}");
            line.clear();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    let _ = writeln!(lines, "{indent}{line}");
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: &[[&str; 4]]) -> String {
        let mut table = Table::new([
            Column::name("VOLUME"),
            Column::figure("SIZE"),
            Column::word("CACHE"),
            Column::name("HELD BY"),
        ]);
        rows.iter().for_each(|row| table.row(row.map(str::to_owned)));
        table.to_string()
    }

    #[test]
    fn columns_are_as_wide_as_their_cells() {
        let text = table(&[["vol0", "512GiB", "back", "db1"], ["logs2", "64MiB", "-", ""]]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            ["VOLUME    SIZE  CACHE  HELD BY", "vol0    512GiB  back   db1", "logs2    64MiB  -",]
        );
    }

    #[test]
    fn long_names_are_whole_and_no_line_is_too_wide() {
        let (long, host) = ("v".repeat(64), "h".repeat(64));
        let text = table(&[
            ["vol0", "512GiB", "back", "db1"],
            [&long, "64MiB", "back", &format!("{host} (away, 18s left)")],
            [&long, "1GiB", "thru", "db1"],
        ]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.iter().all(|line| line.len() <= WIDTH), "{text}");
        assert_eq!(
            lines,
            [
                format!("{:<64}    SIZE  CACHE  HELD BY", "VOLUME"),
                format!("{:<64}  512GiB  back   db1", "vol0"),
                format!("{long}   64MiB  back"),
                format!("    held by: {host} (away, 18s left)"),
                format!("{long}    1GiB  thru   db1"),
            ]
        );
        let text =
            table(&[["vol0", &"9".repeat(60), "back", "db1"], [&long, "64MiB", "back", &host]]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.iter().all(|line| line.len() <= WIDTH), "{text}");
        assert_eq!(lines[2], long);
        assert_eq!(lines[4], format!("    held by: {host}"));
    }

    #[test]
    fn many_names_are_wrapped() {
        let names: Vec<String> = (0..9).map(|n| format!("{n}{}", "n".repeat(40))).collect();
        let text = table(&[["v", "1B", "-", &names.join(", ")]]);
        assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
        assert!(names.iter().all(|name| text.contains(name.as_str())), "{text}");
        assert_eq!(text.lines().count(), 2 + 5);
    }
}
