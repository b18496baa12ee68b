//! [`ShardStopping`]: the progress of a shard that stops. Pure.
//!
//! A shard that stops flushes its volumes and then syncs their stores, each volume on its own: a
//! store that hangs or refuses does not affect the others. A refused flush is retried as long as
//! the shard lives; the caller of the stop sets that limit. A failed sync is not retried: the
//! kernel may have dropped the data, and reports that once.

use std::io;

use nix::errno::Errno;
use rblk_runtime::Micros;

use super::answers::OwnEnded;
use crate::volume::ids::VolumeIndex;

/// Pause before a refused flush is retried, in microseconds.
const REST_US: u64 = 500_000;

/// A volume with acknowledged data that is not safe in its store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unsaved {
    /// The volume.
    pub volume: VolumeIndex,
    /// Bytes that are only in memory. 0: all were written, but could not be made durable.
    pub dirty_bytes: u64,
    /// The store's error with its errno, or the fact that the store did not answer.
    pub cause: String,
}

impl Unsaved {
    pub(super) fn new(volume: VolumeIndex, dirty_bytes: u64, refused: Option<Errno>) -> Self {
        let cause = match refused {
            Some(errno) => io::Error::from_raw_os_error(errno as i32).to_string(),
            None => "the store did not answer".to_owned(),
        };
        Self { volume, dirty_bytes, cause }
    }

    /// Merges the lists of several shards into one entry for each volume.
    #[must_use]
    pub fn merged<'u>(lists: impl IntoIterator<Item = &'u Self>) -> Vec<Self> {
        let mut merged: Vec<Self> = Vec::new();
        for one in lists {
            match merged.iter_mut().find(|other| other.volume == one.volume) {
                Some(other) => other.dirty_bytes += one.dirty_bytes,
                None => merged.push(one.clone()),
            }
        }
        merged
    }
}

/// The next step of a volume's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum StopStep {
    /// Write dirty blocks to the store.
    Flush,
    /// Make the data in the store durable.
    Sync,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StopPhase {
    // The step is due.
    Next(StopStep),
    UnderWay(StopStep),
    // The store refused a flush. The retry is due at this time.
    Rests(Micros),
    Saved,
    // The sync failed.
    Lost,
}

#[derive(Clone, Copy, Debug)]
struct VolumeEnd {
    volume: VolumeIndex,
    phase: StopPhase,
    // The last error of the volume's store.
    refused: Option<Errno>,
}

/// The progress of a shard that stops.
#[derive(Debug)]
pub(super) struct ShardStopping {
    volumes: Vec<VolumeEnd>,
}

impl ShardStopping {
    /// Starts to stop a shard with these volumes.
    pub(super) fn new(volumes: Vec<VolumeIndex>) -> Self {
        let phase = StopPhase::Next(StopStep::Flush);
        let end = |volume| VolumeEnd { volume, phase, refused: None };
        Self { volumes: volumes.into_iter().map(end).collect() }
    }

    /// A flush or a sync ended.
    pub(super) fn ended(&mut self, own: OwnEnded, now: Micros) {
        let end = self.volumes.iter_mut().find(|end| end.volume == own.volume);
        // A volume that was removed or abandoned meanwhile has no entry.
        let Some(end) = end else { return };
        let StopPhase::UnderWay(work) = end.phase else {
            return debug_assert!(false, "{own:?} of {end:?}");
        };
        end.refused = own.result.err().or(end.refused);
        end.phase = match (work, own.result) {
            (StopStep::Flush, Ok(())) => StopPhase::Next(StopStep::Sync),
            (StopStep::Flush, Err(_)) => StopPhase::Rests(now.later(REST_US)),
            (StopStep::Sync, Ok(())) => StopPhase::Saved,
            (StopStep::Sync, Err(_)) => StopPhase::Lost,
        };
    }

    /// The step to start now, for one volume; `None`: no step is due. `is_dirty` returns whether a
    /// volume has dirty blocks, or `None` if none of its data needs to become durable any more.
    pub(super) fn next(
        &mut self,
        now: Micros,
        is_dirty: impl Fn(VolumeIndex) -> Option<bool>,
    ) -> Option<(VolumeIndex, StopStep)> {
        self.volumes.retain(|end| {
            matches!(end.phase, StopPhase::UnderWay(_)) || is_dirty(end.volume).is_some()
        });
        self.volumes.iter_mut().find_map(|end| {
            let work = match end.phase {
                StopPhase::Next(work) => work,
                StopPhase::Rests(until) if until <= now => StopStep::Flush,
                // A late write, without an asker left, made a block dirty.
                StopPhase::Saved if is_dirty(end.volume) == Some(true) => StopStep::Flush,
                _ => return None,
            };
            end.phase = StopPhase::UnderWay(work);
            Some((end.volume, work))
        })
    }

    /// The time of the next retry, which no event announces.
    pub(super) fn looks_at(&self) -> Option<Micros> {
        let rests = self.volumes.iter().filter_map(|end| match end.phase {
            StopPhase::Rests(until) => Some(until),
            _ => None,
        });
        rests.min()
    }

    /// Whether every volume is safe. `None` while this is unknown for some.
    pub(super) fn outcome(&self) -> Option<bool> {
        let is_over = |end: &VolumeEnd| matches!(end.phase, StopPhase::Saved | StopPhase::Lost);
        let is_saved = |end: &VolumeEnd| end.phase == StopPhase::Saved;
        self.volumes.iter().all(is_over).then(|| self.volumes.iter().all(is_saved))
    }

    /// The volumes that are not safe, and their stores' last errors.
    pub(super) fn unsaved(&self) -> impl Iterator<Item = (VolumeIndex, Option<Errno>)> {
        let unsaved = self.volumes.iter().filter(|end| end.phase != StopPhase::Saved);
        unsaved.map(|end| (end.volume, end.refused))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: VolumeIndex = VolumeIndex(0);
    const B: VolumeIndex = VolumeIndex(3);
    const START: Micros = Micros::new(1_000_000);

    fn clean(_: VolumeIndex) -> Option<bool> {
        Some(false)
    }

    fn end(
        stopping: &mut ShardStopping,
        volume: VolumeIndex,
        result: Result<(), Errno>,
        now: Micros,
    ) {
        stopping.ended(OwnEnded { volume, result }, now);
    }

    fn begun(stopping: &mut ShardStopping, now: Micros) -> Vec<(VolumeIndex, StopStep)> {
        std::iter::from_fn(|| stopping.next(now, clean)).collect()
    }

    #[test]
    fn each_volume_is_flushed_and_synced_regardless_of_the_others() {
        let mut stopping = ShardStopping::new(vec![A, B]);
        assert_eq!(begun(&mut stopping, START), [(A, StopStep::Flush), (B, StopStep::Flush)]);
        end(&mut stopping, B, Ok(()), START);
        assert_eq!(begun(&mut stopping, START), [(B, StopStep::Sync)], "a hangs");
        end(&mut stopping, B, Ok(()), START);
        assert_eq!((begun(&mut stopping, START), stopping.outcome()), (vec![], None));
        assert!(stopping.unsaved().eq([(A, None)]));
        end(&mut stopping, A, Ok(()), START);
        assert_eq!(begun(&mut stopping, START), [(A, StopStep::Sync)]);
        end(&mut stopping, A, Ok(()), START);
        assert_eq!((stopping.outcome(), stopping.unsaved().count()), (Some(true), 0));
    }

    #[test]
    fn a_refused_flush_is_retried_until_it_succeeds() {
        let (mut stopping, mut now) = (ShardStopping::new(vec![A]), START);
        for _ in 0..100 {
            assert_eq!(begun(&mut stopping, now), [(A, StopStep::Flush)]);
            end(&mut stopping, A, Err(Errno::ENOSPC), now);
            assert!(stopping.unsaved().eq([(A, Some(Errno::ENOSPC))]));
            let at = stopping.looks_at().unwrap();
            assert!(at > now && begun(&mut stopping, now).is_empty(), "it rests");
            assert_eq!(stopping.outcome(), None, "it is not given up here");
            now = at;
        }
        assert_eq!(begun(&mut stopping, now), [(A, StopStep::Flush)]);
        end(&mut stopping, A, Ok(()), now);
        assert_eq!(begun(&mut stopping, now), [(A, StopStep::Sync)]);
        end(&mut stopping, A, Ok(()), now);
        assert_eq!((stopping.outcome(), stopping.unsaved().count()), (Some(true), 0));
        assert_eq!(stopping.looks_at(), None);
    }

    #[test]
    fn a_failed_sync_is_a_loss_of_its_volume_alone() {
        let mut stopping = ShardStopping::new(vec![A, B]);
        begun(&mut stopping, START);
        [A, B].into_iter().for_each(|volume| end(&mut stopping, volume, Ok(()), START));
        begun(&mut stopping, START);
        end(&mut stopping, A, Err(Errno::EIO), START);
        end(&mut stopping, B, Ok(()), START);
        assert!(begun(&mut stopping, START.later(10 * REST_US)).is_empty(), "it never comes back");
        assert_eq!(stopping.outcome(), Some(false));
        assert!(stopping.unsaved().eq([(A, Some(Errno::EIO))]));
    }

    #[test]
    fn late_dirty_blocks_are_written_unless_their_volume_is_gone() {
        let mut stopping = ShardStopping::new(vec![A, B]);
        assert_eq!(stopping.next(START, |v| (v == A).then_some(false)), Some((A, StopStep::Flush)));
        end(&mut stopping, A, Ok(()), START);
        assert_eq!(stopping.next(START, clean), Some((A, StopStep::Sync)));
        end(&mut stopping, A, Ok(()), START);
        assert_eq!(stopping.outcome(), Some(true), "nothing is left of the other one");
        assert_eq!(stopping.next(START, |_| Some(true)), Some((A, StopStep::Flush)));
        assert_eq!(stopping.outcome(), None);
        // The volume is abandoned: its flush fails, and no other flush starts.
        end(&mut stopping, A, Err(Errno::ENXIO), START);
        assert_eq!(stopping.next(START.later(REST_US), |_| None), None);
        assert_eq!(stopping.outcome(), Some(true));
    }

    #[test]
    fn the_lists_of_shards_have_one_entry_for_a_volume() {
        let of = |volume, bytes| Unsaved::new(volume, bytes, Some(Errno::ENOSPC));
        let lists = [of(A, 4096), Unsaved::new(B, 0, None), of(A, 8192)];
        assert_eq!(Unsaved::merged(&lists), [of(A, 12288), Unsaved::new(B, 0, None)]);
        assert_eq!(lists[0].cause, "No space left on device (os error 28)");
    }
}
