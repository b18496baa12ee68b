//! The cost of the CRC-32C of some bytes on this CPU: instructions by single steps, and time beside
//! that of `memcpy`.

use std::hint::black_box;
use std::process::Command;
use std::time::Instant;

use anyhow::Result;
use clap::ValueEnum;
use rblk_protocol::digest::crc32c;
use serde::{Deserialize, Serialize};

use super::steps;

/// The default sizes: a response, a command, a block of 512 bytes, a block of 4 KiB, and a large
/// request.
pub(super) const SIZES: [u32; 5] = [16, 64, 512, 4 << 10, 128 << 10];
/// Rounds, of which the best counts: the others were disturbed.
const ROUNDS: u32 = 50;
/// Bytes of a round, so that reading the clock is nothing beside it.
const ROUND_BYTES: u32 = 4 << 20;

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct CrcCost {
    pub(crate) bytes: u32,
    /// Instructions of one call, from its first to its return.
    pub(crate) instructions: u64,
    /// Nanoseconds of one call, the data in the CPU's cache.
    pub(crate) nanoseconds: f64,
    pub(crate) memcpy_nanoseconds: f64,
}

pub(super) fn measure(sizes: &[u32]) -> Result<Vec<CrcCost>> {
    sizes.iter().map(|bytes| of(*bytes)).collect()
}

fn of(bytes: u32) -> Result<CrcCost> {
    let data = data(bytes)?;
    let mut copy = data.clone();
    Ok(CrcCost {
        bytes,
        instructions: instructions(bytes)?,
        nanoseconds: best(bytes, || {
            black_box(crc32c(black_box(&data)));
        }),
        memcpy_nanoseconds: best(bytes, || black_box(&mut copy).copy_from_slice(black_box(&data))),
    })
}

fn best(bytes: u32, mut once: impl FnMut()) -> f64 {
    let calls = (ROUND_BYTES / bytes.max(1)).clamp(1, 1 << 14);
    let round = |_| {
        let begin = Instant::now();
        (0..calls).for_each(|_| once());
        begin.elapsed().as_secs_f64() * 1e9 / f64::from(calls)
    };
    (0..ROUNDS).map(round).fold(f64::MAX, f64::min)
}

/// The instructions of one call, without the loop around it.
pub(super) fn instructions(bytes: u32) -> Result<u64> {
    let of = |calls: u32, what: Called| {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["cost", &format!("--crc-calls={calls}"), &format!("--sizes={bytes}")]);
        command.arg(format!("--crc-called={}", super::word(&what)));
        steps::count(&mut command)
    };
    let one = |what: Called| Ok::<_, anyhow::Error>(of(2, what)?.saturating_sub(of(1, what)?));
    Ok((one(Called::Crc)? + NOTHING).saturating_sub(one(Called::Nothing)?))
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Called {
    Crc,
    /// A function that does nothing, which takes as many instructions as the loop, and [`NOTHING`].
    Nothing,
}

/// Instructions of [`nothing`]: one for the value, and the return.
const NOTHING: u64 = 2;

#[inline(never)]
fn nothing(_bytes: &[u8]) -> u32 {
    0
}

/// In the child: so many calls under single steps.
pub(super) fn calls(bytes: u32, calls: u32, called: Called) -> Result<()> {
    let data = data(bytes)?;
    let function = black_box(match called {
        Called::Crc => crc32c,
        Called::Nothing => nothing,
    });
    // The look at the CPU comes before the count.
    black_box(crc32c(black_box(&data)));
    steps::under_steps(|| {
        for _ in 0..black_box(calls) {
            black_box(function(black_box(&data)));
        }
    })
}

fn data(bytes: u32) -> Result<Vec<u8>> {
    Ok(vec![0x5a; usize::try_from(bytes)?])
}

#[cfg(test)]
mod tests;
