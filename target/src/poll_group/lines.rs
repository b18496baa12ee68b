//! [`Lines`]: how often a poll group logs what peers can make it log. Pure: the caller has the
//! clock.
//!
//! A flood of connections must not be a flood of the log: of each kind of line, [`LINES_MAX`] are
//! written in a second. The others are counted, and one line tells how many there were.

use std::time::{Duration, Instant};

/// Lines of one kind in one second.
const LINES_MAX: u32 = 10;
const SECOND: Duration = Duration::from_secs(1);

/// What peers can make a poll group log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Line {
    /// A connection failed.
    Failed,
    /// A connection broke a rule.
    Violation,
    /// A command could not be parsed.
    BadCommand,
    /// A connection ends.
    Ends,
    /// A connection could not be taken or accepted.
    Refused,
}

impl Line {
    const ALL: [Self; 5] =
        [Self::Failed, Self::Violation, Self::BadCommand, Self::Ends, Self::Refused];

    /// The line, as the log of those that were left out names it.
    fn words(self) -> &'static str {
        match self {
            Self::Failed => "connection failed",
            Self::Violation => "ending a connection that broke a rule",
            Self::BadCommand => "bad command",
            Self::Ends => "connection ends",
            Self::Refused => "cannot take a connection",
        }
    }
}

#[derive(Clone, Copy, Default, Debug)]
struct Written {
    // Since when lines are counted: for a second.
    since: Option<Instant>,
    count: u32,
    left_out: u64,
}

/// Lines of each kind.
#[derive(Default, Debug)]
pub(super) struct Lines {
    written: [Written; Line::ALL.len()],
}

impl Lines {
    /// Whether another line of that kind may be written now. If not, it is counted.
    pub(super) fn may_write(&mut self, line: Line, now: Instant) -> bool {
        let written = &mut self.written[line as usize];
        if written.since.is_none_or(|since| now.saturating_duration_since(since) >= SECOND) {
            (written.since, written.count) = (Some(now), 0);
        }
        let may = written.count < LINES_MAX;
        if may {
            written.count += 1;
        } else {
            written.left_out += 1;
        }
        may
    }

    /// The next kind of which lines were left out, more than a second ago: its words, and how many.
    /// `None`: there is none, or none any more.
    pub(super) fn take_left_out(&mut self, now: Instant) -> Option<(&'static str, u64)> {
        let is_over = |written: &Written| {
            let over = |since| now.saturating_duration_since(since) >= SECOND;
            written.left_out > 0 && written.since.is_some_and(over)
        };
        let line = Line::ALL.into_iter().find(|line| is_over(&self.written[*line as usize]))?;
        let left_out = std::mem::take(&mut self.written[line as usize].left_out);
        Some((line.words(), left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_ten_lines_a_second_and_a_sum() {
        let begun = Instant::now();
        let mut lines = Lines::default();
        let flood =
            |lines: &mut Lines, line, now| (0..1000).filter(|_| lines.may_write(line, now)).count();
        assert_eq!(flood(&mut lines, Line::Ends, begun), 10);
        // Another kind has its own.
        assert_eq!(flood(&mut lines, Line::Failed, begun), 10);
        assert_eq!(lines.take_left_out(begun), None);
        let later = begun + SECOND;
        assert_eq!(lines.take_left_out(later), Some(("connection failed", 990)));
        assert_eq!(lines.take_left_out(later), Some(("connection ends", 990)));
        assert_eq!(lines.take_left_out(later), None);
        assert_eq!(flood(&mut lines, Line::Ends, later), 10);
    }
}
