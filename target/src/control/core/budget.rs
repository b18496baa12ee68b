//! [`Budget`] and [`Capacity`]: the resources that connections may take together. Pure.
//!
//! Every host has a part of the target's resources, whether or not its entry says so: no host uses
//! more than a quarter, so the others always have room.

use rblk_protocol::limits::QUEUES_MAX;
use rblk_protocol::width::wide64;

/// Every queue that the protocol allows, and the admin connection.
const OF_A_SESSION: u32 = QUEUES_MAX as u32 + 1;
/// Memory of the connections of a session.
const SESSION_MEMORY: u64 = 512 << 20;
/// The least number of sessions for a host, however few the target has.
const SESSIONS_MIN: u32 = 8;

/// The target's resources for connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// Sessions at a time.
    pub sessions: u32,
    /// Connections at a time.
    pub connections: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
}

/// The most that connections may take together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Budget {
    /// Connections at a time, admin included.
    pub(super) connections_max: u32,
    /// Bytes of their memory: receive slots, answers and replies.
    pub(super) memory_max: u64,
}

impl Capacity {
    /// The capacity of a target with this many sessions and this much memory. `files`: the most
    /// files it may have open for connections, if they take files.
    #[must_use]
    pub fn new(sessions: u32, files: Option<u64>, memory_bytes: u64) -> Self {
        let connections = u64::from(sessions) * u64::from(OF_A_SESSION);
        let connections = connections.min(files.unwrap_or(u64::MAX));
        Self { sessions, connections, memory_bytes }
    }

    /// Sessions with connections that one host may have at a time: a quarter.
    pub(super) fn sessions_of_a_host(self) -> u32 {
        self.sessions.div_ceil(4).max(SESSIONS_MIN).min(self.sessions)
    }

    /// Sessions with connections, and those that lost theirs and are kept: twice as many. So a host
    /// that crashed finds room beside the sessions that its lease keeps.
    pub(super) fn kept_sessions_of_a_host(self) -> u32 {
        self.sessions_of_a_host().saturating_mul(2).min(self.sessions)
    }

    /// The budget of the connections of one host: a quarter. At least that of one session, and two
    /// connections for each of the fewest sessions.
    pub(super) fn of_a_host(self) -> Budget {
        let connections = u32::try_from(self.connections / 4).unwrap_or(u32::MAX);
        Budget {
            connections_max: connections.max(OF_A_SESSION).max(2 * SESSIONS_MIN),
            memory_max: (self.memory_bytes / 4).max(SESSION_MEMORY),
        }
    }
}

impl Budget {
    /// The budget of one session: every queue that the protocol allows.
    pub(super) const OF_A_SESSION: Self =
        Self { connections_max: OF_A_SESSION, memory_max: SESSION_MEMORY };

    /// Whether another connection with this much memory fits.
    pub(super) fn has_room(self, connections: usize, used: u64, memory_bytes: u64) -> bool {
        // A connection above the whole budget fits if it is the only one.
        connections == 0
            || wide64(connections) < u64::from(self.connections_max)
                && used.saturating_add(memory_bytes) <= self.memory_max
    }

    /// Checks that another connection with this much memory fits, without that exception.
    ///
    /// # Errors
    /// The text for the peer names the limit and its key.
    pub(super) fn check(
        self,
        connections: u64,
        used: u64,
        memory_bytes: u64,
    ) -> Result<(), String> {
        let Self { connections_max, memory_max } = self;
        if connections >= connections_max.into() {
            return Err(format!(
                "{connections_max} connections are your limit here (connections_max)"
            ));
        }
        if used.saturating_add(memory_bytes) > memory_max {
            return Err(format!(
                "{} MiB for connections are your limit here (memory_max): less --queue-depth",
                memory_max >> 20
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::limits::REJECT_TEXT_BYTES;

    use super::*;

    #[test]
    fn a_refusal_names_the_limit_and_its_key() {
        let budget = Budget { connections_max: u32::MAX, memory_max: u64::MAX - 1 };
        budget.check(u64::from(u32::MAX) - 1, 1, u64::MAX - 2).unwrap();
        let text = budget.check(u64::from(u32::MAX), 0, 0).unwrap_err();
        assert!(text.contains("connections_max") && text.len() <= REJECT_TEXT_BYTES, "{text}");
        let text = budget.check(0, 1, u64::MAX - 1).unwrap_err();
        assert!(text.contains("memory_max") && text.len() <= REJECT_TEXT_BYTES, "{text}");
    }

    #[test]
    fn a_host_has_a_quarter() {
        let usual = Capacity::new(1024, Some(131_072), 64 << 30);
        assert_eq!((usual.connections, usual.sessions_of_a_host()), (1024 * 65, 256));
        let budget = usual.of_a_host();
        assert_eq!((budget.connections_max, budget.memory_max), (256 * 65, 16 << 30));
        // Few files; a small machine. One session keeps its full budget.
        let small = Capacity::new(1024, Some(512), 1 << 30);
        let budget = small.of_a_host();
        assert_eq!((small.connections, budget.connections_max), (512, 128));
        assert_eq!(budget.memory_max, 512 << 20);
        // A small sessions_max is not divided by four.
        let sessions = [1, 4, 8, 20, 64].map(|n| Capacity::new(n, None, 0).sessions_of_a_host());
        assert_eq!(sessions, [1, 4, 8, 8, 16]);
        let kept = [1, 4, 8, 20, 64].map(|n| Capacity::new(n, None, 0).kept_sessions_of_a_host());
        assert_eq!(kept, [1, 4, 8, 16, 32]);
    }
}
