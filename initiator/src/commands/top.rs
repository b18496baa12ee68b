//! `rblk-initiator top`: the present work of each mount of this host, busiest first.

use std::time::{Duration, SystemTime};

use crate::mount::run_dir::must_be_readable;
use crate::volume::status::MountStatus;
use rblk_config::Exit;
use rblk_operate::Output;
use rblk_operate::screen::Screen;
use rblk_runtime::rates::Rates;
use serde::Serialize;

use super::{living, table};

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
}

/// Shows the mounts repeatedly, or once.
pub(crate) fn top(interval: Duration, once: bool, output: Output) -> anyhow::Result<Exit> {
    must_be_readable()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let screen = match output {
        Output::Table if !once => Screen::open(),
        _ => Screen::lines(),
    };
    loop {
        // The first question starts the measurement.
        let mut mounts = living(&runtime, true);
        let pace = |m: &MountStatus| m.rates.map_or(0, |rates| rates.reads + rates.writes);
        mounts.sort_by_key(|mount| std::cmp::Reverse(pace(mount)));
        match output {
            Output::Json => output.item(&look(&mounts), String::new)?,
            Output::Table => screen.draw(&table::top(&mounts))?,
        }
        if once || screen.wants_to_quit(interval)? {
            return Ok(Exit::Ok);
        }
    }
}

fn look(mounts: &[MountStatus]) -> Look<'_> {
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let mounts = mounts.iter().map(|m| LookAtMount {
        name: &m.name,
        device: &m.device,
        state: &m.state,
        target_name: &m.target_name,
        rates: m.rates,
        in_flight: m.total.in_flight,
    });
    Look { unix_ms: since_1970.map_or(0, |time| time.as_millis()), mounts: mounts.collect() }
}
