//! Tests that leave themselves out: libtest calls them `ok`, as they returned. [`LeftOut`] knows
//! them by the line that each prints, and which of them ran in the lab after all.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// What every test prints that `RBLK_SKIP_LAB`, `RBLK_SKIP_RDMA` or `RBLK_SKIP_ROOT` lets go.
const WORDS: &str = "skipped, as RBLK_SKIP_";

/// Tests that left themselves out on this machine, and tests that ran in the lab, by name. Names of
/// different test binaries are not told apart.
#[derive(Debug, Default)]
pub(crate) struct LeftOut {
    here: BTreeSet<String>,
    in_lab: BTreeSet<String>,
}

impl LeftOut {
    /// One that ran in the lab.
    pub(crate) fn ran_in_lab(&mut self, name: &str) {
        self.in_lab.insert(name.to_owned());
    }

    /// How many left themselves out on this machine.
    pub(crate) fn here(&self) -> u64 {
        self.here.len() as u64
    }

    /// Those that ran nowhere.
    pub(crate) fn nowhere(&self) -> impl Iterator<Item = &str> {
        self.here.difference(&self.in_lab).map(String::as_str)
    }
}

/// Passes the output of `cargo test -- --show-output` on, without what tests printed that passed,
/// and notes those of them that left themselves out.
#[derive(Debug)]
pub(crate) struct Passed<W: Write> {
    to: W,
    line: Vec<u8>,
    // Amid what passed tests printed, and whose it is.
    is_inside: bool,
    name: Option<String>,
    left_out: Arc<Mutex<LeftOut>>,
}

impl<W: Write> Passed<W> {
    /// Passes on to `to`.
    pub(crate) fn new(to: W, left_out: Arc<Mutex<LeftOut>>) -> Self {
        Self { to, line: Vec::new(), is_inside: false, name: None, left_out }
    }

    fn end_line(&mut self) -> io::Result<()> {
        let bytes = std::mem::take(&mut self.line);
        let text = String::from_utf8_lossy(&bytes);
        let text = text.trim_end();
        if text == "successes:" {
            self.is_inside = true;
        } else if text == "failures:" || text.starts_with("test result: ") {
            self.is_inside = false;
        }
        if !self.is_inside {
            return self.to.write_all(&bytes);
        }
        if let Some(name) = header(text) {
            self.name = Some(name.to_owned());
        } else if text.contains(WORDS)
            && let Some(name) = self.name.take()
        {
            self.left_out.lock().unwrap_or_else(PoisonError::into_inner).here.insert(name);
        }
        Ok(())
    }
}

/// The name of a test in the line before its output.
fn header(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

impl<W: Write> Write for Passed<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") {
                self.end_line()?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

impl<W: Write> Drop for Passed<W> {
    fn drop(&mut self) {
        if !self.line.is_empty() {
            // Nobody is left who could be told.
            let _ = self.end_line();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
running 4 tests
test far::a ... ok
test b ... ok
test c ... FAILED
test d ... ok

successes:

---- far::a stdout ----
far::a: skipped, as RBLK_SKIP_LAB=1 asks: no ublk
far::a: skipped, as RBLK_SKIP_LAB=1 asks: once more

---- b stdout ----
nothing to say

---- d stdout ----
skipped, as RBLK_SKIP_ROOT=1 asks: no root


successes:
    far::a
    b
    d

failures:

---- c stdout ----
it says: skipped, as RBLK_SKIP_LAB=1 asks

failures:
    c

test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out
the end";

    #[test]
    fn who_left_itself_out_is_noted_and_what_passed_is_not_shown() {
        for cut in 1..OUTPUT.len() {
            let left_out = Arc::new(Mutex::new(LeftOut::default()));
            let mut shown = Vec::new();
            let mut passed = Passed::new(&mut shown, Arc::clone(&left_out));
            OUTPUT.as_bytes().chunks(cut).for_each(|part| passed.write_all(part).unwrap());
            drop(passed);
            let (begin, rest) = OUTPUT.split_once("successes:").unwrap();
            let (_, end) = rest.split_once("failures:").unwrap();
            assert_eq!(
                String::from_utf8(shown).unwrap(),
                format!("{begin}failures:{end}"),
                "{cut}"
            );
            let mut left_out = left_out.lock().unwrap();
            assert_eq!(left_out.here(), 2, "not the one that failed: {left_out:?}");
            left_out.ran_in_lab("far::a");
            left_out.ran_in_lab("of_another_kernel");
            assert_eq!(left_out.nowhere().collect::<Vec<_>>(), ["d"]);
        }
    }
}
