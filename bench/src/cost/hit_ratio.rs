//! The part of the blocks that reads find in a small cache, for several patterns of access.
//!
//! The requests run through the engines of both ends, so the cache is the target's own: its policy,
//! its memory, and the requests under way that take a part of it.

use anyhow::Result;
use rblk_rig::seed::Random;
use serde::{Deserialize, Serialize};

use super::small_cache::{Request, Setting, SmallCache};
use super::{Op, Volume};

const SMALL: u32 = 4 << 10;
const LARGE: u32 = 128 << 10;
const ARENA_BYTES: usize = 16 << 20;

/// The hits of one pattern.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct HitRatio {
    pub(crate) pattern: String,
    pub(crate) volume: Volume,
    /// The volume is as many times as large as the cache.
    pub(crate) part: usize,
    /// Blocks that reads found, of all that they looked for.
    pub(crate) hits: f64,
}

/// Which requests come.
#[derive(Clone, Copy, Debug)]
enum Pattern {
    /// Popular blocks of 4 KiB: the share of the n-th is n to the power of minus this exponent.
    /// Writes of a hundred.
    Zipf(f64, u32),
    /// The same, in requests of 128 KiB.
    ZipfLarge(f64, u32),
    /// The same, of any length between 4 KiB and 256 KiB, from any block.
    ZipfMixed(f64, u32),
    /// Popular blocks of 4 KiB, and a backup that reads the volume in requests of 128 KiB. So many
    /// small requests for a large one.
    Backup(f64, u64),
    /// Popular blocks of 4 KiB, and large writes of a log that is never read.
    Log(f64, u64),
    /// The same blocks round and round, in requests of so many bytes: so many hundredths of the
    /// cache.
    Loop(u32, u64),
    /// Half popular blocks, read in 4 KiB, half popular ranges, read in 128 KiB, of the same
    /// volume; writes of a hundred, of 4 KiB.
    Both(f64, u32),
}

impl Pattern {
    fn name(self) -> String {
        match self {
            Self::Zipf(exponent, writes) => format!("4 KiB, Zipf {exponent}, {writes} % writes"),
            Self::ZipfLarge(exponent, writes) => {
                format!("128 KiB, Zipf {exponent}, {writes} % writes")
            }
            Self::ZipfMixed(exponent, writes) => {
                format!("4 to 256 KiB, Zipf {exponent}, {writes} % writes")
            }
            Self::Backup(exponent, each) => format!("Zipf {exponent}, 1 of {each} a backup's"),
            Self::Log(exponent, each) => format!("Zipf {exponent}, 1 of {each} a log's"),
            Self::Loop(bytes, hundredths) => {
                format!("loop of {hundredths} % by {} KiB", bytes >> 10)
            }
            Self::Both(exponent, writes) => {
                format!("4 and 128 KiB, Zipf {exponent}, {writes} % writes")
            }
        }
    }
}

/// All patterns: the cache is a sixteenth of the volume.
const PATTERNS: [Pattern; 20] = [
    Pattern::Zipf(0.8, 0),
    Pattern::Zipf(1.0, 0),
    Pattern::Zipf(1.2, 0),
    Pattern::Zipf(0.8, 30),
    Pattern::Zipf(1.0, 30),
    Pattern::Zipf(1.2, 50),
    Pattern::ZipfLarge(0.8, 0),
    Pattern::ZipfLarge(1.0, 30),
    Pattern::ZipfLarge(1.2, 30),
    Pattern::ZipfMixed(0.8, 30),
    Pattern::ZipfMixed(1.0, 30),
    Pattern::Backup(0.8, 33),
    Pattern::Backup(1.0, 9),
    Pattern::Log(0.8, 33),
    Pattern::Log(1.0, 9),
    Pattern::Loop(SMALL, 80),
    Pattern::Loop(SMALL, 120),
    Pattern::Loop(LARGE, 80),
    Pattern::Both(0.8, 20),
    Pattern::Both(1.0, 20),
];

/// Measures all patterns in both cache modes.
pub(crate) fn measure(seed: u64) -> Result<Vec<HitRatio>> {
    let mut ratios = Vec::new();
    for pattern in PATTERNS {
        for volume in [Volume::Cached, Volume::WriteBack] {
            ratios.push(measure_one(pattern, volume, 16, seed)?);
        }
    }
    Ok(ratios)
}

#[expect(clippy::cast_precision_loss, reason = "counts of a run are far below 2^53")]
fn measure_one(pattern: Pattern, volume: Volume, part: usize, seed: u64) -> Result<HitRatio> {
    let setting = Setting { volume, groups: 1, arena_bytes: ARENA_BYTES, part, seed };
    let mut cache = SmallCache::new(setting)?;
    let mut requests = Requests::new(pattern, cache.volume_bytes());
    let blocks = (ARENA_BYTES / SMALL as usize) as u64;
    // As many blocks of requests as fill the cache sixteen times, and then as many that count.
    let count = 16 * blocks / requests.blocks_each();
    cache.drive(count, |random| requests.next(random))?;
    let before = cache.counts().target;
    cache.drive(count, |random| requests.next(random))?;
    let after = cache.counts().target;
    let hits = (after.cache_hits - before.cache_hits) as f64;
    let misses = (after.cache_misses - before.cache_misses) as f64;
    Ok(HitRatio { pattern: pattern.name(), volume, part, hits: hits / (hits + misses) })
}

struct Requests {
    pattern: Pattern,
    volume_bytes: u64,
    popular: Popular,
    number: u64,
}

impl Requests {
    fn new(pattern: Pattern, volume_bytes: u64) -> Self {
        let (exponent, unit) = match pattern {
            Pattern::ZipfLarge(exponent, _) => (exponent, LARGE),
            Pattern::Zipf(exponent, _)
            | Pattern::ZipfMixed(exponent, _)
            | Pattern::Backup(exponent, _)
            | Pattern::Log(exponent, _)
            | Pattern::Both(exponent, _) => (exponent, SMALL),
            Pattern::Loop(bytes, _) => (1.0, bytes),
        };
        let popular = Popular::new(exponent, volume_bytes / u64::from(unit));
        Self { pattern, volume_bytes, popular, number: 0 }
    }

    /// Blocks of a request, about.
    fn blocks_each(&self) -> u64 {
        match self.pattern {
            Pattern::Zipf(..) => 1,
            Pattern::ZipfLarge(..) | Pattern::Loop(LARGE, _) => 32,
            Pattern::Loop(..) => 1,
            Pattern::ZipfMixed(..) => 16,
            Pattern::Backup(_, each) | Pattern::Log(_, each) => 1 + 32 / each,
            Pattern::Both(..) => 8,
        }
    }

    fn next(&mut self, random: &mut Random) -> Request {
        self.number += 1;
        let (small, large) = (u64::from(SMALL), u64::from(LARGE));
        let one_of = |writes: u32, random: &mut Random| match random.chance(10 * writes) {
            true => Op::Write,
            false => Op::Read,
        };
        let stream = |number: u64| number * large % (self.volume_bytes - large);
        match self.pattern {
            Pattern::Zipf(_, writes) => Request {
                op: one_of(writes, random),
                offset: self.popular.one(random) * small,
                bytes: SMALL,
            },
            Pattern::ZipfLarge(_, writes) => Request {
                op: one_of(writes, random),
                offset: self.popular.one(random) * large,
                bytes: LARGE,
            },
            Pattern::ZipfMixed(_, writes) => {
                let bytes = SMALL << random.below(7);
                let offset = self.popular.one(random) * small;
                let last = self.volume_bytes - u64::from(bytes);
                // No request crosses a stripe.
                let fits = (offset % (1 << 20) + u64::from(bytes)) <= 1 << 20;
                let offset = if fits { offset } else { offset / (1 << 20) * (1 << 20) };
                Request { op: one_of(writes, random), offset: offset.min(last), bytes }
            }
            Pattern::Backup(_, each) if self.number.is_multiple_of(each) => {
                Request { op: Op::Read, offset: stream(self.number / each), bytes: LARGE }
            }
            Pattern::Log(_, each) if self.number.is_multiple_of(each) => {
                Request { op: Op::Write, offset: stream(self.number / each), bytes: LARGE }
            }
            Pattern::Backup(..) | Pattern::Log(..) => Request {
                op: one_of(20, random),
                offset: self.popular.one(random) * small,
                bytes: SMALL,
            },
            Pattern::Loop(bytes, hundredths) => {
                let len = ARENA_BYTES as u64 * hundredths / 100 / large * large;
                Request { op: Op::Read, offset: self.number * u64::from(bytes) % len, bytes }
            }
            Pattern::Both(_, writes) => {
                let offset = self.popular.one(random) * small;
                match one_of(writes, random) {
                    Op::Write => Request { op: Op::Write, offset, bytes: SMALL },
                    Op::Read if random.chance(200) => {
                        Request { op: Op::Read, offset: offset / large * large, bytes: LARGE }
                    }
                    Op::Read => Request { op: Op::Read, offset, bytes: SMALL },
                }
            }
        }
    }
}

/// Numbers of unequal popularity, by the law of Zipf.
struct Popular {
    // The sum of the shares up to each rank.
    sums: Vec<f64>,
    // The number of each rank.
    numbers: Vec<u32>,
}

impl Popular {
    #[expect(clippy::cast_precision_loss, reason = "ranks are far below 2^53")]
    #[expect(clippy::cast_possible_truncation, reason = "a volume of some hundred thousand blocks")]
    fn new(exponent: f64, count: u64) -> Self {
        let mut sum = 0.0;
        let share = |rank: u64| {
            sum += ((rank + 1) as f64).powf(-exponent);
            sum
        };
        let sums = (0..count).map(share).collect();
        let mut numbers: Vec<_> = (0..count as u32).collect();
        let mut random = Random::new(count);
        for at in (1..numbers.len()).rev() {
            numbers.swap(at, random.index(at + 1));
        }
        Self { sums, numbers }
    }

    #[expect(clippy::cast_precision_loss, reason = "53 bits are as many as a number has")]
    fn one(&self, random: &mut Random) -> u64 {
        let all = self.sums.last().copied().unwrap_or_default();
        let point = (random.bits() >> 11) as f64 / (1u64 << 53) as f64 * all;
        let rank = self.sums.partition_point(|sum| *sum <= point);
        self.numbers[rank.min(self.numbers.len() - 1)].into()
    }
}
