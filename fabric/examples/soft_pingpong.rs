//! Round trips of a read as rblk does it, over TCP loopback: a 64-byte SEND, answered by a
//! WRITE_WITH_IMM of 4 or 128 KiB. Two threads; spinning, and sleeping on the event descriptors.
//!
//! `cargo run --release --no-default-features -p rblk-fabric --example soft_pingpong [SECONDS]`

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use rblk_fabric::{
    AcceptParams, Access, Address, Completion, ConnectOptions, Connection, ConnectionHello,
    Listener, MemoryRegion, PageKind, Poller as _, ProtectionDomain, QpIndex, QpLimits, RecvWr,
    Region, RemoteBuffer, Scheme, SendOp, SendWr, SgeList, WcStatus, WrId, soft,
};

const COMMAND: usize = 64;

struct Side {
    poller: soft::Poller,
    qp: QpIndex,
    memory: MemoryRegion,
    block: usize,
    polls: u64,
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn limits(depth: u32) -> QpLimits {
    QpLimits {
        send_wrs: 2 * depth,
        recv_wrs: 2 * depth,
        send_sges: 1,
        inline_bytes: 0,
        reads_out: 1,
        reads_in: 1,
    }
}

fn connect(depth: u32, block: usize) -> Result<(Side, Side), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let device = soft::Device::tcp();
    let pd = soft::ProtectionDomain::new(&device);
    let slots = block * depth as usize * 2;
    let register = || -> Result<MemoryRegion, Failure> {
        let region = Region::allocate(slots, PageKind::Normal)?;
        Ok(ProtectionDomain::Soft(pd.clone()).register(&region, Access::REMOTE)?)
    };
    let ((mut poller_a, handle_a), (mut poller_b, handle_b)) =
        (soft::Poller::create(&pd, 1024)?, soft::Poller::create(&pd, 1024)?);
    let (qp_a, qp_b) = runtime.block_on(async {
        let address = Address { scheme: Scheme::Tcp, host: "127.0.0.1".to_owned(), port: 0 };
        let mut listener = Listener::bind(&address).await?;
        let route = soft::Route::resolve(listener.address(), &ConnectOptions::default()).await?;
        let hello = ConnectionHello::default();
        let accepting = async {
            let Ok(rblk_fabric::Incoming::Soft(incoming)) = listener.accept().await else {
                return Err(Failure::from("no peer"));
            };
            let connection = incoming.prepare(&pd, &handle_b, limits(depth))?;
            let qp = poller_b.attach(Connection::Soft(connection))?;
            let params = AcceptParams { hello: hello.clone(), reads_out: 1, reads_in: 1 };
            poller_b.accept(qp, &params)?;
            Ok(qp)
        };
        let (established, qp_b) =
            tokio::join!(route.connect(&pd, &handle_a, limits(depth), &hello), accepting);
        Ok::<_, Failure>((poller_a.attach(established?.connection)?, qp_b?))
    })?;
    let a = Side { poller: poller_a, qp: qp_a, memory: register()?, block, polls: 0 };
    let b = Side { poller: poller_b, qp: qp_b, memory: register()?, block, polls: 0 };
    Ok((a, b))
}

impl Side {
    fn recv(&mut self, slot: usize) -> Result<(), Failure> {
        let sge = self.memory.sge(slot * COMMAND, 64).ok_or("slot")?;
        Ok(self.poller.post_recv(self.qp, &[RecvWr { id: WrId(slot as u64), sge }])?)
    }

    /// One wake-up's worth of completions. Sleeps when there are none, if so asked.
    fn reap(&mut self, out: &mut [Completion], sleep: bool) -> Result<usize, Failure> {
        self.polls += 1;
        let mut count = self.poller.poll(out)?;
        if count == 0 && sleep {
            self.poller.arm()?;
            count = self.poller.poll(out)?;
            if count == 0 {
                // The kernel skips the entry of a descriptor that is none.
                let mut wait = self.poller.event_fds().map(|fd| libc::pollfd {
                    fd: fd.map_or(-1, |fd| fd.as_raw_fd()),
                    events: libc::POLLIN,
                    revents: 0,
                });
                // SAFETY: two valid pollfds.
                unsafe { libc::poll(wait.as_mut_ptr(), 2, 100) };
                self.poller.clear_event();
                count = self.poller.poll(out)?;
            }
        } else if count == 0 {
            // A spinning thread that never yields starves whatever must run here to make progress.
            std::thread::yield_now();
        }
        if let Some(bad) = out[..count].iter().find(|c| c.status != WcStatus::Success) {
            return Err(format!("{bad:?}").into());
        }
        Ok(count)
    }
}

/// Answers each command with a block, every 8th signaled.
fn serve(
    mut side: Side,
    to: RemoteBuffer,
    depth: usize,
    sleep: bool,
    stop: &AtomicBool,
) -> Result<Side, Failure> {
    let mut out = vec![Completion::default(); 64];
    let mut replies = Vec::with_capacity(64);
    let mut served = 0u64;
    let len = u32::try_from(side.block)?;
    while !stop.load(Ordering::Relaxed) {
        let count = side.reap(&mut out, sleep)?;
        for done in out[..count].iter().filter(|c| c.byte_len > 0) {
            let slot = usize::try_from(done.id.0)?;
            side.recv(slot)?;
            served += 1;
            let to =
                RemoteBuffer { addr: to.addr + (side.block * (depth + slot % depth)) as u64, ..to };
            replies.push(SendWr {
                id: WrId(1),
                op: SendOp::WriteWithImm(to, u32::try_from(slot)?),
                sges: SgeList::one(side.memory.sge(side.block * depth, len).ok_or("block")?),
                signaled: served.is_multiple_of(u64::try_from(depth.min(8))?),
                inline: false,
            });
        }
        side.poller.post_send(side.qp, &replies)?;
        replies.clear();
    }
    Ok(side)
}

/// Microseconds of user and system time of both ends together: says more than the clock where
/// others run too.
fn cpu_time() -> Result<[i64; 2], Failure> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    Ok([usage.user_time().num_microseconds(), usage.system_time().num_microseconds()])
}

fn measure(block: usize, depth: usize, sleep: bool, seconds: f64) -> Result<(), Failure> {
    let (mut a, mut b) = connect(u32::try_from(depth)?, block)?;
    for slot in 0..2 * depth {
        a.recv(slot)?;
        b.recv(slot)?;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let to = a.memory.remote(0);
    let server = {
        let stop = Arc::clone(&stop);
        std::thread::spawn(move || serve(b, to, depth, sleep, &stop))
    };
    let mut out = vec![Completion::default(); 64];
    let command = SendWr {
        id: WrId(0),
        op: SendOp::Send,
        sges: SgeList::one(a.memory.sge(block * depth - 64, 64).ok_or("command")?),
        signaled: false,
        inline: false,
    };
    let mut sent = 0u64;
    let mut done = 0u64;
    let every = depth.min(8) as u64;
    let mut batch = Vec::with_capacity(depth);
    let before = cpu_time()?;
    let start = Instant::now();
    let limit = Duration::from_secs_f64(seconds);
    let mut due = depth;
    while start.elapsed() < limit {
        for _ in 0..due {
            sent += 1;
            batch.push(SendWr { signaled: sent.is_multiple_of(every), ..command });
        }
        due = 0;
        a.poller.post_send(a.qp, &batch)?;
        batch.clear();
        let count = a.reap(&mut out, sleep)?;
        for got in out[..count].iter().filter(|c| c.byte_len > 0) {
            a.recv(usize::try_from(got.id.0)?)?;
            due += 1;
            done += 1;
        }
    }
    let took = start.elapsed().as_secs_f64();
    let cpu = cpu_time()?;
    stop.store(true, Ordering::Relaxed);
    let b = server.join().map_err(|_| "the server panicked")??;
    #[allow(clippy::cast_precision_loss, reason = "figures for people")]
    let per = |calls: u64| calls as f64 / done as f64;
    #[allow(clippy::cast_precision_loss, reason = "figures for people")]
    let (rate, mib) = (done as f64 / took, (done * block as u64) as f64 / took / 1_048_576.0);
    #[allow(clippy::cast_precision_loss, reason = "figures for people")]
    let spent = [0, 1].map(|at| (cpu[at] - before[at]) as f64 / done as f64);
    println!(
        "{:3} KiB depth {depth:3} {}: {rate:9.0} round trips/s, {mib:6.0} MiB/s, {:7.2} us each; CPU us user {:.2}, system {:.2}; link calls per round trip: client {:.2}, server {:.2}; polls {:.1}, {:.1}",
        block >> 10,
        if sleep { "sleep" } else { "spin " },
        1e6 / rate,
        spent[0],
        spent[1],
        per(a.poller.link_calls()),
        per(b.poller.link_calls()),
        per(a.polls),
        per(b.polls),
    );
    Ok(())
}

fn main() -> Result<(), Failure> {
    let seconds = std::env::args().nth(1).map_or(Ok(2.0), |s| s.parse())?;
    for (block, depth) in [(4096, 1), (4096, 8), (4096, 32), (128 << 10, 16)] {
        for sleep in [false, true] {
            measure(block, depth, sleep, seconds)?;
        }
    }
    Ok(())
}
