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
    /// What should not have happened.
    pub(crate) faults: Faults,
}

/// What should not happen while a volume is mounted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Faults {
    /// Requests that the initiator answered with an error.
    pub(crate) failed_requests: u64,
    /// Connections that the initiator lost.
    pub(crate) paths_lost: u64,
    /// Commands that the target answered with an error.
    pub(crate) failed_commands: u64,
    /// Connections that the target ended because of a broken rule.
    pub(crate) protocol_errors: u64,
    /// Connections that the target lost.
    pub(crate) lost_connections: u64,
}

impl Faults {
    /// All of them.
    pub(crate) fn sum(&self) -> u64 {
        self.named().iter().map(|(_, count)| count).sum()
    }

    /// Those that there are, for people.
    pub(crate) fn words(&self) -> String {
        let some = self.named().into_iter().filter(|(_, count)| *count > 0);
        some.map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", ")
    }

    fn named(&self) -> [(&'static str, u64); 5] {
        [
            ("requests failed at the initiator", self.failed_requests),
            ("paths lost by the initiator", self.paths_lost),
            ("commands failed at the target", self.failed_commands),
            ("rules broken as the target saw it", self.protocol_errors),
            ("connections lost by the target", self.lost_connections),
        ]
    }
}

impl TargetCounts {
    /// Failed commands and broken rules.
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
            faults: Faults {
                failed_requests: added(&[i.errors], &[i0.errors]),
                paths_lost: added(&[i.paths_lost], &[i0.paths_lost]),
                failed_commands: added(&[t.failed_commands], &[t0.failed_commands]),
                protocol_errors: added(&[t.protocol_errors], &[t0.protocol_errors]),
                lost_connections: added(&[t.lost_connections], &[t0.lost_connections]),
            },
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
                faults: Faults { lost_connections: 1, ..Faults::default() },
            }
        );
        assert_eq!(cost.faults.sum(), 1);
        assert_eq!(cost.faults.words(), "1 connections lost by the target");
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
