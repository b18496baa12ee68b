//! [`Sleepers`]: processes that wake as often as others and do nothing, to measure idle ones by.

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::child;
use crate::peer::undo::{Journal, Step, Undo};

/// Processes that sleep. Dropped, they are gone.
#[derive(Debug)]
pub(super) struct Sleepers {
    children: Vec<Child>,
    _undo: Undo,
}

impl Sleepers {
    /// Starts `count` processes that wake `wakes` times a second, all together, for at most `time`.
    pub(super) fn start(journal: &Journal, count: u32, wakes: f64, time: Duration) -> Result<Self> {
        let tag = format!("{}-sleepers-{count}", std::process::id());
        let undo = journal.note(Step::Processes { tag: tag.clone() })?;
        let program = std::env::current_exe().context("cannot find this program")?;
        // An end that never woke is compared to processes that sleep all the time.
        let period = Duration::try_from_secs_f64(f64::from(count) / wakes).unwrap_or(time);
        let sleeper = |number: u32| {
            let mut command = Command::new(&program);
            command.arg("sleeper").env(child::TAG, &tag);
            // They begin one after the other, as mounts do.
            for part in [period * number / count.max(1), period, time] {
                command.arg(part.as_millis().to_string());
            }
            child::spawn(&mut command)
        };
        let mut sleepers = Self { children: Vec::new(), _undo: undo };
        for number in 0..count {
            sleepers.children.push(sleeper(number)?);
        }
        Ok(sleepers)
    }

    pub(super) fn pids(&self) -> Vec<u32> {
        self.children.iter().map(Child::id).collect()
    }
}

impl Drop for Sleepers {
    fn drop(&mut self) {
        for child in &mut self.children {
            child::end(child);
        }
    }
}

/// Sleeps for `first`, and then `period` after `period`, until `time` is over.
pub(crate) fn sleep(first: Duration, period: Duration, time: Duration) {
    let end = Instant::now() + time;
    std::thread::sleep(first);
    while Instant::now() < end {
        std::thread::sleep(period);
    }
}
