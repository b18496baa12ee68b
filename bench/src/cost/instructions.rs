//! Instructions of each end's engine per I/O, by valgrind's callgrind.
//!
//! This program runs once more under callgrind with the same cases, and dumps a profile at the end
//! of each measured loop. The cost of an end is the cost of the rig's calls to it, less the cost of
//! its own calls to the fabric and the store: the protocol, the cache and the bookkeeping. The
//! rig's fabric is not that of an RDMA device, so it is reported apart. Turns without work are
//! counted too, because a polling thread makes them.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::callgrind::Profile;
use super::rig::MEASURED;
use super::{Case, Plan, crc};
use crate::child;

const LIMIT: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct EndInstructions {
    pub(crate) engine: f64,
    pub(crate) fabric: f64,
    pub(crate) store: f64,
    pub(crate) turns: f64,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct DigestInstructions {
    pub(crate) initiator: f64,
    pub(crate) target: f64,
    /// Of both: the CRC of the data.
    pub(crate) of_data: f64,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct InstructionCost {
    #[serde(flatten)]
    pub(crate) case: Case,
    pub(crate) ios: u64,
    pub(crate) initiator: EndInstructions,
    pub(crate) target: EndInstructions,
    #[serde(default)]
    pub(crate) digests: Option<DigestInstructions>,
    /// Functions with the most instructions of their own, both ends and everything under them, per
    /// I/O.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) hottest: Vec<(String, f64)>,
}

/// Measures the cases of a plan, with the names of `hottest` functions.
pub(crate) fn measure(plan: &Plan, hottest: usize) -> Result<Vec<InstructionCost>> {
    let mut costs = Vec::new();
    let plain =
        if plan.digests { profiles(&Plan { digests: false, ..plan.clone() })? } else { Vec::new() };
    for (number, profile) in profiles(plan)?.iter().enumerate() {
        let case = plan.cases()[number];
        let mut cost = of_profile(profile, case, plan.ios, hottest)?;
        if let Some(plain) = plain.get(number) {
            let plain = of_profile(plain, case, plan.ios, 0)?;
            add_digests(&mut cost, &plain, profile)?;
        }
        costs.push(cost);
    }
    Ok(costs)
}

fn profiles(plan: &Plan) -> Result<Vec<Profile>> {
    let directory = tempfile::tempdir()?;
    let out = directory.path().join("out");
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--quiet"]);
    command.arg(format!("--zero-before={MEASURED}"));
    command.arg(format!("--dump-after={MEASURED}"));
    command.arg(format!("--callgrind-out-file={}", out.display()));
    command.arg(std::env::current_exe()?).args(plan.arguments()?);
    child::output(&mut command, LIMIT).context("valgrind is a package of that name")?;
    let mut profiles = Vec::new();
    for (number, case) in plan.cases().into_iter().enumerate() {
        let dump = Path::new(&format!("{}.{}", out.display(), number + 1)).to_owned();
        let text = std::fs::read_to_string(&dump)
            .with_context(|| format!("callgrind left no profile of {case}"))?;
        profiles.push(Profile::parse(&text).with_context(|| dump.display().to_string())?);
    }
    Ok(profiles)
}

/// The CRC of the data, in which callgrind does not know some instructions.
fn is_crc(name: &str) -> bool {
    name.contains("rblk_crc32c::crc32c")
}

/// Puts the CRCs of the data, as this CPU computes them, into the counts of callgrind, and takes
/// the difference to the cost without digests. Capsules are short, and summed alike under
/// callgrind.
#[expect(clippy::cast_precision_loss, reason = "counts of a run are far below 2^53")]
fn add_digests(
    cost: &mut InstructionCost,
    plain: &InstructionCost,
    profile: &Profile,
) -> Result<()> {
    let counted = profile.sum(|_, to| is_crc(to));
    let most = 2 * (cost.ios + u64::from(cost.case.depth));
    ensure!(
        (2 * cost.ios..=most).contains(&counted.calls),
        "{}: {} CRCs of data, but each end computes one per I/O",
        cost.case,
        counted.calls
    );
    let of_data = crc::instructions(cost.case.bytes)? as f64;
    let counted = counted.cost as f64 / counted.calls as f64;
    for end in [&mut cost.initiator, &mut cost.target] {
        end.engine += of_data - counted;
    }
    cost.digests = Some(DigestInstructions {
        initiator: cost.initiator.engine - plain.initiator.engine,
        target: cost.target.engine - plain.target.engine,
        of_data,
    });
    Ok(())
}

// The names are those of the rig's own functions, which are never inlined.
fn is_initiator(name: &str) -> bool {
    name.contains("inprocess::queue::Queue")
        && (name.ends_with("::turn") || name.ends_with("::submit"))
}

fn is_target(name: &str) -> bool {
    name.contains("inprocess::target::Group") && name.ends_with("::turn")
}

fn is_rigs_poller(name: &str) -> bool {
    name.contains("inprocess::poller::PairedPoller as ")
}

#[expect(clippy::cast_precision_loss, reason = "counts of a run are far below 2^53")]
fn of_profile(profile: &Profile, case: Case, ios: u64, hottest: usize) -> Result<InstructionCost> {
    let per_io = |count: u64| count as f64 / ios as f64;
    let initiator = profile.sum(|_, to| is_initiator(to));
    let turns = profile.sum(|_, to| is_initiator(to) && to.ends_with("::turn"));
    let target = profile.sum(|_, to| is_target(to));
    ensure!(turns.calls > 0 && target.calls > 0, "this program has no symbols");
    // The target's fabric is behind the rig's own poller; the initiator's is not.
    let near =
        profile.sum(|from, to| to.contains("soft::poller::Poller as ") && !is_rigs_poller(from));
    let far = profile.sum(|_, to| is_rigs_poller(to));
    let store = profile.sum(|_, to| to.contains("RamStore as "));
    let end = |all: u64, fabric: u64, store: u64, turns: u64| EndInstructions {
        engine: per_io(all.saturating_sub(fabric + store)),
        fabric: per_io(fabric),
        store: per_io(store),
        turns: per_io(turns),
    };
    Ok(InstructionCost {
        case,
        ios,
        initiator: end(initiator.cost, near.cost, 0, turns.calls),
        target: end(target.cost, far.cost, store.cost, target.calls),
        digests: None,
        hottest: profile
            .hottest(hottest)
            .into_iter()
            .map(|(name, cost)| (name.to_owned(), per_io(cost)))
            .collect(),
    })
}

pub(crate) fn dearest(costs: &[InstructionCost]) -> f64 {
    costs.iter().flat_map(|cost| [cost.initiator.engine, cost.target.engine]).fold(0.0, f64::max)
}
