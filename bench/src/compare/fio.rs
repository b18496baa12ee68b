//! One fio process per sample: its command from a [`Cell`], and what its JSON says.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::child;
use crate::peer::access::Access;
use crate::result::{Cell, Latency};

/// Seconds that a load runs before it is measured.
pub const RAMP: u32 = 1;

/// A load may take so much longer than it should: it starts slowly on a guest's shared file system,
/// and many jobs end one after the other.
pub(super) const LATE: Duration = Duration::from_secs(45);

/// Bins of fio that become one here: 16 are left for each doubling, which is 6 % at most.
const BINS_TOGETHER: u32 = 4;
/// fio's own bins for each doubling.
const FIO_BINS: u32 = 64;

/// What one run of fio measured.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Measured {
    /// How long.
    pub seconds: f64,
    /// I/Os per second.
    pub iops: f64,
    /// Bytes per second.
    pub bytes_per_s: f64,
    /// From submission to completion.
    pub latency: Latency,
    /// I/Os that failed.
    pub errors: u64,
    /// Processors that fio kept busy.
    pub cpu: f64,
}

/// The load of a cell on a system: the words after `fio`.
#[must_use]
pub fn words(cell: &Cell, access: &Access, bytes: u64, seconds: u32, output: &Path) -> Vec<String> {
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

/// Writes a whole disk once: memory is given to it by that, on every system, and not while it is
/// measured.
#[must_use]
pub fn fill_words(access: &Access, bytes: u64) -> Vec<String> {
    let mut words =
        ["--name=fill", "--rw=write", "--bs=1M", "--iodepth=4"].map(str::to_owned).to_vec();
    words.push(format!("--size={bytes}"));
    words.extend(access.words());
    words
}

/// Runs fio to its end. Its processes carry `tag`.
///
/// # Errors
/// It is not installed, does not end in time (it is killed then), or fails.
pub fn run(words: &[String], seconds: u32, tag: &str) -> Result<()> {
    let limit = Duration::from_secs(u64::from(seconds + RAMP)) + LATE;
    let mut command = Command::new("fio");
    command.args(words).env(child::TAG, tag).current_dir("/");
    child::output(&mut command, limit).map(drop)
}

/// Reads what fio wrote.
///
/// # Errors
/// It is not fio's JSON, or fio measured nothing.
pub fn read(file: &Path) -> Result<Measured> {
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
    /// Milliseconds.
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

fn parse(json: &str) -> Result<Measured> {
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
    Ok(Measured {
        seconds,
        iops: ios as f64 / seconds,
        bytes_per_s: sides.iter().map(|side| side.io_bytes).sum::<u64>() as f64 / seconds,
        latency: latency(&bins, waited / ios as f64, max),
        errors: job.error + job.total_err,
        cpu: (job.usr_cpu + job.sys_cpu) / 100.0 * jobs,
    })
}

/// Percentiles of fio's own bins, and fewer bins.
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
mod tests {
    use super::*;

    const SIDE: &str =
        r#"{"io_bytes":0,"total_ios":0,"runtime":0,"lat_ns":{"min":0,"max":0,"mean":0.0}}"#;

    #[test]
    fn both_directions_count() {
        let json = r#"note: both iodepth >= 1
{"fio version":"fio-3.33","jobs":[{"jobname":"x","error":0,"total_err":0,"usr_cpu":10.0,"sys_cpu":15.0,
 "job options":{"numjobs":"2"},
 "read":{"io_bytes":4096000,"total_ios":1000,"runtime":2000,"lat_ns":{"max":9000,"mean":1000.0,
  "bins":{"1000":990,"8000":10}}},
 "write":{"io_bytes":4096000,"total_ios":1000,"runtime":2000,"lat_ns":{"max":5000,"mean":3000.0,
  "bins":{"3000":1000}}}}]}"#;
        let measured = parse(json).unwrap();
        assert!((measured.iops - 1000.0).abs() < 1e-9 && (measured.cpu - 0.5).abs() < 1e-9);
        assert!((measured.bytes_per_s - 4_096_000.0).abs() < 1e-6);
        let latency = &measured.latency;
        assert!((latency.mean_ns - 2000.0).abs() < 1e-9);
        assert_eq!((latency.p50, latency.p99, latency.p999, latency.max), (3000, 3000, 8000, 9000));
        assert_eq!(latency.bins.iter().map(|(_, count)| count).sum::<u64>(), 2000);
    }

    #[test]
    fn a_run_that_measured_nothing_is_an_error() {
        let json = format!(r#"{{"jobs":[{{"error":5,"read":{SIDE},"write":{SIDE}}}]}}"#);
        assert!(parse(&json).unwrap_err().to_string().contains("error 5"));
        assert!(parse("fio: nothing").is_err());
        assert!(parse(r#"{"jobs":[]}"#).is_err());
    }

    #[test]
    fn bins_become_fewer_and_stay_near() {
        for nanoseconds in [0_u64, 1, 15, 16, 17, 100, 12_345, 387_072, 1 << 40] {
            let near = coarse(nanoseconds);
            assert!(
                near >= nanoseconds && (near - nanoseconds) * 16 <= nanoseconds.max(16),
                "{nanoseconds}: {near}"
            );
        }
        assert_eq!((coarse(1024), coarse(1087), coarse(1088)), (1088, 1088, 1152));
    }

    #[test]
    fn a_mix_says_its_share() {
        let cell = Cell::new("randrw", 4096, 32, 1, 1, 70);
        let words = words(&cell, &Access::Disk("/dev/x".into()), 1 << 20, 4, Path::new("/o"));
        for word in ["--rw=randrw", "--rwmixread=70", "--bs=4096", "--runtime=4", "--size=1048576"]
        {
            assert!(words.iter().any(|w| w == word), "{word}");
        }
    }
}
