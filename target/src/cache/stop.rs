//! [`ShardStopping`]: how far the end of a shard is. Pure.
//!
//! A shard that stops flushes its volumes and then syncs their stores, each volume for itself: a
//! store that hangs or refuses says nothing about the others. What a store refuses is tried again,
//! for as long as the shard lives: who stops it decides how long that is. A sync that failed is not
//! tried again. The kernel may have dropped what it covered, and reports that once.

use std::io;

use nix::errno::Errno;
use rblk_fabric::Micros;

use super::answers::OwnEnded;
use crate::volume::ids::VolumeIndex;

/// Wait before a refused flush is tried again, in microseconds.
const REST_US: u64 = 500_000;

/// A volume of which something that was acknowledged is not safe in its store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Unsaved {
    /// The volume.
    pub volume: VolumeIndex,
    /// Bytes that are in memory alone. 0: all were written, and could not be made durable.
    pub dirty_bytes: u64,
    /// What its store said, with the errno; or that it did not answer.
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

    /// One entry for each volume, of the lists of several shards.
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

/// What the end of a volume needs next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    /// Hand what is dirty to its store.
    Flush,
    /// Make durable what its store has.
    Sync,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StopPhase {
    // To be begun.
    Next(Work),
    UnderWay(Work),
    // Its flush was refused. It is tried again at that time.
    Rests(Micros),
    Saved,
    // Its sync failed.
    Lost,
}

#[derive(Clone, Copy, Debug)]
struct VolumeEnd {
    volume: VolumeIndex,
    phase: StopPhase,
    // What its store said last, if that was a refusal.
    refused: Option<Errno>,
}

/// How far the end of a shard is.
#[derive(Debug)]
pub(super) struct ShardStopping {
    volumes: Vec<VolumeEnd>,
}

impl ShardStopping {
    /// The end of a shard with these volumes.
    pub(super) fn new(volumes: Vec<VolumeIndex>) -> Self {
        let phase = StopPhase::Next(Work::Flush);
        let end = |volume| VolumeEnd { volume, phase, refused: None };
        Self { volumes: volumes.into_iter().map(end).collect() }
    }

    /// A flush or a sync has ended.
    pub(super) fn ended(&mut self, own: OwnEnded, now: Micros) {
        let end = self.volumes.iter_mut().find(|end| end.volume == own.volume);
        // A volume that was removed or given up meanwhile has none.
        let Some(end) = end else { return };
        let StopPhase::UnderWay(work) = end.phase else {
            return debug_assert!(false, "{own:?} of {end:?}");
        };
        end.refused = own.result.err().or(end.refused);
        end.phase = match (work, own.result) {
            (Work::Flush, Ok(())) => StopPhase::Next(Work::Sync),
            (Work::Flush, Err(_)) => StopPhase::Rests(now.later(REST_US)),
            (Work::Sync, Ok(())) => StopPhase::Saved,
            (Work::Sync, Err(_)) => StopPhase::Lost,
        };
    }

    /// What is to be begun now, for one volume; none: nothing. `is_dirty` says whether a volume has
    /// dirty blocks; none: there is nothing of it to make durable any more.
    pub(super) fn next(
        &mut self,
        now: Micros,
        is_dirty: impl Fn(VolumeIndex) -> Option<bool>,
    ) -> Option<(VolumeIndex, Work)> {
        self.volumes.retain(|end| {
            matches!(end.phase, StopPhase::UnderWay(_)) || is_dirty(end.volume).is_some()
        });
        self.volumes.iter_mut().find_map(|end| {
            let work = match end.phase {
                StopPhase::Next(work) => work,
                StopPhase::Rests(until) if until <= now => Work::Flush,
                // By a write that nobody is told of any more.
                StopPhase::Saved if is_dirty(end.volume) == Some(true) => Work::Flush,
                _ => return None,
            };
            end.phase = StopPhase::UnderWay(work);
            Some((end.volume, work))
        })
    }

    /// When [`Self::next`] has something to begin that nothing else calls for.
    pub(super) fn looks_at(&self) -> Option<Micros> {
        let rests = self.volumes.iter().filter_map(|end| match end.phase {
            StopPhase::Rests(until) => Some(until),
            _ => None,
        });
        rests.min()
    }

    /// Whether every volume is safe. `None`: that is not known of some.
    pub(super) fn outcome(&self) -> Option<bool> {
        let is_over = |end: &VolumeEnd| matches!(end.phase, StopPhase::Saved | StopPhase::Lost);
        let is_saved = |end: &VolumeEnd| end.phase == StopPhase::Saved;
        self.volumes.iter().all(is_over).then(|| self.volumes.iter().all(is_saved))
    }

    /// The volumes that are not safe, and what their stores said.
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

    fn begun(stopping: &mut ShardStopping, now: Micros) -> Vec<(VolumeIndex, Work)> {
        std::iter::from_fn(|| stopping.next(now, clean)).collect()
    }

    #[test]
    fn each_volume_is_flushed_and_then_synced_whatever_the_others_do() {
        let mut stopping = ShardStopping::new(vec![A, B]);
        assert_eq!(begun(&mut stopping, START), [(A, Work::Flush), (B, Work::Flush)]);
        end(&mut stopping, B, Ok(()), START);
        assert_eq!(begun(&mut stopping, START), [(B, Work::Sync)], "a hangs");
        end(&mut stopping, B, Ok(()), START);
        assert_eq!((begun(&mut stopping, START), stopping.outcome()), (vec![], None));
        assert!(stopping.unsaved().eq([(A, None)]));
        end(&mut stopping, A, Ok(()), START);
        assert_eq!(begun(&mut stopping, START), [(A, Work::Sync)]);
        end(&mut stopping, A, Ok(()), START);
        assert_eq!((stopping.outcome(), stopping.unsaved().count()), (Some(true), 0));
    }

    #[test]
    fn a_refused_flush_is_tried_again_until_it_is_taken() {
        let (mut stopping, mut now) = (ShardStopping::new(vec![A]), START);
        for _ in 0..100 {
            assert_eq!(begun(&mut stopping, now), [(A, Work::Flush)]);
            end(&mut stopping, A, Err(Errno::ENOSPC), now);
            assert!(stopping.unsaved().eq([(A, Some(Errno::ENOSPC))]));
            let at = stopping.looks_at().unwrap();
            assert!(at > now && begun(&mut stopping, now).is_empty(), "it rests");
            assert_eq!(stopping.outcome(), None, "it is not given up here");
            now = at;
        }
        assert_eq!(begun(&mut stopping, now), [(A, Work::Flush)]);
        end(&mut stopping, A, Ok(()), now);
        assert_eq!(begun(&mut stopping, now), [(A, Work::Sync)]);
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
    fn what_gets_dirty_late_is_written_too_and_what_is_gone_is_not() {
        let mut stopping = ShardStopping::new(vec![A, B]);
        assert_eq!(stopping.next(START, |v| (v == A).then_some(false)), Some((A, Work::Flush)));
        end(&mut stopping, A, Ok(()), START);
        assert_eq!(stopping.next(START, clean), Some((A, Work::Sync)));
        end(&mut stopping, A, Ok(()), START);
        assert_eq!(stopping.outcome(), Some(true), "nothing is left of the other one");
        assert_eq!(stopping.next(START, |_| Some(true)), Some((A, Work::Flush)));
        assert_eq!(stopping.outcome(), None);
        // It is given up: its flush fails, and nobody begins another one.
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
