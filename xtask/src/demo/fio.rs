//! Runs of fio on a block device, and what its JSON says.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::process;

/// Seconds of a timed run.
const SECONDS: u64 = 4;

/// A run that takes so much longer than it should is stuck.
const LIMIT: Duration = Duration::from_secs(120);

/// Bytes that the verifying run writes and reads back.
const VERIFIED: u64 = 64 << 20;

/// One run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job {
    /// For the table.
    pub(crate) name: &'static str,
    options: &'static [&'static str],
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Writes, reads back, and compares.
    Verify,
    /// As much as it can for [`SECONDS`].
    Timed,
}

/// Everything that is run, in order.
pub(crate) const JOBS: &[Job] = &[
    Job {
        name: "fio verify crc32c 4k-1M QD32",
        options: &["--rw=randwrite", "--bsrange=4k-1M", "--iodepth=32"],
        kind: Kind::Verify,
    },
    timed("fio randread 4k QD1", &["--rw=randread", "--bs=4k", "--iodepth=1"]),
    timed("fio randread 4k QD32", &["--rw=randread", "--bs=4k", "--iodepth=32"]),
    timed("fio randwrite 4k QD32", &["--rw=randwrite", "--bs=4k", "--iodepth=32"]),
    timed("fio read 128k QD16", &["--rw=read", "--bs=128k", "--iodepth=16"]),
    timed("fio write 128k QD16", &["--rw=write", "--bs=128k", "--iodepth=16"]),
];

const fn timed(name: &'static str, options: &'static [&'static str]) -> Job {
    Job { name, options, kind: Kind::Timed }
}

/// What a run did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Outcome {
    /// Data per second; for a verifying run of its writes and reads together.
    pub(crate) mib_per_s: f64,
    /// I/Os per second.
    pub(crate) iops: f64,
    /// Mean latency in microseconds.
    pub(crate) mean_us: f64,
    /// Errors that fio counted.
    pub(crate) errors: u64,
}

impl Job {
    /// Runs fio; a mismatch or an error of fio's is an error here.
    pub(crate) fn run(&self, device: &Path, work: &Path) -> Result<Outcome> {
        let file = work.join("fio.json");
        let mut command = Command::new("fio");
        command.args(["--name=demo", "--direct=1", "--ioengine=libaio", "--randrepeat=0"]);
        command.args(["--output-format=json", "--output"]).arg(&file);
        command.arg(format!("--filename={}", device.display())).args(self.options);
        match self.kind {
            Kind::Verify => {
                command.args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1"]);
                command.args(["--verify_state_save=0", &format!("--size={VERIFIED}")]);
            }
            Kind::Timed => {
                command.args(["--time_based=1", &format!("--runtime={SECONDS}")]);
            }
        }
        process::output(command.current_dir(work), LIMIT)?;
        let json = std::fs::read_to_string(&file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        parse(&json)
    }
}

#[derive(Deserialize)]
struct Output {
    jobs: Vec<OneJob>,
}

#[derive(Deserialize)]
struct OneJob {
    error: u64,
    #[serde(default)]
    total_err: u64,
    read: Direction,
    write: Direction,
}

#[derive(Deserialize)]
struct Direction {
    io_bytes: u64,
    total_ios: u64,
    /// Milliseconds.
    runtime: u64,
    lat_ns: Latency,
}

#[derive(Deserialize)]
struct Latency {
    mean: f64,
}

fn parse(json: &str) -> Result<Outcome> {
    // Notes of fio's may come before the document.
    let document = json.find('{').map_or(json, |at| &json[at..]);
    let output: Output = serde_json::from_str(document).context("fio's JSON is not understood")?;
    let job = output.jobs.first().context("fio's JSON has no job")?;
    let both = [&job.read, &job.write];
    let sum = |of: fn(&Direction) -> u64| both.iter().map(|&side| of(side)).sum::<u64>() as f64;
    let seconds = sum(|side| side.runtime) / 1e3;
    let ios = sum(|side| side.total_ios);
    let waited: f64 = both.iter().map(|side| side.lat_ns.mean * side.total_ios as f64).sum();
    let per = |value: f64, by: f64| if by > 0.0 { value / by } else { 0.0 };
    Ok(Outcome {
        mib_per_s: per(sum(|side| side.io_bytes) / f64::from(1 << 20), seconds),
        iops: per(ios, seconds),
        mean_us: per(waited, ios) / 1e3,
        errors: job.error + job.total_err,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_directions_count() {
        let json = r#"note: both iodepth >= 1
{"fio version":"fio-3.33","jobs":[{"jobname":"demo","error":0,"total_err":0,
 "read":{"io_bytes":67108864,"total_ios":100,"runtime":1000,"lat_ns":{"mean":1000.0}},
 "write":{"io_bytes":67108864,"total_ios":300,"runtime":3000,"lat_ns":{"mean":3000.0}}}]}"#;
        let outcome = parse(json).unwrap();
        assert_eq!(outcome, Outcome { mib_per_s: 32.0, iops: 100.0, mean_us: 2.5, errors: 0 });
    }

    #[test]
    fn a_run_without_io_is_zero() {
        let side = r#"{"io_bytes":0,"total_ios":0,"runtime":0,"lat_ns":{"mean":0.0}}"#;
        let json = format!(r#"{{"jobs":[{{"error":5,"read":{side},"write":{side}}}]}}"#);
        assert_eq!(
            parse(&json).unwrap(),
            Outcome { mib_per_s: 0.0, iops: 0.0, mean_us: 0.0, errors: 5 }
        );
        assert!(parse("fio: nothing").is_err());
    }
}
