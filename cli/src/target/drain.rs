//! `rblk-target drain`: begins a drain, and polls until the target's process is gone.

use std::path::Path;
use std::time::{Duration, Instant};

use rblk_config::Exit;
use rblk_operate::target::ask::{Ask, EndReport, Response};
use rblk_operate::target::client::ask;
use rblk_operate::target::refusal::Refusal;
use rblk_operate::target::status::{DrainStatus, TargetStatus, UnsavedStatus, in_words};
use rblk_operate::{CannotPrint, Output};
use serde::Serialize;

use crate::target::running::{answered, not_understood, status_in};
use crate::target::table;

/// How often to look.
const STEP: Duration = Duration::from_millis(200);
/// The time of a target beyond that of its drain and of its stores: dead connections end in 5 s,
/// and the memory of a large arena goes back.
const MARGIN: Duration = Duration::from_secs(15);
/// The time of the stores, if the target has not reported it.
const STORES: Duration = Duration::from_secs(30);
/// How long the last response of a target may take after its end.
const LAST_WORD: Duration = Duration::from_secs(1);

/// The outcome, in JSON.
#[derive(Serialize)]
struct DrainOutcome {
    /// The target's process.
    pid: u32,
    /// Whether the process is gone.
    stopped: bool,
    /// How long this took, in milliseconds.
    took_ms: u64,
    /// Sessions that had not left when last seen.
    sessions: usize,
    /// Volumes with acknowledged data that was given up.
    unsaved: Vec<UnsavedStatus>,
    /// The faults of files and devices of volumes before.
    warnings: Vec<String>,
}

/// A process. A later process with the same number is another one.
pub(crate) struct Process {
    pid: u32,
    // In the ticks of /proc; `None` if it cannot be seen, for example from another PID namespace.
    started: Option<u64>,
}

impl Process {
    pub(crate) fn of(pid: u32) -> Self {
        Self { pid, started: look_at(pid) }
    }

    /// Whether the process has ended. Always false if it cannot be seen.
    pub(crate) fn is_gone(&self) -> bool {
        self.started.is_some() && look_at(self.pid) != self.started
    }

    fn can_be_seen(&self) -> bool {
        self.started.is_some()
    }
}

/// The start time of a process that has not ended.
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

/// The report of a target on its end.
#[derive(Debug)]
enum LastWords {
    /// How it ended.
    End(EndReport),
    /// The target is of a version without such a report.
    NotToBeTold,
    /// No report: the connection broke off.
    Nothing,
}

async fn run(path: &Path, wait: bool, output: Output) -> anyhow::Result<Exit> {
    let begun = Instant::now();
    let before = status_in(path, ask(path, Ask::Status).await)?;
    let warnings: Vec<String> =
        before.volumes.iter().filter_map(rblk_operate::target::warnings::store_fault).collect();
    warnings.iter().for_each(|fault| output.aside(format_args!("WARN  {fault}")));
    let process = Process::of(before.pid);
    let answer = ask(path, Ask::Drain { wait });
    let mut drain = EndWait {
        path,
        process: &process,
        instance: &before.instance,
        output,
        last: DrainStatus { sessions: before.sessions.len(), ..DrainStatus::default() },
        deadline: None,
        printed: String::new(),
    };
    let (stopped, said) = if wait {
        drain.wait(answer).await?
    } else {
        answered(path, answer.await)?;
        output.text("draining")?;
        (false, LastWords::NotToBeTold)
    };
    let unsaved = match &said {
        LastWords::End(report) => report.unsaved.clone(),
        LastWords::NotToBeTold | LastWords::Nothing => Vec::new(),
    };
    let outcome = DrainOutcome {
        pid: process.pid,
        stopped,
        took_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
        sessions: drain.last.sessions,
        unsaved,
        warnings,
    };
    output.answer(&outcome, String::new)?;
    if !wait {
        return Ok(Exit::Ok);
    }
    let (pid, seconds) = (process.pid, begun.elapsed().as_secs_f32());
    anyhow::ensure!(
        stopped,
        "the target (process {pid}) has not ended {seconds:.0} s after its drain began, which was to take no longer than \
         that; its log says what it waits for"
    );
    output.text(format_args!("stopped after {seconds:.1} s"))?;
    judge(&said, process.pid)
}

/// The exit of the command after the target has ended.
///
/// # Errors
/// The target did not end in good order.
fn judge(said: &LastWords, pid: u32) -> anyhow::Result<Exit> {
    let report = match said {
        LastWords::End(report) => report,
        LastWords::NotToBeTold => return Ok(Exit::Ok),
        LastWords::Nothing => anyhow::bail!(
            "the target (process {pid}) ended without a word: mounts may report a loss; its log says why"
        ),
    };
    if let Some(error) = &report.error {
        anyhow::bail!("the target ended, and not in good order: {error}");
    }
    if report.unsaved.is_empty() {
        return Ok(Exit::Ok);
    }
    let text = format!(
        "acknowledged data is lost, as its store did not take it: {}. Mounts report the loss when they \
         connect again, or write again what they retained",
        in_words(&report.unsaved)
    );
    Err(Refusal::new(Exit::GaveUp, text).into())
}

/// The wait for the end of a target.
struct EndWait<'t> {
    path: &'t Path,
    process: &'t Process,
    instance: &'t str,
    output: Output,
    // The drain as it was seen last.
    last: DrainStatus,
    deadline: Option<Instant>,
    printed: String,
}

impl EndWait<'_> {
    /// Waits until the target ended, or too long. Returns whether it ended, and its report in
    /// `answer`.
    async fn wait(
        &mut self,
        answer: impl Future<Output = std::io::Result<Response>>,
    ) -> anyhow::Result<(bool, LastWords)> {
        let mut answer = std::pin::pin!(answer);
        let mut said = None;
        while !self.has_ended().await? {
            if Instant::now() > self.deadline() {
                return Ok((false, said.unwrap_or(LastWords::Nothing)));
            }
            tokio::select! {
                answered = &mut answer, if said.is_none() => said = Some(said_by(answered)?),
                () = tokio::time::sleep(STEP) => {}
            }
        }
        if said.is_none() {
            let answered = tokio::time::timeout(LAST_WORD, answer).await;
            said = answered.ok().map(said_by).transpose()?;
        }
        Ok((true, said.unwrap_or(LastWords::Nothing)))
    }

    fn deadline(&mut self) -> Instant {
        *self.deadline.get_or_insert_with(|| Instant::now() + STORES + MARGIN)
    }

    /// Looks once, and prints the news.
    async fn has_ended(&mut self) -> anyhow::Result<bool> {
        if self.process.is_gone() {
            return Ok(true);
        }
        match status(self.path).await {
            // Another target has its place already.
            Ok(Ok(status)) if status.instance != self.instance => return Ok(true),
            Ok(Ok(TargetStatus { drain: Some(drain), .. })) => {
                let left = Duration::from_millis(drain.left_ms + drain.stores_ms);
                self.deadline.get_or_insert_with(|| Instant::now() + left + MARGIN);
                self.tell(&drain)?;
                self.last = drain;
            }
            Ok(_) => {}
            // The socket is gone before the memory is given back, which takes a while for a large
            // arena.
            Err(error) if !self.process.can_be_seen() && is_gone(&error) => return Ok(true),
            Err(_) => {}
        }
        Ok(false)
    }

    /// Printed again when initiators left or a store refuses something, not every second.
    fn tell(&mut self, drain: &DrainStatus) -> Result<(), CannotPrint> {
        let stores: Vec<_> = drain.unsaved.iter().map(|one| (&one.volume, &one.cause)).collect();
        let news = format!("{} {} {stores:?}", drain.sessions, drain.left_ms == 0);
        if self.printed != news {
            self.output.text(table::draining(drain))?;
            for one in &drain.unsaved {
                self.output.text(rblk_operate::target::warnings::refused(one))?;
            }
            self.printed = news;
        }
        Ok(())
    }
}

/// # Errors
/// The target refused.
fn said_by(answer: std::io::Result<Response>) -> anyhow::Result<LastWords> {
    Ok(match answer {
        Ok(Response::Error(refusal)) => return Err(refusal.into()),
        Ok(Response::Ended(report)) => LastWords::End(report),
        Ok(_) => LastWords::NotToBeTold,
        Err(_) => LastWords::Nothing,
    })
}

/// Whether no target listens there any more.
fn is_gone(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    matches!(error.kind(), ConnectionRefused | NotFound)
}

/// The inner error is the target's own refusal.
async fn status(path: &Path) -> std::io::Result<anyhow::Result<TargetStatus>> {
    Ok(match ask(path, Ask::Status).await? {
        Response::Status(status) => Ok(*status),
        Response::Error(refusal) => Err(refusal.into()),
        _ => Err(not_understood()),
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
