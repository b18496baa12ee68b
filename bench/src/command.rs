//! The commands of `rblk-bench`. Those that measure add to the run of their folder.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::args::{Command, OutputArgs, ReportArgs};
use crate::folder::{self, RunFolder};
use crate::output::{self, Output, say};
use crate::result::{Place, Run};
use crate::{compare, cost, hw_check, peer, place, report, scale};

/// Runs one command.
pub fn run(command: Command) -> Result<()> {
    match command {
        Command::HwCheck(args) => {
            ensure!(hw_check::run(&args)?, "something failed, as told");
            Ok(())
        }
        Command::Compare(args) => {
            into_run("compare", &args.output, |folder, run| compare::run(&args, folder, run))
        }
        Command::Scale(args) => {
            into_run("scale", &args.output, |folder, run| scale::run(&args, folder, run))
        }
        Command::Cost(args) => {
            let costs = args.cost.run()?;
            let text = match args.output {
                Output::Table => cost::table(&costs),
                Output::Json => serde_json::to_string_pretty(&costs)? + "\n",
            };
            if let Some(out) = &args.out {
                let folder = RunFolder::open(out)?;
                let mut run = begin(&folder, "cost")?;
                let all = run.cost.get_or_insert_default();
                all.add(costs);
                finish(&folder, &run)?;
            }
            say(&text)
        }
        Command::Report(args) => draw_again(&args),
        Command::CleanUp(args) => peer::clean_up(args.dry_run),
        Command::Sleeper(args) => {
            let [first, period, time] =
                [args.first, args.period, args.time].map(Duration::from_millis);
            scale::sleepers::sleep(first, period, time);
            Ok(())
        }
    }
}

/// Does the work of a command into the run of its folder, keeps the run, draws and prints it.
fn into_run(
    name: &str,
    args: &OutputArgs,
    work: impl FnOnce(&RunFolder, &mut Run) -> Result<()>,
) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(folder::name_for_now()));
    let folder = RunFolder::open(&out)?;
    let mut run = begin(&folder, name)?;
    let done = work(&folder, &mut run);
    // Samples from before a failure are kept.
    finish(&folder, &run)?;
    done?;
    tell(&run, args.output)
}

/// The run of a folder, new or to be added to.
fn begin(folder: &RunFolder, command: &str) -> Result<Run> {
    let mut run = folder.load()?.unwrap_or_else(|| Run::begin(&folder.name()));
    // A caller such as `cargo xtask bench` gives its own words.
    let words = match std::env::var("RBLK_BENCH_COMMAND") {
        Ok(words) if !words.is_empty() => words.split_whitespace().map(str::to_owned).collect(),
        _ => output::to_record(std::env::args()),
    };
    if !run.commands.contains(&words) {
        run.commands.push(words);
    }
    // The place is where fio runs; counts do not depend on it.
    if run.place == Place::default() || (command == "compare" && run.samples.is_empty()) {
        run.place = place::here();
    }
    Ok(run)
}

fn finish(folder: &RunFolder, run: &Run) -> Result<()> {
    folder.save(run)?;
    report::draw(run, folder)?;
    eprintln!("rblk-bench: the report is {}", folder.path().join(report::FILE).display());
    Ok(())
}

fn draw_again(args: &ReportArgs) -> Result<()> {
    let file = if args.run.is_dir() { args.run.join(folder::RUN) } else { args.run.clone() };
    let run = folder::read(&file)?
        .with_context(|| format!("there is no run in {}", args.run.display()))?;
    let out = args.out.as_deref().or(file.parent()).unwrap_or(Path::new("."));
    let folder = RunFolder::open(out)?;
    report::draw(&run, &folder)?;
    eprintln!("rblk-bench: the report is {}", folder.path().join(report::FILE).display());
    tell(&run, args.output)
}

fn tell(run: &Run, output: Output) -> Result<()> {
    match output {
        Output::Table => say(&report::text(run)),
        Output::Json => say(&(serde_json::to_string_pretty(run)? + "\n")),
    }
}
