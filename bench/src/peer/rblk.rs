//! [`Rblk`]: a volume of a [`Target`] of its own, mounted on the same host.
//!
//! Programs are those of one directory, with their defaults, except the number of queues and their
//! depth.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::mount::queue_counts::QueueCounts;
use rblk_operate::target::group_counts::StatsSnapshot;
use serde::Serialize;

use super::access::Access;
use super::daemon::mount_status;
use super::target::{Target, TargetSpec, program};
use super::undo::{Journal, Step, Undo};
use crate::child;
use crate::keys::Keys;

const MOUNT_LIMIT: Duration = Duration::from_secs(60);
pub(crate) const VOLUME: &str = "bench";

/// A system to be set up.
#[derive(Clone, Debug)]
pub(crate) struct RblkSpec {
    /// The target; its flags serve [`VOLUME`].
    pub(crate) target: TargetSpec,
    pub(crate) queues: u16,
    pub(crate) depth: u16,
    pub(crate) mount_flags: Vec<String>,
}

/// A mounted volume and its target. Dropped, both are gone.
#[derive(Debug)]
pub(crate) struct Rblk {
    status: MountStatus,
    // In the order of the drop.
    _mount: Undo,
    target: Target,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Counters {
    /// The mount's, all queues together.
    pub(crate) initiator: Option<QueueCounts>,
    /// The target's, all poll groups together.
    pub(crate) target: Option<StatsSnapshot>,
}

impl Rblk {
    pub(crate) fn start(journal: &Journal, spec: &RblkSpec) -> Result<Self> {
        let target = Target::start(journal, &spec.target)?;
        let run = spec.target.run();
        let (mut command, undo) = mount_command(
            journal,
            &spec.target.programs,
            &target,
            VOLUME,
            &run,
            &spec.mount_flags,
        )?;
        command.envs(spec.target.environment.iter().cloned());
        command.args(["--queues", &spec.queues.to_string()]);
        if !spec.mount_flags.iter().any(|flag| flag.starts_with("--queue-depth")) {
            command.args(["--queue-depth", &spec.depth.to_string()]);
        }
        command.args(&spec.mount_flags);
        let status = mount(&mut command)
            .with_context(|| format!("the target's log ends with:\n{}", target.log_tail()))?;
        Ok(Self { status, _mount: undo, target })
    }

    /// QPs of each queue.
    pub(crate) fn lanes(&self) -> u32 {
        u32::try_from(self.status.lanes).unwrap_or(u32::MAX)
    }

    pub(crate) fn disk(&self) -> PathBuf {
        PathBuf::from(&self.status.device)
    }

    pub(crate) fn detail(&self) -> String {
        let status = &self.status;
        format!(
            "{} by {}, {} queues of {} lanes, depth {}, in-capsule {}, {}",
            status.transport,
            status.rdma_device,
            status.queues,
            status.lanes,
            status.queue_depth,
            status.in_capsule_bytes,
            if status.write_with_imm { "WRITE_WITH_IMM" } else { "no WRITE_WITH_IMM" }
        )
    }

    pub(crate) fn initiator_pid(&self) -> u32 {
        self.status.pid
    }

    pub(crate) fn target_pid(&self) -> u32 {
        self.target.pid()
    }

    /// The counters now; an end that does not answer has none.
    pub(crate) fn counters(&self) -> Counters {
        let initiator = mount_status(&self.status.name).map(|status| status.total);
        Counters { initiator, ..target_counters(&self.target) }
    }
}

pub(crate) fn target_counters(target: &Target) -> Counters {
    Counters { initiator: None, target: target.status().ok().map(|status| status.total) }
}

/// The command that mounts a volume of a target, and the step that unmounts it. `flags`, which the
/// caller adds, decide about encryption.
pub(crate) fn mount_command(
    journal: &Journal,
    programs: &Path,
    target: &Target,
    volume: &str,
    run: &str,
    flags: &[String],
) -> Result<(Command, Undo)> {
    let (name, tag) = (format!("bench-{run}"), format!("{run}-mount"));
    let program = program(programs, "rblk-initiator")?;
    let mut command = Command::new(&program);
    command.args(["mount", target.url(), volume, "--name", &name, "--output", "json"]);
    command.args(Keys::of_mount(target.keys(), flags));
    command.env(child::TAG, &tag).current_dir("/");
    let undo = journal.note(Step::Mount { name, program, tag })?;
    Ok((command, undo))
}

pub(crate) fn mount(command: &mut Command) -> Result<MountStatus> {
    let json = child::output(command, MOUNT_LIMIT)?;
    serde_json::from_str(&json).context("`rblk-initiator mount` gave something else")
}

/// The way of fio to a target by the engine of `library`. `lines` are more lines of the engine's
/// file.
pub(crate) fn engine_access(target: &Target, library: &Path, lines: &[String]) -> Result<Access> {
    let config = target.dir().join("engine.toml");
    let text = Keys::file_of_mount(target.keys(), target.url(), VOLUME) + &lines.join("\n");
    std::fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
    Ok(Access::rblk(library, target.url(), VOLUME, &config))
}
