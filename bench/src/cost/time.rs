//! Time of each end's engine per I/O, over the in-memory fabric.
//!
//! The turns of both ends are timed, less the calls into the fabric, and less the time of reading
//! the clock; and with these calls, of which the in-memory fabric copies the data. The best of
//! several rounds counts: that of a thread without other work whose memory is in its caches. The
//! result is a bound for a core, not a promise of a device. A cache hit is the target's time on a
//! cached volume less its time on a volume of registered memory.

use std::time::Instant;

use anyhow::{Context, Result};
use rblk_fabric::Transport;
use rblk_rig::inprocess::{EngineTime, Times, time_turns};
use serde::{Deserialize, Serialize};

use super::rig::{self, Plan};
use super::{Case, Op, Report, Volume};

/// Rounds of each case; the best one counts.
const ROUNDS: u32 = 15;
const READINGS: u32 = 100_000;

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct EndTime {
    /// Of the engine; at the target with the cache.
    pub(crate) engine_ns: f64,
    /// Of the engine and its calls into the in-memory fabric.
    pub(crate) with_fabric_ns: f64,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct TimeCost {
    #[serde(flatten)]
    pub(crate) case: Case,
    pub(crate) ios: u64,
    pub(crate) initiator: EndTime,
    pub(crate) target: EndTime,
}

pub(crate) fn measure(plan: &Plan) -> Result<Report> {
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
    // A poller is timed if the flag is set when it is made.
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

    /// The time of a round. Each pair of readings adds one reading to the engine's time and one to
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

/// The time that a hit in the cache adds to a READ of that size and depth, if both were measured.
pub(crate) fn hit_ns(times: &[TimeCost], cached: &TimeCost) -> Option<f64> {
    let Case { op: Op::Read, volume: Volume::Cached, .. } = cached.case else { return None };
    let memory = Case { volume: Volume::Memory, ..cached.case };
    times
        .iter()
        .find(|time| time.case == memory)
        .map(|time| cached.target.engine_ns - time.target.engine_ns)
}

#[cfg(test)]
mod tests;
