//! A run as text, for a terminal.

use super::goals::{self, UNKNOWN, plain};
use crate::cost;
use crate::result::{Run, Sample, Summary, SystemInfo, system};

/// The run for a terminal: every system, goals, costs, and the systems that are missing.
pub(crate) fn text(run: &Run) -> String {
    let costs = run.cost.as_ref().map(cost::table).unwrap_or_default();
    let parts = [beside(run), verdicts(run), costs, scale(run), missing(run)];
    let parts: Vec<String> = parts.into_iter().filter(|part| !part.is_empty()).collect();
    if parts.is_empty() { "nothing was measured\n".to_owned() } else { parts.join("\n") }
}

/// Columns as wide as their texts; the first `left` are aligned left, the others right.
fn columns(rows: &[Vec<String>], left: usize) -> String {
    let width = |at: usize| rows.iter().filter_map(|row| row.get(at)?.chars().count().into()).max();
    let widths: Vec<usize> = (0..).map_while(width).collect();
    let line = |row: &Vec<String>| {
        let mut text = String::new();
        for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let gap = if at == 0 { "" } else { "  " };
            text += &match at < left {
                true => format!("{gap}{cell:<width$}"),
                false => format!("{gap}{cell:>width$}"),
            };
        }
        text.trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Known systems in their order, then the others.
fn systems(run: &Run) -> Vec<&SystemInfo> {
    let mut all: Vec<&SystemInfo> = run.systems.iter().collect();
    all.sort_by_key(|info| system::all().position(|key| key == info.key).unwrap_or(usize::MAX));
    all
}

/// Every system in every cell: the median, and the spread of its rounds.
fn beside(run: &Run) -> String {
    let mut systems = systems(run);
    systems.retain(|info| run.samples.iter().any(|sample| sample.system == info.key));
    if systems.is_empty() {
        return String::new();
    }
    let iops = |sample: &Sample| sample.iops;
    let mut rows = vec![vec!["IOPS, median (spread)".to_owned()]];
    rows[0].extend(systems.iter().map(|info| info.title.clone()));
    for cell in &run.cells {
        let mut row = vec![cell.title()];
        row.extend(systems.iter().map(|info| {
            let Some(value) = run.summary(&info.key, &cell.key, iops) else {
                return "-".to_owned();
            };
            let Summary { median, low, high, count } = value;
            match count > 1 && median > 0.0 {
                true => format!("{median:.0} ({:.0} %)", (high - low) / median * 100.0),
                false => format!("{median:.0}"),
            }
        }));
        rows.push(row);
    }
    columns(&rows, 1)
}

fn verdicts(run: &Run) -> String {
    let mut rows = vec![["goal", "value", "needed", ""].map(str::to_owned).to_vec()];
    for verdict in goals::verdicts(run) {
        if verdict.state != UNKNOWN {
            let what = format!("{}  {}", verdict.goal, verdict.what);
            rows.push(vec![what, verdict.value, verdict.need, verdict.state.to_owned()]);
        }
    }
    if rows.len() > 1 { columns(&rows, 4) } else { String::new() }
}

fn scale(run: &Run) -> String {
    let Some(scale) = &run.scale else { return String::new() };
    let mut text = String::new();
    for plot in &scale.plots {
        for line in &plot.lines {
            let points = line.points.iter().map(|p| {
                format!("{}: {} ({}–{})", plain(p.x), plain(p.y), plain(p.low), plain(p.high))
            });
            let points: Vec<String> = points.collect();
            let unit = format!("{:?}", plot.y.unit).to_lowercase();
            text += &format!("{}, {}, {unit}: {}\n", plot.title, line.label, points.join(", "));
        }
    }
    if let Some(idle) = &scale.idle {
        text += &format!("{} idle volumes over {:.0} s:", idle.volumes, idle.seconds);
        for (end, idle) in [("initiators", idle.initiator), ("target", idle.target)] {
            text += &format!(
                " {end} {} % of one processor, {} wake-ups a second ({} % if they only slept);",
                plain(idle.percent),
                plain(idle.wakes),
                plain(idle.sleepers_percent)
            );
        }
        text.pop();
        text.push('\n');
    }
    text
}

/// Systems and plots that were not measured, with the reason.
fn missing(run: &Run) -> String {
    let systems = systems(run).into_iter().map(|info| (&info.title, &info.error));
    let plots = run.scale.iter().flat_map(|scale| &scale.plots);
    let all = systems.chain(plots.map(|plot| (&plot.title, &plot.error)));
    let lines =
        all.filter_map(|(title, why)| Some(format!("not measured: {title}: {}\n", why.as_ref()?)));
    lines.collect()
}
