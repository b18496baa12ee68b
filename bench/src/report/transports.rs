//! The section of `fabric`: what the transports cost by themselves.

use std::collections::BTreeMap;

use crate::result::{Bandwidth, FabricDevice, Pages, Perf, PingPong, Run, Unit, Wait};

use super::chart::{Direction, Form, Layout, Line, Lines};
use super::goals;
use super::latency::distribution;
use super::number;
use super::page::Page;

/// Kinds of messages, in the order in which they are told, with their looks.
const KINDS: [(&str, usize); 5] = [("UDP", 6), ("TCP", 5), ("SEND", 0), ("WRITE", 3), ("READ", 8)];

fn look(what: &str) -> usize {
    KINDS.iter().find(|(kind, _)| *kind == what).map_or(9, |(_, look)| *look)
}

fn name(device: &FabricDevice) -> &str {
    if device.title.is_empty() { &device.address } else { &device.title }
}

fn direction(label: &str, unit: Unit, layout: Layout) -> Direction {
    Direction { label: label.to_owned(), form: Form::Unit(unit), layout }
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn size(bytes: u64) -> f64 {
    bytes as f64
}

pub(super) fn section(page: &mut Page, run: &Run) {
    let devices = run.fabric.as_ref().map_or(&[][..], |fabric| &fabric.devices);
    if devices.is_empty() && run.perftest.is_empty() {
        return;
    }
    page.section(
        "fabric",
        "The transports by themselves",
        "What registering memory, one message and many messages cost without a disk behind them; perftest beside.",
    );
    for device in devices.iter().filter(|device| device.error.is_some()) {
        let why = device.error.as_deref().unwrap_or_default();
        let text = format!("{}: not measured: {why}", name(device));
        page.html.text_in("p", &[], &text);
    }
    let measured: Vec<&FabricDevice> = devices.iter().filter(|d| d.error.is_none()).collect();
    page.cards(|page| {
        registration(page, &measured);
        for (n, device) in measured.iter().enumerate() {
            bandwidth(page, device, n);
            pingpong_plot(page, device, n);
        }
    });
    registration_table(page, &measured);
    for device in &measured {
        pingpong(page, device);
    }
    let perftest = measured.iter().flat_map(|device| &device.perftest).chain(&run.perftest);
    perftest_table(page, perftest);
}

fn registration(page: &mut Page, devices: &[&FabricDevice]) {
    let mut lines = Vec::new();
    for device in devices {
        for (pages, word) in [
            (Pages::Normal, "4 KiB pages"),
            (Pages::Transparent, "THP"),
            (Pages::Huge, "2 MiB pages"),
        ] {
            let points: Vec<_> = device
                .registration
                .iter()
                .filter(|row| row.pages == pages && row.register_ns > 0.0)
                .map(|row| (size(row.bytes), row.register_ns))
                .collect();
            if !points.is_empty() {
                let at = lines.len();
                lines.push(Line::through(&format!("{}, {word}", name(device)), at, points));
            }
        }
    }
    if lines.is_empty() {
        return;
    }
    let chart = |title: &str, y: &str, lines| Lines {
        title: title.to_owned(),
        x: direction("bytes registered", Unit::Bytes, Layout::Set),
        y: direction(y, Unit::Nanoseconds, Layout::Log),
        lines,
        means: Vec::new(),
        marks: true,
    };
    let per_page: Vec<Line> = lines
        .iter()
        .map(|line| {
            let points = line.points.iter().map(|(x, y)| (*x, y.median / (x / 4096.0).max(1.0)));
            Line::through(&line.label, line.look, points)
        })
        .collect();
    let whole = chart("Registering memory", "time", lines);
    page.card("registration", &whole.draw(), false, "");
    let per_page = chart("Registering memory, per 4 KiB", "time per 4 KiB", per_page);
    page.card("registration-per-page", &per_page.draw(), false, "");
}

fn registration_table(page: &mut Page, devices: &[&FabricDevice]) {
    let rows: Vec<_> =
        devices.iter().flat_map(|d| d.registration.iter().map(move |row| (name(d), row))).collect();
    if rows.is_empty() {
        return;
    }
    page.html.element("details", &[], |html| {
        html.text_in("summary", &[], "Registering memory, in numbers");
        let columns = [
            "Device",
            "Pages",
            "#Bytes",
            "#Register",
            "#Per 4 KiB",
            "#Never touched before",
            "#Deregister",
        ];
        html.table(&columns, |html| {
            for (device, row) in rows {
                let pages = match row.pages {
                    Pages::Normal => "4 KiB",
                    Pages::Transparent => "transparent",
                    Pages::Huge => "2 MiB",
                };
                let each = row.register_ns / (size(row.bytes) / 4096.0).max(1.0);
                let mut cells = vec![device.to_owned(), pages.to_owned()];
                cells.push(format!("#{}", number::bytes(size(row.bytes))));
                for ns in [row.register_ns, each, row.fresh_ns, row.deregister_ns] {
                    let text = if ns > 0.0 { number::duration(ns) } else { "-".to_owned() };
                    cells.push(format!("#{text}"));
                }
                html.row(&cells);
            }
        });
    });
}

fn bandwidth(page: &mut Page, device: &FabricDevice, n: usize) {
    let mut by_kind: BTreeMap<&str, Vec<&Bandwidth>> = BTreeMap::new();
    for row in &device.bandwidth {
        by_kind.entry(&row.what).or_default().push(row);
    }
    if by_kind.is_empty() {
        return;
    }
    let mut lines: Vec<Line> = by_kind
        .into_iter()
        .map(|(what, rows)| {
            let points = rows.iter().map(|row| (size(row.bytes), row.bytes_per_s));
            Line::through(what, look(what), points)
        })
        .collect();
    for (tool, what) in [("ib_write_bw", "WRITE"), ("ib_read_bw", "READ"), ("ib_send_bw", "SEND")] {
        let points: Vec<_> = device
            .perftest
            .iter()
            .filter(|perf| perf.tool == tool && !perf.events)
            .filter_map(|perf| Some((size(perf.bytes), perf.mib_per_s? * f64::from(1 << 20))))
            .collect();
        if !points.is_empty() {
            lines.push(Line { dashed: true, ..Line::through(tool, look(what), points) });
        }
    }
    let chart = Lines {
        title: format!("{}: bandwidth by message size", name(device)),
        x: direction("bytes per message", Unit::Bytes, Layout::Set),
        y: direction("bandwidth", Unit::BytesPerSecond, Layout::Log),
        lines,
        means: Vec::new(),
        marks: true,
    };
    page.card(&format!("bandwidth-{n}"), &chart.draw(), false, "");
}

fn pingpong_plot(page: &mut Page, device: &FabricDevice, n: usize) {
    let least = device.pingpong.iter().map(|row| row.bytes).min().unwrap_or(0);
    let lines: Vec<Line> = device
        .pingpong
        .iter()
        .filter(|row| row.bytes == least && row.wait == Wait::Polling)
        .filter_map(|row| {
            let points = distribution([&row.latency].into_iter());
            let line = Line::through(&row.what, look(&row.what), points);
            (!line.points.is_empty()).then_some(line)
        })
        .collect();
    if lines.is_empty() {
        return;
    }
    let chart = Lines {
        title: format!("{}: ping-pong of {}, polling", name(device), number::bytes(size(least))),
        x: direction("half a round trip, READ: a whole one", Unit::Nanoseconds, Layout::Log),
        y: Direction { label: "messages".to_owned(), form: Form::Part, layout: Layout::Nines },
        lines,
        means: Vec::new(),
        marks: false,
    };
    page.card(&format!("pingpong-{n}"), &chart.draw(), false, "");
}

fn pingpong(page: &mut Page, device: &FabricDevice) {
    if device.pingpong.is_empty() {
        return;
    }
    let mut rows: Vec<&PingPong> = device.pingpong.iter().collect();
    let place =
        |what: &str| KINDS.iter().position(|(kind, _)| *kind == what).unwrap_or(KINDS.len());
    rows.sort_by_key(|row| (row.bytes, place(&row.what), row.wait));
    let title = format!("{}: ping-pong, half a round trip (READ: a whole one)", name(device));
    page.html.text_in("h3", &[], &title);
    let columns = ["Message", "#Bytes", "Waits by", "#Mean", "#Median", "#p99", "#p99.9", "#Most"];
    page.html.table(&columns, |html| {
        for row in rows {
            let wait = match row.wait {
                Wait::Polling => "polling",
                Wait::Events => "events",
            };
            let latency = &row.latency;
            let mut cells = vec![
                row.what.clone(),
                format!("#{}", number::bytes(size(row.bytes))),
                wait.to_owned(),
            ];
            if let Some(why) = &row.error {
                cells.push(format!("not measured: {why}"));
                cells.extend((0..4).map(|_| String::new()));
            } else {
                cells.push(format!("#{}", number::duration(latency.mean_ns)));
                for value in [latency.p50, latency.p99, latency.p999, latency.max] {
                    cells.push(format!("#{}", number::duration(goals::nanoseconds(value))));
                }
            }
            html.row(&cells);
        }
    });
}

fn perftest_table<'a>(page: &mut Page, perftest: impl Iterator<Item = &'a Perf>) {
    let rows: Vec<&Perf> = perftest.collect();
    if rows.is_empty() {
        return;
    }
    page.html.text_in("h3", &[], "perftest");
    page.html.table(
        &["Program", "#Bytes", "#Round", "Waits by", "#Mean latency", "#Bandwidth"],
        |html| {
            for perf in rows {
                let wait = if perf.events { "events" } else { "polling" };
                let bytes = number::bytes(size(perf.bytes));
                let mut cells = vec![
                    perf.tool.clone(),
                    format!("#{bytes}"),
                    format!("#{}", perf.round),
                    wait.to_owned(),
                ];
                match &perf.error {
                    Some(why) => cells.extend([format!("not measured: {why}"), String::new()]),
                    None => {
                        let mean = perf.mean_us.map(|us| number::duration(us * 1000.0));
                        let rate =
                            perf.mib_per_s.map(|mib| format!("{} MiB/s", number::plain(mib)));
                        cells
                            .extend([mean, rate].map(|text| {
                                format!("#{}", text.unwrap_or_else(|| "-".to_owned()))
                            }));
                    }
                }
                html.row(&cells);
            }
        },
    );
}
