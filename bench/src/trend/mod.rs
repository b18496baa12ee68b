//! The trend: the figures that decide, from run to run.
//!
//! ```text
//! RESULTS/trend.json      the figures of every run that ever was there
//! RESULTS/index.html      those figures as a table and a plot
//! RESULTS/NAME/run.json   a run that is kept whole
//! ```
//!
//! A whole run has a megabyte, so old runs are deleted. Their figures stay in `trend.json`: a run
//! that is there is read again, and what is known of the others is kept.

mod page;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::folder;
use crate::report::goals::{self, GATE};
use crate::report::notes::{self, Notes};
use crate::result::{Run, Summary, system};

/// Name of the file with the figures.
pub const FILE: &str = "trend.json";
/// Name of the page.
pub const PAGE: &str = "index.html";

/// How a figure is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// Times as much as a peer: above 1 is ahead.
    Ratio,
    /// A number; less is better.
    Number,
}

/// One figure of a run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// What was measured, the same words in every run.
    pub what: String,
    /// How it is written.
    pub form: Form,
    /// The median of the rounds.
    pub median: f64,
    /// The least of the rounds.
    pub low: f64,
    /// The most of the rounds.
    pub high: f64,
}

/// The figures of one run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// The run's name, which is that of its folder.
    pub id: String,
    /// When it began, in seconds of the Unix clock.
    pub began_unix: u64,
    /// The commit that was measured.
    pub commit: String,
    /// The kernel that it ran on.
    pub kernel: String,
    /// Whether it ran in an emulated guest.
    pub lab: bool,
    /// Rounds of rblk over verbs.
    pub rounds: u32,
    /// What a person noted on the whole run.
    pub note: String,
    /// The figures that the run has.
    pub figures: Vec<Figure>,
}

impl Entry {
    /// The figures of a run, with the notes of its folder.
    #[must_use]
    pub fn of(run: &Run, notes: &Notes) -> Self {
        let ours = run.samples.iter().filter(|sample| sample.system == system::RBLK_VERBS);
        let rounds = ours.map(|sample| sample.round);
        Self {
            id: run.id.clone(),
            began_unix: run.began_unix,
            commit: run.place.commit.clone(),
            kernel: run.place.kernel.clone(),
            lab: run.place.lab,
            rounds: rounds.max().unwrap_or(0),
            note: notes.general.join(" "),
            figures: figures(run),
        }
    }

    /// The figure of these words, if the run has it.
    #[must_use]
    pub fn figure(&self, what: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.what == what)
    }
}

/// Every figure that a run has, in the order in which they are shown.
fn figures(run: &Run) -> Vec<Figure> {
    let mut figures = Vec::new();
    let mut add = |what: String, form: Form, value: Option<Summary>| {
        let figure = |Summary { median, low, high, .. }| Figure { what, form, median, low, high };
        figures.extend(value.map(figure));
    };
    for gate in GATE {
        let cell = goals::gate_cell(gate);
        let ratio = run.ratio(system::RBLK_VERBS, system::NVME_RDMA, &cell.key, |s| s.iops);
        add(format!("{}: IOPS against nvme-rdma", cell.title()), Form::Ratio, ratio);
    }
    for gate in &GATE[4..] {
        let what = format!("{}: bandwidth against perftest", goals::gate_cell(*gate).title());
        add(what, Form::Ratio, goals::of_wire(run, *gate));
    }
    let worst = |worst: Option<(Summary, String)>| worst.map(|(summary, _)| summary);
    let tcp = "TCP, worst load of depth 8 and more: IOPS against nvme-tcp";
    add(tcp.to_owned(), Form::Ratio, worst(goals::worst_nvme_tcp(run)));
    add("TCP, worst load: IOPS against NBD".to_owned(), Form::Ratio, worst(goals::worst_nbd(run)));
    for (end, most) in ["initiator", "target"].into_iter().zip(goals::most_instructions(run)) {
        let what = format!("4 KiB: most instructions of the {end}'s engine");
        add(what, Form::Number, most.and_then(|most| Summary::of([most])));
    }
    let idle = run.scale.as_ref().and_then(|scale| scale.idle.as_ref());
    if let Some(idle) = idle {
        for (end, percent) in
            [("initiator", idle.initiator_percent), ("target", idle.target_percent)]
        {
            let what = format!("{} idle volumes: percent of a CPU at the {end}", idle.volumes);
            add(what, Form::Number, Summary::of([percent]));
        }
    }
    figures
}

/// Reads the runs of a directory, keeps their figures, and writes the page. Returns where the page
/// is.
///
/// # Errors
/// A run or the figures cannot be read, or a file cannot be written.
pub fn write(results: &Path) -> Result<PathBuf> {
    let mut entries = read(&results.join(FILE))?;
    let mut kept = Vec::new();
    for directory in directories(results)? {
        let Some(run) = folder::read(&directory.join(folder::RUN))? else { continue };
        let notes = fs::read_to_string(directory.join(notes::FILE)).unwrap_or_default();
        let entry = Entry::of(&run, &Notes::parse(&notes));
        kept.push(entry.id.clone());
        entries.retain(|old| old.id != entry.id);
        entries.push(entry);
    }
    entries.sort_by(|a, b| (a.began_unix, &a.id).cmp(&(b.began_unix, &b.id)));
    let save = |name: &str, text: &str| {
        let path = results.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    };
    save(FILE, &(serde_json::to_string_pretty(&entries)? + "\n"))?;
    save(PAGE, &page::text(&entries, &kept))?;
    Ok(results.join(PAGE))
}

fn read(path: &Path) -> Result<Vec<Entry>> {
    match fs::read_to_string(path) {
        Ok(text) => serde_json::from_str(&text)
            .with_context(|| format!("{} does not hold figures of runs", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn directories(results: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(results).with_context(|| format!("cannot read {}", results.display()))?;
    let mut directories: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    directories.sort();
    Ok(directories)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::RunFolder;
    use crate::result::Sample;

    fn run(id: &str, began_unix: u64, ours: f64) -> Run {
        let mut run = Run { id: id.to_owned(), began_unix, ..Run::default() };
        let cell = goals::gate_cell(GATE[0]);
        run.add_cell(cell.clone());
        for (system, iops) in [(system::RBLK_VERBS, ours), (system::NVME_RDMA, 100.0)] {
            let sample = Sample { system: system.into(), iops, round: 1, ..Sample::default() };
            run.set_sample(Sample { cell: cell.key.clone(), ..sample });
        }
        run
    }

    #[test]
    fn figures_outlive_their_run() {
        let dir = tempfile::tempdir().unwrap();
        for (id, began, ours) in [("new", 2, 150.0), ("old", 1, 90.0)] {
            let folder = RunFolder::open(&dir.path().join(id)).unwrap();
            folder.save(&run(id, began, ours)).unwrap();
        }
        fs::write(dir.path().join("old/notes.txt"), "A slow host.\n1: why\n").unwrap();
        write(dir.path()).unwrap();
        fs::remove_dir_all(dir.path().join("old")).unwrap();
        let page = fs::read_to_string(write(dir.path()).unwrap()).unwrap();
        let entries = read(&dir.path().join(FILE)).unwrap();
        let ids: Vec<&str> = entries.iter().map(|entry| entry.id.as_str()).collect();
        assert_eq!(ids, ["old", "new"], "the oldest first");
        assert_eq!(entries[0].note, "A slow host.");
        let what = "4k randread QD1: IOPS against nvme-rdma";
        let median = |entry: &Entry| entry.figure(what).unwrap().median;
        assert!((median(&entries[0]) - 0.9).abs() < 1e-9);
        assert!((median(&entries[1]) - 1.5).abs() < 1e-9);
        assert!(page.contains("href=\"new/report.html\""), "{page}");
        assert!(!page.contains("href=\"old/") && !page.contains("deleted"), "{page}");
        assert!(page.contains("0.90× (1 round)"), "{page}");
    }

    #[test]
    fn what_is_no_trend_is_told() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), "{]").unwrap();
        let error = format!("{:#}", write(dir.path()).unwrap_err());
        assert!(error.contains("trend.json does not hold figures"), "{error}");
        assert!(write(&dir.path().join("nowhere")).is_err());
    }
}
