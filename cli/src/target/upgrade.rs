//! `rblk-target upgrade`: puts another program in the place of the running target, and waits until
//! every mount is back, or the target is gone.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use rblk_config::Exit;
use rblk_operate::Output;
use rblk_operate::target::ask::{Ask, Response, STOPPING};
use rblk_operate::target::client::{ServingTarget, ask, ask_any_version};
use rblk_operate::target::status::UpgradeStatus;
use rblk_operate::target::warnings;
use serde::Serialize;

use crate::target::drain::Process;
use crate::target::running::{no_answer, not_understood};

/// How often to look.
const STEP: Duration = Duration::from_millis(50);

/// The order.
pub(crate) struct What {
    /// The program; the daemon beside this one by default.
    pub(crate) program: Option<PathBuf>,
    /// Also if that loses something.
    pub(crate) force: bool,
    /// How long the other program and the mounts may take. Stores that refuse data have their time
    /// besides.
    pub(crate) timeout: Duration,
}

/// The outcome, in JSON.
#[derive(Serialize)]
struct UpgradeOutcome<'s> {
    /// The process, which stays.
    pid: u32,
    /// Version of the program that serves now.
    to_version: &'s str,
    #[serde(flatten)]
    upgrade: &'s UpgradeStatus,
}

/// Puts another program in the place of the target at that socket.
pub(crate) fn upgrade(path: &Path, what: What, output: Output) -> anyhow::Result<Exit> {
    let program = match what.program {
        Some(program) => std::path::absolute(program)?,
        None => std::env::current_exe()?.with_file_name("rblk-targetd"),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(run(path, &program, (what.force, what.timeout), output))
}

async fn run(
    path: &Path,
    program: &Path,
    (force, timeout): (bool, Duration),
    output: Output,
) -> anyhow::Result<Exit> {
    let before = ask_any_version(path).await.map_err(|error| no_answer(path, &error))?;
    if let Some(refusal) = before.error {
        return Err(refusal.into());
    }
    let before = before.status.ok_or_else(not_understood)?;
    let process = Process::of(before.pid);
    let order = Ask::Upgrade { program: program.to_owned(), force };
    // The process may become the other program before its answer gets out. The program that serves
    // then counts.
    if let Ok(Response::Error(refusal)) = ask(path, order).await {
        if refusal.text() == STOPPING {
            anyhow::bail!("{refusal}, or another program takes its place already");
        }
        anyhow::bail!("{refusal}\n  The target serves as before");
    }
    output.aside(format_args!("handing over to {}", program.display()));
    let mut deadline = Instant::now() + timeout;
    let (mut last, mut is_told) = (None, false);
    while Instant::now() < deadline {
        // Without an answer the target is between the two programs, or gone.
        let is_gone = process.is_gone();
        let now = ask_any_version(path).await.ok().and_then(|answer| answer.status);
        // By force, although a store refuses dirty blocks: the target tries again before it gives
        // them up.
        let refused =
            now.iter().filter_map(|now| now.drain.as_ref()).find(|d| !d.unsaved.is_empty());
        if let Some(drain) = refused {
            deadline = Instant::now() + Duration::from_millis(drain.stores_ms) + timeout;
            if !std::mem::replace(&mut is_told, true) {
                drain.unsaved.iter().for_each(|one| output.aside(warnings::refused(one)));
            }
        }
        if let Some(now) = now
            && now.instance != before.instance
        {
            let upgrade = now.upgrade.clone().with_context(|| {
                format!(
                    "the target was started anew (process {}) instead of being upgraded: its log says why",
                    now.pid
                )
            })?;
            if upgrade.failed.is_some() || upgrade.pause_ms.is_some() {
                return end(&now, &upgrade, output);
            }
            last = Some((now, upgrade));
        } else if is_gone {
            anyhow::bail!(
                "the target is gone: its process {} has ended, and its log says why. Start it: mounts come back by \
                 themselves",
                before.pid
            );
        }
        tokio::time::sleep(STEP).await;
    }
    match last {
        Some((now, upgrade)) => end(&now, &upgrade, output),
        None => anyhow::bail!(
            "no other program serves at {} after {timeout:?}: the log of the target says what it waits for",
            path.display()
        ),
    }
}

/// Prints the outcome.
fn end(now: &ServingTarget, upgrade: &UpgradeStatus, output: Output) -> anyhow::Result<Exit> {
    let outcome = UpgradeOutcome { pid: now.pid, to_version: &now.version, upgrade };
    output.answer(&outcome, || match &upgrade.failed {
        Some(_) => String::new(),
        None => in_words(&now.version, now.pid, upgrade),
    })?;
    if let Some(why) = &upgrade.failed {
        anyhow::bail!("{why}. Version {} serves again", now.version);
    }
    match upgrade.away.as_slice() {
        [] if upgrade.clean => Ok(Exit::Ok),
        [] => Ok(Exit::GaveUp),
        away => anyhow::bail!(
            "the target is upgraded, and some mounts are not back yet: {}",
            away.join(", ")
        ),
    }
}

/// The outcome, for people.
fn in_words(to: &str, pid: u32, upgrade: &UpgradeStatus) -> String {
    let from = &upgrade.from_version;
    let mut text = match from == to {
        true => format!("process {pid} serves anew, by the same version {to}\n"),
        false => format!("process {pid} serves by version {to} instead of {from}\n"),
    };
    let (back, mounts) = (upgrade.back, upgrade.mounts);
    let pause = match upgrade.pause_ms {
        Some(ms) => format!("pause {ms} ms"),
        None => "the pause goes on".to_owned(),
    };
    text += &format!(
        "{pause}, mounts back {back} of {mounts}, requests sent again {}\n",
        upgrade.sent_again
    );
    if upgrade.stayed > 0 {
        text += &format!("mounts that had not left in time: {}\n", upgrade.stayed);
    }
    if !upgrade.clean {
        text += "not everything was made durable before: mounts may report a loss\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outcome_in_words() {
        let upgrade = UpgradeStatus {
            from_version: "1.0.0".to_owned(),
            pause_ms: Some(180),
            mounts: 2,
            back: 2,
            clean: true,
            ..UpgradeStatus::default()
        };
        assert_eq!(
            in_words("1.1.0", 7, &upgrade),
            "process 7 serves by version 1.1.0 instead of 1.0.0\n\
             pause 180 ms, mounts back 2 of 2, requests sent again 0\n"
        );
        let bad = UpgradeStatus {
            pause_ms: None,
            back: 1,
            stayed: 1,
            sent_again: 3,
            clean: false,
            ..upgrade
        };
        let text = in_words("1.0.0", 7, &bad);
        for piece in
            ["same version 1.0.0", "the pause goes on", "1 of 2", "again 3", "in time: 1", "a loss"]
        {
            assert!(text.contains(piece), "{piece}: {text}");
        }
    }
}
