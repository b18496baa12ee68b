//! `rblk-initiator top`: the present work of each mount of this host, busiest first.

use std::time::Duration;

use rblk_config::Exit;
use rblk_operate::Output;
use rblk_operate::mount::mount_status::MountStatus;
use rblk_operate::mount::path_status::PathStatus;
use rblk_operate::mount::run_dir::must_be_readable;
use rblk_runtime::rates::Rates;
use serde::Serialize;

use super::known::living;
use super::mount_table;
use crate::program::top::{self, TopView};

/// One snapshot of the mounts of this host, as JSON.
#[derive(Serialize)]
struct Look<'a> {
    /// The time, in milliseconds since 1970.
    unix_ms: u128,
    /// The mounts, busiest first.
    mounts: Vec<LookAtMount<'a>>,
}

#[derive(Serialize)]
struct LookAtMount<'a> {
    name: &'a str,
    device: &'a str,
    state: &'a str,
    target_name: &'a str,
    rates: Option<Rates>,
    in_flight: u64,
    /// Of a mount that uses all its addresses at once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    paths: Vec<LookAtPath<'a>>,
}

#[derive(Serialize)]
struct LookAtPath<'a> {
    address: &'a str,
    state: &'a str,
    rates: Option<Rates>,
}

/// The mounts, busiest first.
struct Mounts(Vec<MountStatus>);

impl TopView for Mounts {
    fn look(&self) -> impl Serialize {
        look(&self.0)
    }

    fn frame(&self) -> String {
        mount_table::top(&self.0)
    }
}

/// Shows the mounts repeatedly, or once.
pub(crate) fn top(interval: Duration, once: bool, output: Output) -> anyhow::Result<Exit> {
    must_be_readable()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    top::top(interval, once, output, || {
        // The first question starts the measurement.
        let mut mounts = living(&runtime, true);
        let pace = |m: &MountStatus| m.rates.map_or(0, |rates| rates.reads + rates.writes);
        mounts.sort_by_key(|mount| std::cmp::Reverse(pace(mount)));
        Ok(Some(Mounts(mounts)))
    })
}

fn path(path: &PathStatus) -> LookAtPath<'_> {
    let PathStatus { address, state, rates, .. } = path;
    LookAtPath { address, state, rates: *rates }
}

fn look(mounts: &[MountStatus]) -> Look<'_> {
    let mounts = mounts.iter().map(|m| LookAtMount {
        name: &m.name,
        device: &m.device,
        state: &m.state,
        target_name: &m.target_name,
        rates: m.rates,
        in_flight: m.total.in_flight,
        paths: m.paths.iter().map(path).collect(),
    });
    Look { unix_ms: top::unix_ms(), mounts: mounts.collect() }
}
