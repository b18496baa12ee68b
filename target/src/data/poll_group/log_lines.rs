//! [`LogLines`]: limits on the log lines that peers can cause in a poll group. Pure: the caller has
//! the clock.
//!
//! A flood of connections must not flood the log: a [`LogLimit`] bounds the lines of each kind in a
//! second, and one line reports how many were left out.

use std::time::Instant;

use rblk_runtime::log_limit::LogLimit;

/// A kind of log line that peers can cause.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LogLine {
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
    /// A self-test has no valid proof.
    Unproven,
    /// The WRs of a connection cannot be posted.
    Post,
}

impl LogLine {
    const ALL: [Self; 7] = [
        Self::Failed,
        Self::Violation,
        Self::BadCommand,
        Self::Ends,
        Self::Refused,
        Self::Unproven,
        Self::Post,
    ];

    /// The name of the kind in the report of lines left out.
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

/// The limits of all kinds.
#[derive(Default, Debug)]
pub(super) struct LogLines {
    written: [LogLimit; LogLine::ALL.len()],
}

impl LogLines {
    /// Whether another line of this kind may be written now. If not, counts it as left out.
    pub(super) fn may_write(&mut self, line: LogLine, now: Instant) -> bool {
        self.written[line as usize].may_write(now)
    }

    /// The next kind with lines left out more than a second ago: its name, and their number.
    /// `None`: no kind has any.
    pub(super) fn take_left_out(&mut self, now: Instant) -> Option<(&'static str, u64)> {
        LogLine::ALL.into_iter().find_map(|line| {
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
        let mut lines = LogLines::default();
        let flood = |lines: &mut LogLines, line, now| {
            (0..1000).filter(|_| lines.may_write(line, now)).count()
        };
        assert_eq!(flood(&mut lines, LogLine::Ends, begun), 10);
        // Each kind has its own limit.
        assert_eq!(flood(&mut lines, LogLine::Failed, begun), 10);
        assert_eq!(lines.take_left_out(begun), None);
        let later = begun + Duration::from_secs(1);
        assert_eq!(lines.take_left_out(later), Some(("connection failed", 990)));
        assert_eq!(lines.take_left_out(later), Some(("connection ends", 990)));
        assert_eq!(lines.take_left_out(later), None);
        assert_eq!(flood(&mut lines, LogLine::Ends, later), 10);
    }
}
