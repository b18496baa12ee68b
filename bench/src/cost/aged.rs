//! Large requests in a cache that is full of small blocks: the target's RDMA READs and WRITEs, and
//! its store operations.
//!
//! The cache is a sixteenth of the volume. Requests of 128 KiB are counted in a fresh cache, and
//! again after random reads and writes of 4 KiB, half of them of a part of the volume as large as
//! the cache, so that blocks are hit and fill the main queue. The last rows count reads of 128 KiB
//! that find all their blocks in the cache, where these blocks came one by one.

use anyhow::Result;
use clap::ValueEnum;
use rblk_rig::seed::Random;
use serde::{Deserialize, Serialize};

use super::small_cache::{Request, Setting, SmallCache, SmallCounts};
use super::{Op, Volume};

const SMALL: u32 = 4 << 10;
const LARGE: u32 = 128 << 10;
const ARENA_BYTES: usize = 8 << 20;
const PART: usize = 16;

/// The requests that were sent before the counted ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Past {
    /// Requests of 128 KiB only.
    Large,
    /// Random reads of 4 KiB.
    SmallReads,
    /// Random writes of 4 KiB.
    SmallWrites,
    /// Random reads and writes of 4 KiB.
    SmallMixed,
    /// Reads of 4 KiB of each block that the counted requests read.
    SameBlocks,
}

/// The cost of one request of 128 KiB, on average.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct AgedCost {
    /// The cache mode.
    pub volume: Volume,
    /// Poll groups of the target.
    pub groups: usize,
    /// The requests before.
    pub after: Past,
    /// The counted request.
    pub request: Op,
    /// RDMA READs.
    pub reads: f64,
    /// RDMA WRITEs.
    pub writes: f64,
    /// Reads and writes of the store, write-backs too.
    pub store_ops: f64,
    /// Runs of memory of one operation of the store.
    pub store_pieces: f64,
    /// Blocks that were copied to other memory of the cache.
    pub moved: f64,
}

/// Measures all cases.
///
/// # Errors
/// A request failed.
pub fn measure(seed: u64) -> Result<Vec<AgedCost>> {
    let mut costs = Vec::new();
    for volume in [Volume::Cached, Volume::WriteBack] {
        for groups in [1, 3] {
            costs.extend(measure_one(volume, groups, seed)?);
        }
    }
    Ok(costs)
}

/// Measures one cache mode with one number of poll groups.
///
/// # Errors
/// A request failed.
pub fn measure_one(volume: Volume, groups: usize, seed: u64) -> Result<Vec<AgedCost>> {
    let setting = Setting { volume, groups, arena_bytes: ARENA_BYTES, part: PART, seed };
    let mut cache = SmallCache::new(setting)?;
    let blocks = (ARENA_BYTES * groups) as u64 / u64::from(SMALL);
    let mut costs = Vec::new();
    for after in [Past::Large, Past::SmallReads, Past::SmallWrites, Past::SmallMixed] {
        age(&mut cache, after, 8 * blocks)?;
        for request in [Op::Write, Op::Read] {
            let count = 2 * blocks * u64::from(SMALL) / u64::from(LARGE);
            let units = cache.volume_bytes() / u64::from(LARGE);
            let next = |random: &mut Random| Request {
                op: request,
                offset: random.below(units) * u64::from(LARGE),
                bytes: LARGE,
            };
            let before = cache.counts();
            cache.drive(count, next)?;
            let cost = AgedCost { volume, groups, after, request, ..AgedCost::NONE };
            costs.push(cost.of(count, &before, &cache.counts()));
        }
    }
    costs.push(hits(&mut cache, AgedCost { volume, groups, ..AgedCost::NONE })?);
    Ok(costs)
}

// Fills the cache with small blocks.
fn age(cache: &mut SmallCache, past: Past, count: u64) -> Result<()> {
    let all = cache.volume_bytes() / u64::from(SMALL);
    let hot = all / PART as u64;
    let next = |random: &mut Random| {
        let op = match past {
            Past::SmallReads => Op::Read,
            Past::SmallWrites => Op::Write,
            _ => [Op::Read, Op::Write][random.index(2)],
        };
        // Every sixteenth block is one of the hot ones, so they are no neighbours.
        let block = match random.chance(500) {
            true => random.below(hot) * PART as u64,
            false => random.below(all),
        };
        Request { op, offset: block * u64::from(SMALL), bytes: SMALL }
    };
    if past == Past::Large { Ok(()) } else { cache.drive(count, next) }
}

// Large reads of blocks that came one by one.
fn hits(cache: &mut SmallCache, cost: AgedCost) -> Result<AgedCost> {
    let (small, large) = (u64::from(SMALL), u64::from(LARGE));
    let hot = cache.volume_bytes() / PART as u64 / 8 / large * large;
    for _ in 0..4 {
        cache.drive(4 * hot / small, |random| Request {
            op: Op::Read,
            offset: random.below(hot / small) * small,
            bytes: SMALL,
        })?;
    }
    let count = 16 * hot / large;
    let before = cache.counts();
    cache.drive(count, |random| Request {
        op: Op::Read,
        offset: random.below(hot / large) * large,
        bytes: LARGE,
    })?;
    let cost = AgedCost { after: Past::SameBlocks, request: Op::Read, ..cost };
    Ok(cost.of(count, &before, &cache.counts()))
}

impl AgedCost {
    const NONE: Self = Self {
        volume: Volume::Cached,
        groups: 0,
        after: Past::Large,
        request: Op::Read,
        reads: 0.0,
        writes: 0.0,
        store_ops: 0.0,
        store_pieces: 0.0,
        moved: 0.0,
    };

    #[expect(clippy::cast_precision_loss, reason = "counts of a run are far below 2^53")]
    fn of(self, count: u64, before: &SmallCounts, after: &SmallCounts) -> Self {
        let each = |after: u64, before: u64| (after - before) as f64 / count as f64;
        let writes = |of: &SmallCounts| of.target.rdma_writes + of.target.rdma_writes_with_imm;
        let ops = each(after.store.ops, before.store.ops);
        let pieces = each(after.store.pieces, before.store.pieces);
        Self {
            reads: each(after.target.rdma_reads, before.target.rdma_reads),
            writes: each(writes(after), writes(before)),
            store_ops: ops,
            store_pieces: if ops > 0.0 { pieces / ops } else { 0.0 },
            moved: each(after.target.cache_moved, before.target.cache_moved),
            ..self
        }
    }
}
