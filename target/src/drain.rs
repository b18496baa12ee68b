//! `rblk-target drain`: begins a drain, and polls until the target's process is gone.

use std::path::Path;
use std::time::{Duration, Instant};

use rblk_config::Exit;
use rblk_target::args::Output;
use rblk_target::control::socket::{Ask, Response, ask};
use rblk_target::control::status::{DrainStatus, TargetStatus};
use serde::Serialize;

use crate::{no_answer, table};

/// How often to look.
const STEP: Duration = Duration::from_millis(200);
/// What a target may take beyond the time of its drain: dead connections end in 5 s, and dirty
/// blocks are written to the stores in 30 s, or given up.
const MARGIN: Duration = Duration::from_secs(45);

/// The outcome, in JSON.
#[derive(Serialize)]
struct Outcome {
    /// The target's process.
    pid: u32,
    /// It is gone.
    stopped: bool,
    /// How long this took, in milliseconds.
    took_ms: u64,
    /// Sessions that had not left when last seen.
    sessions: usize,
}

/// A process. Another process with the same number later is not the same one.
struct Process {
    pid: u32,
    // In the ticks of /proc; `None` where it cannot be seen, such as from another PID namespace.
    started: Option<u64>,
}

impl Process {
    fn of(pid: u32) -> Self {
        Self { pid, started: look_at(pid) }
    }

    /// Whether it has ended. Always false where it cannot be seen.
    fn is_gone(&self) -> bool {
        self.started.is_some() && look_at(self.pid) != self.started
    }

    fn can_be_seen(&self) -> bool {
        self.started.is_some()
    }
}

/// When a process that has not ended was started.
fn look_at(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; the state is the field behind it, the start the
    // 20th.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Asks the target at that socket to drain; waits for its end if `wait`.
pub(crate) fn drain(path: &Path, wait: bool, output: Output) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(path, wait, output))
}

async fn run(path: &Path, wait: bool, output: Output) -> anyhow::Result<Exit> {
    let begun = Instant::now();
    let before = match status(path).await {
        Ok(status) => status?,
        Err(error) => return Ok(no_answer(path, &error)),
    };
    for fault in before.volumes.iter().filter_map(table::store_fault) {
        eprintln!("WARN  {fault}");
    }
    let process = Process::of(before.pid);
    match ask(path, Ask::Drain).await {
        Ok(Response::Error(error)) => anyhow::bail!(error),
        Ok(_) => {}
        Err(error) => return Ok(no_answer(path, &error)),
    }
    let mut last = DrainStatus { lasted_ms: 0, left_ms: 0, sessions: before.sessions.len() };
    let mut stopped = false;
    if wait {
        stopped = wait_for(path, &process, &before.instance, &mut last, output).await;
    } else if output == Output::Table {
        println!("draining");
    }
    let outcome = Outcome {
        pid: process.pid,
        stopped,
        took_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
        sessions: last.sessions,
    };
    if output == Output::Json {
        println!("{}", serde_json::to_string_pretty(&outcome)?);
    }
    if !wait || stopped {
        if stopped && output == Output::Table {
            println!("stopped after {:.1} s", begun.elapsed().as_secs_f32());
        }
        return Ok(Exit::Ok);
    }
    anyhow::bail!(
        "the target (process {}) has not ended {:.0} s after its drain began, which was to take no longer than that; \
         its log says what it waits for",
        process.pid,
        begun.elapsed().as_secs_f32()
    )
}

/// Returns whether the target ended in time. `last` is what was last seen of the drain.
async fn wait_for(
    path: &Path,
    process: &Process,
    instance: &str,
    last: &mut DrainStatus,
    output: Output,
) -> bool {
    let mut deadline: Option<Instant> = None;
    let mut printed = String::new();
    loop {
        if process.is_gone() {
            return true;
        }
        match status(path).await {
            // Another target has taken its place already.
            Ok(Ok(status)) if status.instance != instance => return true,
            Ok(Ok(TargetStatus { drain: Some(drain), .. })) => {
                *last = drain;
                let left = Duration::from_millis(drain.left_ms);
                deadline.get_or_insert_with(|| Instant::now() + left + MARGIN);
                // Printed again when initiators left, not every second.
                let now = table::draining(&drain);
                let count = format!("{} {}", drain.sessions, drain.left_ms == 0);
                if output == Output::Table && printed != count {
                    println!("{now}");
                    printed = count;
                }
            }
            Ok(_) => {}
            // Its socket is gone before its memory is given back, which takes a while for a large
            // arena.
            Err(error) if !process.can_be_seen() && is_gone(&error) => return true,
            Err(_) => {}
        }
        let deadline = *deadline.get_or_insert_with(|| Instant::now() + MARGIN);
        if Instant::now() > deadline {
            return false;
        }
        tokio::time::sleep(STEP).await;
    }
}

/// Whether no target listens there any more.
fn is_gone(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    matches!(error.kind(), ConnectionRefused | NotFound)
}

/// The inner error is what a target says that cannot answer.
async fn status(path: &Path) -> std::io::Result<anyhow::Result<TargetStatus>> {
    Ok(match ask(path, Ask::Status).await? {
        Response::Status(status) => Ok(*status),
        Response::Error(error) => Err(anyhow::anyhow!(error)),
        _ => Err(anyhow::anyhow!("the target did not understand the question")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_seen_until_it_ends() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of(child.id());
        assert!(process.can_be_seen() && !process.is_gone());
        let other = Process { pid: child.id(), started: process.started.map(|at| at + 1) };
        assert!(other.is_gone(), "another of the same number");
        child.kill().unwrap();
        while look_at(child.id()).is_some() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(process.is_gone(), "although its parent has not waited for it yet");
        child.wait().unwrap();
        assert!(process.is_gone());
        assert!(!Process { pid: u32::MAX, started: None }.is_gone(), "it could never be seen");
    }
}
