//! `rblk-bench scale`: many hosts or mounts of one target.
//!
//! | file | measures |
//! |---|---|
//! | `connect` | sessions and mounts that connect at once, with keys and without |
//! | `neighbour` | the p99 of a quiet volume beside busy queues of another |
//! | `idle` | processor time of mounts without I/O |
//! | `apart` | target and clients on processors of their own |
//! | `client`, `queue` | a session without a block device |

mod apart;
mod client;
mod connect;
mod idle;
mod neighbour;
mod queue;
pub(crate) mod sleepers;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::ValueEnum;

use crate::args::{Growth, ScaleArgs};
use crate::folder::RunFolder;
use crate::interrupt;
use crate::peer::loaded::Loaded;
use crate::peer::target::{Carrier, Target, TargetSpec, free_port};
use crate::peer::undo::{self, Journal};
use crate::result::{Axis, Point, Run, Scale, ScaleLine, ScalePlot, Summary};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

#[derive(Debug)]
struct Setting {
    journal: Journal,
    programs: PathBuf,
    rdma_address: Option<IpAddr>,
    time: Duration,
    rounds: u32,
    with_keys: bool,
}

impl Setting {
    /// A target on a free port of `ip`.
    fn target(
        &self,
        name: &str,
        (carrier, ip, with_keys): (Carrier, IpAddr, bool),
        flags: &[String],
    ) -> Result<Target> {
        let spec = TargetSpec {
            key: format!("scale-{name}"),
            carrier,
            at: SocketAddr::new(ip, free_port(ip)?),
            programs: self.programs.clone(),
            environment: Vec::new(),
            with_keys,
            tables: None,
            flags: flags.to_vec(),
        };
        Target::start(&self.journal, &spec)
    }

    /// A target over TCP on this host.
    fn local_target(&self, name: &str, flags: &[String]) -> Result<Target> {
        self.target(name, (Carrier::Tcp, LOOPBACK, self.with_keys), flags)
    }

    #[expect(clippy::unused_self, reason = "every measurement has a setting")]
    fn tell(&self, word: &str) {
        eprintln!("rblk-bench: {word}");
    }
}

/// Measures into `run`; a plot that the run holds already is replaced. A failed measurement is a
/// plot with an error.
pub(crate) fn run(args: &ScaleArgs, folder: &RunFolder, run: &mut Run) -> Result<()> {
    ensure!((1..=1000).contains(&args.volumes), "--volumes has to be from 1 to 1000");
    interrupt::watch()?;
    undo::sweep(Path::new(undo::DIR))?;
    let setting = Setting {
        programs: match &args.programs {
            Some(dir) => std::path::absolute(dir)?,
            None => crate::compare::programs()?,
        },
        journal: Journal::create(Path::new(undo::DIR))?,
        rdma_address: crate::compare::rdma_address(args.address),
        time: Duration::from_secs(args.seconds.into()),
        rounds: args.rounds,
        with_keys: !args.insecure,
    };
    let all = Growth::value_variants();
    let mut measured = false;
    for growth in all.iter().filter(|one| args.what.is_empty() || args.what.contains(one)) {
        interrupt::check()?;
        let scale = run.scale.get_or_insert_with(Scale::default);
        let done = match growth {
            Growth::Connect => connect::measure(&setting, args.volumes),
            Growth::Neighbour => neighbour::measure(&setting),
            Growth::Idle => {
                let time = Duration::from_secs(args.idle_seconds.max(1).into());
                idle::measure(&setting, args.volumes, time).map(|idle| {
                    scale.idle = Some(idle);
                    Vec::new()
                })
            }
        };
        let (key, title) = names(*growth);
        let plots = done.unwrap_or_else(|error| {
            setting.tell(&format!("{title}: {error:#}"));
            let error = Some(format!("{error:#}"));
            vec![ScalePlot { error, ..empty(key, title) }]
        });
        // Idle mounts have no plot.
        measured |= plots.is_empty() || plots.iter().any(|plot| plot.error.is_none());
        plots.into_iter().for_each(|plot| put(scale, plot));
        folder.save(run)?;
    }
    interrupt::check()?;
    if !measured {
        bail!("nothing could be measured");
    }
    Ok(())
}

fn empty(key: &str, title: &str) -> ScalePlot {
    ScalePlot { key: key.to_owned(), title: title.to_owned(), ..ScalePlot::default() }
}

/// Takes a plot in, instead of an earlier one of the same key.
fn put(scale: &mut Scale, plot: ScalePlot) {
    match scale.plots.iter_mut().find(|known| known.key == plot.key) {
        Some(known) => *known = plot,
        None => scale.plots.push(plot),
    }
}

fn names(growth: Growth) -> (&'static str, &'static str) {
    match growth {
        Growth::Connect => ("time-by-mounts-at-once", "Mounts at once, with keys and without"),
        Growth::Neighbour => ("p99-by-neighbour", "A read beside a volume that is never idle"),
        Growth::Idle => ("idle", "Mounts with nothing to do"),
    }
}

fn plot(key: &str, title: &str, x: Axis, y: Axis, note: String) -> ScalePlot {
    ScalePlot { x, y, note, ..empty(key, title) }
}

/// Points, by ascending `x`.
#[derive(Clone, Debug, Default)]
struct Line(Vec<Point>);

impl Line {
    fn add(&mut self, x: f64, of: Summary) {
        self.0.push(Point { x, y: of.median, low: of.low, high: of.high });
    }

    fn named(self, label: &str) -> ScaleLine {
        ScaleLine { label: label.to_owned(), points: self.0 }
    }
}

/// 1, 10, 100, ... up to `most`, which is the last one.
fn steps(most: u32) -> Vec<u32> {
    let decades = std::iter::successors(Some(1_u32), |decade| decade.checked_mul(10));
    let mut steps: Vec<u32> = decades.take_while(|step| *step < most).collect();
    steps.push(most);
    steps
}

/// The ublk driver, which stays until the drop.
fn front_end(setting: &Setting) -> Result<Loaded> {
    ensure!(nix::unistd::geteuid().is_root(), "mounting needs root");
    let loaded = Loaded::new(&setting.journal);
    loaded.ensure_ublk()?;
    Ok(loaded)
}

#[cfg(test)]
mod tests;
