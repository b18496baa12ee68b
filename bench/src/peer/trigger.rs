//! The trigger of the kernel's tracing that counts system calls by thread and number.
//!
//! The trigger stays on until it is removed, also when this program is killed. So it is set only
//! with a step in the journal.

use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

/// The file that the trigger is written to.
const TRIGGER: &str = "/sys/kernel/tracing/events/raw_syscalls/sys_enter/trigger";
/// The file with the counts.
const HISTOGRAM: &str = "/sys/kernel/tracing/events/raw_syscalls/sys_enter/hist";
/// The trigger's words. Its name tells it from other people's triggers.
const WORDS: &str = "hist:keys=common_pid,id:size=4096:name=rblk_bench";

/// Whether this kernel has triggers for system calls.
#[must_use]
pub fn exists() -> bool {
    Path::new(TRIGGER).exists()
}

/// Begins to count.
///
/// # Errors
/// The kernel refuses.
pub fn set() -> Result<()> {
    write(WORDS)
}

/// Ends counting, if it was begun.
///
/// # Errors
/// The kernel still counts.
pub fn remove() -> Result<()> {
    let is_on = fs::read_to_string(TRIGGER).is_ok_and(|text| text.contains("rblk_bench"));
    if is_on { write(&format!("!{WORDS}")) } else { Ok(()) }
}

/// Threads and counts so far, one for each number of a system call.
///
/// # Errors
/// They cannot be read.
pub fn counts() -> Result<Vec<(u32, u64)>> {
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
mod tests {
    use super::*;

    #[test]
    fn the_histogram_is_read() {
        let text = "# event histogram\n#\n# trigger info: hist:keys=common_pid,id:vals=hitcount\n\n\
                    { common_pid:        123, id:          1 } hitcount:         10\n\
                    { common_pid:        123, id:        426 } hitcount:          5\n\
                    { common_pid:       2437, id:         24 } hitcount:          7\n\n\
                    Totals:\n    Hits: 22\n    Entries: 3\n    Dropped: 0\n";
        assert_eq!(parse(text), [(123, 10), (123, 5), (2437, 7)]);
    }
}
