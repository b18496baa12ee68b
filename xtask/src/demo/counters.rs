//! What one I/O costs, from the counters of both daemons before and after some work.

use serde::{Deserialize, Serialize};

/// The counters of one mount (`total` of `rblk-initiator list --output json`) that matter here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct InitiatorCounts {
    reads: u64,
    writes: u64,
    flushes: u64,
    discards: u64,
    write_zeroes: u64,
    read_bytes: u64,
    written_bytes: u64,
    errors: u64,
    paths_lost: u64,
    sends: u64,
    completions: u64,
}

/// The counters of a target (`total` of `rblk-target status --output json`) that matter here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(crate) struct TargetCounts {
    failed_commands: u64,
    protocol_errors: u64,
    lost_connections: u64,
    sends: u64,
    rdma_writes: u64,
    rdma_writes_with_imm: u64,
    rdma_reads: u64,
    completions: u64,
}

/// Both at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    /// Of the mount.
    pub(crate) initiator: InitiatorCounts,
    /// Of the target.
    pub(crate) target: TargetCounts,
}

/// What some work came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Cost {
    /// Commands that the initiator sent and had answered.
    pub(crate) commands: u64,
    /// Bytes read and written by them.
    pub(crate) bytes: u64,
    /// Messages of both sides: SENDs, RDMA WRITEs (with and without immediate), RDMA READs.
    pub(crate) messages: u64,
    /// Completions that the initiator reaped.
    pub(crate) initiator_completions: u64,
    /// Completions that the target reaped.
    pub(crate) target_completions: u64,
    /// Failed commands, broken rules and lost connections, as either side counts them.
    pub(crate) errors: u64,
}

impl TargetCounts {
    /// Whatever should not have happened while a volume was mounted.
    fn errors(&self) -> u64 {
        self.refusals() + self.lost_connections
    }

    /// Failed commands and broken rules. The end of a session may count as a lost connection: the
    /// initiator is the one that hangs up.
    pub(crate) fn refusals(&self) -> u64 {
        self.failed_commands + self.protocol_errors
    }
}

impl Counters {
    /// The cost of what was done between `before` and `self`.
    pub(crate) fn since(&self, before: &Counters) -> Cost {
        let (i, i0) = (&self.initiator, &before.initiator);
        let (t, t0) = (&self.target, &before.target);
        let added = |now: &[u64], then: &[u64]| {
            now.iter().zip(then).map(|(now, then)| now.wrapping_sub(*then)).sum::<u64>()
        };
        Cost {
            commands: added(
                &[i.reads, i.writes, i.flushes, i.discards, i.write_zeroes],
                &[i0.reads, i0.writes, i0.flushes, i0.discards, i0.write_zeroes],
            ),
            bytes: added(&[i.read_bytes, i.written_bytes], &[i0.read_bytes, i0.written_bytes]),
            messages: added(
                &[i.sends, t.sends, t.rdma_writes, t.rdma_writes_with_imm, t.rdma_reads],
                &[i0.sends, t0.sends, t0.rdma_writes, t0.rdma_writes_with_imm, t0.rdma_reads],
            ),
            initiator_completions: added(&[i.completions], &[i0.completions]),
            target_completions: added(&[t.completions], &[t0.completions]),
            errors: added(
                &[i.errors, i.paths_lost, t.errors()],
                &[i0.errors, i0.paths_lost, t0.errors()],
            ),
        }
    }
}

impl Cost {
    /// `count` for each command; nothing where there was none.
    pub(crate) fn per_command(&self, count: u64) -> Option<f64> {
        (self.commands > 0).then(|| count as f64 / self.commands as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_both_sides_count() {
        let before = Counters {
            initiator: InitiatorCounts { reads: 5, sends: 9, completions: 7, ..Default::default() },
            target: TargetCounts { sends: 1, ..Default::default() },
        };
        let after = Counters {
            initiator: InitiatorCounts {
                reads: 15,
                writes: 10,
                read_bytes: 40960,
                written_bytes: 40960,
                sends: 29,
                completions: 27,
                ..Default::default()
            },
            target: TargetCounts {
                sends: 11,
                rdma_writes_with_imm: 10,
                rdma_reads: 10,
                completions: 50,
                lost_connections: 1,
                ..Default::default()
            },
        };
        let cost = after.since(&before);
        assert_eq!(
            cost,
            Cost {
                commands: 20,
                bytes: 81920,
                messages: 50,
                initiator_completions: 20,
                target_completions: 50,
                errors: 1,
            }
        );
        assert_eq!(cost.per_command(cost.messages), Some(2.5));
    }

    #[test]
    fn no_command_has_no_cost() {
        let cost = Counters::default().since(&Counters::default());
        assert_eq!(cost.per_command(cost.messages), None);
    }

    #[test]
    fn the_daemons_json_is_understood() {
        // Unknown counters are theirs to add; a missing one would be a counter renamed.
        let text = r#"{"failed_commands":0,"protocol_errors":0,"lost_connections":0,"sends":3,
            "rdma_writes":0,"rdma_writes_with_imm":2,"rdma_reads":1,"completions":9,"new":1}"#;
        let counts: TargetCounts = serde_json::from_str(text).unwrap();
        assert_eq!((counts.sends, counts.completions), (3, 9));
        assert!(serde_json::from_str::<TargetCounts>("{}").is_err());
    }
}
