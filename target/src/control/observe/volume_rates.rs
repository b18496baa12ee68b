//! [`VolumeRates`]: what each volume did per second. Measured by a tick of control, and only while
//! somebody asks: see [`rblk_runtime::rates`].

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use rblk_runtime::rates::{RateWindow, Rates, Work};

use crate::control::groups::Groups;
use crate::volume::Volume;
use crate::volume::ids::VolumeIndex;

/// Work by volume.
type Counted = HashMap<VolumeIndex, Work>;

/// The work of each volume per second.
#[derive(Debug, Default)]
pub(in crate::control) struct VolumeRates {
    window: RateWindow<Counted>,
}

impl VolumeRates {
    /// Notes that a client asks. Returns whether [`Self::take`] is due now.
    pub(in crate::control) fn ask(&mut self, now: Instant) -> bool {
        self.window.ask(now)
    }

    /// When [`Self::take`] is due next: never without a client that asks.
    pub(in crate::control) async fn due(&self) {
        match self.window.due() {
            Some(due) => tokio::time::sleep_until(due.into()).await,
            None => std::future::pending().await,
        }
    }

    /// Takes the counts up to now.
    pub(in crate::control) fn take(
        &mut self,
        groups: &Groups,
        volumes: &[Arc<Volume>],
        now: Instant,
    ) {
        let of = |volume: &Arc<Volume>| (volume.index, work(groups, volume.index));
        self.window.take(now, volumes.iter().map(of).collect());
    }

    /// The rates of a volume.
    pub(in crate::control) fn of(&self, volume: VolumeIndex) -> Option<Rates> {
        let (earlier, later, apart) = self.window.moments()?;
        // A volume that is new has no rates yet.
        Some(Rates::between(earlier.get(&volume)?, later.get(&volume)?, apart))
    }

    /// The rates of all volumes together.
    pub(in crate::control) fn of_all(&self) -> Option<Rates> {
        let (earlier, later, apart) = self.window.moments()?;
        let sum = |counted: &Counted| {
            counted.values().fold(Work::default(), |mut sum, work| {
                sum.add(work);
                sum
            })
        };
        Some(Rates::between(&sum(earlier), &sum(later), apart))
    }
}

/// The work of a volume so far, by all poll groups.
fn work(groups: &Groups, volume: VolumeIndex) -> Work {
    let mut work = Work::default();
    for stats in groups.iter().filter_map(|group| group.volume_stats(volume)) {
        let (io, times) = (stats.io(), stats.times());
        let mut store = times.read.store;
        store.add(&times.write.store);
        work.add(&Work {
            reads: times.read.total,
            writes: times.write.total,
            store,
            read_bytes: io.read_bytes,
            written_bytes: io.written_bytes,
        });
    }
    work
}
