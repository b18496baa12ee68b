//! The section of `cost`: what one I/O costs, which does not depend on the machine.

use crate::cost::{Case, EndCost, Report};
use crate::result::Run;

use super::number;
use super::page::Page;

pub(super) fn section(page: &mut Page, run: &Run) {
    let Some(cost) = run.cost.as_ref() else { return };
    if cost.costs.is_empty() && cost.instructions.is_empty() && cost.live.is_empty() {
        return;
    }
    page.section(
        "cost",
        "What one I/O costs",
        "Counted, not timed: the real engines over the in-memory fabric, the same numbers on every machine. \
         I is the initiator, T the target.",
    );
    counters(page, cost);
    instructions(page, cost);
    live(page, cost);
}

fn case(case: &Case) -> [String; 4] {
    [
        case.op.word().to_owned(),
        format!("#{}", number::bytes(f64::from(case.bytes))),
        format!("#{}", case.depth),
        case.volume.word().to_owned(),
    ]
}

fn counters(page: &mut Page, cost: &Report) {
    if cost.costs.is_empty() {
        return;
    }
    let columns = [
        "",
        "#Size",
        "#Depth",
        "Volume",
        "#Messages I",
        "#T",
        "#Signaled I",
        "#T",
        "#Completions I",
        "#T",
        "#Doorbells I",
        "#T",
        "#Copied bytes I",
        "#T",
        "#Allocations I",
        "#T",
    ];
    page.html.table(&columns, |html| {
        for row in &cost.costs {
            let mut cells = case(&row.case).to_vec();
            let values: [fn(&EndCost) -> Option<f64>; 6] = [
                |end| Some(end.messages),
                |end| Some(end.signaled),
                |end| Some(end.completions),
                |end| Some(end.send_doorbells),
                |end| Some(end.copied_bytes),
                |end| end.allocations,
            ];
            for value in values {
                for end in [&row.initiator, &row.target] {
                    let text = value(end).map_or_else(|| "-".to_owned(), number::plain);
                    cells.push(format!("#{text}"));
                }
            }
            html.row(&cells);
        }
    });
}

fn instructions(page: &mut Page, cost: &Report) {
    if cost.instructions.is_empty() {
        return;
    }
    page.html.text_in("h3", &[], "User-space instructions per I/O, by callgrind");
    let columns = [
        "",
        "#Size",
        "#Depth",
        "Volume",
        "#Engine I",
        "#T",
        "#Fabric under it I",
        "#T",
        "#Store T",
        "#Turns I",
        "#T",
    ];
    page.html.table(&columns, |html| {
        for row in &cost.instructions {
            let mut cells = case(&row.case).to_vec();
            let (i, t) = (&row.initiator, &row.target);
            for value in [i.engine, t.engine, i.fabric, t.fabric, t.store] {
                cells.push(format!("#{value:.0}"));
            }
            cells.extend([i.turns, t.turns].map(|turns| format!("#{}", number::plain(turns))));
            html.row(&cells);
        }
    });
}

fn live(page: &mut Page, cost: &Report) {
    if cost.live.is_empty() {
        return;
    }
    page.html.text_in("h3", &[], "The same of running daemons, per I/O");
    let columns = [
        "",
        "#Size",
        "#Depth",
        "Over",
        "End",
        "#Messages",
        "#Signaled",
        "#Completions",
        "#Doorbells",
        "#Ring enters",
        "#Yields",
        "#Arms",
        "#Sleeps",
        "#Switches",
        "#Copied bytes",
    ];
    page.html.table(&columns, |html| {
        for row in &cost.live {
            let ends = [("initiator", Some(&row.initiator)), ("target", row.target.as_ref())];
            for (name, end) in ends {
                let Some(end) = end else { continue };
                let mut cells = vec![
                    row.op.word().to_owned(),
                    format!("#{}", number::bytes(f64::from(row.bytes))),
                    format!("#{}", row.depth),
                    row.transport.clone(),
                    name.to_owned(),
                ];
                for value in [
                    Some(end.messages),
                    Some(end.signaled),
                    Some(end.completions),
                    Some(end.send_doorbells),
                    Some(end.ring_enters),
                    Some(end.yields),
                    Some(end.arms),
                    Some(end.sleeps),
                    end.switches,
                    Some(end.copied_bytes),
                ] {
                    cells.push(format!("#{}", value.map_or_else(|| "-".to_owned(), number::plain)));
                }
                html.row(&cells);
            }
        }
    });
}
