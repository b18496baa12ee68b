//! The trigger of the kernel's tracing that counts system calls by thread and number.
//!
//! The trigger stays on until it is removed, also when this program is killed. So it is set only
//! with a step in the journal.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

const TRIGGER: &str = "/sys/kernel/tracing/events/raw_syscalls/sys_enter/trigger";
const HISTOGRAM: &str = "/sys/kernel/tracing/events/raw_syscalls/sys_enter/hist";
/// The name tells the trigger from those of other programs.
const WORDS: &str = "hist:keys=common_pid,id:size=4096:name=rblk_bench";

pub(crate) fn exists() -> bool {
    Path::new(TRIGGER).exists()
}

pub(crate) fn set() -> Result<()> {
    write(WORDS)
}

pub(crate) fn remove() -> Result<()> {
    let is_on = fs::read_to_string(TRIGGER).is_ok_and(|text| text.contains("rblk_bench"));
    if is_on { write(&format!("!{WORDS}")) } else { Ok(()) }
}

/// Counts by thread, one for each number of a system call.
pub(crate) fn counts() -> Result<Vec<(u32, u64)>> {
    let text = fs::read_to_string(HISTOGRAM).with_context(|| format!("reading {HISTOGRAM}"))?;
    Ok(parse(&text))
}

fn write(words: &str) -> Result<()> {
    fs::OpenOptions::new()
        .write(true)
        .open(TRIGGER)
        .and_then(|mut file| file.write_all(words.as_bytes()))
        .with_context(|| format!("{TRIGGER}: {words}"))
}

/// Thread and count of lines such as `{ common_pid: 123, id: 1 } hitcount: 10`.
fn parse(histogram: &str) -> Vec<(u32, u64)> {
    let of_line = |line: &str| {
        let line = line.trim().strip_prefix("{ common_pid:")?;
        let (thread, rest) = line.split_once(',')?;
        let count = rest.split_once("hitcount:")?.1;
        Some((thread.trim().parse().ok()?, count.trim().parse().ok()?))
    };
    histogram.lines().filter_map(of_line).collect()
}

#[cfg(test)]
mod tests;
