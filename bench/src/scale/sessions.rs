//! Sessions of one target: memory and time to connect, and whether those that do nothing cost one
//! that does.
//!
//! Each session is a real one, admin connection and one queue, over the software provider in this
//! process; the target is a process of its own, so that its memory is its own.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::Setting;
use super::client::{self, BLOCK, Client};
use super::plot::{Line, plot};
use super::target::{Target, resident};
use crate::interrupt;
use crate::result::{Axis, ScalePlot, Summary, Unit};

/// Descriptors of a session here, at most: two sockets, and what their pollers wait with.
const FILES_PER_SESSION: u64 = 10;
/// Descriptors for everything else.
const FILES: u64 = 200;
/// Bytes of the volume, in the target's memory.
const VOLUME: &str = "v=16MiB";
/// How long the busy session reads at each step.
const READ_TIME: Duration = Duration::from_millis(500);
/// What the target may take to let memory settle.
const SETTLE: Duration = Duration::from_millis(200);

/// Measures up to `most` sessions; gives three plots.
pub(super) fn measure(setting: &Setting, most: u32) -> Result<Vec<ScalePlot>> {
    let most = most.min(raise_files()?);
    let flags = ["--memory", VOLUME, "--arena", "64MiB"].map(str::to_owned);
    let target = setting.target("sessions", &flags, |_| Ok(()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let buffers = client::buffers()?;
    let mut grown = Grown::default();
    let connect = |number| {
        let begin = Instant::now();
        let client = Client::connect(&runtime, &target, "v", number, &buffers)?;
        Ok::<_, anyhow::Error>((client, begin.elapsed()))
    };
    let idle_target = settled(&target)?;
    let idle_here = resident(std::process::id()).unwrap_or(0);
    let mut clients: Vec<Client> = Vec::new();
    for step in steps(most) {
        let mut took = Vec::new();
        while clients.len() < step as usize {
            interrupt::check()?;
            let number = u32::try_from(clients.len()).unwrap_or(u32::MAX);
            let (client, time) = connect(number)
                .with_context(|| format!("session {} of {most}", number.saturating_add(1)))?;
            clients.push(client);
            took.push(time.as_secs_f64() * 1e9);
        }
        let there = settled(&target)?.saturating_sub(idle_target);
        let here = resident(std::process::id()).unwrap_or(0).saturating_sub(idle_here);
        let mut next = (0..).map(|n: u64| n * 7919 % 4096 * BLOCK);
        let busy = clients.first_mut().context("no session")?;
        let latency = busy.queue().latency(READ_TIME, || next.next())?.latency();
        setting.tell(&format!(
            "{step} sessions: {} KiB each at the target, {} KiB here; a read takes {} us",
            (there / u64::from(step)) >> 10,
            (here / u64::from(step)) >> 10,
            latency.p50 / 1000
        ));
        grown.add(step, &took, there, here, &latency);
    }
    let status = target.status()?;
    ensure!(status.sessions.len() >= clients.len(), "the target has lost sessions");
    for client in clients.into_iter().rev() {
        client.leave(&runtime);
    }
    Ok(grown.plots())
}

/// What was seen at each step.
#[derive(Debug, Default)]
struct Grown {
    connect: Line,
    target: Line,
    initiator: Line,
    read: Line,
}

impl Grown {
    #[allow(clippy::cast_precision_loss, reason = "bytes and nanoseconds far below 2^53")]
    fn add(
        &mut self,
        sessions: u32,
        took_ns: &[f64],
        there: u64,
        here: u64,
        latency: &crate::result::Latency,
    ) {
        let x = f64::from(sessions);
        if let Some(took) = Summary::of(took_ns.iter().copied()) {
            self.connect.add(x, took);
        }
        self.target.add_one(x, there as f64);
        self.initiator.add_one(x, here as f64);
        self.read.add_one(x, latency.p50 as f64);
    }

    fn plots(self) -> Vec<ScalePlot> {
        let sessions = || Axis { label: "sessions".to_owned(), unit: Unit::Count, log: true };
        let axis = |label: &str, unit| Axis { label: label.to_owned(), unit, log: true };
        let what = "one admin connection and one queue of 16 commands each, over TCP by the \
                    software provider";
        let mut memory = plot(
            "memory-by-sessions",
            "Memory for sessions",
            sessions(),
            axis("resident memory beyond that without sessions", Unit::Bytes),
            format!("{what}; from 10 sessions on, as the first ones fill what is there already"),
        );
        memory.lines.push(self.target.growth_from("target", 10.0));
        memory.lines.push(self.initiator.growth_from("initiator", 10.0));
        let mut connect = plot(
            "connect-by-sessions",
            "Time of one more session",
            sessions(),
            axis("time to connect, log in, open, and connect a queue", Unit::Nanoseconds),
            format!("{what}; the exponent is that of all of them together"),
        );
        connect.lines.push(self.connect.growth_of_all("median"));
        let mut read = plot(
            "read-by-sessions",
            "A read beside sessions that do nothing",
            sessions(),
            axis("4 KiB read at depth 1, median", Unit::Nanoseconds),
            format!("{what}; all but one of them idle; the exponent is that of one read by each"),
        );
        read.lines.push(self.read.growth_of_all("read"));
        vec![memory, connect, read]
    }
}

/// 1, 3, 10, 30, ... up to `most`, which is the last one.
fn steps(most: u32) -> Vec<u32> {
    super::steps(&[1, 3], most)
}

/// Raises the limit of open files; how many sessions it has room for.
fn raise_files() -> Result<u32> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(u32::try_from(hard.saturating_sub(FILES) / FILES_PER_SESSION).unwrap_or(u32::MAX))
}

fn settled(target: &Target) -> Result<u64> {
    interrupt::sleep(SETTLE)?;
    resident(target.pid()).context("the target is gone")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_grow_to_the_most() {
        assert_eq!(steps(1000), [1, 3, 10, 30, 100, 300, 1000]);
        assert_eq!(steps(50), [1, 3, 10, 30, 50]);
        assert_eq!(steps(1), [1]);
        assert!(steps(0).is_empty());
        assert_eq!(steps(u32::MAX).last(), Some(&u32::MAX));
    }
}
