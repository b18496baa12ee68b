//! `iscsi-perf` of libiscsi instead of fio: one process per sample, reads alone, one job.
//!
//! The program prints I/Os per second and no latency. With `n` requests outstanding all the time,
//! the mean latency is `n` by the rate (Little's law); percentiles are absent.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::fio::{LATE, RAMP};
use crate::child;
use crate::peer::server::{ISCSI_BLOCK as BLOCK, ISCSI_CLIENT as CLIENT};
use crate::result::{Cell, Latency, Sample};

pub(crate) fn can(cell: &Cell) -> bool {
    cell.read_percent == 100 && cell.jobs == 1 && cell.block_bytes.is_multiple_of(BLOCK)
}

/// The load of a cell on a LUN: the words after `iscsi-perf`.
fn words(cell: &Cell, url: &str, seconds: u32) -> Vec<String> {
    let numbers = [
        ("-m", u64::from(cell.depth)),
        ("-b", cell.block_bytes / BLOCK),
        ("-t", u64::from(seconds + RAMP)),
    ];
    let mut words = vec!["-i".to_owned(), CLIENT.to_owned()];
    words.extend(
        numbers.into_iter().flat_map(|(word, number)| [word.to_owned(), number.to_string()]),
    );
    if cell.rw == "randread" {
        words.push("-r".to_owned());
    }
    words.push(url.to_owned());
    words
}

/// Runs the load of a cell to its end. Returns the numbers and the output.
pub(crate) fn run(cell: &Cell, url: &str, seconds: u32, tag: &str) -> Result<(Sample, String)> {
    let limit = Duration::from_secs(u64::from(seconds + RAMP)) + LATE;
    let mut command = Command::new("iscsi-perf");
    command.args(words(cell, url, seconds)).env(child::TAG, tag).current_dir("/");
    let said = child::output(&mut command, limit)?;
    Ok((parse(&said, cell, seconds)?, said))
}

/// The last `iops average 21507 (84 MB/s)` is of the whole time.
fn parse(said: &str, cell: &Cell, seconds: u32) -> Result<Sample> {
    let (_, last) = said.rsplit_once("iops average ").context("iscsi-perf told no rate")?;
    let number = last.split_whitespace().next().unwrap_or_default();
    let iops: f64 = number.parse().with_context(|| format!("`{number}` is no rate"))?;
    ensure!(iops > 0.0, "iscsi-perf measured no I/O");
    let mean_ns = f64::from(cell.depth) / iops * 1e9;
    Ok(Sample {
        seconds: f64::from(seconds + RAMP),
        iops,
        bytes_per_s: iops * cell.block_bytes as f64,
        latency: Latency { mean_ns, ..Latency::default() },
        ..Sample::default()
    })
}

#[cfg(test)]
mod tests;
