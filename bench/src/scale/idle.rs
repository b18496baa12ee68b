//! Processor time of mounts without I/O, and of their target, beside processes that only sleep.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::sleepers::Sleepers;
use super::{Setting, front_end};
use crate::compare::probe::Usage;
use crate::interrupt;
use crate::peer::daemon::mount_status;
use crate::peer::rblk::{mount, mount_command};
use crate::peer::undo::Undo;
use crate::result::{Idle, IdleEnd};

const BYTES: u64 = 16 << 20;
/// Time until idle mounts are at rest. The query for the status has a mount take a sample of its
/// rates each second for a minute, and KEEP_ALIVEs are rare after ten seconds without I/O.
const REST: Duration = Duration::from_secs(75);
/// Time until the sleepers have started.
const SETTLE: Duration = Duration::from_secs(2);
/// Time that the sleepers go on longer than they are watched.
const MARGIN: Duration = Duration::from_secs(60);
const GONE: &str = "a daemon is gone";
/// Clock ticks of `/proc/PID/stat` in a second (USER_HZ).
const TICKS: u64 = 100;

/// Mounts `count` volumes of one target, and watches them for `time`.
pub(super) fn measure(setting: &Setting, count: u32, time: Duration) -> Result<Idle> {
    let _module = front_end(setting)?;
    let numbers = 0..count;
    let flags = numbers.clone().flat_map(|n| ["--memory".to_owned(), format!("v{n}={BYTES}")]);
    let target = setting.local_target("volumes", &flags.collect::<Vec<_>>())?;
    let mut mounts: Vec<(Undo, u32)> = Vec::new();
    for number in numbers {
        interrupt::check()?;
        let (run, volume) = (format!("{}-v{number}", std::process::id()), format!("v{number}"));
        let (mut command, undo) =
            mount_command(&setting.journal, &setting.programs, &target, &volume, &run, &[])?;
        // 2 MiB of buffers for each.
        command.args(["--queues", "1", "--queue-depth", "16", "--max-io", "128KiB"]);
        let status = mount(&mut command).with_context(|| format!("mount {}", number + 1))?;
        ensure!(mount_status(&status.name).is_some(), "{} does not answer", status.name);
        mounts.push((undo, status.pid));
    }
    let mounts_of: Vec<u32> = mounts.iter().map(|(_, pid)| *pid).collect();
    let ends = [mounts_of, vec![target.pid()]];
    setting.tell(&format!(
        "{count} volumes with nothing to do, for {} s",
        (REST + 2 * time).as_secs()
    ));
    interrupt::sleep(REST)?;
    let wakes = wakes_in(&ends, time)?;
    let sleepers = [
        Sleepers::start(&setting.journal, count, wakes[0], time + MARGIN)?,
        Sleepers::start(&setting.journal, 1, wakes[1], time + MARGIN)?,
    ];
    let asleep = sleepers.each_ref().map(Sleepers::pids);
    interrupt::sleep(SETTLE)?;
    let (begin, before) = (Instant::now(), used(&ends, &asleep)?);
    interrupt::sleep(time)?;
    let (took, after) = (begin.elapsed(), used(&ends, &asleep)?);
    let percent = |which: usize| {
        100.0 * after[which].saturating_sub(before[which]).as_secs_f64() / took.as_secs_f64()
    };
    let end = |which: usize| IdleEnd {
        percent: percent(which),
        wakes: wakes[which],
        sleepers_percent: percent(ends.len() + which),
    };
    let idle = Idle {
        volumes: count,
        seconds: took.as_secs_f64(),
        initiator: end(0),
        target: end(1),
        place: "over TCP by the software provider, one queue each".to_owned(),
    };
    setting.tell(&format!(
        "idle: {:.2} % of a processor for the mounts, {:.2} % for the target",
        idle.initiator.percent, idle.target.percent
    ));
    Ok(idle)
}

/// Times a second that the threads of each end wake, looked at for `time`.
fn wakes_in(ends: &[Vec<u32>; 2], time: Duration) -> Result<[f64; 2]> {
    let switches = || -> Result<Vec<u64>> {
        let of_end = |end: &Vec<u32>| {
            let each = end.iter().map(|pid| Some(Usage::of(*pid)?.switches));
            each.sum::<Option<u64>>().context(GONE)
        };
        ends.iter().map(of_end).collect()
    };
    let (begin, before) = (Instant::now(), switches()?);
    interrupt::sleep(time)?;
    let (took, after) = (begin.elapsed(), switches()?);
    #[expect(clippy::cast_precision_loss, reason = "switches of a minute are below 2^53")]
    let rate =
        |which: usize| after[which].saturating_sub(before[which]) as f64 / took.as_secs_f64();
    Ok([rate(0), rate(1)])
}

/// Processor time of each end, and then of the sleepers beside it.
fn used(ends: &[Vec<u32>; 2], asleep: &[Vec<u32>; 2]) -> Result<Vec<Duration>> {
    let of = |pids: &Vec<u32>| {
        pids.iter().map(|pid| processor_time(*pid)).sum::<Option<Duration>>().context(GONE)
    };
    ends.iter().chain(asleep).map(of).collect()
}

/// Processor time that a process has used.
fn processor_time(pid: u32) -> Option<Duration> {
    processor_time_in(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn processor_time_in(stat: &str) -> Option<Duration> {
    // The name may hold any character, so fields are counted from its end.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut words = rest.split_whitespace().skip(11);
    let user: u64 = words.next()?.parse().ok()?;
    let system: u64 = words.next()?.parse().ok()?;
    Some(Duration::from_millis((user + system) * 1000 / TICKS))
}

#[cfg(test)]
mod tests;
