//! [`Server`]: the passive end. It does its part of each client's job, one job after the other.
//!
//! A client reaches only the memory of its job, which is made for the job and freed with it. A job
//! has a deadline, so a client that stays longer, or sends nothing, is disconnected.

use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rblk_fabric::{
    AcceptParams, Address, ConnectionHello, Incoming, Listener, MemoryOrder, Transport,
};

use super::control::{Control, GRACE, passive_wait};
use super::echo::Echo;
use super::end::{self, Broken, End};
use super::job::{Job, Kind, Offer};
use super::{ping, stream};
use crate::interrupt;

/// How long one wait for a client is.
const NAP: Duration = Duration::from_millis(100);

/// A server on a thread of its own. Dropped, it ends after the job it is at.
#[derive(Debug)]
pub(super) struct Server {
    address: Address,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens; port 0 takes a free one.
    pub(super) fn start(address: &Address) -> Result<Self> {
        let mut serving = Serving::new(address)?;
        let address = serving.listener.address().clone();
        let stop = Arc::new(AtomicBool::new(false));
        let asked = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("fabric-server".into())
            .spawn(move || {
                if let Err(error) = serving.run(&asked) {
                    eprintln!("rblk-bench: the server: {error:#}");
                }
            })
            .context("cannot start a thread")?;
        Ok(Self { address, stop, thread: Some(thread) })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> &Address {
        &self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves until this process is asked to end; tells of each client on stderr.
///
/// # Errors
/// The address cannot be listened on, or the listener broke.
pub(super) fn serve(address: &Address) -> Result<()> {
    let mut serving = Serving::new(address)?;
    serving.tells = true;
    let listens = serving.listener.address();
    eprintln!(
        "rblk-bench: serving at {listens}; measure with `rblk-bench fabric --peer {listens}`"
    );
    serving.run(&AtomicBool::new(false))
}

#[derive(Debug)]
struct Serving {
    // What belongs to the runtime goes before it.
    listener: Listener,
    echo: Echo,
    control: Control,
    tells: bool,
}

impl Serving {
    fn new(address: &Address) -> Result<Self> {
        let control = Control::start()?;
        let listener = control.wait(Listener::bind(address))?;
        let echo = Echo::start(ip_of(address)?)?;
        Ok(Self { listener, echo, control, tells: false })
    }

    fn run(&mut self, stop: &AtomicBool) -> Result<()> {
        while !stop.load(Ordering::Relaxed) && !interrupt::is_set() {
            let (control, listener) = (&self.control, &mut self.listener);
            let next =
                control.wait(async { tokio::time::timeout(NAP, listener.accept()).await.ok() });
            let Some(incoming) = next else { continue };
            let incoming = incoming?;
            let peer = incoming.peer();
            let job = match Job::from_hello(incoming.hello()) {
                Ok(job) => job,
                Err(why) => {
                    incoming.reject(&ConnectionHello(why.as_bytes().to_vec()));
                    self.tell(|| format!("{peer}: refused: {why}"));
                    continue;
                }
            };
            self.tell(|| format!("{peer}: {} {} B x {}", job.kind.word(), job.bytes, job.depth));
            match self.take(incoming, job) {
                // The client ends each job by leaving.
                Ok(()) | Err(Broken::Ended(_) | Broken::Interrupted) => {}
                Err(error) => eprintln!("rblk-bench: {peer}: {error}"),
            }
        }
        Ok(())
    }

    fn take(&mut self, incoming: Incoming, job: Job) -> Result<(), Broken> {
        let device = incoming.device();
        // The ping looks for the last byte, so the bytes have to land in order.
        let pd = device.alloc_pd_with(MemoryOrder::Strict)?;
        let limits = end::limits(device.caps(), &job);
        let (mut poller, handle) = pd.poller(end::cq_entries(&limits))?;
        let memory = end::memory(&pd, &job)?;
        let offer = Offer {
            buffer: memory.remote(0),
            udp_port: self.echo.udp_port(),
            tcp_port: self.echo.tcp_port(),
        };
        let (serves, wants) = incoming.peer_reads();
        let params = AcceptParams {
            hello: offer.to_hello(),
            reads_out: limits.reads_out.min(serves),
            reads_in: limits.reads_in.min(wants),
        };
        let connection = self.control.wait(async { incoming.prepare(&pd, &handle, limits) })?;
        let qp = poller.attach(connection)?;
        let deadline = Instant::now() + job.time + 2 * GRACE;
        let mut end = End::new(poller, qp, memory, job, deadline);
        if !job.kind.is_two_sided() {
            let software =
                matches!(device.caps().transport, Transport::SoftTcp | Transport::SoftMemory);
            end.set_wait(passive_wait(&job, software));
        }
        // One more than the job needs, so that the end of the connection is always seen.
        match job.kind {
            Kind::SendStream => {
                let slots: Vec<usize> =
                    (0..u64::from(job.depth)).map(|slot| end.incoming(slot)).collect();
                end.recv(job.bytes, slots)?;
            }
            _ => {
                let len = if job.kind == Kind::CommandPing { super::job::SMALL } else { job.bytes };
                let place =
                    if job.kind == Kind::CommandPing { end.small_in() } else { end.incoming(0) };
                end.recv(len, [place, place])?;
            }
        }
        end.accept(&params)?;
        match job.kind {
            Kind::SendPing | Kind::CommandPing => ping::answer(&mut end),
            Kind::WritePing => ping::answer_writes(&mut end),
            Kind::SendStream => stream::receive(&mut end),
            Kind::ReadPing | Kind::WriteStream | Kind::ReadStream | Kind::Echo => loop {
                end.turn()?;
            },
        }
    }

    fn tell(&self, what: impl FnOnce() -> String) {
        if self.tells {
            eprintln!("rblk-bench: {}", what());
        }
    }
}

/// The IP address of an address's host.
pub(crate) fn ip_of(address: &Address) -> Result<IpAddr> {
    let all = (address.host.as_str(), address.port).to_socket_addrs();
    let first = all.with_context(|| format!("cannot resolve {}", address.host))?.next();
    Ok(first.with_context(|| format!("{} has no address", address.host))?.ip())
}
