//! The goals, and the verdict of a run on each: met, short, or not measured.
//!
//! The numbers of a goal are medians of ratios within a round, never ratios of medians.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cost::{Cost, InstructionCost, Op, Volume};
use crate::result::{Cell, Perf, Run, Sample, Summary, paired, system};

/// The states of a goal in a run.
const MET: &str = "met";
const SHORT: &str = "short";
pub(super) const UNKNOWN: &str = "not measured";

fn state(met: Option<bool>) -> &'static str {
    met.map_or(UNKNOWN, |met| if met { MET } else { SHORT })
}

/// The verdict on one goal, or on one part of it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct Verdict {
    pub(super) goal: u8,
    pub(super) what: String,
    pub(super) value: String,
    pub(super) need: String,
    pub(super) state: &'static str,
}

pub(super) const GOALS: [(u8, &str); 6] = [
    (1, "Ahead of the kernel's NVMe over RDMA"),
    (2, "128k fills the wire"),
    (3, "What an I/O costs"),
    (4, "Instructions"),
    (5, "Over TCP, and many jobs"),
    (6, "Idle costs nothing, waiting costs little"),
];

/// rblk over verbs by default, set up alone (`--variant adaptive=`), to be compared with
/// [`system::RBLK_VERBS_SPIN`], which is set up alone, too: spinning takes processors from its
/// neighbours.
const ADAPTIVE: &str = "adaptive";

/// The workloads of goal 1, with one queue.
const GATE: [(&str, u64, u32); 6] = [
    ("randread", 4 << 10, 1),
    ("randwrite", 4 << 10, 1),
    ("randread", 4 << 10, 32),
    ("randwrite", 4 << 10, 32),
    ("read", 128 << 10, 16),
    ("write", 128 << 10, 16),
];

fn gate_cell((rw, bytes, depth): (&str, u64, u32)) -> Cell {
    let reads = if rw.ends_with("read") { 100 } else { 0 };
    Cell::new(rw, bytes, depth, 1, 1, reads)
}

fn at_least(goal: u8, what: String, value: Option<Summary>, need: f64) -> Verdict {
    Verdict {
        goal,
        what,
        value: value.map_or_else(dash, |value| spread(&value)),
        need: format!("≥ {}", ratio(need)),
        state: state(value.map(|value| value.median >= need)),
    }
}

fn at_most(goal: u8, what: String, value: Option<f64>, need: f64) -> Verdict {
    Verdict {
        goal,
        what,
        value: value.map_or_else(dash, plain),
        need: if need > 0.0 { format!("≤ {}", plain(need)) } else { "0".to_owned() },
        state: state(value.map(|value| value <= need)),
    }
}

/// A ratio with its spread, where there are several rounds.
fn spread(value: &Summary) -> String {
    let Summary { median, low, high, count } = *value;
    let more = if count > 1 { format!(" ({low:.2}–{high:.2})") } else { String::new() };
    ratio(median) + &more
}

fn iops(sample: &Sample) -> f64 {
    sample.iops
}

/// All verdicts on a run, by goal.
pub(crate) fn verdicts(run: &Run) -> Vec<Verdict> {
    [ahead(run), wire(run), io_cost(run), instructions(run), tcp(run), idle(run)].concat()
}

/// The bound of our ratio to nvme-rdma in a cell of the gate: at depth 32 the smaller of 1.5 and
/// 0.9 of an empty ublk disk.
fn needed(run: &Run, cell: &Cell) -> f64 {
    if cell.depth != 32 || cell.block_bytes != 4 << 10 {
        return 1.0;
    }
    let floor = run.ratio(system::UBLK_NULL, system::NVME_RDMA, &cell.key, iops);
    floor.map_or(1.5, |floor| (0.9 * floor.median).min(1.5)).max(1.0)
}

fn ahead(run: &Run) -> Vec<Verdict> {
    let mut all = Vec::new();
    for cell in GATE.map(gate_cell) {
        let value = run.ratio(system::RBLK_VERBS, system::NVME_RDMA, &cell.key, iops);
        let what = format!("{}: IOPS against nvme-rdma", cell.title());
        let mut verdict = at_least(1, what, value, needed(run, &cell));
        if cell.depth == 32 {
            verdict.need += " (the smaller of 1.5× and 0.9× ublk null)";
        }
        all.push(verdict);
    }
    for cell in [gate_cell(GATE[0]), gate_cell(GATE[1])] {
        let value = wake_floor(run, &cell);
        let words = |(ours, floor): (f64, f64)| {
            format!("{} ({:.0} of {:.0} µs)", ratio(ours / floor), ours / 1e3, floor / 1e3)
        };
        all.push(Verdict {
            goal: 1,
            what: format!(
                "{}: mean latency against ublk null + ib_send_lat 64 B + ib_write_lat 4 KiB",
                cell.title()
            ),
            value: value.map_or_else(dash, words),
            need: format!("≤ {}", ratio(1.1)),
            state: state(value.map(|(ours, floor)| ours <= 1.1 * floor)),
        });
    }
    all
}

/// Our mean latency in a cell, and its floor, an empty ublk disk and our messages, in nanoseconds.
fn wake_floor(run: &Run, cell: &Cell) -> Option<(f64, f64)> {
    let mean = |system| run.summary(system, &cell.key, |s| s.latency.mean_ns);
    let lat = |tool, bytes| {
        let rounds = run.perf_rounds(1, tool, bytes, |perf| perf.mean_us);
        Summary::of(rounds.into_values()).map(|us| us.median * 1000.0)
    };
    let (ours, null) = (mean(system::RBLK_VERBS)?, mean(system::UBLK_NULL)?);
    let floor = null.median + lat("ib_send_lat", 64)? + lat("ib_write_lat", 4 << 10)?;
    (floor > 0.0).then_some((ours.median, floor))
}

/// Our bandwidth against perftest's with as many QPs: a read is RDMA WRITEs of the target, a write
/// is its RDMA READs. A run from before QPs were noted has perftest with one.
fn wire(run: &Run) -> Vec<Verdict> {
    let ours = run.systems.iter().find(|info| info.key == system::RBLK_VERBS);
    let qps = ours.map_or(0, |info| info.qps);
    let words = match qps {
        0 => "perftest with one QP".to_owned(),
        1 => "one QP each".to_owned(),
        qps => format!("{qps} QPs each"),
    };
    let of = |gate, tool| {
        let cell = gate_cell(gate);
        let mib = |sample: &&Sample| sample.bytes_per_s / f64::from(1 << 20);
        let ours = run.rounds(system::RBLK_VERBS, &cell.key);
        let ours: BTreeMap<u32, f64> = ours.iter().map(|s| (s.round, mib(s))).collect();
        let rate = |perf: &Perf| perf.mib_per_s;
        let wire = run.perf_rounds(qps.max(1), tool, cell.block_bytes, rate);
        let what = format!("{}: bandwidth against {tool} ({words})", cell.title());
        at_least(2, what, paired(&ours, &wire), 0.95)
    };
    vec![of(GATE[4], "ib_write_bw"), of(GATE[5], "ib_read_bw")]
}

fn io_cost(run: &Run) -> Vec<Verdict> {
    let costs: Vec<&Cost> = run.cost.iter().flat_map(|cost| &cost.costs).collect();
    let costs: Vec<&Cost> = costs.into_iter().filter(|cost| cost.case.bytes == 4 << 10).collect();
    // The dearest of the cases: a goal holds for all of them.
    let worst = |value: &dyn Fn(&Cost) -> Option<f64>| {
        let values: Option<Vec<f64>> = costs.iter().map(|cost| value(cost)).collect();
        values.and_then(Summary::of).map(|summary| summary.high)
    };
    let hit = |cost: &&&Cost| cost.case.op == Op::Read && cost.case.volume == Volume::Cached;
    let hits = costs.iter().filter(hit).map(|cost| cost.target.copied_bytes);
    let copied = Summary::of(hits).map(|summary| summary.high);
    let lines = [
        ("messages", worst(&|c| Some(c.initiator.messages + c.target.messages)), 2.0),
        // One for each answer, and one for 64 SENDs to prove them.
        (
            "completions at the initiator",
            worst(&|c| Some(c.initiator.completions)),
            1.0 + 1.0 / 64.0,
        ),
        ("signaled sends at the target", worst(&|c| Some(c.target.signaled)), 1.0 / 16.0),
        ("allocations at the initiator", worst(&|c| c.initiator.allocations), 0.0),
        ("allocations at the target", worst(&|c| c.target.allocations), 0.0),
        ("bytes copied at the initiator", worst(&|c| Some(c.initiator.copied_bytes)), 0.0),
        ("bytes copied at the target on a cache hit", copied, 0.0),
    ];
    let line = |(what, value, need)| at_most(3, format!("4 KiB: {what}"), value, need);
    let mut all: Vec<Verdict> = lines.map(line).to_vec();
    for cell in [gate_cell(GATE[2]), gate_cell(GATE[3])] {
        let rounds = run.rounds(system::RBLK_VERBS, &cell.key);
        for (end, is_target) in [("initiator", false), ("target", true)] {
            let calls = |s: &&Sample| if is_target { s.target } else { s.initiator }?.syscalls;
            let value = Summary::of(rounds.iter().filter_map(calls)).map(|value| value.median);
            all.push(at_most(
                3,
                format!("{}: system calls at the {end}", cell.title()),
                value,
                0.5,
            ));
        }
    }
    all
}

fn instructions(run: &Run) -> Vec<Verdict> {
    let rows: Vec<&InstructionCost> = run.cost.iter().flat_map(|c| &c.instructions).collect();
    let rows = rows.into_iter().filter(|row| row.case.bytes == 4 << 10);
    let of = |end: &str, value: fn(&InstructionCost) -> f64| {
        let most = Summary::of(rows.clone().map(value)).map(|summary| summary.high);
        at_most(4, format!("4 KiB: instructions of the {end}'s engine"), most, 1500.0)
    };
    vec![of("initiator", |row| row.initiator.engine), of("target", |row| row.target.engine)]
}

/// Our least ratio of IOPS over TCP to a peer, in the cells with one job and one queue from a depth
/// on, with the title of that cell.
fn worst_over_tcp(run: &Run, peer: &str, depth_least: u32) -> Option<(Summary, String)> {
    let cells = run.cells.iter().filter(|cell| cell.jobs == 1 && cell.queues == 1);
    cells
        .filter(|cell| cell.depth >= depth_least)
        .filter_map(|cell| {
            Some((run.ratio(system::RBLK_TCP, peer, &cell.key, iops)?, cell.title()))
        })
        .min_by(|a, b| a.0.median.total_cmp(&b.0.median))
}

fn tcp(run: &Run) -> Vec<Verdict> {
    let line = |what: &str, worst: Option<(Summary, String)>, need: f64| {
        let mut verdict = at_least(5, what.to_owned(), worst.as_ref().map(|worst| worst.0), need);
        if let Some((_, cell)) = worst {
            verdict.value += &format!(", the least: {cell}");
        }
        verdict
    };
    let nvme = worst_over_tcp(run, system::NVME_TCP, 8);
    let nbd = worst_over_tcp(run, system::NBD, 0);
    let jobs: Vec<(u32, Summary)> = run
        .cells
        .iter()
        .filter(|cell| cell.rw == "randread" && cell.depth == 8 && cell.queues == 1)
        .filter_map(|cell| Some((cell.jobs, run.summary(system::RBLK_VERBS, &cell.key, iops)?)))
        .collect();
    let peak = jobs.iter().map(|(_, value)| value.median).fold(0.0, f64::max);
    let many = jobs.iter().find(|(jobs, _)| *jobs == 64).filter(|_| peak > 0.0).map(|(_, v)| {
        Summary { median: v.median / peak, low: v.low / peak, high: v.high / peak, count: v.count }
    });
    vec![
        line("rblk over TCP against nvme-tcp, depth 8 and more", nvme, 1.0),
        line("rblk over TCP against NBD, everywhere", nbd, 2.0),
        at_least(5, "64 jobs at depth 8: IOPS against our own peak".to_owned(), many, 0.95),
    ]
}

fn idle(run: &Run) -> Vec<Verdict> {
    let idle = run.scale.as_ref().and_then(|scale| scale.idle.as_ref());
    let volumes = idle.map_or(100, |idle| idle.volumes);
    let of = |end: &str, value| {
        let what = format!("{volumes} idle volumes: percent of one processor at the {end}");
        at_most(6, what, value, 1.0)
    };
    let cell = Cell::new("randread", 4 << 10, 8, 1, 1, 100);
    #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a latency are below 2^53")]
    let p99 = |s: &Sample| s.latency.p99 as f64;
    let waits = run.ratio(ADAPTIVE, system::RBLK_VERBS_SPIN, &cell.key, p99);
    vec![
        of("initiator", idle.map(|idle| idle.initiator.percent)),
        of("target", idle.map(|idle| idle.target.percent)),
        Verdict {
            goal: 6,
            what: format!("{}: p99 against spinning all the time", cell.title()),
            value: waits.as_ref().map_or_else(dash, spread),
            need: "≤ 1.20×".to_owned(),
            state: state(waits.map(|ratio| ratio.median <= 1.2)),
        },
    ]
}

fn dash() -> String {
    "-".to_owned()
}

fn ratio(value: f64) -> String {
    format!("{value:.2}×")
}

/// Three digits that count: `0.0313`, `1.57`, `387`, `12926`.
pub(super) fn plain(value: f64) -> String {
    let digits = match value.abs() {
        a if a >= 100.0 => 0,
        a if a >= 10.0 => 1,
        a if a >= 1.0 => 2,
        a if a >= 0.1 => 3,
        _ => 4,
    };
    let text = format!("{value:.digits$}");
    if !text.contains('.') {
        return text;
    }
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests;
