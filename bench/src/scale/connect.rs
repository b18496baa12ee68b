//! Sessions and mounts that connect at once: the time until all of them have read, with keys and
//! without, over each transport there is.
//!
//! Both ways take turns, so that a ratio is of neighbours in time. Streams stay in clear: the proof
//! alone makes the difference.

use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rblk_fabric::Region;
use tokio::runtime::Runtime;
use tokio::task::{JoinSet, LocalSet};

use super::client::{self, Client, Wish};
use super::{LOOPBACK, Line, Setting, front_end, plot, steps};
use crate::keys::Keys;
use crate::peer::rblk::mount_command;
use crate::peer::target::{Carrier, Target};
use crate::peer::undo::Undo;
use crate::result::{Axis, ScalePlot, Summary, Unit};
use crate::{child, interrupt};

/// Repeats of sessions for each round of mounts: they take little time.
const REPEATS: u32 = 5;
/// Most sessions at once: each has some memory in this process.
const SESSIONS_MOST: u32 = 100;
const MOUNT_LIMIT: Duration = Duration::from_secs(120);
/// Flags of the targets. Each volume is in memory, so a small arena does. All sessions come from
/// one host, and its share of one CQ of a small device is too small for a hundred.
const FLAGS: [&str; 4] = ["--arena", "64MiB", "--poll-groups", "2"];

/// A way to connect, its target, and its times.
struct Way {
    label: String,
    target: Target,
    line: Line,
}

/// Two plots: sessions at once, and mounts at once, or the reason why there are none.
pub(super) fn measure(setting: &Setting, most: u32) -> Result<Vec<ScalePlot>> {
    let sessions = sessions(setting, most.min(SESSIONS_MOST))?;
    let mut plots = vec![drawn("sessions", sessions)];
    let mounts = front_end(setting).and_then(|_module| mounts(setting, most));
    plots.push(match mounts {
        Ok(ways) => drawn("mounts", ways),
        Err(error) => {
            interrupt::check()?;
            ScalePlot { error: Some(format!("{error:#}")), ..drawn("mounts", Vec::new()) }
        }
    });
    Ok(plots)
}

fn drawn(what: &str, ways: Vec<Way>) -> ScalePlot {
    let x = Axis { label: format!("{what} at once"), unit: Unit::Count };
    let label = "time until all of them are there".to_owned();
    let y = Axis { label, unit: Unit::Nanoseconds };
    let title = format!("Many {what} at once, with keys and without");
    let note = "one admin connection and one queue of 16 commands each, in clear".to_owned();
    let mut plot = plot(&format!("time-by-{what}-at-once"), &title, x, y, note);
    plot.lines.extend(ways.into_iter().map(|way| way.line.named(&way.label)));
    plot
}

/// A target for each way to connect, with as many volumes.
fn ways(setting: &Setting, what: &str, volumes: u32) -> Result<Vec<Way>> {
    let mut flags = FLAGS.map(str::to_owned).to_vec();
    for number in 0..volumes {
        flags.extend(["--memory".to_owned(), format!("v{number}=1MiB")]);
    }
    let verbs = setting.rdma_address.filter(|_| cfg!(feature = "verbs"));
    let carriers =
        [Some(("tcp", Carrier::Tcp, LOOPBACK)), verbs.map(|ip| ("verbs", Carrier::Verbs, ip))];
    let mut ways = Vec::new();
    for (word, carrier, ip) in carriers.into_iter().flatten() {
        for with_keys in [false, true] {
            let keys = if with_keys { "keys" } else { "no keys" };
            let name = format!("{what}-{word}-{with_keys}");
            let target = setting.target(&name, (carrier, ip, with_keys), &flags)?;
            ways.push(Way { label: format!("{word}, {keys}"), target, line: Line::default() });
        }
    }
    Ok(ways)
}

/// Runs all ways in turn, so many times, for each number of sessions or mounts up to `most`.
fn take_turns(
    setting: &Setting,
    ways: &mut [Way],
    what: &str,
    (most, rounds): (u32, u32),
    once: impl Fn(&Target, u32) -> Result<Duration>,
) -> Result<()> {
    for count in steps(most) {
        let mut took = vec![Vec::new(); ways.len()];
        // The first round starts programs and memory cold, and does not count.
        for round in 0..=rounds {
            for (way, took) in ways.iter().zip(&mut took) {
                interrupt::check()?;
                let time = once(&way.target, count).with_context(|| way.label.clone())?;
                if round > 0 {
                    took.push(time.as_secs_f64() * 1e9);
                }
            }
        }
        for (way, took) in ways.iter_mut().zip(took) {
            let time = Summary::of(took).context("nothing was measured")?;
            setting.tell(&format!(
                "{count} {what} at once, {}: {:.2} ms ({:.2} to {:.2})",
                way.label,
                time.median / 1e6,
                time.low / 1e6,
                time.high / 1e6
            ));
            way.line.add(f64::from(count), time);
        }
    }
    Ok(())
}

fn sessions(setting: &Setting, most: u32) -> Result<Vec<Way>> {
    let mut ways = ways(setting, "sessions", 1)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let buffers = client::buffers()?;
    let rounds = REPEATS * setting.rounds;
    let once = |target: &Target, count| sessions_at_once(&runtime, target, count, &buffers);
    take_turns(setting, &mut ways, "sessions", (most, rounds), once)?;
    Ok(ways)
}

fn sessions_at_once(
    runtime: &Runtime,
    target: &Target,
    count: u32,
    buffers: &Arc<Region>,
) -> Result<Duration> {
    let credentials = Rc::new(target.keys().map(Keys::credentials).transpose()?);
    let address = target.address()?;
    let volume = ("v0", Wish::READ);
    let begin = Instant::now();
    let mut clients = runtime.block_on(LocalSet::new().run_until(async {
        let mut connecting = JoinSet::new();
        for number in 0..count {
            let (address, buffers) = (address.clone(), Arc::clone(buffers));
            let credentials = Rc::clone(&credentials);
            connecting.spawn_local(async move {
                Client::begin(&address, credentials.as_ref().as_ref(), volume, number, &buffers)
                    .await
            });
        }
        let mut clients = Vec::new();
        while let Some(client) = connecting.join_next().await {
            clients.push(client??);
        }
        Ok::<_, anyhow::Error>(clients)
    }))?;
    for client in &mut clients {
        client.queue().until_ready()?;
        client.queue().read(0, client::BLOCK)?;
    }
    let took = begin.elapsed();
    clients.into_iter().for_each(|client| client.leave(runtime));
    Ok(took)
}

fn mounts(setting: &Setting, most: u32) -> Result<Vec<Way>> {
    let mut ways = ways(setting, "mounts", most)?;
    let once = |target: &Target, count| mounts_at_once(setting, target, count);
    take_turns(setting, &mut ways, "mounts", (most, setting.rounds), once)?;
    Ok(ways)
}

/// The time until so many mounts are made. Then they are unmounted.
fn mounts_at_once(setting: &Setting, target: &Target, count: u32) -> Result<Duration> {
    let mut commands = Vec::new();
    let mut undo: Vec<Undo> = Vec::new();
    for number in 0..count {
        let (run, volume) = (format!("{}-c{number}", std::process::id()), format!("v{number}"));
        let (mut command, step) =
            mount_command(&setting.journal, &setting.programs, target, &volume, &run, &[])?;
        command.args(["--queues", "1", "--queue-depth", "16", "--max-io", "128KiB"]);
        commands.push(command);
        undo.push(step);
    }
    let begin = Instant::now();
    let made = thread::scope(|scope| {
        let run =
            |mut command: Command| scope.spawn(move || child::output(&mut command, MOUNT_LIMIT));
        let running: Vec<_> = commands.into_iter().map(run).collect();
        let joined = running.into_iter().map(|one| one.join().map_err(|_| anyhow!("it panicked")));
        joined.collect::<Result<Vec<_>>>()
    })?;
    let took = begin.elapsed();
    drop(undo);
    made.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(took)
}
