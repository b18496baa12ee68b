//! A quiet volume beside a noisy one: the p99 of its reads, and the bytes of the noisy one
//! meanwhile.
//!
//! The noisy volume has queues that are always full of large I/Os. The quiet one reads 4 KiB at
//! depth 1. Samples without and with the neighbour alternate, and a ratio is of two samples of the
//! same round. The neighbour's bytes during one quiet read do not depend on the speed of the
//! machine. Where the machine allows, target and clients are [`Apart`], as hosts are.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rblk_initiator::engine::io::IoOp;
use rblk_protocol::AccessMode;
use tokio::runtime::Runtime;

use super::apart::Apart;
use super::client::{self, BLOCK, Client, IO_MAX, Wish};
use super::{Line, Setting, plot};
use crate::histogram::Histogram;
use crate::interrupt;
use crate::peer::target::Target;
use crate::result::{Axis, ScalePlot, Summary, Unit};

/// Each queue of the noisy volume.
const NOISY: Wish = Wish { mode: AccessMode::Shared, depth: 32 };
const QUEUES: [u32; 2] = [1, 4];
const NOISY_BYTES: u64 = 64 << 20;
const QUIET_BYTES: u64 = 16 << 20;
const PAUSE: Duration = Duration::from_micros(20);
/// In millionths.
const P50: u32 = 500_000;
const P99: u32 = 990_000;

/// One sample of the quiet volume, in nanoseconds and in bytes of the neighbour.
#[derive(Debug)]
struct Sample {
    p50: u64,
    p99: u64,
    meanwhile: u64,
    // Bytes per second of the neighbour.
    rate: f64,
}

#[derive(Debug, Default)]
struct Lines {
    p99: Line,
    meanwhile: Line,
}

/// Measures beside reads and beside writes; gives two plots.
pub(super) fn measure(setting: &Setting) -> Result<Vec<ScalePlot>> {
    let flags = ["--memory", "quiet=16MiB", "--memory", "noisy=64MiB", "--poll-groups", "1"];
    let target = setting.local_target("neighbour", &flags.map(str::to_owned))?;
    let runtime = runtime()?;
    let apart = Apart::of(target.pid());
    setting.tell(&match &apart {
        Ok(_) => "the target has the first processor; the quiet client goes first on the others"
            .to_owned(),
        Err(error) => format!("target and clients share processors: {error:#}"),
    });
    let mut quiet =
        Client::connect(&runtime, &target, ("quiet", Wish::READ), 0, &client::buffers()?)?;
    let mut lines = [(IoOp::Read, Lines::default()), (IoOp::Write, Lines::default())];
    for (op, lines) in &mut lines {
        let mut alone = Vec::new();
        let mut beside = QUEUES.map(|_| Vec::new());
        for _ in 0..setting.rounds {
            for (queues, beside) in QUEUES.into_iter().zip(&mut beside) {
                let before = sample(setting, &target, &mut quiet, *op, 0)?;
                let with = sample(setting, &target, &mut quiet, *op, queues)?;
                setting.tell(&format!(
                    "{queues} queues of {op:?}: p50 {} us alone, {} us beside; p99 {} us alone, {} us \
                     beside, {:.2} times; {} KiB of the neighbour meanwhile, {:.0} MiB/s",
                    before.p50 / 1000,
                    with.p50 / 1000,
                    before.p99 / 1000,
                    with.p99 / 1000,
                    as_f64(with.p99) / as_f64(before.p99.max(1)),
                    with.meanwhile >> 10,
                    with.rate / f64::from(1 << 20),
                ));
                alone.push(before);
                beside.push(with);
            }
        }
        lines.add(0, &alone);
        for (queues, beside) in QUEUES.into_iter().zip(&beside) {
            lines.add(queues, beside);
        }
    }
    quiet.leave(&runtime);
    Ok(plots(lines.map(|(_, lines)| lines), apart.is_ok()))
}

/// Reads the quiet volume beside so many queues of the noisy one.
fn sample(
    setting: &Setting,
    target: &Target,
    quiet: &mut Client,
    op: IoOp,
    queues: u32,
) -> Result<Sample> {
    let (stop, moved) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let noisy = scope.spawn(|| flood(target, op, queues, &stop, &moved));
        let seen = watch(setting, quiet, queues, &moved);
        stop.store(true, Ordering::Relaxed);
        noisy.join().ok().context("the neighbour panicked")??;
        seen
    })
}

/// Reads the quiet volume for the time of a sample.
fn watch(setting: &Setting, quiet: &mut Client, queues: u32, moved: &AtomicU64) -> Result<Sample> {
    let wanted = u64::from(queues) * u64::from(NOISY.depth) * u64::from(IO_MAX);
    let begin = Instant::now();
    while moved.load(Ordering::Relaxed) < wanted {
        ensure!(begin.elapsed() < Duration::from_secs(60), "the neighbour does not begin");
        interrupt::sleep(Duration::from_millis(5))?;
    }
    let (begin, at_begin) = (Instant::now(), moved.load(Ordering::Relaxed));
    let mut meanwhile = Histogram::new();
    let mut before = None;
    let mut number = 0;
    let latency = quiet.queue().latency(setting.time, || {
        let now = moved.load(Ordering::Relaxed);
        if let Some(before) = before.replace(now) {
            meanwhile.record(now - before);
        }
        number += 1;
        Some(number * 7919 % (QUIET_BYTES / BLOCK) * BLOCK)
    })?;
    let all = as_f64(moved.load(Ordering::Relaxed) - at_begin);
    let rate = all / begin.elapsed().as_secs_f64();
    Ok(Sample { p50: latency.at(P50), p99: latency.at(P99), meanwhile: meanwhile.at(P99), rate })
}

/// Keeps all queues full until the stop.
fn flood(
    target: &Target,
    op: IoOp,
    queues: u32,
    stop: &AtomicBool,
    moved: &AtomicU64,
) -> Result<()> {
    if queues == 0 {
        return Ok(());
    }
    let runtime = runtime()?;
    let buffers = client::buffers_of(NOISY.depth)?;
    let mut client = Client::connect(&runtime, target, ("noisy", NOISY), 1, &buffers)?;
    let mut more = Vec::new();
    for _ in 1..queues {
        more.push(client.add_queue(&runtime, &client::buffers_of(NOISY.depth)?)?);
    }
    let own = std::iter::once(client.queue()).chain(&mut more);
    let mut own: Vec<_> = own.map(|queue| (queue, Vec::from_iter(0..NOISY.depth))).collect();
    let mut at = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut busy = false;
        for (queue, free) in &mut own {
            for tag in free.drain(..) {
                queue.submit(tag, op, at, IO_MAX.into())?;
                at = (at + u64::from(IO_MAX)) % NOISY_BYTES;
            }
            busy |= queue.look(|tag| {
                moved.fetch_add(IO_MAX.into(), Ordering::Relaxed);
                free.push(tag);
            })?;
        }
        if !busy {
            std::thread::sleep(PAUSE);
        }
    }
    drop(more);
    client.leave(&runtime);
    Ok(())
}

fn runtime() -> Result<Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

#[expect(clippy::cast_precision_loss, reason = "bytes and nanoseconds far below 2^53")]
fn as_f64(value: u64) -> f64 {
    value as f64
}

impl Lines {
    fn add(&mut self, queues: u32, samples: &[Sample]) {
        let x = f64::from(queues);
        if let Some(p99) = Summary::of(samples.iter().map(|sample| as_f64(sample.p99))) {
            self.p99.add(x, p99);
        }
        if let Some(bytes) = Summary::of(samples.iter().map(|sample| as_f64(sample.meanwhile))) {
            self.meanwhile.add(x, bytes);
        }
    }
}

fn plots([reads, writes]: [Lines; 2], are_apart: bool) -> Vec<ScalePlot> {
    let of_queues = |name, title, label: &str, unit, lines| {
        let axis = |label: &str, unit| Axis { label: label.to_owned(), unit };
        let what = format!(
            "4 KiB reads of one volume at depth 1 beside 128 KiB I/Os of another at depth 32 a \
             queue, over TCP on one host, both in memory, one data thread, {}",
            if are_apart { "on a processor of its own" } else { "on processors that all share" }
        );
        let queues = axis("queues of the neighbour", Unit::Count);
        ScalePlot { lines, ..plot(name, title, queues, axis(label, unit), what) }
    };
    vec![
        of_queues(
            "p99-by-neighbour",
            "A read beside a volume that is never idle",
            "4 KiB read at depth 1, p99",
            Unit::Nanoseconds,
            vec![reads.p99.named("beside reads"), writes.p99.named("beside writes")],
        ),
        of_queues(
            "bytes-by-neighbour",
            "What the neighbour gets during one read",
            "bytes of the neighbour during one quiet read, p99",
            Unit::Bytes,
            vec![reads.meanwhile.named("reads"), writes.meanwhile.named("writes")],
        ),
    ]
}
