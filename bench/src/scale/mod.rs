//! `rblk-bench scale`: how cost grows with the work.
//!
//! | file | what grows |
//! |---|---|
//! | `sessions` | sessions of one target: memory, time to connect, a read beside them |
//! | `blocks` | the file behind a volume, and the cache before it: a hit and a miss |
//! | `connect` | sessions and mounts that connect at once, with keys and without |
//! | `mounts` | queues of a mount, mounted volumes (IOPS, memory), and idle mounts |
//! | `neighbour` | busy queues of another volume: the p99 of a quiet one beside them |
//! | `apart` | target and clients on processors of their own |
//! | [`fit`], `plot` | the exponent of growth |
//! | `target`, `client` | a target in a process of its own, and a session without a block device |
//!
//! Each thing grows by itself, the rest held fixed. What is judged is the exponent of what *all* of
//! it costs: 1 where twice as much costs twice as much, and more is flagged. What cannot be
//! measured here is a plot with the reason.

mod apart;
mod blocks;
mod client;
mod connect;
pub mod fit;
mod mounts;
mod neighbour;
mod plot;
mod queue;
mod sessions;
mod target;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use rblk_fabric::Scheme;

use self::target::{Door, Target};
use crate::args::{Growth, ScaleArgs};
use crate::folder::RunFolder;
use crate::interrupt;
use crate::peer::undo::{self, Journal};
use crate::result::{Run, Scale, ScalePlot};

/// What all measurements have in common.
#[derive(Debug)]
struct Setting {
    journal: Journal,
    programs: PathBuf,
    rdma_address: Option<IpAddr>,
    address: IpAddr,
    /// How long each sample is.
    time: Duration,
    rounds: u32,
    /// Both ends prove their keys.
    with_keys: bool,
    /// For files of a measurement; it goes with the run.
    scratch: PathBuf,
}

impl Setting {
    fn target(
        &self,
        name: &str,
        flags: &[String],
        prepare: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Target> {
        let with_keys = self.with_keys;
        let door = Door { scheme: Scheme::Tcp, ip: mounts::LOOPBACK, with_keys };
        self.target_at(name, door, flags, prepare)
    }

    fn target_at(
        &self,
        name: &str,
        door: Door,
        flags: &[String],
        prepare: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<Target> {
        let name = format!("scale-{name}");
        Target::start(&self.journal, &self.programs, &name, door, flags, prepare)
    }

    /// Prints progress.
    #[expect(clippy::unused_self, reason = "every measurement has a setting")]
    fn tell(&self, word: &str) {
        eprintln!("rblk-bench: {word}");
    }
}

/// Measures what the arguments ask for into `run`; a plot that it holds already is replaced. What
/// cannot be measured here is a plot with an error.
///
/// # Errors
/// Nothing can be measured at all, or it was interrupted.
pub fn run(args: &ScaleArgs, folder: &RunFolder, run: &mut Run) -> Result<()> {
    let sizes = [("--file-size", args.file_size.0), ("--arena", args.arena.0)];
    for (flag, bytes) in sizes {
        ensure!(
            bytes <= 1 << 44 && bytes.is_multiple_of(1 << 20) && bytes > 0,
            "{flag} has to be whole MiB, at most 16TiB"
        );
    }
    ensure!((1..=1000).contains(&args.volumes), "--volumes has to be from 1 to 1000");
    ensure!((1..=60_000).contains(&args.sessions), "--sessions has to be from 1 to 60000");
    interrupt::watch()?;
    undo::sweep(Path::new(undo::DIR))?;
    let journal = Journal::create(Path::new(undo::DIR))?;
    let (scratch, _scratch) = journal.directory(&format!("{}-scale", std::process::id()))?;
    let rdma_address = crate::compare::rdma_address(args.address);
    let setting = Setting {
        programs: match &args.programs {
            Some(dir) => std::path::absolute(dir)?,
            None => crate::compare::programs()?,
        },
        journal,
        rdma_address,
        address: args.address.or(rdma_address).unwrap_or(mounts::LOOPBACK),
        time: Duration::from_secs(args.seconds.into()),
        rounds: args.rounds,
        with_keys: !args.insecure,
        scratch,
    };
    let all = [
        Growth::Queues,
        Growth::Volumes,
        Growth::Sessions,
        Growth::FileSize,
        Growth::Arena,
        Growth::Connect,
        Growth::Neighbour,
        Growth::Idle,
    ];
    let wanted = |growth: &Growth| args.what.is_empty() || args.what.contains(growth);
    let mut measured = false;
    for growth in all.iter().filter(|growth| wanted(growth)) {
        interrupt::check()?;
        let scale = run.scale.get_or_insert_with(Scale::default);
        match one(&setting, args, *growth, scale) {
            Ok(()) => measured = true,
            Err(error) => {
                setting.tell(&format!("{}: {error:#}", title(*growth)));
                put(
                    scale,
                    ScalePlot {
                        key: key(*growth).to_owned(),
                        title: title(*growth).to_owned(),
                        error: Some(format!("{error:#}")),
                        ..ScalePlot::default()
                    },
                );
            }
        }
        folder.save(run)?;
    }
    interrupt::check()?;
    if !measured {
        bail!("nothing could be measured");
    }
    Ok(())
}

fn one(setting: &Setting, args: &ScaleArgs, growth: Growth, scale: &mut Scale) -> Result<()> {
    match growth {
        Growth::Queues => put(scale, mounts::queues(setting)?),
        Growth::Volumes => {
            let (plots, _) = mounts::volumes(setting, args.volumes, true, None)?;
            plots.into_iter().for_each(|plot| put(scale, plot));
        }
        Growth::Sessions => {
            let plots = sessions::measure(setting, args.sessions)?;
            plots.into_iter().for_each(|plot| put(scale, plot));
        }
        Growth::FileSize => put(scale, blocks::by_file(setting, args.file_size.0)?),
        Growth::Arena => put(scale, blocks::by_arena(setting, args.arena.0)?),
        Growth::Connect => {
            let plots = connect::measure(setting, args.volumes)?;
            plots.into_iter().for_each(|plot| put(scale, plot));
        }
        Growth::Neighbour => {
            let plots = neighbour::measure(setting)?;
            plots.into_iter().for_each(|plot| put(scale, plot));
        }
        Growth::Idle => {
            let time = Duration::from_secs(args.idle_seconds.max(1).into());
            let (_, idle) = mounts::volumes(setting, args.volumes, false, Some(time))?;
            scale.idle = idle;
        }
    }
    Ok(())
}

/// Takes a plot in, instead of an earlier one of the same key.
fn put(scale: &mut Scale, plot: ScalePlot) {
    match scale.plots.iter_mut().find(|known| known.key == plot.key) {
        Some(known) => *known = plot,
        None => scale.plots.push(plot),
    }
}

fn key(growth: Growth) -> &'static str {
    match growth {
        Growth::Queues => "iops-by-queues",
        Growth::Volumes => "iops-by-volumes",
        Growth::Sessions => "memory-by-sessions",
        Growth::FileSize => "latency-by-file-size",
        Growth::Arena => "latency-by-arena",
        Growth::Connect => "time-by-mounts-at-once",
        Growth::Neighbour => "p99-by-neighbour",
        Growth::Idle => "idle",
    }
}

fn title(growth: Growth) -> &'static str {
    match growth {
        Growth::Queues => "IOPS against queues",
        Growth::Volumes => "IOPS against volumes",
        Growth::Sessions => "Memory for sessions",
        Growth::FileSize => "A read against the size of the file",
        Growth::Arena => "A read against the size of the cache",
        Growth::Connect => "Mounts at once, with keys and without",
        Growth::Neighbour => "A read beside a volume that is never idle",
        Growth::Idle => "Mounts with nothing to do",
    }
}

/// `parts` of 1, 10, 100, ... up to `most`, which is the last one.
fn steps(parts: &[u32], most: u32) -> Vec<u32> {
    let decades = std::iter::successors(Some(1_u32), |decade| decade.checked_mul(10));
    let mut steps: Vec<u32> = decades
        .flat_map(|decade| parts.iter().map(move |part| decade.checked_mul(*part)))
        .flatten()
        .take_while(|step| *step <= most)
        .collect();
    if steps.last().is_some_and(|last| *last != most) {
        steps.push(most);
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_that_is_measured_again_replaces_what_was() {
        let mut scale = Scale::default();
        let plot = |error: Option<&str>| ScalePlot {
            key: "k".to_owned(),
            error: error.map(str::to_owned),
            ..ScalePlot::default()
        };
        put(&mut scale, plot(Some("not here")));
        put(&mut scale, plot(None));
        assert_eq!(scale.plots, [plot(None)]);
    }
}
