//! `iscsi-perf` of libiscsi instead of fio: one process per sample, reads alone, one job.
//!
//! It tells I/Os per second and no latency. With `n` requests outstanding all the time, the mean
//! latency is `n` by the rate (Little's law); percentiles are absent.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::fio::{LATE, Measured, RAMP};
use crate::child;
use crate::peer::tgt::{BLOCK, CLIENT};
use crate::result::{Cell, Latency};

/// Whether the program can do what a cell asks for.
#[must_use]
pub fn can(cell: &Cell) -> bool {
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

/// Runs the load of a cell to its end, and gives what it measured with what it said. Its processes
/// carry `tag`.
///
/// # Errors
/// It is not installed, does not end in time (it is killed then), fails, or measures nothing.
pub fn run(cell: &Cell, url: &str, seconds: u32, tag: &str) -> Result<(Measured, String)> {
    let limit = Duration::from_secs(u64::from(seconds + RAMP)) + LATE;
    let mut command = Command::new("iscsi-perf");
    command.args(words(cell, url, seconds)).env(child::TAG, tag).current_dir("/");
    let said = child::output(&mut command, limit)?;
    Ok((parse(&said, cell, seconds)?, said))
}

/// Its last word, `iops average 21507 (84 MB/s)`, is of the whole time.
fn parse(said: &str, cell: &Cell, seconds: u32) -> Result<Measured> {
    let (_, last) = said.rsplit_once("iops average ").context("iscsi-perf told no rate")?;
    let number = last.split_whitespace().next().unwrap_or_default();
    let iops: f64 = number.parse().with_context(|| format!("`{number}` is no rate"))?;
    ensure!(iops > 0.0, "iscsi-perf measured no I/O");
    let mean_ns = f64::from(cell.depth) / iops * 1e9;
    Ok(Measured {
        seconds: f64::from(seconds + RAMP),
        iops,
        bytes_per_s: iops * cell.block_bytes as f64,
        latency: Latency { mean_ns, ..Latency::default() },
        ..Measured::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(rw: &str, percent: u32) -> Cell {
        Cell::new(rw, 4096, 32, 1, 1, percent)
    }

    #[test]
    fn the_program_is_told_a_cell() {
        let words = words(&cell("randread", 100), "iscsi://x/y/1", 3).join(" ");
        assert!(words.contains("-m 32 -b 8 -t 4 -r iscsi://x/y/1"), "{words}");
        assert!(
            can(&cell("read", 100)) && !can(&cell("randwrite", 0)) && !can(&cell("randrw", 70))
        );
        assert!(!can(&Cell::new("read", 4096, 1, 2, 1, 100)));
    }

    #[test]
    fn its_last_rate_counts() {
        let said = "lba 1, iops current 9 (1 MB/s), iops average 23289 (90 MB/s), in_flight 32\r\
                    iops average 21507 (84 MB/s)        \n\nfinished.\n";
        let measured = parse(said, &cell("randread", 100), 3).unwrap();
        assert!((measured.iops - 21507.0).abs() < 1e-9);
        assert!((measured.latency.mean_ns - 32e9 / 21507.0).abs() < 1.0);
        assert!(parse("iops average 0 (0 MB/s)", &cell("read", 100), 3).is_err());
        assert!(parse("connection refused", &cell("read", 100), 3).is_err());
        assert!(parse("iops average many", &cell("read", 100), 3).is_err());
    }
}
