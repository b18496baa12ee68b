//! [`LinkLines`]: limits the log lines that a target can cause. A target that takes each connection
//! and ends it again would otherwise fill the log of the host.

use std::time::Instant;

use rblk_runtime::log_limit::LogLimit;

/// A kind of log line that a target can cause.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LinkLine {
    /// The target is lost.
    Loss,
    /// The target is back.
    Resume,
    /// The target does not know the session.
    Session,
    /// The target sent an event.
    News,
    /// The mount uses an address that is not the best.
    Fallback,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct LinkLines([LogLimit; 5]);

impl LinkLines {
    /// Whether another line of that kind may be written now. If not, the line is counted; the next
    /// line that may be written follows a line with the number of lines left out.
    pub(super) fn may_write(&mut self, line: LinkLine, now: Instant) -> bool {
        let limit = &mut self.0[line as usize];
        if let Some(count) = limit.take_left_out(now) {
            tracing::warn!(?line, count, "lines of the log were left out: too many in a second");
        }
        limit.may_write(now)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_target_that_flaps_is_ten_lines_of_a_kind_in_a_second() {
        let (mut lines, begun) = (LinkLines::default(), Instant::now());
        for second in 0..3 {
            let now = begun + Duration::from_secs(second);
            for line in [
                LinkLine::Loss,
                LinkLine::Resume,
                LinkLine::Session,
                LinkLine::News,
                LinkLine::Fallback,
            ] {
                assert_eq!((0..500).filter(|_| lines.may_write(line, now)).count(), 10);
            }
        }
    }
}
