//! `cargo xtask bench`: rblk beside its peers in the lab, and the report of it in `bench/results/`.
//!
//! Counts that do not depend on the machine are made on this one; the rest runs in the guest. Every
//! command writes to the same folder, so that one report holds everything. A step that fails does
//! not end the run: the report has what was measured.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::artifacts::Artifacts;
use crate::lab::{self, Lab, host};
use crate::packages;
use crate::process;
use crate::workspace::Workspace;

/// What is built.
const SELECTION: &[&str] = &[
    "--bins",
    "-p",
    "rblk-cli",
    "-p",
    "rblk-target",
    "-p",
    "rblk-initiator",
    "-p",
    "rblk-bench",
    "--features",
    "verbs",
];

/// The profile that is measured: what people would install.
const PROFILE: &str = "release";

/// Limit on each count that runs on this machine.
const COUNT_LIMIT: Duration = Duration::from_secs(15 * 60);

/// Where runs are kept, in the workspace.
const RESULTS: &str = "bench/results";

/// How much is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Extent {
    Quick,
    Gate,
    Full,
}

/// Measure rblk beside the kernel's own remote disks in the lab, and draw the report
///
/// Builds the programs as they would be installed, counts what an I/O costs, boots the lab's guest
/// and measures there. Leaves run.json and report.html in bench/results/NAME. Other work on this
/// machine makes the numbers worthless: keep it quiet.
///
/// Exit status: 0 when everything was measured, 1 when a step failed (what there is was drawn), 124
/// at the time limit of the guest.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct BenchArgs {
    /// One short round of the six cells that decide; 5 minutes
    #[arg(long, group = "extent")]
    quick: bool,

    /// Three rounds of the six cells that decide; 15 minutes. This is the default
    #[arg(long, group = "extent")]
    gate: bool,

    /// All cells, profiles and idle mounts; an hour
    #[arg(long, group = "extent")]
    full: bool,

    /// Virtual CPUs of the guest
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,

    /// Memory of the guest
    #[arg(long, default_value = "6G", value_name = "SIZE")]
    mem: lab::Size,

    /// Kernel version prefix
    #[arg(long, default_value = lab::DEFAULT_KERNEL, value_name = "VERSION")]
    kernel: String,

    /// How the guest's CPUs are run
    #[arg(long, value_enum, default_value_t = lab::Accel::Auto)]
    accel: lab::Accel,

    /// Name of the run [default: the time and how much was measured]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,

    /// Leave out what is counted on this machine
    #[arg(long)]
    no_cost: bool,

    /// More words for `rblk-bench compare`, after `--`: --systems, --cells, --rounds, --seconds,
    /// ...
    #[arg(last = true, value_name = "WORDS")]
    compare: Vec<OsString>,
}

/// One command of a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Step {
    name: &'static str,
    words: Vec<OsString>,
}

/// One boot.
#[derive(Debug)]
struct Boot {
    cpus: u32,
    limit: Duration,
    steps: Vec<Step>,
}

/// The commands of `rblk-bench` that the boots run.
struct Commands<'a> {
    artifacts: &'a Artifacts,
    run: &'a Path,
    compare: &'a [OsString],
}

impl Commands<'_> {
    fn step(&self, name: &'static str, words: &[&str]) -> Step {
        let mut all: Vec<OsString> = vec![self.artifacts.program("rblk-bench").into(), name.into()];
        all.extend(words.iter().map(OsString::from));
        all.extend(["--out".into(), self.run.into()]);
        Step { name, words: all }
    }

    fn compare(&self, words: &[&str]) -> Step {
        let mut step = self.step("compare", words);
        step.words.extend(self.compare.iter().cloned());
        step
    }

    /// Counts system calls. Counting patches the running kernel, which an emulated kernel may not
    /// survive, so this runs by itself and last, and nothing is measured again.
    fn probing(&self, words: &[&str]) -> Step {
        let gate = ["--cells", "gate", "--systems", "rblk-verbs,rblk-tcp", "--no-perftest"];
        self.compare(&[&gate, words].concat())
    }

    /// Samples the processors while fio runs: why a system is as fast as it is.
    fn profiling(&self) -> Step {
        let systems = ["--systems", "rblk-verbs,rblk-tcp,nvme-rdma,nvme-tcp"];
        let gate = ["--cells", "gate", "--no-perftest", "--no-probe", "--profile"];
        self.compare(&[systems.as_slice(), &gate].concat())
    }

    /// Spinning and not spinning, in turn and each alone: a mount that only waits beside another
    /// one would change the numbers of that other one.
    fn waiting(&self) -> impl Iterator<Item = Step> {
        let of = |system: &[&str], round: &str| {
            let cell = ["--cells", "randread-4k-qd8-j1-q1", "--rounds", round];
            self.step("compare", &[system, &cell, &["--no-probe", "--no-perftest"]].concat())
        };
        let turns = ["1", "2", "3"].map(|round| {
            let alone = of(&["--systems", "none", "--variant", "adaptive="], round);
            [alone, of(&["--systems", "rblk-verbs-spin"], round)]
        });
        turns.into_iter().flatten()
    }
}

impl BenchArgs {
    fn extent(&self) -> Extent {
        match (self.quick, self.full) {
            (true, _) => Extent::Quick,
            (_, true) => Extent::Full,
            _ => Extent::Gate,
        }
    }

    /// Builds, measures, draws.
    pub(crate) fn run(&self) -> Result<i32> {
        let workspace = Workspace::find()?;
        host::ensure_installed(packages::BUILD)?;
        host::ensure_installed(packages::TEST)?;
        host::ensure_installed(host::PACKAGES)?;
        let name = self.name.clone().map_or_else(|| self.name_for_now(), Ok)?;
        if name.is_empty() || name.contains('/') || name.starts_with('.') {
            bail!("{name:?} cannot be the name of a run: it is the name of a directory");
        }
        let results = workspace.root.join(RESULTS).join(&name);
        if results.exists() {
            bail!("{} is there already; take another --name", results.display());
        }
        eprintln!("bench: building");
        let artifacts = Artifacts::build(&workspace, PROFILE, SELECTION)?;
        // A directory of this name: the run is named after it.
        let run = artifacts.dir().join(&name);
        let commit = commit(&workspace.root);
        let mut status = 0;
        if !self.no_cost {
            status |= self.count(&artifacts, &run, &commit);
        }
        for boot in self.boots(&artifacts, &run) {
            let ended = self.boot(&workspace, &artifacts, &boot, &commit)?;
            status = if status == 0 { ended } else { status };
        }
        let mut report = Command::new(artifacts.program("rblk-bench"));
        report.arg("report").arg(&run);
        let table = process::output(&mut report, COUNT_LIMIT).context("nothing was measured")?;
        print!("{table}");
        keep(&run, &results)?;
        eprintln!("bench: the run is {}", results.display());
        eprintln!("bench: the report is {}", results.join("report.html").display());
        Ok(status)
    }

    fn name_for_now(&self) -> Result<String> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let extent = match self.extent() {
            Extent::Quick => "quick",
            Extent::Gate => "gate",
            Extent::Full => "full",
        };
        Ok(format!("{}-{extent}", stamp(now)?))
    }

    /// What does not depend on the machine.
    fn count(&self, artifacts: &Artifacts, run: &Path, commit: &str) -> i32 {
        let mut status = 0;
        for words in [&["cost"][..], &["cost", "--instructions", "--ios", "2000"]] {
            eprintln!("bench: {} on this machine", words.join(" "));
            let mut command = Command::new(artifacts.program("rblk-bench"));
            command.args(words).arg("--out").arg(run);
            command.env("RBLK_COMMIT", commit).env("RBLK_BENCH_COMMAND", self.words());
            if let Err(error) = process::output(&mut command, COUNT_LIMIT) {
                eprintln!("bench: {error:#}");
                status = 1;
            }
        }
        status
    }

    /// This command, to make the run again.
    fn words(&self) -> String {
        let mut text = "cargo xtask bench".to_owned();
        text += match self.extent() {
            Extent::Quick => " --quick",
            Extent::Gate => " --gate",
            Extent::Full => " --full",
        };
        if self.cpus != 2 {
            text += &format!(" --cpus {}", self.cpus);
        }
        if self.kernel != lab::DEFAULT_KERNEL {
            text += &format!(" --kernel {}", self.kernel);
        }
        if !self.compare.is_empty() {
            text += " --";
            for word in &self.compare {
                text += &format!(" {}", word.to_string_lossy());
            }
        }
        text
    }

    fn boots(&self, artifacts: &Artifacts, run: &Path) -> Vec<Boot> {
        let commands = Commands { artifacts, run, compare: &self.compare };
        let minutes = |minutes: u64| Duration::from_secs(minutes * 60);
        match self.extent() {
            Extent::Quick => vec![Boot {
                cpus: self.cpus,
                limit: minutes(20),
                steps: vec![
                    commands.compare(&[
                        "--cells",
                        "gate",
                        "--no-probe",
                        "--rounds",
                        "1",
                        "--seconds",
                        "2",
                    ]),
                    commands.probing(&["--rounds", "1", "--seconds", "2"]),
                ],
            }],
            Extent::Gate => vec![Boot {
                cpus: self.cpus,
                limit: minutes(45),
                steps: [commands.compare(&["--cells", "gate", "--no-probe"])]
                    .into_iter()
                    .chain(commands.waiting())
                    .chain([commands.probing(&[])])
                    .collect(),
            }],
            Extent::Full => vec![Boot {
                cpus: self.cpus,
                limit: minutes(120),
                steps: [commands.compare(&["--cells", "full", "--queues", "1,2", "--no-probe"])]
                    .into_iter()
                    .chain(commands.waiting())
                    .chain([
                        commands.profiling(),
                        commands.step("scale", &["--what", "idle"]),
                        commands.probing(&[]),
                    ])
                    .collect(),
            }],
        }
    }

    fn boot(
        &self,
        workspace: &Workspace,
        artifacts: &Artifacts,
        boot: &Boot,
        commit: &str,
    ) -> Result<i32> {
        let names: Vec<&str> = boot.steps.iter().map(|step| step.name).collect();
        eprintln!("bench: {} in a guest with {} CPUs", names.join(", "), boot.cpus);
        let lab = Lab {
            kernel: self.kernel.clone(),
            mem: self.mem,
            cpus: boot.cpus,
            timeout: boot.limit,
            accel: self.accel,
            shares: vec![workspace.root.clone(), artifacts.dir().to_owned()],
            ..Lab::default()
        };
        let mut words: Vec<OsString> = vec!["env".into()];
        for (name, value) in [("RBLK_COMMIT", commit), ("RBLK_BENCH_COMMAND", &self.words())] {
            words.push(format!("{name}={value}").into());
        }
        words.extend(["sh".into(), "-c".into(), script(&boot.steps).into()]);
        // Progress; the tables are printed at the end, of everything.
        lab.run_into(&words, std::io::stderr()).map(|end| end.status())
    }
}

/// Runs steps, each whatever became of the one before; ends with the first status that is not 0.
fn script(steps: &[Step]) -> String {
    let mut text = "failed=0\n".to_owned();
    for step in steps {
        let words: Vec<String> =
            step.words.iter().map(|word| quoted(&word.to_string_lossy())).collect();
        text += &format!(
            "{} || {{ status=$?; echo \"bench: {} ended with status $status\"; [ $failed -ne 0 ] || failed=$status; }}\n",
            words.join(" "),
            step.name
        );
    }
    text + "exit $failed\n"
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The commit of the sources, with `+` where they have been changed since.
fn commit(root: &Path) -> String {
    let git = |words: &[&str]| {
        let mut command = Command::new("git");
        command.arg("-C").arg(root).args(words);
        process::output(&mut command, Duration::from_secs(20)).unwrap_or_default()
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]);
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]);
    let mark = if changed.trim().is_empty() { "" } else { "+" };
    format!("{}{mark}", commit.trim())
}

/// Copies a run to where runs are kept; what fio said goes into one archive.
fn keep(run: &Path, results: &Path) -> Result<()> {
    fs::create_dir_all(results).with_context(|| format!("cannot make {}", results.display()))?;
    let entries = fs::read_dir(run).with_context(|| format!("cannot read {}", run.display()))?;
    for entry in entries {
        let entry = entry?;
        let (from, to) = (entry.path(), results.join(entry.file_name()));
        if from.is_file() {
            fs::copy(&from, &to).with_context(|| format!("cannot write {}", to.display()))?;
        }
    }
    if fs::read_dir(run.join("raw")).is_ok_and(|mut files| files.next().is_some()) {
        let mut tar = Command::new("tar");
        tar.args(["--owner=0", "--group=0", "-czf"]).arg(results.join("raw.tar.gz"));
        tar.arg("-C").arg(run).arg("raw");
        process::output(&mut tar, Duration::from_secs(300))?;
    }
    Ok(())
}

/// Seconds of the Unix clock as `20261121-1159`, in UTC.
fn stamp(unix: u64) -> Result<String> {
    let mut date = Command::new("date");
    date.arg("-u").arg("-d").arg(format!("@{unix}")).arg("+%Y%m%d-%H%M");
    Ok(process::output(&mut date, Duration::from_secs(10))?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        bench: BenchArgs,
    }

    fn args(words: &[&str]) -> BenchArgs {
        Cli::try_parse_from([&["bench"][..], words].concat()).unwrap().bench
    }

    #[test]
    fn a_failed_step_does_not_end_the_run() {
        let step =
            |script: &str| Step { name: "x", words: vec!["sh".into(), "-c".into(), script.into()] };
        let steps = [step("echo it\\'s a; exit 3"), step("echo b; exit 4"), step("echo c")];
        let mut command = Command::new("sh");
        command.args(["-c", &script(&steps)]);
        let error = process::output(&mut command, Duration::from_secs(20)).unwrap_err();
        let text = format!("{error:#}");
        for part in ["exit status: 3", "it's a", "\nb\n", "\nc", "x ended with status 4"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn the_command_makes_the_same_run_again() {
        assert_eq!(args(&[]).words(), "cargo xtask bench --gate");
        let words = ["--full", "--cpus", "4", "--", "--rounds", "1"];
        assert_eq!(args(&words).words(), "cargo xtask bench --full --cpus 4 -- --rounds 1");
        assert!(Cli::try_parse_from(["bench", "--full", "--quick"]).is_err());
    }

    #[test]
    fn a_run_is_kept_with_what_fio_said() {
        let dir = tempfile::tempdir().unwrap();
        let (run, results) = (dir.path().join("run"), dir.path().join("a/results"));
        fs::create_dir_all(run.join("raw")).unwrap();
        fs::write(run.join("run.json"), "{}").unwrap();
        fs::write(run.join("raw/x.json"), "{}").unwrap();
        keep(&run, &results).unwrap();
        assert!(results.join("run.json").is_file() && results.join("raw.tar.gz").is_file());
        assert!(!results.join("raw").exists());
    }

    #[test]
    fn runs_are_named_by_their_time() {
        assert_eq!(stamp(1_795_261_140).unwrap(), "20261121-1139");
        assert_eq!(stamp(951_827_696).unwrap(), "20000229-1234");
    }
}
