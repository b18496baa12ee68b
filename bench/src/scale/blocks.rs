//! Latency of a read against the size of the file behind the volume, and of the cache before it;
//! hits and misses apart.
//!
//! A hit is a block that was read shortly before; a miss one that never was. Whether they were is
//! not assumed: the target's counters are looked at, and a part that is not what it should be is an
//! error.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Setting;
use super::client::{self, BLOCK, Client, IO_MAX};
use super::plot::{Line, plot};
use super::target::Target;
use crate::result::{Axis, ScalePlot, Summary, Unit};

/// Smallest file, and arena beside files.
const FILE_LEAST: u64 = 64 << 20;
/// Smallest arena.
const ARENA_LEAST: u64 = 8 << 20;
/// The file beside arenas.
const FILE_BESIDE_ARENAS: u64 = 4 << 30;
/// Part of an arena that is read for hits, at most so many bytes: all of that has to be read in
/// first.
const HOT_PART: u64 = 4;
const HOT_MOST: u64 = 128 << 20;
/// Blocks between two that are read one after the other: odd, so that every block has its turn, and
/// far enough apart that neither the kernel nor the target reads ahead.
const STRIDE: u64 = 6151;
/// Turns of hits and misses in each round, so that what else this machine does is in both.
const TURNS: u32 = 3;
/// Part of reads that have to be what they should be.
const MOSTLY: f64 = 0.95;

/// Measures files up to `largest` bytes, with an arena of 64 MiB.
pub(super) fn by_file(setting: &Setting, largest: u64) -> Result<ScalePlot> {
    let mut pair = Pair::default();
    for bytes in sizes(FILE_LEAST, largest) {
        pair.measure(setting, "file", bytes, bytes, FILE_LEAST)?;
    }
    Ok(pair.plot(
        "latency-by-file-size",
        "A read against the size of the file",
        "size of the file",
        "a sparse file behind an arena of 64 MiB".to_owned(),
    ))
}

/// Measures arenas up to `largest` bytes, before a file of 4 GiB.
pub(super) fn by_arena(setting: &Setting, largest: u64) -> Result<ScalePlot> {
    let mut pair = Pair::default();
    for arena in sizes(ARENA_LEAST, largest) {
        pair.measure(setting, "arena", arena, FILE_BESIDE_ARENAS, arena)?;
    }
    Ok(pair.plot(
        "latency-by-arena",
        "A read against the size of the cache",
        "size of the arena",
        "a sparse file of 4 GiB; hits are in a quarter of the arena, at most 128 MiB".to_owned(),
    ))
}

/// The smallest, each four times the one before, and the largest.
fn sizes(least: u64, largest: u64) -> Vec<u64> {
    let mut sizes: Vec<u64> = std::iter::successors(Some(least), |size| size.checked_mul(4))
        .take_while(|size| *size <= largest)
        .collect();
    if sizes.last().is_some_and(|last| *last != largest) {
        sizes.push(largest);
    }
    sizes
}

/// Hits and misses.
#[derive(Debug, Default)]
struct Pair {
    hits: Line,
    misses: Line,
}

impl Pair {
    fn measure(
        &mut self,
        setting: &Setting,
        name: &str,
        x: u64,
        file: u64,
        arena: u64,
    ) -> Result<()> {
        let flags = [
            "--file".to_owned(),
            "v={dir}/volume".to_owned(),
            "--arena".to_owned(),
            arena.to_string(),
            "--poll-groups".to_owned(),
            "1".to_owned(),
        ];
        let target = setting.target(&format!("{name}-{}", x >> 20), &flags, |dir| {
            let made = std::fs::File::create(dir.join("volume")).and_then(|f| f.set_len(file));
            made.context("cannot make the file")
        })?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let buffers = client::buffers()?;
        let mut client = Client::connect(&runtime, &target, "v", 0, &buffers)?;
        let hot = (arena / HOT_PART).clamp(u64::from(IO_MAX), HOT_MOST).min(file / 2);
        let (mut hits, mut misses) = (Vec::new(), Vec::new());
        // Where misses go on, from turn to turn: each block once, behind the hot ones.
        let cold = (file - hot) / BLOCK;
        let mut at = 0_u64;
        let time = setting.time / TURNS;
        for turn in 0..setting.rounds * TURNS {
            for offset in (0..hot).step_by(IO_MAX as usize) {
                client.queue().read(offset, u64::from(IO_MAX))?;
            }
            let mut number = 0_u64;
            let hit = Self::part(&target, &mut client, time, 1.0, || {
                number += STRIDE;
                Some(number % (hot / BLOCK) * BLOCK)
            })
            .with_context(|| format!("hits, turn {}", turn + 1))?;
            hits.push(hit);
            let miss = Self::part(&target, &mut client, time, 0.0, || {
                at += 1;
                (at < cold).then(|| hot + at * (STRIDE % cold) % cold * BLOCK)
            })
            .with_context(|| format!("misses, turn {}", turn + 1))?;
            misses.push(miss);
        }
        client.leave(&runtime);
        setting.tell(&format!(
            "{} MiB of {name}: a hit takes {:.1} us, a miss {:.1} us",
            x >> 20,
            Summary::of(hits.iter().copied()).map_or(0.0, |s| s.median / 1e3),
            Summary::of(misses.iter().copied()).map_or(0.0, |s| s.median / 1e3),
        ));
        #[allow(clippy::cast_precision_loss, reason = "sizes far below 2^53")]
        let x = x as f64;
        for (line, values) in [(&mut self.hits, hits), (&mut self.misses, misses)] {
            if let Some(of) = Summary::of(values) {
                line.add(x, of);
            }
        }
        Ok(())
    }

    /// The median of reads of which a part of `wanted` has to be hits.
    #[allow(clippy::cast_precision_loss, reason = "counts and nanoseconds far below 2^53")]
    fn part(
        target: &Target,
        client: &mut Client,
        time: Duration,
        wanted: f64,
        next: impl FnMut() -> Option<u64>,
    ) -> Result<f64> {
        let before = target.status()?.total;
        let histogram = client.queue().latency(time, next)?;
        let after = target.status()?.total;
        let hits = after.cache_hits.saturating_sub(before.cache_hits) as f64;
        let misses = after.cache_misses.saturating_sub(before.cache_misses) as f64;
        let part = hits / (hits + misses).max(1.0);
        ensure!(
            (part - wanted).abs() <= 1.0 - MOSTLY,
            "{:.0} of 100 reads were hits instead of {:.0}",
            part * 100.0,
            wanted * 100.0
        );
        Ok(histogram.latency().p50 as f64)
    }

    fn plot(self, key: &str, title: &str, x: &str, note: String) -> ScalePlot {
        let axis = |label: &str, unit| Axis { label: label.to_owned(), unit, log: true };
        let y = axis("4 KiB read at depth 1, median", Unit::Nanoseconds);
        let note = format!("{note}; no block device; the exponent is that of reading all of it");
        let mut plot = plot(key, title, axis(x, Unit::Bytes), y, note);
        plot.lines.push(self.hits.growth_of_all("hit"));
        plot.lines.push(self.misses.growth_of_all("miss"));
        plot
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_grow_to_the_largest() {
        assert_eq!(sizes(64, 4096), [64, 256, 1024, 4096]);
        assert_eq!(sizes(64, 1000), [64, 256, 1000]);
        assert!(sizes(64, 63).is_empty());
        assert_eq!(sizes(1, u64::MAX).last(), Some(&u64::MAX));
    }
}
