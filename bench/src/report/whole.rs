//! The whole report: its header, the goals, every section in its place, and where the run ran.

use std::collections::BTreeMap;

use crate::folder;
use crate::result::{Run, system};

use super::goals::{self, GOALS, State, Verdict};
use super::html::Html;
use super::notes::Notes;
use super::page::{Page, look, systems, title};
use super::{compared, costs, growth, latency, number, profiles, style, transports};

/// The whole report.
#[must_use]
pub(super) fn write(run: &Run, notes: &Notes) -> String {
    let verdicts = goals::verdicts(run);
    let mut page = Page::default();
    compared::ratios(&mut page, run);
    judge(&mut page, &verdicts, notes);
    compared::systems_beside(&mut page, run);
    latency::section(&mut page, run);
    compared::processors(&mut page, run);
    profiles::section(&mut page, run);
    transports::section(&mut page, run);
    costs::section(&mut page, run);
    growth::section(&mut page, run);
    place(&mut page, run);
    let Page { html: body, sections } = page;
    let mut html = Html::default();
    header(&mut html, run, &verdicts, notes, &sections);
    html.element("main", &[], |html| html.raw(&body.whole()));
    html.element("footer", &[], |html| {
        html.text("Drawn by rblk-bench from ");
        html.text_in("a", &[("href", folder::RUN)], folder::RUN);
        html.text(
            ". Point at a bar or a mark for its numbers. Ratios are of samples of the same round.",
        );
    });
    html.page(&format!("rblk: {}", heading(run)), &style::page())
}

fn heading(run: &Run) -> String {
    if run.id.is_empty() { "a run".to_owned() } else { run.id.clone() }
}

fn header(
    html: &mut Html,
    run: &Run,
    verdicts: &[Verdict],
    notes: &Notes,
    sections: &[(&str, &str)],
) {
    html.element("header", &[], |html| {
        html.text_in("h1", &[], "rblk beside the kernel's own");
        html.text_in("p", &[("class", "lead")], &subtitle(run));
        for note in &notes.general {
            html.element("p", &[], |html| notes_text(html, note));
        }
        tiles(html, run, verdicts);
        html.element("nav", &[], |html| {
            for (id, title) in sections {
                html.text_in("a", &[("href", &format!("#{id}"))], title);
            }
        });
    });
}

fn subtitle(run: &Run) -> String {
    let place = &run.place;
    let mut parts = vec![heading(run)];
    if run.began_unix > 0 {
        parts.push(format!("{} UTC", &folder::utc(run.began_unix)[..16]));
    }
    if !place.kernel.is_empty() {
        parts.push(format!("Linux {}", place.kernel));
    }
    if !place.cpu.is_empty() {
        parts.push(format!("{} × {}", place.cpus, place.cpu));
    }
    if place.lab {
        parts.push("emulated guest: compare ratios, not speeds".to_owned());
    }
    parts.extend(rounds(run));
    if !place.commit.is_empty() {
        parts.push(format!("commit {}", place.commit));
    }
    parts.join(" · ")
}

/// How many rounds there are of each figure: each system in each cell.
fn rounds(run: &Run) -> Option<String> {
    let mut figures: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for sample in &run.samples {
        *figures.entry((&sample.system, &sample.cell)).or_default() += 1;
    }
    let (least, most) = (figures.values().min()?, figures.values().max()?);
    if least == most {
        return Some(format!("{most} round{}", if *most == 1 { "" } else { "s" }));
    }
    let few = figures.values().filter(|count| *count == least).count();
    let name = if *least == 1 { "one".to_owned() } else { least.to_string() };
    Some(format!("{least} to {most} rounds: {few} of {} figures have {name}", figures.len()))
}

/// The few numbers that say most.
fn tiles(html: &mut Html, run: &Run, verdicts: &[Verdict]) {
    let mut tiles: Vec<(String, String, State)> = Vec::new();
    let iops = |sample: &crate::result::Sample| sample.iops;
    let names = [
        (0, "4k reads, one at a time"),
        (1, "4k writes, one at a time"),
        (2, "4k reads, 32 deep"),
        (3, "4k writes, 32 deep"),
    ];
    for (at, name) in names {
        let cell = goals::gate_cell(goals::GATE[at]);
        if let Some(value) = run.ratio(system::RBLK_VERBS, system::NVME_RDMA, &cell.key, iops) {
            let met = value.median >= goals::needed(run, &cell);
            let state = if met { State::Met } else { State::Short };
            let text = format!("nvme-rdma: {name}");
            tiles.push((number::ratio(value.median), text, state));
        }
    }
    for (gate, text) in [(4, "of the wire, 128k reads"), (5, "of the wire, 128k writes")] {
        if let Some(value) = goals::of_wire(run, goals::GATE[gate]) {
            let state = if value.median >= 0.95 { State::Met } else { State::Short };
            let text = format!("{text}, {}", goals::qps_of_wire(run));
            tiles.push((format!("{:.0} %", value.median * 100.0), text, state));
        }
    }
    let count = |state| verdicts.iter().filter(|verdict| verdict.state == state).count();
    let (met, short) = (count(State::Met), count(State::Short));
    let unknown = count(State::Unknown);
    if met + short > 0 {
        let state = if short == 0 { State::Met } else { State::Unknown };
        let rest = if unknown > 0 { format!(", {unknown} not measured") } else { String::new() };
        tiles.push((format!("{met} of {}", met + short), format!("goals met{rest}"), state));
    }
    if tiles.is_empty() {
        return;
    }
    html.element("div", &[("class", "tiles")], |html| {
        for (value, text, state) in &tiles {
            let class = match state {
                State::Met => "tile good",
                State::Short => "tile bad",
                State::Unknown => "tile",
            };
            html.element("div", &[("class", class)], |html| {
                html.text_in("b", &[], value);
                html.text_in("span", &[], text);
            });
        }
    });
}

/// A table of verdicts, by goal, with what was noted on each.
fn judge(page: &mut Page, verdicts: &[Verdict], notes: &Notes) {
    page.section(
        "goals",
        "Goals",
        "Each is judged by the median of its rounds; in brackets the least and the most.",
    );
    let mut by_goal: BTreeMap<u8, Vec<&Verdict>> = BTreeMap::new();
    for verdict in verdicts {
        by_goal.entry(verdict.goal).or_default().push(verdict);
    }
    page.html.table(&["Measured", "Value", "Needed", ""], |html| {
        for (goal, name) in GOALS {
            html.element("tr", &[("class", "part")], |html| {
                html.text_in("td", &[("colspan", "4")], &format!("{goal}. {name}"));
            });
            let verdicts = by_goal.get(&goal).map_or(&[][..], Vec::as_slice);
            let said = verdicts.iter().any(|verdict| verdict.state != State::Unknown);
            if !said {
                html.element("tr", &[], |html| {
                    html.text_in("td", &[("colspan", "3"), ("class", "soft")], "Not in this run.");
                    html.element("td", &[], |html| badge(html, State::Unknown));
                });
            }
            for verdict in verdicts.iter().filter(|_| said) {
                html.element("tr", &[], |html| {
                    html.text_in("td", &[], &verdict.what);
                    html.text_in("td", &[], &verdict.value);
                    html.text_in("td", &[], &verdict.need);
                    html.element("td", &[], |html| badge(html, verdict.state));
                });
            }
            for note in notes.goals.get(&goal).into_iter().flatten() {
                html.element("tr", &[], |html| {
                    html.element("td", &[("colspan", "4"), ("class", "soft")], |html| {
                        notes_text(html, note);
                    });
                });
            }
        }
    });
}

fn badge(html: &mut Html, state: State) {
    let class = match state {
        State::Met => "badge met",
        State::Short => "badge short",
        State::Unknown => "badge",
    };
    html.text_in("span", &[("class", class)], state.word());
}

/// A note, whose words that name files of the run are links.
fn notes_text(html: &mut Html, note: &str) {
    for (at, word) in note.split(' ').enumerate() {
        if at > 0 {
            html.text(" ");
        }
        let file = word.trim_end_matches(['.', ',', ';', ':', ')']);
        if Notes::is_file(file) {
            html.text_in("a", &[("href", file)], file);
            html.text(&word[file.len()..]);
        } else {
            html.text(word);
        }
    }
}

fn place(page: &mut Page, run: &Run) {
    page.section("place", "Where, how and what", "");
    let place = &run.place;
    page.html.table(&["", ""], |html| {
        let mut fact = |name: &str, value: &str| {
            if !value.is_empty() {
                html.row(&[name.to_owned(), value.to_owned()]);
            }
        };
        fact("Host", &place.host);
        fact("Kernel", &place.kernel);
        fact("Processors", &format!("{} × {}", place.cpus, place.cpu));
        fact("Commit", &place.commit);
        for extra in &place.facts {
            fact(&extra.name, &extra.value);
        }
    });
    if !run.commands.is_empty() {
        page.html.text_in("h3", &[], "The commands");
        let lines: Vec<String> = run.commands.iter().map(|words| words.join(" ")).collect();
        page.html.text_in("pre", &[], &lines.join("\n"));
    }
    page.html.text_in("h3", &[], "Systems");
    page.html.table(&["System", "What was set up"], |html| {
        for info in systems(run) {
            html.element("tr", &[], |html| {
                html.element("td", &[], |html| {
                    let swatch = style::swatch(look(run, &info.key));
                    html.text_in("span", &[("class", "key"), ("style", &swatch)], "");
                    html.text(title(info));
                });
                let text = match &info.error {
                    Some(why) => format!("not measured: {why}"),
                    None => info.detail.clone(),
                };
                html.text_in("td", &[], &text);
            });
        }
    });
    raw(page, run);
}

fn raw(page: &mut Page, run: &Run) {
    if run.samples.is_empty() {
        return;
    }
    let what = format!("All {} samples, with what fio said", run.samples.len());
    page.html.element("details", &[], |html| {
        html.text_in("summary", &[], &what);
        let hint = "Where there is raw.tar.gz instead of raw/, unpack it here for the links.";
        html.text_in("p", &[("class", "soft")], hint);
        let columns = [
            "System",
            "Cell",
            "#Round",
            "#IOPS",
            "#Rate",
            "#Mean",
            "#p99",
            "#Load before",
            "#Errors",
            "Raw",
        ];
        html.table(&columns, |html| {
            for sample in &run.samples {
                html.element("tr", &[], |html| {
                    html.text_in("td", &[], &sample.system);
                    html.text_in("td", &[], &sample.cell);
                    for value in [
                        sample.round.to_string(),
                        number::thousands(sample.iops),
                        format!("{}/s", number::bytes(sample.bytes_per_s)),
                        number::duration(sample.latency.mean_ns),
                        number::duration(goals::nanoseconds(sample.latency.p99)),
                        number::plain(sample.load_before),
                        sample.errors.to_string(),
                    ] {
                        html.text_in("td", &[("class", "number")], &value);
                    }
                    html.element("td", &[], |html| {
                        if !sample.raw.is_empty() {
                            html.text_in("a", &[("href", &sample.raw)], "fio");
                        }
                    });
                });
            }
        });
    });
}
