//! [`Control`]: a thread that serves connection events while the measuring threads poll.

use std::future::Future;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use rblk_fabric::{Address, ConnectOptions, MemoryOrder, Route};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use super::end::{self, Broken, End};
use super::job::{Job, Offer};
use crate::result::Wait;

/// Deadline of each step of connecting.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// What a measurement may take beyond its time.
pub(super) const GRACE: Duration = Duration::from_secs(15);

/// A runtime on a thread of its own, ended on drop.
#[derive(Debug)]
pub(crate) struct Control {
    handle: Handle,
    // Dropped, it ends the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Control {
    /// Starts the thread.
    pub(crate) fn start() -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build().context("a runtime")?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("fabric-control".into())
            .spawn(move || {
                // An error is what drop makes: the end.
                let _ = runtime.block_on(stopped);
            })
            .context("cannot start a thread")?;
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }

    /// Waits for something, with the thread serving it.
    pub(crate) fn wait<T>(&self, what: impl Future<Output = T>) -> T {
        self.handle.block_on(what)
    }

    /// Options for connecting.
    pub(crate) fn options() -> ConnectOptions {
        ConnectOptions { timeout: CONNECT_LIMIT, ..ConnectOptions::default() }
    }

    /// The client's end of a job.
    pub(super) fn connect(&self, address: &Address, job: Job) -> Result<(End, Offer), Broken> {
        let connected = self.wait(async {
            let route = Route::resolve(address, &Self::options()).await?;
            let device = route.device();
            // The ping looks for the last byte, so the bytes have to land in order.
            let pd = device.alloc_pd_with(MemoryOrder::Strict)?;
            let limits = end::limits(device.caps(), &job);
            let (poller, handle) = pd.poller(end::cq_entries(&limits))?;
            let memory = end::memory(&pd, &job)?;
            let job = Job { buffer: memory.remote(0), ..job };
            let established = route.connect(&pd, &handle, limits, &job.to_hello()).await?;
            Ok::<_, Broken>((poller, memory, job, established))
        });
        let (mut poller, memory, job, established) = connected?;
        let qp = poller.attach(established.connection)?;
        let deadline = std::time::Instant::now() + job.time + GRACE;
        let offer = Offer::from_hello(&established.hello);
        let mut end = End::new(poller, qp, memory, job, deadline);
        end.reads_out = established.reads_out;
        match offer {
            Some(offer) => Ok((end, offer)),
            None => Err(Broken::NotOurs),
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How a passive end waits: a device answers by itself, the software provider only in its turns.
pub(super) fn passive_wait(job: &Job, is_software: bool) -> Wait {
    if is_software { job.wait } else { Wait::Events }
}
