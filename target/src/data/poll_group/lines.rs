//! [`Lines`]: how often a poll group logs what peers can make it log. Pure: the caller has the
//! clock.
//!
//! A flood of connections must not be a flood of the log: of each kind of line, a [`LogLimit`] says
//! how many are written in a second, and one line tells how many were left out.

use std::time::Instant;

use rblk_runtime::log_limit::LogLimit;

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
    /// A self-test does not prove what it has to.
    Unproven,
    /// What a connection has to send cannot be posted.
    Post,
}

impl Line {
    const ALL: [Self; 7] = [
        Self::Failed,
        Self::Violation,
        Self::BadCommand,
        Self::Ends,
        Self::Refused,
        Self::Unproven,
        Self::Post,
    ];

    /// The line, as the log of those that were left out names it.
    fn words(self) -> &'static str {
        match self {
            Self::Failed => "connection failed",
            Self::Violation => "ending a connection that broke a rule",
            Self::BadCommand => "bad command",
            Self::Ends => "connection ends",
            Self::Refused => "cannot take a connection",
            Self::Unproven => "a self-test proves nothing",
            Self::Post => "cannot post",
        }
    }
}

/// Lines of each kind.
#[derive(Default, Debug)]
pub(super) struct Lines {
    written: [LogLimit; Line::ALL.len()],
}

impl Lines {
    /// Whether another line of that kind may be written now. If not, it is counted.
    pub(super) fn may_write(&mut self, line: Line, now: Instant) -> bool {
        self.written[line as usize].may_write(now)
    }

    /// The next kind of which lines were left out, more than a second ago: its words, and how many.
    /// `None`: there is none, or none any more.
    pub(super) fn take_left_out(&mut self, now: Instant) -> Option<(&'static str, u64)> {
        Line::ALL.into_iter().find_map(|line| {
            let left_out = self.written[line as usize].take_left_out(now)?;
            Some((line.words(), left_out))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
        let later = begun + Duration::from_secs(1);
        assert_eq!(lines.take_left_out(later), Some(("connection failed", 990)));
        assert_eq!(lines.take_left_out(later), Some(("connection ends", 990)));
        assert_eq!(lines.take_left_out(later), None);
        assert_eq!(flood(&mut lines, Line::Ends, later), 10);
    }
}
