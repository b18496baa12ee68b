//! The section on latency: its distribution, and how it and IOPS change with what is outstanding.

use std::collections::BTreeMap;

use crate::result::{Cell, Latency, Run, Sample, Unit, system};

use super::chart::{Direction, Form, Layout, Line, Lines};
use super::goals;
use super::page::{Page, look, systems, title};

/// Points of a distribution that are drawn at most.
const POINTS: usize = 240;

/// Where distributions end: what is beyond is a few I/Os.
const LAST: f64 = 0.9999;

/// Distributions are drawn of these.
const CELLS: [(&str, u64, u32); 4] = [
    ("randread", 4 << 10, 1),
    ("randwrite", 4 << 10, 1),
    ("randread", 4 << 10, 32),
    ("randwrite", 4 << 10, 32),
];

pub(super) fn section(page: &mut Page, run: &Run) {
    let cells: Vec<Cell> = CELLS.into_iter().map(goals::gate_cell).collect();
    let distributions: Vec<(&Cell, Vec<Line>)> = cells
        .iter()
        .map(|cell| (cell, distribution_lines(run, cell)))
        .filter(|(_, lines)| !lines.is_empty())
        .collect();
    let grown = ["randread", "randwrite"].into_iter().filter(|rw| depths(run, rw).len() > 1);
    let grown: Vec<&str> = grown.collect();
    if distributions.is_empty() && grown.is_empty() {
        return;
    }
    page.section(
        "latency",
        "Latency and depth",
        "From submission to completion as fio sees it. Distributions are stretched towards the tail: each step up \
         leaves a tenth as many I/Os above the line.",
    );
    page.cards(|page| {
        for (cell, lines) in distributions {
            let chart = Lines {
                title: format!("{}: latency that so many I/Os do not exceed", cell.title()),
                x: direction("latency", Form::Unit(Unit::Nanoseconds), Layout::Log),
                y: direction("I/Os", Form::Part, Layout::Nines),
                lines,
                means: Vec::new(),
                marks: false,
            };
            page.card(&format!("latency-{}", cell.key), &chart.draw(), false, "");
        }
        for rw in grown {
            by_depth(page, run, rw);
        }
        by_jobs(page, run);
    });
}

fn direction(label: &str, form: Form, layout: Layout) -> Direction {
    Direction { label: label.to_owned(), form, layout }
}

fn distribution_lines(run: &Run, cell: &Cell) -> Vec<Line> {
    systems(run)
        .into_iter()
        .filter_map(|info| {
            let rounds = run.rounds(&info.key, &cell.key);
            let points = distribution(rounds.iter().map(|sample| &sample.latency));
            let line = Line::through(title(info), look(run, &info.key), points);
            let dashed = info.transport == "tcp";
            (!line.points.is_empty()).then_some(Line { dashed, ..line })
        })
        .collect()
}

/// Nanoseconds, and the part of all I/Os that did not take longer.
pub(super) fn distribution<'a>(latencies: impl Iterator<Item = &'a Latency>) -> Vec<(f64, f64)> {
    let mut bins: BTreeMap<u64, u64> = BTreeMap::new();
    for (nanoseconds, count) in latencies.flat_map(|latency| &latency.bins) {
        *bins.entry(*nanoseconds).or_default() += count;
    }
    let total: u64 = bins.values().sum();
    if total == 0 {
        return Vec::new();
    }
    let every = bins.len().div_ceil(POINTS);
    let mut below = 0;
    let mut points = Vec::new();
    for (n, (nanoseconds, count)) in bins.iter().enumerate() {
        below += count;
        // The tail is few bins, and all there is to see of it.
        let tail = below * 100 >= total * 99;
        if n % every == 0 || tail || n + 1 == bins.len() {
            let part = goals::nanoseconds(below) / goals::nanoseconds(total);
            points.push((goals::nanoseconds(*nanoseconds), part));
            if part >= LAST {
                break;
            }
        }
    }
    points
}

/// Cells of 4k with one job and one queue that differ in depth only.
fn depths<'a>(run: &'a Run, rw: &str) -> Vec<&'a Cell> {
    let mut cells: Vec<&Cell> = run
        .cells
        .iter()
        .filter(|c| c.rw == rw && c.block_bytes == 4 << 10 && c.jobs == 1 && c.queues == 1)
        .collect();
    cells.sort_by_key(|cell| cell.depth);
    cells
}

fn lines(
    run: &Run,
    cells: &[&Cell],
    x: impl Fn(&Cell) -> u32,
    y: impl Fn(&Sample) -> f64,
) -> Vec<Line> {
    systems(run)
        .into_iter()
        .filter_map(|info| {
            let points: Vec<_> = cells
                .iter()
                .filter_map(|cell| {
                    Some((f64::from(x(cell)), run.summary(&info.key, &cell.key, &y)?))
                })
                .collect();
            (points.len() > 1).then(|| Line {
                label: title(info).to_owned(),
                look: look(run, &info.key),
                dashed: info.transport == "tcp",
                points,
            })
        })
        .collect()
}

fn by_depth(page: &mut Page, run: &Run, rw: &str) {
    let cells = depths(run, rw);
    let x = || direction("I/Os outstanding", Form::Unit(Unit::Count), Layout::Set);
    let iops = Lines {
        title: format!("4k {rw}: IOPS against depth"),
        x: x(),
        y: direction("IOPS", Form::Unit(Unit::Iops), Layout::Zero),
        // Beside a disk of this machine all others would be one line.
        lines: lines(run, &cells, |cell| cell.depth, |sample| sample.iops)
            .into_iter()
            .filter(|line| line.look != look(run, system::LOCAL))
            .collect(),
        means: Vec::new(),
        marks: true,
    };
    page.card(&format!("depth-iops-{rw}"), &iops.draw(), false, "");
    let mean = Lines {
        title: format!("4k {rw}: mean latency against depth"),
        x: x(),
        y: direction("mean latency", Form::Unit(Unit::Nanoseconds), Layout::Log),
        lines: lines(run, &cells, |cell| cell.depth, |sample| sample.latency.mean_ns),
        means: Vec::new(),
        marks: true,
    };
    page.card(&format!("depth-latency-{rw}"), &mean.draw(), false, "");
}

fn by_jobs(page: &mut Page, run: &Run) {
    let mut cells: Vec<&Cell> = run
        .cells
        .iter()
        .filter(|c| c.rw == "randread" && c.block_bytes == 4 << 10 && c.depth == 8 && c.queues == 1)
        .collect();
    cells.sort_by_key(|cell| cell.jobs);
    if cells.len() < 2 {
        return;
    }
    let chart = Lines {
        title: "4k randread QD8: IOPS against jobs".to_owned(),
        x: direction("jobs", Form::Unit(Unit::Count), Layout::Set),
        y: direction("IOPS", Form::Unit(Unit::Iops), Layout::Zero),
        lines: lines(run, &cells, |cell| cell.jobs, |sample| sample.iops),
        means: Vec::new(),
        marks: true,
    };
    page.card("jobs-iops", &chart.draw(), false, "");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_distribution_is_of_all_rounds() {
        let latency = |bins: &[(u64, u64)]| Latency { bins: bins.to_vec(), ..Latency::default() };
        let two = [latency(&[(10, 1), (20, 2)]), latency(&[(20, 1)])];
        assert_eq!(distribution(two.iter()), [(10.0, 0.25), (20.0, 1.0)]);
        assert!(distribution([latency(&[])].iter()).is_empty());
        assert!(distribution([latency(&[(5, 0)])].iter()).is_empty());
        let many: Vec<(u64, u64)> = (1..5000).map(|ns| (ns, 7)).collect();
        let points = distribution([latency(&many)].iter());
        assert!(points.len() < POINTS + 60, "{}", points.len());
        assert!(points.last().unwrap().1 >= LAST);
    }
}
