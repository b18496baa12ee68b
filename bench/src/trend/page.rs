//! The page of the trend: a plot of the ratios to nvme-rdma, and a table of all figures.

use super::{Entry, Figure, Form};
use crate::folder;
use crate::report::chart::{self, Direction, Layout, Line, Lines, Mean};
use crate::report::goals::{self, GATE};
use crate::report::html::Html;
use crate::report::{self, number, style};
use crate::result::{Summary, Unit};

/// The page. `kept` names the runs whose report is there.
pub(super) fn text(entries: &[Entry], kept: &[String]) -> String {
    let mut html = Html::default();
    html.element("header", &[], |html| {
        html.text_in("h1", &[], "rblk from run to run");
        let lead = "Each column is one run, the oldest first: the median of its rounds, and in \
                    brackets the least and the most. Ratios are of samples of the same round. \
                    Speeds of different runs are not comparable, so none are here. A hollow \
                    mark, and (1 round), is one round alone: it tells ratios only roughly.";
        html.text_in("p", &[("class", "lead")], lead);
    });
    html.element("main", &[], |html| {
        if entries.len() > 1 {
            html.element("figure", &[("class", "card wide")], |html| {
                html.raw(&plot(entries).draw().inline());
            });
        }
        html.text_in("h2", &[("id", "figures")], "Figures");
        table(html, entries, kept);
        html.text_in("h2", &[("id", "runs")], "Runs");
        runs(html, entries);
    });
    html.page("rblk: from run to run", &style::page())
}

fn plot(entries: &[Entry]) -> Lines {
    let line = |(look, gate): (usize, (&str, u64, u32))| {
        let title = goals::gate_cell(gate).title();
        let what = format!("{title}: IOPS against nvme-rdma");
        let points = (1..).zip(entries).filter_map(|(at, entry)| {
            let Figure { median, low, high, .. } = *entry.figure(&what)?;
            Some((f64::from(at), Summary { median, low, high, count: entry.rounds as usize }))
        });
        Line { label: title, look, dashed: false, points: points.collect() }
    };
    let direction = |label: &str, form, layout| Direction { label: label.to_owned(), form, layout };
    Lines {
        title: "IOPS against nvme-rdma".to_owned(),
        x: direction("run", chart::Form::Unit(Unit::Count), Layout::Steps),
        y: direction("times nvme-rdma", chart::Form::Ratio, Layout::Zero),
        lines: GATE.into_iter().enumerate().map(line).collect(),
        means: vec![Mean { value: 1.0, label: "nvme-rdma".to_owned() }],
        marks: true,
    }
}

fn table(html: &mut Html, entries: &[Entry], kept: &[String]) {
    let mut whats: Vec<&str> = Vec::new();
    for figure in entries.iter().flat_map(|entry| &entry.figures) {
        if !whats.contains(&figure.what.as_str()) {
            whats.push(&figure.what);
        }
    }
    let heads: Vec<String> = entries.iter().map(|entry| format!("#{}", entry.id)).collect();
    let columns: Vec<&str> =
        ["Measured"].into_iter().chain(heads.iter().map(String::as_str)).collect();
    html.table(&columns, |html| {
        for what in whats {
            let cells = entries.iter().map(|entry| {
                let figure = entry.figure(what);
                figure.map_or_else(
                    || "#-".to_owned(),
                    |figure| format!("#{}", value(figure, entry.rounds)),
                )
            });
            let row: Vec<String> = [what.to_owned()].into_iter().chain(cells).collect();
            html.row(&row);
        }
        html.element("tr", &[], |html| {
            html.text_in("td", &[], "Report");
            for entry in entries {
                html.element("td", &[("class", "number")], |html| {
                    if kept.contains(&entry.id) {
                        let file = format!("{}/{}", entry.id, report::FILE);
                        html.text_in("a", &[("href", &file)], "report");
                    } else {
                        html.text("–");
                    }
                });
            }
        });
    });
}

fn value(figure: &Figure, rounds: u32) -> String {
    let Figure { form, median, low, high, .. } = figure;
    let write = |value: f64| match form {
        Form::Ratio => format!("{value:.2}"),
        Form::Number => number::plain(value),
    };
    let unit = if *form == Form::Ratio { "×" } else { "" };
    if low < high {
        format!("{}{unit} ({}–{})", write(*median), write(*low), write(*high))
    } else if *form == Form::Ratio && rounds == 1 {
        format!("{}{unit} (1 round)", write(*median))
    } else {
        format!("{}{unit}", write(*median))
    }
}

fn runs(html: &mut Html, entries: &[Entry]) {
    html.table(&["#", "Run", "Began (UTC)", "Commit", "Where", "#Rounds", "Note"], |html| {
        for (at, entry) in (1..).zip(entries) {
            let place = if entry.lab { "emulated guest" } else { "a machine" };
            html.row(&[
                format!("#{at}"),
                entry.id.clone(),
                folder::utc(entry.began_unix).chars().take(16).collect(),
                entry.commit.clone(),
                format!("{place}, Linux {}", entry.kernel),
                format!("#{}", entry.rounds),
                entry.note.clone(),
            ]);
        }
    });
}
