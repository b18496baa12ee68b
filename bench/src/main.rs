//! `rblk-bench`: measures rblk.

#![forbid(unsafe_code)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use rblk_bench::args::{self, Cli, Command, Output, OutputArgs, ReportArgs};
use rblk_bench::folder::{self, RunFolder};
use rblk_bench::result::{Place, Run};
use rblk_bench::{compare, cost, fabric, hw_check, peer, place, report, scale, trend};
use rblk_config::Exit;
use rblk_rig::allocations::CountingAllocator;

// `cost` counts what the data path asks it for.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    match work(Cli::parse().command) {
        Ok(()) => Exit::Ok.into(),
        Err(error) => {
            eprintln!("rblk-bench: {error:#}");
            Exit::Failure.into()
        }
    }
}

fn work(command: Command) -> Result<()> {
    match command {
        Command::HwCheck(args) => {
            ensure!(hw_check::run(&args)?, "something failed, as told");
            Ok(())
        }
        Command::Compare(args) => {
            into_run("compare", &args.output, |folder, run| compare::run(&args, folder, run))
        }
        Command::Fabric(args) if args.serve => fabric::run(&args).map(drop),
        Command::Fabric(args) => into_run("fabric", &args.output, |_, run| {
            run.fabric = Some(fabric::run(&args)?);
            Ok(())
        }),
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
        Command::Trend(args) => {
            let page = trend::write(&args.results)?;
            eprintln!("rblk-bench: the index is {}", page.display());
            Ok(())
        }
        Command::CleanUp(args) => peer::clean_up(args.dry_run),
    }
}

/// Does a command's work into the run of its folder, then keeps it, draws it and tells it.
fn into_run(
    name: &str,
    args: &OutputArgs,
    work: impl FnOnce(&RunFolder, &mut Run) -> Result<()>,
) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(folder::name_for_now()));
    let folder = RunFolder::open(&out)?;
    let mut run = begin(&folder, name)?;
    let done = work(&folder, &mut run);
    // What was measured before it failed is worth as much as it was.
    finish(&folder, &run)?;
    done?;
    tell(&run, args.output)
}

/// The run of a folder, to be added to.
fn begin(folder: &RunFolder, command: &str) -> Result<Run> {
    let mut run = folder.load()?.unwrap_or_else(|| Run::begin(&folder.name()));
    // Who runs this for others knows how to have it again.
    let words = match std::env::var("RBLK_BENCH_COMMAND") {
        Ok(words) if !words.is_empty() => words.split_whitespace().map(str::to_owned).collect(),
        _ => args::to_record(std::env::args()),
    };
    if !run.commands.contains(&words) {
        run.commands.push(words);
    }
    // The place is where fio runs; what is counted does not depend on it.
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
    if let Some(file) = &args.chart {
        std::fs::write(file, report::chart(&run)?)
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    tell(&run, args.output)
}

fn tell(run: &Run, output: Output) -> Result<()> {
    match output {
        Output::Table => say(&report::table::text(run)),
        Output::Json => say(&(serde_json::to_string_pretty(run)? + "\n")),
    }
}

fn say(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // Who reads it has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}
