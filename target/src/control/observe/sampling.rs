//! [`Sampling`]: takes the deeds of volumes into the [`Past`], once a second while there are
//! sessions.
//!
//! Sampling runs only if the live page is served, and sleeps without sessions: then nothing
//! happens. A volume without replies since the last sample costs one look at its counters of
//! commands. No data thread does anything for it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rblk_protocol::InstanceId;
use rblk_runtime::LatencyCounts;

use crate::control::groups::Groups;
use crate::control::observe::past::{Deeds, Past, PastReport, buckets};
use crate::control::observe::status_report::{millis, unix_ms};
use crate::volume::Volume;
use crate::volume::ids::VolumeIndex;
use rblk_operate::target::traffic::IoCounts;

/// Time between two samples.
const INTERVAL: Duration = Duration::from_secs(1);

/// The counters of a volume, as they were seen last.
#[derive(Debug, Default)]
struct LastCounters {
    io: IoCounts,
    // Of READs, WRITEs and FLUSHes.
    times: [LatencyCounts; 3],
}

/// See the module.
#[derive(Debug)]
pub(in crate::control) struct Sampling {
    is_wanted: bool,
    taken: Instant,
    // The last sample had sessions, so there may be something new.
    is_behind: bool,
    seen: HashMap<VolumeIndex, LastCounters>,
    past: Past,
}

impl Sampling {
    /// Nothing is sampled yet, and nothing will be unless the page is served.
    pub(in crate::control) fn new(is_wanted: bool, now: Instant) -> Self {
        let (seen, past) = (HashMap::new(), Past::default());
        Self { is_wanted, taken: now, is_behind: false, seen, past }
    }

    /// When [`Self::take`] is due next, which is never without a session.
    pub(in crate::control) async fn due(&self, has_sessions: bool) {
        if self.is_wanted && (has_sessions || self.is_behind) {
            tokio::time::sleep_until((self.taken + INTERVAL).into()).await;
        } else {
            std::future::pending().await
        }
    }

    /// Takes the counts up to now.
    pub(in crate::control) fn take(
        &mut self,
        groups: &Groups,
        volumes: &[Arc<Volume>],
        has_sessions: bool,
    ) {
        let now = Instant::now();
        if self.seen.len() > volumes.len() {
            let there: HashSet<_> = volumes.iter().map(|volume| volume.index).collect();
            self.seen.retain(|index, _| there.contains(index));
        }
        let deeds = volumes.iter().filter_map(|volume| self.deeds_of(groups, volume)).collect();
        let lasted = now.saturating_duration_since(self.taken);
        // Before the first session there was nothing to count.
        let lasted = if self.is_behind { lasted } else { lasted.min(INTERVAL) };
        self.past.note(unix_ms(), millis(lasted), deeds);
        (self.taken, self.is_behind) = (now, has_sessions);
    }

    /// The deeds of a volume since the last time; `None`: nothing.
    fn deeds_of(&mut self, groups: &Groups, volume: &Volume) -> Option<Deeds> {
        let mut io = IoCounts::default();
        let stats = || groups.iter().filter_map(|group| group.volume_stats(volume.index));
        stats().for_each(|stats| io.add(&stats.io()));
        let seen = self.seen.entry(volume.index).or_default();
        if io.operations() == seen.io.operations() {
            return None;
        }
        let mut times: [LatencyCounts; 3] = Default::default();
        for stats in stats() {
            times.iter_mut().zip(stats.latency.totals()).for_each(|(sum, of)| sum.add(&of));
        }
        let grown = |now: u64, was: u64| now.saturating_sub(was);
        let [read, write, flush] =
            [0, 1, 2].map(|kind| buckets(&times[kind].since(&seen.times[kind])));
        let deeds = Deeds {
            name: volume.name.to_string(),
            reads: grown(io.reads, seen.io.reads),
            writes: grown(io.writes, seen.io.writes),
            read_bytes: grown(io.read_bytes, seen.io.read_bytes),
            written_bytes: grown(io.written_bytes, seen.io.written_bytes),
            errors: grown(io.errors, seen.io.errors),
            read,
            write,
            flush,
        };
        *seen = LastCounters { io, times };
        Some(deeds)
    }

    /// What volumes did lately, in this run that began then.
    pub(in crate::control) fn report(&self, instance: InstanceId, started: Instant) -> PastReport {
        let (last, moments) = self.past.kept();
        let now_unix_ms = unix_ms();
        PastReport {
            instance: instance.to_string(),
            last,
            started_unix_ms: now_unix_ms.saturating_sub(millis(started.elapsed())),
            now_unix_ms,
            moments,
        }
    }
}
