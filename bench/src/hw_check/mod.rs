//! `rblk-bench hw-check ADDRESS`: a check of a card, by the verbs and sizes that rblk uses.
//!
//! | file | contents |
//! |---|---|
//! | [`args`], [`document`] | the command line; the findings |
//! | `site`, `ends`, `control` | the device and the effort; two ends in one process; its events |
//! | `judge` | pure rules: numbers in, findings out |
//! | the others | the parts, each in a file of its name |
//! | `load`, `counters` | WRITEs and READs, many at once; counters of the port |
//!
//! Each part runs on a thread of its own and has a deadline. A part that does not end is a finding,
//! and ends the check: the part may hold up the others by its part of the device.

pub(crate) mod args;
mod connects;
mod control;
mod counters;
mod device;
pub(crate) mod document;
mod drain;
mod ends;
mod hands;
mod judge;
mod load;
mod queues;
mod random;
mod registration;
mod site;
mod streams;
mod verbs;
mod wakes;

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rblk_operate::doctor::{Finding, Verdict};

use self::args::{HwCheckArgs, Part};
use self::document::{Document, SCHEMA, Section};
use self::site::Site;
use crate::output::Output;
use crate::{interrupt, output};

const LOOK: Duration = Duration::from_millis(200);
/// Time for a part after an interrupt.
const INTERRUPTED: Duration = Duration::from_secs(5);

/// Checks and prints. True if nothing failed.
pub(crate) fn run(args: &HwCheckArgs) -> Result<bool> {
    interrupt::watch()?;
    // As the daemons do.
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_MEMLOCK) {
        let _ = setrlimit(Resource::RLIMIT_MEMLOCK, hard, hard);
    }
    let mut document = Document {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        command: output::to_record(std::env::args()),
        address: args.address.clone(),
        kernel: crate::place::here().kernel,
        ..Document::default()
    };
    let table = args.output == Output::Table;
    match Site::find(args) {
        Ok(site) => {
            let caps = site.device.caps();
            document.device.clone_from(&caps.name);
            document.transport = caps.transport.to_string();
            say(table, &document.head())?;
            check(args, &Arc::new(site), &mut document)?;
        }
        Err(error) => {
            let mut section = Section::new(Part::Device);
            let fix = "rdma link; ip address";
            section.findings.push(Finding::fail("address", format!("{error:#}")).fix(fix));
            say(table, &document.head())?;
            say(table, &section.to_string())?;
            document.sections.push(section);
        }
    }
    if let Some(file) = &args.report {
        let text = serde_json::to_string_pretty(&document.to_json())? + "\n";
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
        eprintln!("rblk-bench: the report is {}", file.display());
    }
    match args.output {
        Output::Table => say(true, &format!("\n{}", document.end()))?,
        Output::Json => say(true, &(serde_json::to_string_pretty(&document.to_json())? + "\n"))?,
    }
    Ok(document.count(Verdict::Fail) == 0)
}

#[derive(Debug)]
enum Told {
    Found(Finding),
    Figure(String, f64),
}

/// The findings and figures of a part, sent at once: they stay if the part never ends.
#[derive(Clone, Debug)]
struct Out(Sender<Told>);

impl Out {
    fn add(&self, finding: Finding) {
        // The receiver is gone once the part took too long.
        let _ = self.0.send(Told::Found(finding));
    }

    fn add_all(&self, findings: impl IntoIterator<Item = Finding>) {
        findings.into_iter().for_each(|finding| self.add(finding));
    }

    fn figure(&self, name: impl Into<String>, value: f64) {
        let _ = self.0.send(Told::Figure(name.into(), value));
    }

    #[expect(clippy::unused_self, reason = "every part has one")]
    fn tell(&self, progress: &str) {
        eprintln!("rblk-bench: {progress}");
    }
}

fn check(args: &HwCheckArgs, site: &Arc<Site>, document: &mut Document) -> Result<()> {
    let mut stuck = None;
    for part in Part::value_variants().iter().copied().filter(|part| args.wants(*part)) {
        let mut section = match (stuck, interrupt::is_set()) {
            (None, false) => {
                eprintln!("rblk-bench: {}", part.word());
                let (section, ended) = watched(part, site);
                if !ended {
                    stuck = Some(part);
                }
                section
            }
            (_, true) => skipped(part, "interrupted".to_owned()),
            (Some(before), false) => {
                skipped(part, format!("the part `{}` did not end", before.word()))
            }
        };
        if interrupt::is_set() {
            section.findings.push(Finding::skip("interrupted", "the check is not whole"));
        }
        if args.output == Output::Table {
            say(true, &section.to_string())?;
        }
        document.sections.push(section);
    }
    Ok(())
}

fn skipped(part: Part, why: String) -> Section {
    Section { findings: vec![Finding::skip(part.word(), why)], ..Section::new(part) }
}

/// Runs one part. False if it did not end.
fn watched(part: Part, site: &Arc<Site>) -> (Section, bool) {
    let mut section = Section::new(part);
    let limit = site.limit(part);
    let begun = Instant::now();
    let mut deadline = begun + limit;
    let (sender, told) = mpsc::channel();
    let here = Arc::clone(site);
    let work = move || {
        let out = Out(sender);
        if let Err(error) = run_part(part, &here, &out) {
            out.add(Finding::fail(part.word(), format!("{error:#}")));
        }
    };
    let thread = match std::thread::Builder::new().name(part.word()).spawn(work) {
        Ok(thread) => thread,
        Err(error) => {
            section.findings.push(Finding::fail(part.word(), format!("no thread: {error}")));
            return (section, true);
        }
    };
    let mut was_interrupted = false;
    let ended = loop {
        match told.recv_timeout(LOOK) {
            Ok(Told::Found(finding)) => section.findings.push(finding),
            Ok(Told::Figure(name, value)) => drop(section.figures.insert(name, value)),
            Err(RecvTimeoutError::Disconnected) => break true,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if Instant::now() >= deadline {
            break false;
        }
        if interrupt::is_set() && !was_interrupted {
            was_interrupted = true;
            deadline = deadline.min(Instant::now() + INTERRUPTED);
        }
    };
    section.seconds = begun.elapsed().as_secs_f64();
    if !ended {
        section.findings.push(
            Finding::fail(part.word(), format!("it did not end within {} s", limit.as_secs()))
                .fix("look for a call that hangs: cat /proc/PID/task/*/stack, dmesg"),
        );
    } else if thread.join().is_err() {
        section.findings.push(Finding::fail(part.word(), "the check itself failed: a bug of it"));
    }
    (section, ended)
}

fn run_part(part: Part, site: &Site, out: &Out) -> Result<()> {
    let needs_both = !matches!(part, Part::Device | Part::Registration | Part::Hands);
    if needs_both && !site.is_here {
        out.add(Finding::skip(
            part.word(),
            format!(
                "{} is not an address of this host, and both ends must be: run it there, or with \
                 an address of this host",
                site.address.host
            ),
        ));
        return Ok(());
    }
    match part {
        Part::Device => device::check(site, out),
        Part::Queues => queues::check(site, out),
        Part::Registration => registration::check(site, out),
        Part::Connects => connects::check(site, out),
        Part::Verbs => verbs::check(site, out),
        Part::Drain => drain::check(site, out),
        Part::Wakes => wakes::check(site, out),
        Part::Streams => streams::check(site, out),
        Part::Random => random::check(site, out),
        Part::Hands => {
            hands::list(site, out);
            Ok(())
        }
    }
}

fn say(wanted: bool, text: &str) -> Result<()> {
    if wanted { output::say(text) } else { Ok(()) }
}
