//! Time to resolve, connect, accept and destroy many connections at once, and the stall of a
//! neighbour.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rblk_fabric::{
    AcceptParams, Access, ConnectionHello, Established, Listener, MemoryRegion, QpIndex, QpLimits,
    RecvWr, Route, SendOp, WcOpcode, WrId,
};
use rblk_operate::doctor::Finding;

use super::Out;
use super::control::Control;
use super::ends::{At, Ends, Side, limits, listener, wr};
use super::judge::{self, StepTimes};
use super::site::Site;
use crate::interrupt;

const WORKERS: usize = 16;
const WRS: u32 = 2;
/// Descriptors for each connection, of both ends, and for the rest.
const FILES_EACH: u64 = 3;
const FILES: u64 = 200;
const ACCEPT_LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
struct Times {
    resolve: Vec<Duration>,
    connect: Vec<Duration>,
    prepare: Vec<Duration>,
    accept: Vec<Duration>,
    destroy: Vec<Duration>,
}

pub(super) fn check(site: &Site, out: &Out) -> Result<()> {
    let caps = site.device.caps();
    let soft = caps.kernel_software || !site.is_rdma();
    for count in site.by_effort([1, 8, 24], [1, 100, 1000], [1, 100, 1000]) {
        interrupt::check()?;
        let entries = u32::try_from(count).unwrap_or(u32::MAX).saturating_mul(2 * WRS);
        let subject = format!("{count}: connect");
        if entries > caps.max_cq_entries {
            let words = format!("a CQ has {} entries at most", caps.max_cq_entries);
            out.add(Finding::skip(subject, words));
            continue;
        }
        let files = FILES + FILES_EACH * count as u64;
        if let Some(few) = too_few_files(files) {
            let words = format!("{few} open files are allowed, {files} are needed");
            out.add(Finding::skip(subject, words).fix(format!("ulimit -n {files}")));
            continue;
        }
        out.tell(&format!("  {count} connections"));
        let begun = Instant::now();
        let (times, longest) = beside_neighbour(site, || storm(site, count, entries))?;
        out.figure(format!("connections_per_s_of_{count}"), per_second(count, &times, begun));
        for (name, times) in [
            ("resolve", times.resolve),
            ("connect", times.connect),
            ("make the QP of the peer", times.prepare),
            ("accept", times.accept),
            ("destroy", times.destroy),
        ] {
            let times = StepTimes::of(times);
            let key = name.split(' ').next().unwrap_or_default();
            let us = |time: Duration| time.as_secs_f64() * 1e6;
            out.figure(format!("{key}_median_us_of_{count}"), us(times.median));
            out.figure(format!("{key}_max_us_of_{count}"), us(times.max));
            out.add(judge::step(name, count, times, soft));
        }
        out.figure(format!("stall_us_of_{count}"), longest.as_secs_f64() * 1e6);
        out.add(judge::stall(count, longest, soft));
    }
    Ok(())
}

fn per_second(count: usize, times: &Times, begun: Instant) -> f64 {
    let destroying: Duration = times.destroy.iter().sum();
    let connecting = begun.elapsed().saturating_sub(destroying).as_secs_f64();
    judge::float(count as u64) / connecting.max(1e-9)
}

/// Raises the limit of open files. Returns the limit if it stays too low.
fn too_few_files(wanted: u64) -> Option<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    if soft >= wanted {
        return None;
    }
    let most = wanted.min(hard);
    let _ = setrlimit(Resource::RLIMIT_NOFILE, most, hard);
    let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    (soft < wanted).then_some(soft)
}

/// Connects `count` times, has all of them at once, and destroys them.
fn storm(site: &Site, count: usize, entries: u32) -> Result<Times> {
    let sizes = QpLimits { send_sges: 1, inline_bytes: 0, ..limits(site.device.caps(), WRS) };
    let (mut a, mut b) = (Side::new(site, entries)?, Side::new(site, entries)?);
    let mut listener = listener(site)?;
    let address = listener.address().clone();
    let all = Mutex::new(Times::default());
    let next = AtomicUsize::new(0);
    let (sender, established) = mpsc::channel::<Result<Established>>();
    let mut connections = Vec::with_capacity(count);
    let accepted = std::thread::scope(|scope| -> Result<_> {
        let (b, listener) = (&mut b, &mut listener);
        let server = std::thread::Builder::new()
            .name("acceptor".into())
            .spawn_scoped(scope, move || accept_all(site, b, listener, count, sizes))?;
        for _ in 0..WORKERS.min(count) {
            let (sender, all, next, address) = (sender.clone(), &all, &next, &address);
            let (pd, handle) = (a.pd.clone(), a.handle.clone());
            let work = move || {
                while next.fetch_add(1, Ordering::Relaxed) < count && !interrupt::is_set() {
                    let begun = Instant::now();
                    let done = site.control.wait(async {
                        let route = Route::resolve(address, &Control::options()).await?;
                        let resolved = Instant::now();
                        let hello = ConnectionHello(b"hw-check".to_vec());
                        let established = route.connect(&pd, &handle, sizes, &hello).await?;
                        Ok((resolved, established))
                    });
                    let done = done.map(|(resolved, established)| {
                        let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                        all.resolve.push(resolved.duration_since(begun));
                        all.connect.push(resolved.elapsed());
                        established
                    });
                    let failed = done.is_err();
                    if sender.send(done).is_err() || failed {
                        return;
                    }
                }
            };
            let thread = std::thread::Builder::new().name("connector".into());
            thread.spawn_scoped(scope, work)?;
        }
        drop(sender);
        for one in established {
            connections.push(one.context("a connection")?.connection);
        }
        server.join().map_err(|_| anyhow!("the thread that accepts failed"))?
    });
    // Both ends are moved to the error state and destroyed, as at the end of a session.
    let mut times = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    let connected = connections.len();
    for connection in connections {
        let qp = a.poller.attach(connection)?;
        times.destroy.push(destroy(&mut a, qp));
    }
    let (accepted, qps, memory) = accepted?;
    (times.prepare, times.accept) = (accepted.prepare, accepted.accept);
    times.destroy.extend(qps.into_iter().map(|qp| destroy(&mut b, qp)));
    drop(memory);
    ensure!(connected == count, "{connected} of {count} connected");
    Ok(times)
}

fn destroy(side: &mut Side, qp: QpIndex) -> Duration {
    side.poller.fail(qp);
    let connection = side.poller.detach(qp);
    let begun = Instant::now();
    drop(connection);
    begun.elapsed()
}

/// The side that is connected to. Its QPs stay until both ends have all connections.
fn accept_all(
    site: &Site,
    side: &mut Side,
    listener: &mut Listener,
    count: usize,
    sizes: QpLimits,
) -> Result<(Times, Vec<QpIndex>, MemoryRegion)> {
    let memory = side.memory(4096, Access::LOCAL_WRITE)?;
    let sge = memory.sge(0, 4096).context("a place")?;
    let mut times = Times::default();
    let mut qps = Vec::with_capacity(count);
    for index in 0..count {
        interrupt::check()?;
        let next = async { tokio::time::timeout(ACCEPT_LIMIT, listener.accept()).await };
        let incoming = site
            .control
            .wait(next)
            .map_err(|_| anyhow!("no peer came within {ACCEPT_LIMIT:?}, after {index}"))??;
        let begun = Instant::now();
        let connection = incoming.prepare(&side.pd, &side.handle, sizes)?;
        times.prepare.push(begun.elapsed());
        let qp = side.poller.attach(connection)?;
        side.poller.post_recv(qp, &[RecvWr::one(WrId(0), sge)])?;
        let hello = ConnectionHello(b"hw-check".to_vec());
        let params = AcceptParams { hello, reads_out: sizes.reads_out, reads_in: sizes.reads_in };
        let begun = Instant::now();
        side.poller.accept(qp, &params)?;
        times.accept.push(begun.elapsed());
        qps.push(qp);
    }
    Ok((times, qps, memory))
}

/// Does `work` while a connection beside it sends small messages, one after the other. Returns the
/// longest time of a message, too.
fn beside_neighbour<T>(site: &Site, work: impl FnOnce() -> Result<T>) -> Result<(T, Duration)> {
    let mut ends = Ends::new(site, 256)?;
    let a = ends.a.memory(4096, Access::LOCAL_WRITE)?;
    let b = ends.b.memory(4096, Access::LOCAL_WRITE)?;
    let recv = RecvWr::one(WrId(1), b.sge(0, 64).context("a place")?);
    let link = ends.connect(site, limits(site.device.caps(), 16), &[recv; 4])?;
    let sge = a.sge(0, 64).context("a place")?;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ping = std::thread::Builder::new().name("neighbour".into()).spawn_scoped(
            scope,
            || -> Result<Duration> {
                let mut longest = Duration::ZERO;
                while !stop.load(Ordering::Relaxed) {
                    let begun = Instant::now();
                    ends.a.poller.post_send(link.a, &[wr(1, SendOp::Send, sge)])?;
                    let mut left = 2;
                    ends.until("the neighbour", |at, completion| {
                        left -= i32::from(at == At::A || completion.opcode == WcOpcode::Recv);
                        left == 0
                    })?;
                    longest = longest.max(begun.elapsed());
                    ends.b.poller.post_recv(link.b, &[recv])?;
                    std::thread::sleep(Duration::from_micros(200));
                }
                ends.close(link);
                Ok(longest)
            },
        )?;
        let done = work();
        stop.store(true, Ordering::Relaxed);
        let longest = ping.join().map_err(|_| anyhow!("the neighbour's thread failed"))??;
        Ok((done?, longest))
    })
}
