//! The goals, and the verdict of a run on each: met, short, or not measured.
//!
//! The numbers of a goal are medians of ratios within a round, never ratios of medians. A goal
//! without numbers in a run is not measured, and that is not met.

use std::collections::BTreeMap;

use crate::cost::{Op, Volume};
use crate::result::{Cell, Run, Sample, Summary, paired, system};

use super::number::{duration, plain, ratio};

/// What became of a goal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It is reached.
    Met,
    /// It is not.
    Short,
    /// The run does not say.
    Unknown,
}

impl State {
    /// The word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Short => "short",
            Self::Unknown => "not measured",
        }
    }
}

/// What a run says of one goal, or of one part of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// The goal's number.
    pub goal: u8,
    /// What is measured.
    pub what: String,
    /// What it is.
    pub value: String,
    /// What it should be.
    pub need: String,
    /// What became of it.
    pub state: State,
}

/// The goals' numbers with what each is about.
pub const GOALS: [(u8, &str); 7] = [
    (1, "Ahead of the kernel's NVMe over RDMA"),
    (2, "128k fills the wire"),
    (3, "What an I/O costs"),
    (4, "Instructions"),
    (5, "Over TCP, and many jobs"),
    (6, "Idle costs nothing, waiting costs little"),
    (7, "Nothing grows faster than its work"),
];

/// rblk over verbs as it is by default, but set up alone (`--variant adaptive=`), to be compared
/// with [`system::RBLK_VERBS_SPIN`], which is set up alone, too: spinning takes processors from
/// whatever is beside it.
pub const ADAPTIVE: &str = "adaptive";

/// The workloads of goal 1, with one queue.
pub const GATE: [(&str, u64, u32); 6] = [
    ("randread", 4 << 10, 1),
    ("randwrite", 4 << 10, 1),
    ("randread", 4 << 10, 32),
    ("randwrite", 4 << 10, 32),
    ("read", 128 << 10, 16),
    ("write", 128 << 10, 16),
];

/// A cell of the gate.
#[must_use]
pub fn gate_cell(gate: (&str, u64, u32)) -> Cell {
    let (rw, bytes, depth) = gate;
    let reads = if rw.ends_with("read") { 100 } else { 0 };
    Cell::new(rw, bytes, depth, 1, 1, reads)
}

fn at_least(goal: u8, what: String, value: Option<Summary>, need: f64) -> Verdict {
    Verdict {
        goal,
        what,
        value: value.map_or_else(|| "-".to_owned(), |value| spread(&value)),
        need: format!("≥ {}", ratio(need)),
        state: state(value.map(|value| value.median >= need)),
    }
}

fn at_most(goal: u8, what: String, value: Option<f64>, need: f64) -> Verdict {
    Verdict {
        goal,
        what,
        value: value.map_or_else(|| "-".to_owned(), plain),
        need: if need > 0.0 { format!("≤ {}", plain(need)) } else { "0".to_owned() },
        state: state(value.map(|value| value <= need)),
    }
}

fn state(met: Option<bool>) -> State {
    match met {
        Some(true) => State::Met,
        Some(false) => State::Short,
        None => State::Unknown,
    }
}

/// A ratio with its spread, where there are several rounds.
#[must_use]
pub fn spread(value: &Summary) -> String {
    if value.count > 1 {
        format!("{} ({:.2}–{:.2})", ratio(value.median), value.low, value.high)
    } else {
        ratio(value.median)
    }
}

fn iops(sample: &Sample) -> f64 {
    sample.iops
}

fn by_round(run: &Run, system: &str, cell: &str, value: fn(&Sample) -> f64) -> BTreeMap<u32, f64> {
    run.rounds(system, cell).into_iter().map(|sample| (sample.round, value(sample))).collect()
}

/// All verdicts on a run, by goal.
#[must_use]
pub fn verdicts(run: &Run) -> Vec<Verdict> {
    let mut all = ahead(run);
    all.extend(wire(run));
    all.extend(io_cost(run));
    all.extend(instructions(run));
    all.extend(tcp(run));
    all.extend(idle(run));
    all.extend(growth(run));
    all
}

/// What our ratio to nvme-rdma has to be in a cell of the gate, in each round: at depth 32 the
/// smaller of 1.5 and what 0.9 of an empty ublk disk would be.
#[must_use]
pub fn needed(run: &Run, cell: &Cell) -> f64 {
    if cell.depth != 32 || cell.block_bytes != 4 << 10 {
        return 1.0;
    }
    let floor = run.ratio(system::UBLK_NULL, system::NVME_RDMA, &cell.key, iops);
    floor.map_or(1.5, |floor| (0.9 * floor.median).min(1.5)).max(1.0)
}

fn ahead(run: &Run) -> Vec<Verdict> {
    let mut all = Vec::new();
    for gate in GATE {
        let cell = gate_cell(gate);
        let value = run.ratio(system::RBLK_VERBS, system::NVME_RDMA, &cell.key, iops);
        let need = needed(run, &cell);
        let what = format!("{}: IOPS against nvme-rdma", cell.title());
        let mut verdict = at_least(1, what, value, need);
        if cell.depth == 32 {
            verdict.need += " (the smaller of 1.5× and 0.9× ublk null)";
        }
        all.push(verdict);
    }
    for gate in &GATE[..2] {
        let cell = gate_cell(*gate);
        let what = format!(
            "{}: mean latency against ublk null + ib_send_lat 64 B + ib_write_lat 4 KiB",
            cell.title()
        );
        let value = wake_floor(run, &cell);
        all.push(Verdict {
            goal: 1,
            what,
            value: value.map_or_else(
                || "-".to_owned(),
                |(ours, floor)| {
                    format!("{} ({} of {})", ratio(ours / floor), duration(ours), duration(floor))
                },
            ),
            need: format!("≤ {}", ratio(1.1)),
            state: state(value.map(|(ours, floor)| ours <= 1.1 * floor)),
        });
    }
    all
}

/// Our mean latency in a cell, and what nothing with our front end and our messages can go below,
/// in nanoseconds.
fn wake_floor(run: &Run, cell: &Cell) -> Option<(f64, f64)> {
    let mean = |system| run.summary(system, &cell.key, |s| s.latency.mean_ns);
    let lat = |tool, bytes| {
        let rounds = run.perf_rounds(tool, bytes, |perf| perf.mean_us);
        Summary::of(rounds.into_values()).map(|us| us.median * 1000.0)
    };
    let (ours, null) = (mean(system::RBLK_VERBS)?, mean(system::UBLK_NULL)?);
    let floor = null.median + lat("ib_send_lat", 64)? + lat("ib_write_lat", 4 << 10)?;
    (floor > 0.0).then_some((ours.median, floor))
}

/// Our bandwidth against perftest's: a read is RDMA WRITEs of the target, a write is its RDMA
/// READs.
#[must_use]
pub fn of_wire(run: &Run, gate: (&str, u64, u32)) -> Option<Summary> {
    let cell = gate_cell(gate);
    let tool = if gate.0 == "read" { "ib_write_bw" } else { "ib_read_bw" };
    let ours = by_round(run, system::RBLK_VERBS, &cell.key, |s| s.bytes_per_s / f64::from(1 << 20));
    let wire = run.perf_rounds_by(wire_qps(run), tool, cell.block_bytes, |perf| perf.mib_per_s);
    paired(&ours, &wire)
}

/// With how many QPs perftest is compared with us: as many as we use. A run from before that was
/// noted has perftest with one.
fn wire_qps(run: &Run) -> u32 {
    let ours = run.systems.iter().find(|info| info.key == system::RBLK_VERBS);
    ours.map_or(1, |info| info.qps.max(1))
}

/// That in words; a run from before does not say how many we used.
#[must_use]
pub fn qps_of_wire(run: &Run) -> String {
    let ours = run.systems.iter().find(|info| info.key == system::RBLK_VERBS);
    match ours.map_or(0, |info| info.qps) {
        0 => "perftest with one QP".to_owned(),
        1 => "one QP each".to_owned(),
        qps => format!("{qps} QPs each"),
    }
}

fn wire(run: &Run) -> Vec<Verdict> {
    let gates = [(GATE[4], "ib_write_bw"), (GATE[5], "ib_read_bw")];
    gates
        .into_iter()
        .map(|(gate, tool)| {
            let qps = qps_of_wire(run);
            let what = format!("{}: bandwidth against {tool} ({qps})", gate_cell(gate).title());
            at_least(2, what, of_wire(run, gate), 0.95)
        })
        .collect()
}

fn io_cost(run: &Run) -> Vec<Verdict> {
    let mut all = Vec::new();
    let costs: Vec<_> = run
        .cost
        .iter()
        .flat_map(|cost| &cost.costs)
        .filter(|cost| cost.case.bytes == 4 << 10)
        .collect();
    // The dearest of the cases: a goal holds for all of them.
    let worst = |value: &dyn Fn(&crate::cost::Cost) -> Option<f64>| {
        let values: Option<Vec<f64>> = costs.iter().map(|cost| value(cost)).collect();
        values.and_then(Summary::of).map(|summary| summary.high)
    };
    let mut line = |what: &str, value: Option<f64>, need: f64| {
        all.push(at_most(3, format!("4 KiB: {what}"), value, need));
    };
    line("messages", worst(&|c| Some(c.initiator.messages + c.target.messages)), 2.0);
    // One per answer, and one per 64 SENDs for their proof.
    line(
        "completions at the initiator",
        worst(&|c| Some(c.initiator.completions)),
        1.0 + 1.0 / 64.0,
    );
    line("signaled sends at the target", worst(&|c| Some(c.target.signaled)), 1.0 / 16.0);
    line("allocations at the initiator", worst(&|c| c.initiator.allocations), 0.0);
    line("allocations at the target", worst(&|c| c.target.allocations), 0.0);
    line("bytes copied at the initiator", worst(&|c| Some(c.initiator.copied_bytes)), 0.0);
    let hits: Vec<f64> = costs
        .iter()
        .filter(|cost| cost.case.op == Op::Read && cost.case.volume == Volume::Cached)
        .map(|cost| cost.target.copied_bytes)
        .collect();
    let copied = Summary::of(hits).map(|summary| summary.high);
    line("bytes copied at the target on a cache hit", copied, 0.0);
    for gate in &GATE[2..4] {
        let cell = gate_cell(*gate);
        for (end, syscalls) in [
            (
                "initiator",
                (|s: &Sample| s.initiator.and_then(|end| end.syscalls)) as fn(&Sample) -> _,
            ),
            ("target", |s: &Sample| s.target.and_then(|end| end.syscalls)),
        ] {
            let rounds = run.rounds(system::RBLK_VERBS, &cell.key);
            let value = Summary::of(rounds.into_iter().filter_map(syscalls));
            let what = format!("{}: system calls at the {end}", cell.title());
            all.push(at_most(3, what, value.map(|value| value.median), 0.5));
        }
    }
    all
}

fn instructions(run: &Run) -> Vec<Verdict> {
    let ends = ["initiator", "target"].into_iter().zip(most_instructions(run));
    ends.map(|(end, most)| {
        at_most(4, format!("4 KiB: instructions of the {end}'s engine"), most, 1500.0)
    })
    .collect()
}

/// Our least ratio of IOPS over TCP to a peer, in the cells with one job and one queue that have at
/// least this depth, and the title of that cell.
fn worst_over_tcp(run: &Run, peer: &str, depth_least: u32) -> Option<(Summary, String)> {
    let single = |cell: &&Cell| cell.jobs == 1 && cell.queues == 1;
    let mut cells: Vec<&Cell> = run.cells.iter().filter(single).collect();
    let gate: Vec<Cell> = GATE.into_iter().map(gate_cell).collect();
    if cells.is_empty() {
        cells = gate.iter().collect();
    }
    let ratio = |cell: &Cell| run.ratio(system::RBLK_TCP, peer, &cell.key, iops);
    cells
        .into_iter()
        .filter(|cell| cell.depth >= depth_least)
        .filter_map(|cell| Some((ratio(cell)?, cell.title())))
        .min_by(|a, b| a.0.median.total_cmp(&b.0.median))
}

/// The least ratio to nvme-tcp at depth 8 and more.
#[must_use]
pub fn worst_nvme_tcp(run: &Run) -> Option<(Summary, String)> {
    worst_over_tcp(run, system::NVME_TCP, 8)
}

/// The least ratio to NBD.
#[must_use]
pub fn worst_nbd(run: &Run) -> Option<(Summary, String)> {
    worst_over_tcp(run, system::NBD, 0)
}

/// The most instructions that the engines of the initiator and of the target take for 4 KiB.
#[must_use]
pub fn most_instructions(run: &Run) -> [Option<f64>; 2] {
    let rows = run.cost.iter().flat_map(|cost| &cost.instructions);
    let rows: Vec<_> = rows.filter(|row| row.case.bytes == 4 << 10).collect();
    let most = |value: fn(&crate::cost::InstructionCost) -> f64| {
        Summary::of(rows.iter().map(|row| value(row))).map(|summary| summary.high)
    };
    [most(|row| row.initiator.engine), most(|row| row.target.engine)]
}

fn tcp(run: &Run) -> Vec<Verdict> {
    let mut all = Vec::new();
    let mut line = |what: &str, worst: Option<(Summary, String)>, need: f64| {
        let mut verdict = at_least(5, what.to_owned(), worst.as_ref().map(|worst| worst.0), need);
        if let Some((_, cell)) = worst {
            verdict.value += &format!(", the least: {cell}");
        }
        all.push(verdict);
    };
    line("rblk over TCP against nvme-tcp, depth 8 and more", worst_nvme_tcp(run), 1.0);
    line("rblk over TCP against NBD, everywhere", worst_nbd(run), 2.0);
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
    all.push(at_least(5, "64 jobs at depth 8: IOPS against our own peak".to_owned(), many, 0.95));
    all
}

fn idle(run: &Run) -> Vec<Verdict> {
    let idle = run.scale.as_ref().and_then(|scale| scale.idle.as_ref());
    let volumes = idle.map_or(100, |idle| idle.volumes);
    let mut all: Vec<Verdict> = [
        ("initiator", idle.map(|idle| idle.initiator_percent)),
        ("target", idle.map(|idle| idle.target_percent)),
    ]
    .into_iter()
    .map(|(end, value)| {
        let what = format!("{volumes} idle volumes: percent of one processor at the {end}");
        at_most(6, what, value, 1.0)
    })
    .collect();
    let cell = Cell::new("randread", 4 << 10, 8, 1, 1, 100);
    let p99 = |s: &Sample| nanoseconds(s.latency.p99);
    let ratio = run.ratio(ADAPTIVE, system::RBLK_VERBS_SPIN, &cell.key, p99);
    let what = format!("{}: p99 against spinning all the time", cell.title());
    all.push(Verdict {
        goal: 6,
        what,
        value: ratio.as_ref().map_or_else(|| "-".to_owned(), spread),
        need: "≤ 1.20×".to_owned(),
        state: state(ratio.map(|ratio| ratio.median <= 1.2)),
    });
    all
}

/// Nanoseconds as a number to reckon with.
#[expect(clippy::cast_precision_loss, reason = "nanoseconds of a latency are far below 2^53")]
#[must_use]
pub fn nanoseconds(value: u64) -> f64 {
    value as f64
}

fn growth(run: &Run) -> Vec<Verdict> {
    let plots = run.scale.iter().flat_map(|scale| &scale.plots);
    let mut all: Vec<Verdict> = plots
        .map(|plot| {
            let slopes: Vec<String> = plot
                .lines
                .iter()
                .filter_map(|line| Some(format!("{}: {}", line.label, plain(line.slope?))))
                .collect();
            let flagged = plot.lines.iter().any(|line| line.flagged);
            let measured =
                plot.error.is_none() && plot.lines.iter().any(|line| !line.points.is_empty());
            Verdict {
                goal: 7,
                what: plot.title.clone(),
                value: if slopes.is_empty() { "plotted".to_owned() } else { slopes.join(", ") },
                need: "exponent ≤ 1".to_owned(),
                state: state(measured.then_some(!flagged)),
            }
        })
        .collect();
    if all.is_empty() {
        all.push(Verdict {
            goal: 7,
            what: "Queues, volumes, sessions, file and arena".to_owned(),
            value: "-".to_owned(),
            need: "exponent ≤ 1".to_owned(),
            state: State::Unknown,
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::{Perf, SystemInfo};

    fn put(run: &mut Run, system: &str, cell: &Cell, round: u32, iops: f64, mean_ns: f64) {
        run.add_cell(cell.clone());
        let mut sample = Sample {
            system: system.into(),
            cell: cell.key.clone(),
            round,
            iops,
            #[expect(clippy::cast_precision_loss, reason = "small")]
            bytes_per_s: iops * cell.block_bytes as f64,
            ..Sample::default()
        };
        sample.latency.mean_ns = mean_ns;
        run.set_sample(sample);
    }

    fn find<'a>(verdicts: &'a [Verdict], part: &str) -> &'a Verdict {
        verdicts.iter().find(|verdict| verdict.what.contains(part)).unwrap()
    }

    #[test]
    fn an_empty_run_meets_nothing() {
        let verdicts = verdicts(&Run::default());
        assert!(verdicts.iter().all(|verdict| verdict.state == State::Unknown), "{verdicts:#?}");
        for (goal, _) in GOALS {
            assert!(verdicts.iter().any(|verdict| verdict.goal == goal), "{goal}");
        }
    }

    #[test]
    fn depth_32_needs_the_smaller_of_two() {
        let mut run = Run::default();
        let cell = gate_cell(GATE[2]);
        put(&mut run, system::NVME_RDMA, &cell, 1, 100.0, 0.0);
        assert!((needed(&run, &cell) - 1.5).abs() < 1e-9);
        put(&mut run, system::UBLK_NULL, &cell, 1, 140.0, 0.0);
        assert!((needed(&run, &cell) - 1.26).abs() < 1e-9);
        put(&mut run, system::RBLK_VERBS, &cell, 1, 126.1, 0.0);
        assert_eq!(find(&ahead(&run), "randread QD32").state, State::Met);
        put(&mut run, system::RBLK_VERBS, &cell, 1, 125.9, 0.0);
        assert_eq!(find(&ahead(&run), "randread QD32").state, State::Short);
        // The floor never asks for less than every other cell does.
        put(&mut run, system::UBLK_NULL, &cell, 1, 90.0, 0.0);
        assert!((needed(&run, &cell) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_floor_at_depth_1_is_a_sum() {
        let mut run = Run::default();
        let cell = gate_cell(GATE[0]);
        put(&mut run, system::RBLK_VERBS, &cell, 1, 1.0, 427_000.0);
        put(&mut run, system::UBLK_NULL, &cell, 1, 1.0, 289_000.0);
        for (tool, bytes) in [("ib_send_lat", 64), ("ib_write_lat", 4096)] {
            let mean_us = Some(49.0);
            run.perftest.push(Perf {
                tool: tool.into(),
                bytes,
                round: 1,
                mean_us,
                ..Perf::default()
            });
        }
        // 1.1 x 387 us = 425.7 us.
        assert_eq!(find(&ahead(&run), "randread QD1: mean").state, State::Short);
        put(&mut run, system::RBLK_VERBS, &cell, 1, 1.0, 425_000.0);
        assert_eq!(find(&ahead(&run), "randread QD1: mean").state, State::Met);
    }

    #[test]
    fn a_read_is_measured_against_writes_on_the_wire() {
        let mut run = Run::default();
        put(&mut run, system::RBLK_VERBS, &gate_cell(GATE[4]), 1, 800.0, 0.0);
        let mib_per_s = Some(100.0);
        run.perftest.push(Perf {
            tool: "ib_write_bw".into(),
            bytes: 128 << 10,
            round: 1,
            mib_per_s,
            ..Perf::default()
        });
        assert!((of_wire(&run, GATE[4]).unwrap().median - 1.0).abs() < 1e-9);
        assert_eq!(of_wire(&run, GATE[5]), None);
    }

    /// A wire with two QPs carries more than with one: two of ours are not compared with one.
    #[test]
    fn the_wire_is_measured_with_as_many_qps() {
        let mut run = Run::default();
        put(&mut run, system::RBLK_VERBS, &gate_cell(GATE[4]), 1, 960.0, 0.0);
        for (qps, mib) in [(0, 100.0), (2, 120.0)] {
            let (bytes, mib_per_s) = (128 << 10, Some(mib));
            let perf = Perf {
                tool: "ib_write_bw".into(),
                bytes,
                round: 1,
                mib_per_s,
                qps,
                ..Perf::default()
            };
            run.perftest.push(perf);
        }
        let set = |run: &mut Run, qps| {
            run.set_system(SystemInfo {
                key: system::RBLK_VERBS.into(),
                qps,
                ..SystemInfo::default()
            });
        };
        // Of a run from before: against one QP, and it is said.
        assert!((of_wire(&run, GATE[4]).unwrap().median - 1.2).abs() < 1e-9);
        assert_eq!(qps_of_wire(&run), "perftest with one QP");
        set(&mut run, 2);
        assert!((of_wire(&run, GATE[4]).unwrap().median - 1.0).abs() < 1e-9);
        assert!(find(&wire(&run), "ib_write_bw").what.ends_with("(2 QPs each)"));
        // perftest was not run with three.
        set(&mut run, 3);
        assert_eq!(of_wire(&run, GATE[4]), None);
    }

    #[test]
    fn the_worst_cell_decides() {
        let mut run = Run::default();
        for (gate, ours) in GATE.into_iter().zip([10.0, 90.0, 120.0, 99.0, 130.0, 140.0]) {
            let cell = gate_cell(gate);
            put(&mut run, system::RBLK_TCP, &cell, 1, ours, 0.0);
            put(&mut run, system::NVME_TCP, &cell, 1, 100.0, 0.0);
        }
        let verdicts = tcp(&run);
        let verdict = find(&verdicts, "nvme-tcp");
        // Depth 1 does not count here.
        assert_eq!(verdict.state, State::Short);
        assert!(verdict.value.contains("4k randwrite QD32"), "{verdict:?}");
        assert_eq!(find(&verdicts, "NBD").state, State::Unknown);
    }
}
