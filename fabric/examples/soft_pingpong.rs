//! Round trips of a read as rblk does it, over TCP loopback: a 64-byte SEND, answered by a 4 KiB
//! WRITE_WITH_IMM. Two threads; spinning, and sleeping on the event descriptor.
//!
//! `cargo run --release --no-default-features -p rblk-fabric --example soft_pingpong [SECONDS]`

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rblk_fabric::{
    AcceptParams, Access, Address, Completion, ConnectOptions, Connection, ConnectionHello,
    Listener, MemoryRegion, PageKind, Poller as _, ProtectionDomain, QpIndex, QpLimits, RecvWr,
    Region, RemoteBuffer, Scheme, SendOp, SendWr, SgeList, WcStatus, WrId, soft,
};

const BLOCK: usize = 4096;
const COMMAND: usize = 64;

struct Side {
    poller: soft::Poller,
    qp: QpIndex,
    memory: MemoryRegion,
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

fn connect(depth: u32) -> Result<(Side, Side), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let device = soft::Device::tcp();
    let pd = device.alloc_pd()?;
    let slots = BLOCK * depth as usize * 2;
    let register = || -> Result<MemoryRegion, Failure> {
        let region = Region::allocate(slots, PageKind::Normal)?;
        Ok(ProtectionDomain::Soft(pd.clone()).register(&region, Access::REMOTE)?)
    };
    let ((mut poller_a, handle_a), (mut poller_b, handle_b)) = (pd.poller(1024)?, pd.poller(1024)?);
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
    let a = Side { poller: poller_a, qp: qp_a, memory: register()?, polls: 0 };
    let b = Side { poller: poller_b, qp: qp_b, memory: register()?, polls: 0 };
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
                let mut wait = libc::pollfd {
                    fd: self.poller.event_fd().as_raw_fd(),
                    events: libc::POLLIN,
                    revents: 0,
                };
                // SAFETY: one valid pollfd.
                unsafe { libc::poll(&raw mut wait, 1, 100) };
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
    while !stop.load(Ordering::Relaxed) {
        let count = side.reap(&mut out, sleep)?;
        for done in out[..count].iter().filter(|c| c.byte_len > 0) {
            let slot = usize::try_from(done.id.0)?;
            side.recv(slot)?;
            served += 1;
            let to = RemoteBuffer { addr: to.addr + (BLOCK * (depth + slot % depth)) as u64, ..to };
            replies.push(SendWr {
                id: WrId(1),
                op: SendOp::WriteWithImm(to, u32::try_from(slot)?),
                sges: SgeList::one(side.memory.sge(BLOCK * depth, 4096).ok_or("block")?),
                signaled: served.is_multiple_of(u64::try_from(depth.min(8))?),
                inline: false,
            });
        }
        side.poller.post_send(side.qp, &replies)?;
        replies.clear();
    }
    Ok(side)
}

fn measure(depth: usize, sleep: bool, seconds: f64) -> Result<(), Failure> {
    let (mut a, mut b) = connect(u32::try_from(depth)?)?;
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
        sges: SgeList::one(a.memory.sge(BLOCK * depth - 64, 64).ok_or("command")?),
        signaled: false,
        inline: false,
    };
    let mut sent = 0u64;
    let mut done = 0u64;
    let every = depth.min(8) as u64;
    let mut batch = Vec::with_capacity(depth);
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
    stop.store(true, Ordering::Relaxed);
    let b = server.join().map_err(|_| "the server panicked")??;
    #[allow(clippy::cast_precision_loss, reason = "figures for people")]
    let per = |calls: u64| calls as f64 / done as f64;
    #[allow(clippy::cast_precision_loss, reason = "figures for people")]
    let rate = done as f64 / took;
    println!(
        "depth {depth:3} {}: {rate:9.0} round trips/s, {:7.2} us each; link calls per round trip: client {:.2}, server {:.2}; polls {:.1}, {:.1}",
        if sleep { "sleep" } else { "spin " },
        1e6 / rate,
        per(a.poller.link_calls()),
        per(b.poller.link_calls()),
        per(a.polls),
        per(b.polls),
    );
    Ok(())
}

fn main() -> Result<(), Failure> {
    let seconds = std::env::args().nth(1).map_or(Ok(2.0), |s| s.parse())?;
    for depth in [1, 8, 32] {
        for sleep in [false, true] {
            measure(depth, sleep, seconds)?;
        }
    }
    Ok(())
}
