//! Time of each end's engine per I/O, over the in-memory fabric, and what a core could do with it.
//!
//! The turns of both ends are timed, less the calls into the fabric, and less what reading the
//! clock takes; and with these calls, of which the in-memory fabric copies the data. It is the time
//! of a thread that has nothing else to do and whose memory is in its caches: the best of several
//! rounds. It is a bound for a core, not a promise of a device. A cache hit is the target's time on
//! a cached volume less its time on a volume of registered memory.

use std::time::Instant;

use anyhow::{Context, Result};
use rblk_fabric::Transport;
use rblk_rig::inprocess::{EngineTime, Times, time_turns};
use serde::{Deserialize, Serialize};

use super::rig::{self, Plan};
use super::{Case, Op, Report, Volume};

/// Rounds of each case; the best one counts.
const ROUNDS: u32 = 15;
/// Readings of the clock, to know what one takes.
const READINGS: u32 = 100_000;

/// Nanoseconds of one end per I/O.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct EndTime {
    /// Of the engine; at the target with the cache.
    pub engine_ns: f64,
    /// The same, with its calls into the in-memory fabric.
    pub with_fabric_ns: f64,
}

/// Time of both ends per I/O.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct TimeCost {
    /// Which I/O.
    #[serde(flatten)]
    pub case: Case,
    /// I/Os of a round.
    pub ios: u64,
    /// The initiator.
    pub initiator: EndTime,
    /// The target.
    pub target: EndTime,
}

/// Measures every case of a plan.
///
/// # Errors
/// The sizes do not fit each other, or the I/O does not end.
pub fn measure(plan: &Plan) -> Result<Report> {
    let reading_ns = reading_ns();
    let mut times = Vec::new();
    for case in plan.cases() {
        times.push(measure_one(plan, case, reading_ns).with_context(|| case.to_string())?);
    }
    Ok(Report {
        transport: Transport::SoftMemory.to_string(),
        queue_depth: plan.queue_depth,
        immediates: plan.immediates,
        in_capsule_bytes: plan.in_capsule_bytes,
        times,
        ..Report::default()
    })
}

fn measure_one(plan: &Plan, case: Case, reading_ns: f64) -> Result<TimeCost> {
    // Where a poller is made says whether it is timed.
    time_turns(true);
    let warm = rig::warm(plan, case);
    let best = warm.and_then(|(mut rig, queue)| {
        let mut best = (EndTime::WORST, EndTime::WORST);
        for _ in 0..ROUNDS {
            let before = rig.times();
            rig::run(&mut rig, queue, case, plan.ios)?;
            let Times { initiator, target } = rig.times();
            let of = |after, before| EndTime::of(after, before, plan.ios, reading_ns);
            best.0 = best.0.min(of(initiator, before.initiator));
            best.1 = best.1.min(of(target, before.target));
        }
        Ok(best)
    });
    time_turns(false);
    let (initiator, target) = best?;
    Ok(TimeCost { case, ios: plan.ios, initiator, target })
}

impl EndTime {
    const WORST: Self = Self { engine_ns: f64::MAX, with_fabric_ns: f64::MAX };

    /// What a round took. Each pair of readings adds one reading to the engine's time and one to
    /// that of the fabric.
    #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a round are far below 2^53")]
    fn of(after: EngineTime, before: EngineTime, ios: u64, reading_ns: f64) -> Self {
        let readings = (after.readings - before.readings) as f64 * reading_ns;
        let engine = (after.ns - before.ns) as f64 - readings;
        let fabric = (after.below_ns - before.below_ns) as f64 - readings;
        let ios = ios as f64;
        Self { engine_ns: engine / ios, with_fabric_ns: (engine + fabric.max(0.0)) / ios }
    }

    fn min(self, other: Self) -> Self {
        Self {
            engine_ns: self.engine_ns.min(other.engine_ns),
            with_fabric_ns: self.with_fabric_ns.min(other.with_fabric_ns),
        }
    }
}

/// What a reading of the clock takes.
fn reading_ns() -> f64 {
    let once = || {
        let begun = Instant::now();
        for _ in 0..READINGS {
            std::hint::black_box(Instant::now());
        }
        begun.elapsed().as_secs_f64() * 1e9 / f64::from(READINGS)
    };
    (0..ROUNDS).map(|_| once()).fold(f64::MAX, f64::min)
}

/// What a hit in the cache adds to a READ of that size and depth, if both were measured.
#[must_use]
pub fn hit_ns(times: &[TimeCost], cached: &TimeCost) -> Option<f64> {
    let Case { op: Op::Read, volume: Volume::Cached, .. } = cached.case else { return None };
    let memory = Case { volume: Volume::Memory, ..cached.case };
    times
        .iter()
        .find(|time| time.case == memory)
        .map(|time| cached.target.engine_ns - time.target.engine_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hit_is_what_the_cache_adds_to_a_read() {
        let case = Case { op: Op::Read, bytes: 4096, depth: 32, volume: Volume::Memory };
        let end = |engine_ns| EndTime { engine_ns, with_fabric_ns: engine_ns };
        let time = |case, ns| TimeCost { case, ios: 1, initiator: end(1.0), target: end(ns) };
        let memory = time(case, 100.0);
        let cached = time(Case { volume: Volume::Cached, ..case }, 140.0);
        assert_eq!(hit_ns(&[memory, cached], &cached), Some(40.0));
        assert_eq!(hit_ns(&[cached], &cached), None);
        assert_eq!(hit_ns(&[memory, cached], &memory), None);
    }

    #[test]
    fn readings_of_the_clock_are_taken_off() {
        let at = |ns, below_ns, readings| EngineTime { ns, below_ns, readings };
        let time = EndTime::of(at(2100, 1000, 4), at(100, 0, 0), 10, 50.0);
        assert!((time.engine_ns - 180.0).abs() < 1e-9);
        assert!((time.with_fabric_ns - 260.0).abs() < 1e-9);
    }
}
