//! [`PeerLines`]: limits the lines that peers can make control log. Pure: the caller has the clock.
//!
//! A [`LogLimit`] for each kind says how many lines are written in a second. A line about an
//! address is written once in a second: repetitions of its words are counted, and so one stranger
//! leaves room for the lines of others.

use std::time::{Duration, Instant};

use rblk_runtime::log_limit::{LINES_MAX, LogLimit};

use crate::control::peers::account::address_of;

const SECOND: Duration = Duration::from_secs(1);
/// Lines of a kind that every host causes. After a restart of a target all hosts come at once.
const USUAL_MAX: u32 = 100;

/// A kind of line that peers can make control log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::control) enum PeerLine {
    /// A connection was refused.
    Refused,
    /// An initiator failed its proof.
    Unproven,
    /// A command could not be parsed.
    BadCommand,
    /// OPEN was refused.
    OpenRefused,
    /// A connection was made.
    Connection,
    /// A LOGIN was accepted, or waits.
    Login,
    /// A volume was opened.
    Open,
    /// An initiator came back with a session that does not exist.
    NoSession,
}

impl PeerLine {
    const ALL: [Self; 8] = [
        Self::Refused,
        Self::Unproven,
        Self::BadCommand,
        Self::OpenRefused,
        Self::Connection,
        Self::Login,
        Self::Open,
        Self::NoSession,
    ];

    /// The name of the line in the log of omissions.
    fn words(self) -> &'static str {
        match self {
            Self::Refused => "refused a connection",
            Self::Unproven => "an initiator did not prove its key",
            Self::BadCommand => "bad command",
            Self::OpenRefused => "OPEN refused",
            Self::Connection => "connection",
            Self::Login => "login",
            Self::Open => "open",
            Self::NoSession => "an initiator comes back",
        }
    }

    fn limit(self) -> LogLimit {
        match self {
            Self::Connection | Self::Login | Self::Open => LogLimit::new(USUAL_MAX),
            Self::Refused
            | Self::Unproven
            | Self::BadCommand
            | Self::OpenRefused
            | Self::NoSession => LogLimit::new(LINES_MAX),
        }
    }
}

/// A line that was written about an address.
#[derive(Debug)]
struct Said {
    line: PeerLine,
    address: String,
    text: String,
    since: Instant,
    left_out: u64,
}

/// Lines that were left out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::control) struct LeftOut {
    /// Their kind.
    pub(in crate::control) line: &'static str,
    /// Their address, if they had the same words.
    pub(in crate::control) address: Option<String>,
    /// Their number.
    pub(in crate::control) count: u64,
}

impl LeftOut {
    /// Logs the omission.
    pub(in crate::control) fn log(&self) {
        let Self { line, address, count } = self;
        let address = address.as_deref();
        tracing::warn!(
            line,
            address,
            count,
            "lines of the log were left out: too many in a second"
        );
    }
}

/// See the module.
#[derive(Debug)]
pub(in crate::control) struct PeerLines {
    limits: [LogLimit; PeerLine::ALL.len()],
    // Lines written in the last second: as many as the limits allow.
    said: Vec<Said>,
}

impl Default for PeerLines {
    fn default() -> Self {
        Self { limits: PeerLine::ALL.map(PeerLine::limit), said: Vec::new() }
    }
}

impl PeerLines {
    /// Whether another line of that kind may be written now. If not, it is counted.
    pub(in crate::control) fn may_write(&mut self, line: PeerLine, now: Instant) -> bool {
        self.limits[line as usize].may_write(now)
    }

    /// Whether another line with these words about a peer may be written now. If not, it is
    /// counted.
    pub(in crate::control) fn may_say(
        &mut self,
        line: PeerLine,
        peer: &str,
        text: &str,
        now: Instant,
    ) -> bool {
        let address = address_of(peer);
        let is_it =
            |said: &&mut Said| said.line == line && said.address == address && said.text == text;
        if let Some(said) = self.said.iter_mut().find(is_it) {
            if said.left_out > 0 || now.saturating_duration_since(said.since) < SECOND {
                said.left_out += 1;
                return false;
            }
            said.since = now;
            return self.may_write(line, now);
        }
        let may = self.may_write(line, now);
        if may {
            let is_fresh = |said: &Said| {
                said.left_out > 0 || now.saturating_duration_since(said.since) < SECOND
            };
            self.said.retain(is_fresh);
            let (address, text) = (address.to_owned(), text.to_owned());
            self.said.push(Said { line, address, text, since: now, left_out: 0 });
        }
        may
    }

    /// The next lines that were left out, more than a second ago. `None`: there are none, or no
    /// more.
    pub(in crate::control) fn take_left_out(&mut self, now: Instant) -> Option<LeftOut> {
        let is_over =
            |said: &Said| said.left_out > 0 && now.saturating_duration_since(said.since) >= SECOND;
        if let Some(at) = self.said.iter().position(is_over) {
            let Said { line, address, left_out: count, .. } = self.said.swap_remove(at);
            return Some(LeftOut { line: line.words(), address: Some(address), count });
        }
        PeerLine::ALL.into_iter().find_map(|line| {
            let count = self.limits[line as usize].take_left_out(now)?;
            Some(LeftOut { line: line.words(), address: None, count })
        })
    }

    /// Whether lines were left out that the log does not mention yet.
    pub(in crate::control) fn owes(&self) -> bool {
        self.limits.iter().any(LogLimit::owes) || self.said.iter().any(|said| said.left_out > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_about_an_address_is_written_once_in_a_second() {
        let begun = Instant::now();
        let mut lines = PeerLines::default();
        let say = |lines: &mut PeerLines, peer: &str, text, now| {
            lines.may_say(PeerLine::Refused, peer, text, now)
        };
        let all = (0..1000)
            .filter(|port| say(&mut lines, &format!("tcp://192.0.2.1:{port}"), "version 9", begun));
        assert_eq!(all.count(), 1);
        assert!(say(&mut lines, "tcp://192.0.2.1:1", "version 8", begun));
        assert!(say(&mut lines, "tcp://192.0.2.2:1", "version 9", begun));
        assert_eq!(lines.take_left_out(begun), None);
        assert!(lines.owes());
        let later = begun + SECOND;
        // The line goes on, and its count goes on until the log has it.
        assert!(!say(&mut lines, "tcp://192.0.2.1:1", "version 9", later));
        let left_out = LeftOut {
            line: "refused a connection",
            address: Some("tcp://192.0.2.1".to_owned()),
            count: 1000,
        };
        assert_eq!(lines.take_left_out(later), Some(left_out));
        assert_eq!((lines.take_left_out(later), lines.owes()), (None, false));
        assert!(say(&mut lines, "tcp://192.0.2.1:1", "version 9", later));
    }

    #[test]
    fn many_addresses_together_get_ten_lines_in_a_second() {
        let begun = Instant::now();
        let mut lines = PeerLines::default();
        for second in 0..20 {
            let now = begun + SECOND * second;
            let written = (0..5000)
                .filter(|at| {
                    let peer = format!("tcp://[2001:db8::{at:x}]:1");
                    lines.may_say(PeerLine::Unproven, &peer, "no key", now)
                })
                .count();
            let told = std::iter::from_fn(|| lines.take_left_out(now)).count();
            assert!(written <= 10 && told <= 11, "{second}: {written} lines, {told} sums");
            assert!(lines.said.len() <= 20, "{} are kept", lines.said.len());
        }
    }
}
