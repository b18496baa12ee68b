//! Processor time of mounts without I/O, and of their target.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{Setting, front_end};
use crate::interrupt;
use crate::peer::daemon::mount_status;
use crate::peer::rblk::{mount, mount_command};
use crate::peer::undo::Undo;
use crate::result::Idle;

const BYTES: u64 = 16 << 20;
/// Time until idle mounts are at rest: from there on KEEP_ALIVEs are rare.
const REST: Duration = Duration::from_secs(15);
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
    setting.tell(&format!("{count} volumes with nothing to do, for {} s", time.as_secs()));
    let used = || -> Result<(Duration, Duration)> {
        let gone = "a daemon is gone";
        let each = mounts.iter().map(|(_, pid)| processor_time(*pid).context(gone));
        Ok((each.sum::<Result<Duration>>()?, processor_time(target.pid()).context(gone)?))
    };
    interrupt::sleep(REST)?;
    let (begin, before) = (Instant::now(), used()?);
    interrupt::sleep(time)?;
    let (took, after) = (begin.elapsed(), used()?);
    let percent = |before: Duration, after: Duration| {
        100.0 * after.saturating_sub(before).as_secs_f64() / took.as_secs_f64()
    };
    let idle = Idle {
        volumes: count,
        seconds: took.as_secs_f64(),
        initiator_percent: percent(before.0, after.0),
        target_percent: percent(before.1, after.1),
        place: "over TCP by the software provider, one queue each".to_owned(),
    };
    setting.tell(&format!(
        "idle: {:.2} % of a processor for the mounts, {:.2} % for the target",
        idle.initiator_percent, idle.target_percent
    ));
    Ok(idle)
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
