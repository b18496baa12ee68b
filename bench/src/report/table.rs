//! A run as text, for a terminal: ratios first, then every system, then what is missing.

use crate::cost;
use crate::result::{Cell, Family, Run, Sample, Summary, system};

use super::goals::{self, State};
use super::number;
use super::page::{systems, title};

/// The run for a terminal.
#[must_use]
pub fn text(run: &Run) -> String {
    let parts = [
        headline(run),
        beside(run),
        verdicts(run),
        fabric(run),
        costs(run),
        growth(run),
        missing(run),
    ];
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    if parts.is_empty() {
        return "nothing was measured\n".to_owned();
    }
    parts.join("\n")
}

/// Columns as wide as their texts; the first stands left, the others right.
fn columns(heads: &[&str], rows: &[Vec<String>]) -> String {
    aligned(heads, rows, 1)
}

/// Columns as wide as their texts; so many of the first stand left, the others right.
fn aligned(heads: &[&str], rows: &[Vec<String>], left: usize) -> String {
    let count = |text: &str| text.chars().count();
    let width = |at: usize| {
        let cells = rows.iter().filter_map(|row| row.get(at)).map(|cell| count(cell));
        cells.chain([count(heads[at])]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let line = |cells: &[String]| {
        let mut text = String::new();
        for (at, (cell, width)) in cells.iter().zip(&widths).enumerate() {
            let gap = if at == 0 { "" } else { "  " };
            text += &if at < left {
                format!("{gap}{cell:<width$}")
            } else {
                format!("{gap}{cell:>width$}")
            };
        }
        text.trim_end().to_owned() + "\n"
    };
    let heads: Vec<String> = heads.iter().map(|head| (*head).to_owned()).collect();
    line(&heads) + &rows.iter().map(|row| line(row)).collect::<String>()
}

fn iops(sample: &Sample) -> f64 {
    sample.iops
}

/// The gate: we, nvme-rdma, the ratio, the floor, what is needed, met.
fn headline(run: &Run) -> String {
    let cells: Vec<Cell> = goals::GATE.into_iter().map(goals::gate_cell).collect();
    let number = |key: &str, cell: &Cell| {
        let value = run.summary(key, &cell.key, iops);
        value.map_or_else(|| "-".to_owned(), |value| format!("{:.0}", value.median))
    };
    let rows: Vec<Vec<String>> = cells
        .iter()
        .filter(|cell| run.summary(system::RBLK_VERBS, &cell.key, iops).is_some())
        .map(|cell| {
            let ratio = run.ratio(system::RBLK_VERBS, system::NVME_RDMA, &cell.key, iops);
            let need = goals::needed(run, cell);
            let met = match ratio {
                Some(ratio) if ratio.median >= need => State::Met.word(),
                Some(_) => State::Short.word(),
                None => "-",
            };
            vec![
                cell.title(),
                number(system::RBLK_VERBS, cell),
                number(system::NVME_RDMA, cell),
                ratio.as_ref().map_or_else(|| "-".to_owned(), goals::spread),
                number(system::UBLK_NULL, cell),
                number::ratio(need),
                met.to_owned(),
            ]
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    columns(&["IOPS", "rblk verbs", "nvme-rdma", "ratio", "ublk null", "needed", ""], &rows)
}

/// Every system in every cell: the median, and the ratio to the first of ours.
fn beside(run: &Run) -> String {
    let systems: Vec<_> = systems(run)
        .into_iter()
        .filter(|info| run.samples.iter().any(|sample| sample.system == info.key))
        .collect();
    if systems.is_empty() || run.cells.is_empty() {
        return String::new();
    }
    let mut heads = vec!["IOPS, median (spread)"];
    heads.extend(systems.iter().map(|info| title(info)));
    let rows: Vec<Vec<String>> = run
        .cells
        .iter()
        .map(|cell| {
            let mut row = vec![cell.title()];
            row.extend(systems.iter().map(|info| {
                let value = run.summary(&info.key, &cell.key, iops);
                value.as_ref().map_or_else(|| "-".to_owned(), with_spread)
            }));
            row
        })
        .collect();
    columns(&heads, &rows)
}

fn with_spread(value: &Summary) -> String {
    if value.count > 1 && value.median > 0.0 {
        let percent = (value.high - value.low) / value.median * 100.0;
        format!("{:.0} ({percent:.0} %)", value.median)
    } else {
        format!("{:.0}", value.median)
    }
}

fn verdicts(run: &Run) -> String {
    let rows: Vec<Vec<String>> = goals::verdicts(run)
        .into_iter()
        .filter(|verdict| verdict.state != State::Unknown)
        .map(|verdict| {
            let what = format!("{}  {}", verdict.goal, verdict.what);
            vec![what, verdict.value, verdict.need, verdict.state.word().to_owned()]
        })
        .collect();
    if rows.is_empty() {
        String::new()
    } else {
        aligned(&["goal", "value", "needed", ""], &rows, 4)
    }
}

fn fabric(run: &Run) -> String {
    let devices = run.fabric.iter().flat_map(|fabric| &fabric.devices);
    let mut text = String::new();
    for device in devices.filter(|device| device.error.is_none()) {
        let rows: Vec<Vec<String>> = device
            .pingpong
            .iter()
            .map(|row| {
                let latency = &row.latency;
                let duration = |ns| number::duration(goals::nanoseconds(ns));
                let wait = format!("{:?}", row.wait).to_lowercase();
                let mut cells = vec![format!("{} {} B, {wait}", row.what, row.bytes)];
                cells.extend(match &row.error {
                    Some(_) => ["-"; 4].map(str::to_owned),
                    None => [
                        number::duration(latency.mean_ns),
                        duration(latency.p50),
                        duration(latency.p99),
                        duration(latency.max),
                    ],
                });
                cells
            })
            .collect();
        if !rows.is_empty() {
            text += &columns(&[&device.address, "mean", "median", "p99", "most"], &rows);
        }
        let rows: Vec<Vec<String>> = device
            .bandwidth
            .iter()
            .map(|row| {
                let rate = format!("{}/s", number::bytes(row.bytes_per_s));
                let name = format!("{} {} B, depth {}", row.what, row.bytes, row.depth);
                vec![name, rate, number::thousands(row.messages_per_s)]
            })
            .collect();
        if !rows.is_empty() {
            text += &columns(&[&device.address, "bandwidth", "messages/s"], &rows);
        }
        let rows: Vec<Vec<String>> = device
            .registration
            .iter()
            .map(|row| {
                let pages = format!("{:?}", row.pages).to_lowercase();
                let name = format!("register {} B, {pages} pages", row.bytes);
                vec![name, number::duration(row.register_ns), number::duration(row.deregister_ns)]
            })
            .collect();
        if !rows.is_empty() {
            text += &columns(&[&device.address, "register", "deregister"], &rows);
        }
    }
    text
}

fn costs(run: &Run) -> String {
    run.cost.as_ref().map(cost::table).unwrap_or_default()
}

fn growth(run: &Run) -> String {
    let Some(scale) = &run.scale else { return String::new() };
    let mut text = String::new();
    for plot in &scale.plots {
        for line in &plot.lines {
            let points: Vec<String> = line
                .points
                .iter()
                .map(|p| {
                    let (x, y) =
                        (number::with_unit(p.x, plot.x.unit), number::with_unit(p.y, plot.y.unit));
                    format!("{x}: {y}")
                })
                .collect();
            let slope =
                line.slope.map(|slope| format!(" (exponent {slope:.2})")).unwrap_or_default();
            let flag = if line.flagged { " WORSE THAN LINEAR" } else { "" };
            text +=
                &format!("{}, {}{slope}{flag}: {}\n", plot.title, line.label, points.join(", "));
        }
    }
    if let Some(idle) = &scale.idle {
        text += &format!(
            "{} idle volumes over {:.0} s: initiators {} %, target {} % of one processor\n",
            idle.volumes,
            idle.seconds,
            number::plain(idle.initiator_percent),
            number::plain(idle.target_percent)
        );
    }
    text
}

/// What could not be measured, and why.
fn missing(run: &Run) -> String {
    let systems = systems(run).into_iter().filter_map(|info| {
        let family = match info.family {
            Family::Rblk => "",
            Family::Kernel => " (peer)",
            Family::Floor => " (floor)",
        };
        Some(format!("not measured: {}{family}: {}\n", title(info), info.error.as_ref()?))
    });
    let devices = run.fabric.iter().flat_map(|fabric| &fabric.devices).filter_map(|device| {
        Some(format!("not measured: {}: {}\n", device.address, device.error.as_ref()?))
    });
    let plots = run.scale.iter().flat_map(|scale| &scale.plots).filter_map(|plot| {
        Some(format!("not measured: {}: {}\n", plot.title, plot.error.as_ref()?))
    });
    systems.chain(devices).chain(plots).collect()
}
