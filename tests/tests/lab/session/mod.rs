//! `docs/session.md`, typed: every command of it runs in its order with the real programs, on two
//! hosts that share a kernel, and prints the document's output.
//!
//! `RBLK_SESSION=write` replaces the samples that differ by the present output. Do that after
//! adding a command to the document, without a sample, or after changing a text. Read the
//! difference before you keep it.

mod document;
mod hosts;
mod masks;

use std::time::{Duration, Instant};

use rblk_tests::lab::{KernelFeature, Lab, run};

use document::{Item, Session};
use hosts::Hosts;

/// Commands that only read. The test repeats them while their output differs: a host learns of a
/// change a moment later. `discover` is not in the list: it begins a session, which is an event.
const LOOKS: [&str; 13] = [
    "rblk-target check",
    "rblk-target doctor",
    "rblk-target dump",
    "rblk-target events",
    "rblk-target host list",
    "rblk-target session list",
    "rblk-target status",
    "rblk-target top",
    "rblk-target volume list",
    "rblk-initiator list",
    "rblk-initiator metrics",
    "rblk-initiator status",
    "rblk-initiator top",
];
/// The time limit for a matching output, and the delay before a new sample is taken.
const PATIENCE: Duration = Duration::from_secs(20);
const SETTLED: Duration = Duration::from_secs(2);
/// The document promises a session of this length.
const COMMANDS_LEAST: usize = 55;
/// The address of the target in the document.
const ADDRESS: &str = "192.0.2.1";

/// The directory of the programs in the document.
const PROGRAMS: &str = "/usr/bin";

/// Names in the document that differ in the lab: the address of the target, the directory of the
/// programs, and keys.
struct Names(Vec<(String, String)>);

impl Names {
    fn to_lab(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, (ours, real)| text.replace(ours, real))
    }

    fn to_document(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, (ours, real)| text.replace(real, ours))
    }

    /// Maps the keys of the sample to those of the output, in their order.
    fn learn(&mut self, sample: &[String], output: &str) {
        let lines: Vec<&str> = sample.iter().map(String::as_str).collect();
        let new = keys(&lines.join("\n")).into_iter().zip(keys(output));
        for (ours, real) in new {
            if !self.0.iter().any(|(known, other)| *known == ours || *other == real) {
                self.0.push((ours, real));
            }
        }
    }
}

/// Whether samples are to be replaced.
fn writes() -> bool {
    std::env::var("RBLK_SESSION").is_ok_and(|word| word == "write")
}

/// The public keys in a text.
fn keys(text: &str) -> Vec<String> {
    let after = text.split("rblk1:").skip(1);
    let keys = after.map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric()).next());
    keys.flatten().filter(|key| !key.is_empty()).map(|key| format!("rblk1:{key}")).collect()
}

/// Runs one command. Returns its output if the sample does not fit.
fn step(
    hosts: &Hosts<'_>,
    names: &mut Names,
    (host, command): (&str, &str),
    sample: &[String],
) -> Option<(Vec<String>, String)> {
    let since = Instant::now();
    loop {
        let said = hosts.run(host, &names.to_lab(command));
        names.learn(sample, &said);
        let said = names.to_document(&said);
        let said: Vec<String> = said.lines().map(|line| line.trim_end().to_owned()).collect();
        let why = masks::difference(command, sample, &said)?;
        let patience = if writes() { SETTLED } else { PATIENCE };
        let looks = LOOKS.iter().any(|look| command.starts_with(look));
        if !looks || since.elapsed() > patience {
            return Some((said, why));
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn type_all(lab: &Lab, session: &mut Session) -> Vec<String> {
    let hosts = Hosts::start(lab);
    let programs = lab.programs().display().to_string();
    let mut names =
        Names(vec![(ADDRESS.to_owned(), lab.host().to_owned()), (PROGRAMS.to_owned(), programs)]);
    let mut faults = Vec::new();
    let mut commands = 0;
    for item in &mut session.items {
        match item {
            Item::Text(_) => {}
            Item::File { path, text } => hosts.write(path, &names.to_lab(text)),
            Item::Command { host, command, sample } => {
                commands += 1;
                if let Some((said, why)) = step(&hosts, &mut names, (host, command), sample) {
                    faults
                        .push(format!("{host}# {command}\n{why}\nit says:\n{}\n", said.join("\n")));
                    *sample = said;
                }
            }
        }
    }
    println!("{}: {commands} commands", lab.test());
    assert!(commands >= COMMANDS_LEAST, "only {commands} commands");
    faults
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn the_session_of_the_documents() {
    if KernelFeature::RESIZE_IN_USE.is_missing() {
        return;
    }
    run("the_session_of_the_documents", |lab| {
        let mut session = Session::read();
        let faults = type_all(lab, &mut session);
        if writes() {
            println!("{}: {} samples are written anew", lab.test(), faults.len());
            session.write();
            return;
        }
        assert!(
            faults.is_empty(),
            "{} samples of {} do not fit; RBLK_SESSION=write writes them anew:\n{}",
            faults.len(),
            document::PATH,
            faults.join("\n")
        );
    });
}

#[test]
fn keys_are_found() {
    assert_eq!(keys("--key rblk1:abc2 x rblk1:... (rblk1:d)"), ["rblk1:abc2", "rblk1:d"]);
}
