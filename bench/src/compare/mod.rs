//! fio on rblk and on its peers, in the same run on the same machine, round by round.
//!
//! ```text
//! plan (cells, systems)
//!   -> per number of queues: set all up -> fill -> rounds x cells x systems -> probe -> take down
//! ```

pub(crate) mod fio;
pub(crate) mod iscsi;
pub(crate) mod perftest;
pub(crate) mod plan;
pub(crate) mod probe;
pub(crate) mod profile;
pub(crate) mod rounds;
pub(crate) mod socket_limit;

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context, Result, bail};

use self::perftest::Wire;
use self::rounds::{Progress, Rounds};
use crate::args::CompareArgs;
use crate::folder::RunFolder;
use crate::peer::Setting;
use crate::peer::loaded::Loaded;
use crate::peer::undo::{self, Journal};
use crate::result::Run;
use crate::{child, interrupt, sysfs};

/// Measures into `run`, which is saved after every round; samples that the run holds already are
/// not measured again. A system that cannot be measured is one with an error in the run.
pub(crate) fn run(args: &CompareArgs, folder: &RunFolder, run: &mut Run) -> Result<()> {
    let cells = plan::cells(&args.cells, &args.queues)?;
    let keys = plan::keys_for(args.engine, &args.systems);
    let mut candidates = plan::systems(&keys, &args.variant, &args.rblk, &args.peer)?;
    if args.volume.is_file() {
        plan::add_local_file(&mut candidates);
    }
    if candidates.is_empty() {
        bail!("no system is to be measured");
    }
    check_host(args)?;
    interrupt::watch()?;
    sweep()?;
    let journal = Journal::create(Path::new(undo::DIR))?;
    let modules = Rc::new(Loaded::new(&journal));
    let rdma_address = rdma_address(args.address);
    let programs = match &args.programs {
        Some(dir) => std::path::absolute(dir)?,
        None => programs()?,
    };
    let fio_engine = match &args.fio_engine {
        // fio takes no relative one.
        Some(path) => Some(std::path::absolute(path)?),
        None => engine_near(&programs),
    };
    let wire = if args.no_perftest || !(args.rblk.is_empty() && args.peer.is_empty()) {
        None
    } else {
        rdma_address.and_then(Wire::of)
    };
    for cell in &cells {
        run.add_cell(cell.clone());
    }
    let rounds_of_all = usize::try_from(args.rounds)?;
    let total = cells.len() * candidates.len() * rounds_of_all;
    let mut rounds = Rounds {
        folder,
        run,
        rounds: args.rounds,
        seconds: args.seconds,
        probe: !args.no_probe,
        profile: args.profile,
        wire,
        progress: Progress::of(total, args.seconds),
    };
    for ((queues, depth), cells) in rounds::by_shape(&cells) {
        let setting = Setting {
            journal: journal.clone(),
            modules: Rc::clone(&modules),
            rdma_address,
            address: args.address.or(rdma_address).unwrap_or(Ipv4Addr::LOCALHOST.into()),
            bytes: args.size.0,
            queues: u16::try_from(queues)?,
            depth,
            programs: programs.clone(),
            fio_engine: fio_engine.clone(),
            volume: args.volume,
            directory: args.directory.as_deref().map(std::path::absolute).transpose()?,
            with_keys: !args.insecure,
        };
        rounds.measure(&candidates, &cells, &setting)?;
    }
    if run.samples.is_empty() {
        bail!("no system could be measured");
    }
    Ok(())
}

/// The engine beside the programs, or above them, where `cargo xtask fio-engine` puts it.
fn engine_near(programs: &Path) -> Option<PathBuf> {
    let places = programs.ancestors().take(2).map(|dir| dir.join("librblk_fio.so"));
    places.into_iter().find(|file| file.is_file())
}

fn check_host(args: &CompareArgs) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!("this command needs root: it makes devices and writes to them");
    }
    if !child::is_installed("fio") {
        bail!("fio is not installed");
    }
    if args.profile && !child::is_installed(profile::PERF) {
        bail!("perf is not installed and --profile needs it (Debian: linux-perf)");
    }
    Ok(())
}

fn sweep() -> Result<()> {
    let swept = undo::sweep(Path::new(undo::DIR))?;
    if swept.undone > 0 {
        eprintln!("undid {} steps of a run that was killed", swept.undone);
    }
    for error in &swept.failed {
        eprintln!("rblk-bench: cannot undo a step of a run that was killed: {error:#}");
    }
    Ok(())
}

/// The address of an RDMA device of this host: `asked`, if it is one, or the first.
pub(crate) fn rdma_address(asked: Option<IpAddr>) -> Option<IpAddr> {
    let all = sysfs::gids();
    match asked {
        Some(address) => sysfs::gid_of(address, &all).map(|gid| gid.ip),
        None => {
            let of_v4 = all.iter().find(|gid| gid.ip.is_ipv4());
            of_v4.or(all.first()).map(|gid| gid.ip)
        }
    }
}

/// The directory of the daemons: `RBLK_BIN_DIR`, or that of this program.
pub(crate) fn programs() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("RBLK_BIN_DIR") {
        return Ok(std::path::absolute(PathBuf::from(dir))?);
    }
    let exe = std::env::current_exe().context("the path of this program")?;
    Ok(exe.parent().context("its directory")?.to_owned())
}
