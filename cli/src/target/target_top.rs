//! `rblk-target top`: the work of each volume now, busiest first.

use std::path::Path;
use std::time::Duration;

use rblk_config::Exit;
use rblk_operate::table::{Column, Table, wrapped};
use rblk_operate::target::ask::Ask;
use rblk_operate::target::client::ask;
use rblk_operate::target::status::{TargetStatus, VolumeStatus};
use rblk_operate::{Output, figures};
use rblk_runtime::rates::Rates;
use serde::Serialize;

use super::running::status_in;
use crate::program::top::{self, TopView, rate_columns, rate_figures};

/// One look at a target, as JSON.
#[derive(Serialize)]
struct TopLook<'a> {
    /// The time, in milliseconds since 1970.
    unix_ms: u128,
    /// The target's name.
    target: &'a str,
    /// The rates per second, all volumes together.
    rates: Option<Rates>,
    /// The volumes, busiest first.
    volumes: Vec<LookAtVolume<'a>>,
}

#[derive(Serialize)]
struct LookAtVolume<'a> {
    name: &'a str,
    rates: Option<Rates>,
    in_flight: u64,
    dirty_bytes: u64,
    hit_ratio: Option<f64>,
    held_by: Option<&'a str>,
}

/// Shows a target again and again, or once.
pub(crate) fn top(
    path: &Path,
    interval: Duration,
    once: bool,
    output: Output,
) -> anyhow::Result<Exit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    top::top(interval, once, output, || {
        let status = status_in(path, runtime.block_on(ask(path, Ask::Status)))?;
        // The first command begins the measurement.
        Ok(status.rates.is_some().then_some(status))
    })
}

impl TopView for TargetStatus {
    fn look(&self) -> impl Serialize {
        look(self)
    }

    fn frame(&self) -> String {
        frame(self)
    }
}

/// The volumes, busiest first.
fn busiest(status: &TargetStatus) -> Vec<&VolumeStatus> {
    let mut volumes: Vec<&VolumeStatus> = status.volumes.iter().collect();
    let pace = |v: &&VolumeStatus| v.rates.map_or(0, |rates| rates.reads + rates.writes);
    volumes.sort_by_key(|volume| std::cmp::Reverse(pace(volume)));
    volumes
}

fn look(status: &TargetStatus) -> TopLook<'_> {
    let volumes = busiest(status).into_iter().map(|v| LookAtVolume {
        name: &v.name,
        rates: v.rates,
        in_flight: v.io.in_flight,
        dirty_bytes: v.counts.dirty_bytes,
        hit_ratio: v.counts.hit_ratio(),
        held_by: v.holder.as_ref().map(|holder| holder.host.as_str()),
    });
    TopLook {
        unix_ms: top::unix_ms(),
        target: &status.name,
        rates: status.rates,
        volumes: volumes.collect(),
    }
}

fn frame(status: &TargetStatus) -> String {
    let rates = status.rates.unwrap_or_default();
    let (total, arena) = (&status.total, status.arena_bytes);
    #[allow(clippy::cast_precision_loss, reason = "a share of a memory")]
    let share = |bytes: u64| figures::percent((arena > 0).then(|| bytes as f64 / arena as f64));
    let first = format!(
        "{}  {} IOPS  {} MiB/s  arena {}: {} cached, {} dirty",
        status.name,
        figures::count(rates.reads + rates.writes),
        figures::mib_per_second(rates.read_bytes.saturating_add(rates.written_bytes)),
        figures::size(arena),
        share(total.cached_bytes),
        share(total.dirty_bytes)
    );
    let others = ["DEPTH", "HIT", "STORE P99"].map(Column::figure);
    let columns = [Column::name("VOLUME")].into_iter().chain(rate_columns()).chain(others);
    let mut table = Table::new(columns.chain([Column::name("HOST")]));
    for v in busiest(status) {
        let rates = v.rates.unwrap_or_default();
        let others = [
            v.io.in_flight.to_string(),
            figures::percent(v.counts.hit_ratio()),
            figures::latency(rates.store_p99_us),
            v.holder.as_ref().map_or_else(|| "-".to_owned(), |holder| holder.host.clone()),
        ];
        table.row([v.name.clone()].into_iter().chain(rate_figures(Some(&rates))).chain(others));
    }
    format!("{}{table}", wrapped(&first, ""))
}
