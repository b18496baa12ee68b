//! [`Budget`]: what connections may take together.

use rblk_protocol::limits::QUEUES_MAX;

/// What connections may take together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Budget {
    /// Connections at a time, admin included.
    pub(super) connections_max: u32,
    /// Bytes of their memory: receive slots, answers and replies.
    pub(super) memory_max: u64,
}

impl Budget {
    /// Of one session, where no host is known: every queue that the protocol allows.
    pub(super) const OF_A_SESSION: Self =
        Self { connections_max: QUEUES_MAX as u32 + 1, memory_max: 512 << 20 };

    /// Whether another connection with so much memory fits.
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
}
