//! [`Budget`] and [`Capacity`]: what connections may take together. Pure.
//!
//! Every host has a part of what the target has, whether or not its entry says so: no host uses
//! more than a quarter, so that there is room for others whatever a host does.

use rblk_protocol::limits::QUEUES_MAX;
use rblk_protocol::width::wide64;

/// Every queue that the protocol allows, and the admin connection.
const OF_A_SESSION: u32 = QUEUES_MAX as u32 + 1;
/// Memory of the connections of a session.
const SESSION_MEMORY: u64 = 512 << 20;
/// Sessions that a host may have however few the target has.
const SESSIONS_MIN: u32 = 8;

/// What a target has for connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// Sessions at a time.
    pub sessions: u32,
    /// Connections at a time.
    pub connections: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
}

/// What connections may take together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Budget {
    /// Connections at a time, admin included.
    pub(super) connections_max: u32,
    /// Bytes of their memory: receive slots, answers and replies.
    pub(super) memory_max: u64,
}

impl Capacity {
    /// Of a target with so many sessions at a time, which may have so many files open for
    /// connections, if they take files, and has so much memory.
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

    /// The same, with those that lost their connections and are kept: twice as many. So a host that
    /// died finds room beside what its lease keeps.
    pub(super) fn kept_sessions_of_a_host(self) -> u32 {
        self.sessions_of_a_host().saturating_mul(2).min(self.sessions)
    }

    /// What the connections of one host may take: a quarter. At the least what one session may,
    /// and two connections for each of the fewest sessions.
    pub(super) fn of_a_host(self) -> Budget {
        let connections = u32::try_from(self.connections / 4).unwrap_or(u32::MAX);
        Budget {
            connections_max: connections.max(OF_A_SESSION).max(2 * SESSIONS_MIN),
            memory_max: (self.memory_bytes / 4).max(SESSION_MEMORY),
        }
    }
}

impl Budget {
    /// Of one session: every queue that the protocol allows.
    pub(super) const OF_A_SESSION: Self =
        Self { connections_max: OF_A_SESSION, memory_max: SESSION_MEMORY };

    /// Whether another connection with so much memory fits.
    pub(super) fn has_room(self, connections: usize, used: u64, memory_bytes: u64) -> bool {
        // One that is larger than all of it fits where nothing else is.
        connections == 0
            || wide64(connections) < u64::from(self.connections_max)
                && used.saturating_add(memory_bytes) <= self.memory_max
    }

    /// The same.
    ///
    /// # Errors
    /// The text for the peer: which limit it reached, and its key.
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
        // Few files; a small machine. One session has what it may have.
        let small = Capacity::new(1024, Some(512), 1 << 30);
        let budget = small.of_a_host();
        assert_eq!((small.connections, budget.connections_max), (512, 128));
        assert_eq!(budget.memory_max, 512 << 20);
        // Whoever allows few sessions does not mean a quarter of them.
        let sessions = [1, 4, 8, 20, 64].map(|n| Capacity::new(n, None, 0).sessions_of_a_host());
        assert_eq!(sessions, [1, 4, 8, 8, 16]);
        let kept = [1, 4, 8, 20, 64].map(|n| Capacity::new(n, None, 0).kept_sessions_of_a_host());
        assert_eq!(kept, [1, 4, 8, 16, 32]);
    }
}
