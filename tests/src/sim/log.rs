//! [`Log`]: the last events of a simulation, to understand a failure.

use std::collections::VecDeque;
use std::fmt;

/// The number of events kept.
const KEPT: usize = 250;

/// The last events of a run, by step.
#[derive(Debug, Default)]
pub struct Log {
    events: VecDeque<(u64, &'static str, [u64; 3])>,
    step: u64,
    hash: u64,
    aloud: bool,
}

impl Log {
    /// An empty log. With `RBLK_LOG=1` it also prints each event at once.
    #[must_use]
    pub fn new() -> Self {
        let aloud = std::env::var("RBLK_LOG").is_ok_and(|value| value == "1");
        Self { aloud, ..Self::default() }
    }

    /// Sets the step of the next events.
    pub fn at(&mut self, step: u64) {
        self.step = step;
    }

    /// Adds an event. The numbers identify its objects.
    pub fn add(&mut self, what: &'static str, numbers: [u64; 3]) {
        if self.aloud {
            let [a, b, c] = numbers;
            eprintln!("{:>8}  {what} {a} {b} {c}", self.step);
        }
        if self.events.len() == KEPT {
            self.events.pop_front();
        }
        self.events.push_back((self.step, what, numbers));
        let mut hash = self.hash ^ self.step;
        for byte in what.bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        for number in numbers {
            hash = (hash ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        }
        self.hash = hash;
    }

    /// A hash of all events: equal for equal runs.
    #[must_use]
    pub fn hash(&self) -> u64 {
        self.hash
    }
}

impl fmt::Display for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (step, what, [a, b, c]) in &self.events {
            writeln!(f, "{step:>8}  {what} {a} {b} {c}")?;
        }
        Ok(())
    }
}
