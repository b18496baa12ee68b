//! The sections of `compare`: ratios first, then systems beside each other, then what they took of
//! the processors.

use crate::result::{Cell, Family, Run, Sample, Summary, SystemInfo, Unit, system};

use super::chart::{Bar, Bars, Form, Mean};
use super::goals;
use super::html::Html;
use super::number;
use super::page::{Page, look, systems, title};
use super::svg::Svg;

/// From here on bandwidth says more than IOPS.
const LARGE: u64 = 64 << 10;

/// Who is compared with whom, in the order in which it is told.
const PAIRS: [(&str, &str); 3] = [
    (system::RBLK_VERBS, system::NVME_RDMA),
    (system::RBLK_TCP, system::NVME_TCP),
    (system::RBLK_TCP, system::NBD),
];

fn iops(sample: &Sample) -> f64 {
    sample.iops
}

/// Pairs that this run has something of; of systems with other names, each peer with the first of
/// ours.
fn pairs(run: &Run) -> Vec<(String, String)> {
    let has = |key: &str| run.samples.iter().any(|sample| sample.system == key);
    let mut pairs: Vec<(String, String)> = PAIRS
        .iter()
        .filter(|(ours, theirs)| has(ours) && has(theirs))
        .map(|(ours, theirs)| ((*ours).to_owned(), (*theirs).to_owned()))
        .collect();
    let ours = systems(run).into_iter().find(|info| info.family == Family::Rblk && has(&info.key));
    let others = systems(run).into_iter().filter(|info| {
        info.family == Family::Kernel
            && !system::ORDER.contains(&info.key.as_str())
            && has(&info.key)
    });
    for other in others {
        pairs.extend(ours.map(|ours| (ours.key.clone(), other.key.clone())));
    }
    pairs
}

fn name(run: &Run, key: &str) -> String {
    let info = run.systems.iter().find(|info| info.key == key);
    info.map_or_else(|| key.to_owned(), |info| title(info).to_owned())
}

/// How many times as fast as a peer, cell by cell.
pub(super) fn ratios(page: &mut Page, run: &Run) {
    let pairs = pairs(run);
    let Some((first, rest)) = pairs.split_first() else { return };
    let best = against_best(run);
    page.section(
        "ratios",
        "How many times as fast",
        "IOPS of rblk divided by those of the peer in the same round: right of the dashed line rblk is ahead. \
         Whiskers go from the least round to the most; a diamond is what the goal asks for; pale bars are behind.",
    );
    let gate: Vec<Cell> = goals::GATE.into_iter().map(goals::gate_cell).collect();
    let (decide, others): (Vec<&Cell>, Vec<&Cell>) =
        run.cells.iter().partition(|cell| gate.iter().any(|one| one.key == cell.key));
    let (decide, others) = if decide.is_empty() { (others, decide) } else { (decide, others) };
    if let Some(best) = best {
        page.card("ratio-best", &best, true, "In each line the peer that was fastest there.");
    }
    ratio_card(page, run, first, &decide, true);
    page.cards(|page| {
        ratio_card(page, run, first, &others, false);
        for pair in rest {
            ratio_card(page, run, pair, &run.cells.iter().collect::<Vec<_>>(), false);
        }
    });
}

fn ratio_card(
    page: &mut Page,
    run: &Run,
    (ours, theirs): &(String, String),
    cells: &[&Cell],
    wide: bool,
) {
    let gate: Vec<Cell> = goals::GATE.into_iter().map(goals::gate_cell).collect();
    let absolute = |key: &str, cell: &Cell| {
        let value = run.summary(key, &cell.key, iops).map_or(f64::NAN, |value| value.median);
        format!("{}: {} IOPS", name(run, key), number::thousands(value))
    };
    let bars = cells.iter().filter_map(|cell| {
        let value = run.ratio(ours, theirs, &cell.key, iops)?;
        let need = match theirs.as_str() {
            system::NVME_RDMA if gate.iter().any(|one| one.key == cell.key) => {
                Some(goals::needed(run, cell))
            }
            system::NVME_TCP if cell.depth >= 8 => Some(1.0),
            system::NBD => Some(2.0),
            _ => None,
        };
        Some(Bar {
            label: cell.title(),
            look: look(run, ours),
            value: Ok(value),
            need,
            floor: false,
            tip: format!("{}\n{}", absolute(ours, cell), absolute(theirs, cell)),
        })
    });
    let bars: Vec<Bar> = bars.collect();
    if bars.is_empty() {
        return;
    }
    let whole = wide || cells.len() == run.cells.len();
    let rest = if whole { "" } else { ", the other cells" };
    let chart = Bars {
        title: format!("{} against {}{rest}", name(run, ours), name(run, theirs)),
        form: Form::Ratio,
        bars,
        means: vec![Mean { value: 1.0, label: format!("as fast as {}", name(run, theirs)) }],
        width: if wide { 1060.0 } else { 520.0 },
    };
    let file = if whole { "" } else { "-others" };
    page.card(&format!("ratio-{ours}-{theirs}{file}"), &chart.draw(), wide, "");
}

/// Each of ours that is reached without a disk, against the fastest such peer, cell by cell. `None`
/// if there is none of either.
pub(super) fn against_best(run: &Run) -> Option<Svg> {
    let has = |info: &&SystemInfo| run.samples.iter().any(|sample| sample.system == info.key);
    let all = systems(run).into_iter().filter(has);
    let (ours, peers): (Vec<_>, Vec<_>) = all
        .filter(|info| !system::ORDER.contains(&info.key.as_str()))
        .partition(|info| info.family == Family::Rblk);
    let median = |info: &SystemInfo, cell: &Cell| {
        run.summary(&info.key, &cell.key, iops).map_or(0.0, |value| value.median)
    };
    let mut bars = Vec::new();
    for cell in &run.cells {
        let fastest =
            |a: &&&SystemInfo, b: &&&SystemInfo| median(a, cell).total_cmp(&median(b, cell));
        let Some(best) = peers.iter().max_by(fastest) else { continue };
        for (at, info) in ours.iter().enumerate() {
            let Some(value) = run.ratio(&info.key, &best.key, &cell.key, iops) else { continue };
            let of = |info: &SystemInfo| {
                format!("{}: {} IOPS", title(info), number::thousands(median(info, cell)))
            };
            bars.push(Bar {
                // The first one is in the title, and those below are of the same cell.
                label: if at == 0 { cell.title() } else { info.key.clone() },
                look: look(run, &info.key),
                value: Ok(value),
                need: None,
                floor: false,
                tip: format!("{}\n{}", of(info), of(best)),
            });
        }
    }
    let peers: Vec<&str> = peers.iter().map(|info| title(info)).collect();
    let first = ours.first().map_or("", |info| title(info));
    let chart = Bars {
        title: format!("{first}, against the fastest of {}", peers.join("; ")),
        form: Form::Ratio,
        means: vec![Mean { value: 1.0, label: "as fast".to_owned() }],
        width: 1060.0,
        bars,
    };
    (!chart.bars.is_empty()).then(|| chart.draw())
}

/// Every system in every cell.
pub(super) fn systems_beside(page: &mut Page, run: &Run) {
    if run.cells.is_empty() {
        return;
    }
    page.section(
        "systems",
        "Side by side",
        "Blue is rblk, warm colours are the kernel's own, grey and green are floors: they do less than the work. \
         At 128k the dashed line is what perftest moves over the same device.",
    );
    page.cards(|page| {
        for cell in run.cells.iter().filter(|cell| cell.jobs <= 1) {
            let chart = beside(run, cell);
            if chart.bars.iter().any(|bar| bar.value.is_ok()) {
                page.card(&format!("systems-{}", cell.key), &chart.draw(), false, "");
            }
        }
    });
}

fn beside(run: &Run, cell: &Cell) -> Bars {
    let large = cell.block_bytes >= LARGE;
    let value = move |sample: &Sample| if large { sample.bytes_per_s } else { sample.iops };
    let bars = systems(run).into_iter().filter_map(|info| {
        let summary = run.summary(&info.key, &cell.key, value);
        let value = match (summary, &info.error) {
            (Some(summary), _) => Ok(summary),
            (None, Some(why)) => Err(why.clone()),
            // It is not meant to be in this cell.
            (None, None) => return None,
        };
        let mean = run.summary(&info.key, &cell.key, |s| s.latency.mean_ns);
        let p99 = run.summary(&info.key, &cell.key, |s| goals::nanoseconds(s.latency.p99));
        let tip = match (mean, p99) {
            (Some(mean), Some(p99)) => format!(
                "mean latency {}, p99 {}",
                number::duration(mean.median),
                number::duration(p99.median)
            ),
            _ => String::new(),
        };
        Some(Bar {
            label: title(info).to_owned(),
            look: look(run, &info.key),
            value,
            need: None,
            floor: info.family == Family::Floor,
            tip,
        })
    });
    let unit = if large { Unit::BytesPerSecond } else { Unit::Iops };
    Bars {
        title: format!("{}, {}", cell.title(), if large { "bandwidth" } else { "IOPS" }),
        form: Form::Unit(unit),
        bars: bars.collect(),
        means: if large { wire(run, cell) } else { Vec::new() },
        width: 520.0,
    }
}

/// What perftest moves in messages of this size, in the direction of this cell.
fn wire(run: &Run, cell: &Cell) -> Vec<Mean> {
    let tool = match cell.rw.as_str() {
        "read" | "randread" => "ib_write_bw",
        "write" | "randwrite" => "ib_read_bw",
        _ => return Vec::new(),
    };
    let rounds = run.perf_rounds(tool, cell.block_bytes, |perf| perf.mib_per_s);
    Summary::of(rounds.into_values())
        .map(|value| Mean { value: value.median * f64::from(1 << 20), label: tool.to_owned() })
        .into_iter()
        .collect()
}

/// What each system took of the processors, and what it did with it.
pub(super) fn processors(page: &mut Page, run: &Run) {
    let rows: Vec<(&Cell, &str, &str)> = run
        .cells
        .iter()
        .flat_map(|cell| systems(run).into_iter().map(move |info| (cell, info)))
        .filter(|(cell, info)| {
            run.rounds(&info.key, &cell.key)
                .iter()
                .any(|sample| sample.cpu.busy > 0.0 || sample.initiator.is_some())
        })
        .map(|(cell, info)| (cell, info.key.as_str(), title(info)))
        .collect();
    if rows.is_empty() {
        return;
    }
    page.section(
        "processors",
        "What it takes of the processors",
        "Processor time of the whole machine per I/O, fio and the kernel included, and what rblk's two ends do per I/O.",
    );
    let gate: Vec<Cell> = goals::GATE.into_iter().map(goals::gate_cell).collect();
    let (decide, others): (Vec<_>, Vec<_>) =
        rows.into_iter().partition(|row| gate.iter().any(|cell| cell.key == row.0.key));
    if !decide.is_empty() {
        processors_table(&mut page.html, run, &decide);
    }
    if !others.is_empty() {
        page.html.element("details", &[], |html| {
            html.text_in("summary", &[], "The other cells");
            processors_table(html, run, &others);
        });
    }
}

fn processors_table(html: &mut Html, run: &Run, rows: &[(&Cell, &str, &str)]) {
    let columns = [
        "Cell",
        "System",
        "#Busy",
        "#Per I/O",
        "#Daemons",
        "#Messages",
        "#Syscalls I",
        "#Syscalls T",
        "#Switches I",
        "#Switches T",
    ];
    html.table(&columns, |html| {
        let mut last = "";
        for &(cell, key, title) in rows {
            let number = |value: Option<Summary>, write: &dyn Fn(f64) -> String| {
                format!("#{}", value.map_or_else(|| "-".to_owned(), |value| write(value.median)))
            };
            let of = |value: &dyn Fn(&Sample) -> Option<f64>| {
                Summary::of(run.rounds(key, &cell.key).into_iter().filter_map(value))
            };
            let busy = of(&|s| (s.cpu.busy > 0.0).then_some(s.cpu.busy));
            let per_io =
                of(&|s| (s.cpu.busy > 0.0 && s.iops > 0.0).then_some(s.cpu.busy / s.iops * 1e9));
            let daemons = of(&|s| (s.cpu.daemons > 0.0).then_some(s.cpu.daemons));
            let messages =
                of(&|s| match (s.initiator?.messages, s.target.and_then(|t| t.messages)) {
                    (Some(ours), theirs) => Some(ours + theirs.unwrap_or(0.0)),
                    _ => None,
                });
            let name = if last == cell.key { String::new() } else { cell.title() };
            last = &cell.key;
            html.row(&[
                name,
                title.to_owned(),
                number(busy, &number::plain),
                number(per_io, &number::duration),
                number(daemons, &number::plain),
                number(messages, &number::plain),
                number(of(&|s| s.initiator?.syscalls), &number::plain),
                number(of(&|s| s.target?.syscalls), &number::plain),
                number(of(&|s| s.initiator?.switches), &number::plain),
                number(of(&|s| s.target?.switches), &number::plain),
            ]);
        }
    });
}
