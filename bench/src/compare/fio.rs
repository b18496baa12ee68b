//! One fio process per sample: its command from a [`Cell`], and its JSON.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::child;
use crate::peer::access::Access;
use crate::result::{Cell, Cpu, Latency, Sample};

/// Seconds that a load runs before it is measured.
pub(crate) const RAMP: u32 = 1;

/// Most time of a load beyond its seconds: fio starts slowly on a guest's shared file system.
pub(super) const LATE: Duration = Duration::from_secs(45);

/// Bins of fio that become one here: 16 are left for each doubling, which is 6 % at most.
const BINS_TOGETHER: u32 = 4;
const FIO_BINS: u32 = 64;

/// The load of a cell on a system: the words after `fio`.
pub(crate) fn words(
    cell: &Cell,
    access: &Access,
    bytes: u64,
    seconds: u32,
    output: &Path,
) -> Vec<String> {
    let mut words = vec![
        format!("--name={}", cell.key),
        format!("--size={bytes}"),
        format!("--rw={}", cell.rw),
        format!("--bs={}", cell.block_bytes),
        format!("--iodepth={}", cell.depth),
        format!("--numjobs={}", cell.jobs),
        format!("--ramp_time={RAMP}"),
        format!("--runtime={seconds}"),
        format!("--output={}", output.display()),
    ];
    let fixed = [
        "--time_based=1",
        "--randrepeat=0",
        "--norandommap=1",
        "--group_reporting=1",
        "--lat_percentiles=1",
        "--clat_percentiles=0",
        "--output-format=json+",
    ];
    words.extend(fixed.map(str::to_owned));
    words.extend(access.words());
    if cell.rw == "randrw" {
        words.push(format!("--rwmixread={}", cell.read_percent));
    }
    words
}

/// Writes a whole disk once, so that it has its memory before the first sample.
pub(crate) fn fill_words(access: &Access, bytes: u64) -> Vec<String> {
    let mut words =
        ["--name=fill", "--rw=write", "--bs=1M", "--iodepth=4"].map(str::to_owned).to_vec();
    words.push(format!("--size={bytes}"));
    words.extend(access.words());
    words
}

pub(crate) fn run(words: &[String], seconds: u32, tag: &str) -> Result<()> {
    let limit = Duration::from_secs(u64::from(seconds + RAMP)) + LATE;
    let mut command = Command::new("fio");
    command.args(words).env(child::TAG, tag).current_dir("/");
    child::output(&mut command, limit).map(drop)
}

pub(crate) fn read(file: &Path) -> Result<Sample> {
    let text = std::fs::read_to_string(file);
    parse(&text.with_context(|| format!("cannot read {}", file.display()))?)
}

#[derive(Deserialize)]
struct Output {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: u64,
    #[serde(default)]
    total_err: u64,
    #[serde(default)]
    usr_cpu: f64,
    #[serde(default)]
    sys_cpu: f64,
    #[serde(default, rename = "job options")]
    options: BTreeMap<String, String>,
    read: Direction,
    write: Direction,
}

#[derive(Deserialize)]
struct Direction {
    io_bytes: u64,
    total_ios: u64,
    runtime: u64,
    lat_ns: LatNs,
}

#[derive(Deserialize)]
struct LatNs {
    #[serde(default)]
    max: u64,
    #[serde(default)]
    mean: f64,
    #[serde(default)]
    bins: BTreeMap<u64, u64>,
}

fn parse(json: &str) -> Result<Sample> {
    // Notes of fio's may come before the document.
    let document = json.find('{').map_or(json, |at| &json[at..]);
    let output: Output = serde_json::from_str(document).context("fio's JSON is not understood")?;
    let Some(job) = output.jobs.first() else { bail!("fio's JSON has no job") };
    let sides = [&job.read, &job.write];
    let ios: u64 = sides.iter().map(|side| side.total_ios).sum();
    let seconds = sides.iter().map(|side| side.runtime).max().unwrap_or(0) as f64 / 1e3;
    if ios == 0 || seconds <= 0.0 {
        bail!("fio measured no I/O (error {})", job.error);
    }
    let mut bins = BTreeMap::new();
    for (nanoseconds, count) in sides.iter().flat_map(|side| &side.lat_ns.bins) {
        *bins.entry(*nanoseconds).or_default() += count;
    }
    let waited: f64 = sides.iter().map(|side| side.lat_ns.mean * side.total_ios as f64).sum();
    let max = sides.iter().map(|side| side.lat_ns.max).max().unwrap_or(0);
    // With jobs as a group fio gives the mean of their processor time.
    let jobs = job.options.get("numjobs").and_then(|jobs| jobs.parse().ok()).unwrap_or(1.0);
    Ok(Sample {
        seconds,
        iops: ios as f64 / seconds,
        bytes_per_s: sides.iter().map(|side| side.io_bytes).sum::<u64>() as f64 / seconds,
        latency: latency(&bins, waited / ios as f64, max),
        errors: job.error + job.total_err,
        cpu: Cpu { fio: (job.usr_cpu + job.sys_cpu) / 100.0 * jobs, ..Cpu::default() },
        ..Sample::default()
    })
}

fn latency(bins: &BTreeMap<u64, u64>, mean_ns: f64, max: u64) -> Latency {
    let total: u64 = bins.values().sum();
    let at = |share: f64| -> u64 {
        let mut left = (total as f64 * share).ceil();
        for (nanoseconds, count) in bins {
            left -= *count as f64;
            if left <= 0.0 {
                return *nanoseconds;
            }
        }
        max
    };
    let mut fewer: BTreeMap<u64, u64> = BTreeMap::new();
    for (nanoseconds, count) in bins {
        *fewer.entry(coarse(*nanoseconds)).or_default() += count;
    }
    Latency {
        mean_ns,
        p50: at(0.50),
        p90: at(0.90),
        p95: at(0.95),
        p99: at(0.99),
        p999: at(0.999),
        p9999: at(0.9999),
        max,
        bins: fewer.into_iter().collect(),
    }
}

/// The upper edge of the wider bin that a latency falls into.
fn coarse(nanoseconds: u64) -> u64 {
    let per_doubling = u64::from(FIO_BINS / BINS_TOGETHER);
    if nanoseconds < per_doubling {
        return nanoseconds;
    }
    let width = 1_u64 << (nanoseconds.ilog2() - per_doubling.ilog2());
    (nanoseconds / width + 1) * width
}

#[cfg(test)]
mod tests;
