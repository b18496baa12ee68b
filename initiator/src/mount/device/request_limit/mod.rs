//! [`RequestLimit`]: the disk of a server that leaves has a few requests for each queue (kernels
//! before 6.16, see [`LeaveGate`]).
//!
//! A [process of its own](limit_process) limits the disk, and reads from it until the queues can
//! get no other request. All of that can wait for an answer that this process withholds: the
//! settings of the disk, an open and a close of it. This process waits for none of it: not for the
//! other process, nor for its end. The other process outlives an exec of this one, and ends the
//! limit after any end of this one.

mod limit_news;
pub mod limit_process;

use std::io::{self, Write};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use rblk_operate::CpuList;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::net::unix::pipe;
use tokio::time::Instant;

use self::limit_news::LimitNews;
use super::queue_settings::FEWEST;
use crate::front::ublk::{LeaveGate, UblkError};

/// Time to fill the queues of a limited disk, from the moment when all of them are quiet.
pub(crate) const FILL: Duration = Duration::from_secs(2);
/// Between two looks at the queues.
const STEP: Duration = Duration::from_millis(2);
/// The order to read from the disk.
const READ: &[u8] = b"read\n";

/// The limit of a disk, and the closed gate of its queues. When it is dropped, the gate is open,
/// and the other process ends the limit.
#[derive(Debug)]
pub(crate) struct RequestLimit {
    gate: Arc<LeaveGate>,
    // The other process ends the limit when this ends.
    orders: ChildStdin,
    news: Lines<BufReader<pipe::Receiver>>,
}

impl RequestLimit {
    /// Limits the disk of a gate, and closes the gate. Afterwards each queue has `usual` requests
    /// again. The CPUs are those that submit to each queue.
    ///
    /// # Errors
    /// The other process cannot limit the disk.
    pub(crate) async fn begin(
        gate: Arc<LeaveGate>,
        usual: u16,
        cpus: Vec<CpuList>,
    ) -> io::Result<Self> {
        let device = gate.device();
        let started = tokio::task::spawn_blocking(move || start(device, usual, &cpus));
        let (orders, news) = started.await??;
        let news = pipe::Receiver::from_owned_fd(news.into())?;
        let mut news = BufReader::new(news).lines();
        match news.next_line().await?.as_deref().and_then(LimitNews::parse) {
            Some(LimitNews::Limited) => {}
            Some(LimitNews::Failed(why)) => return Err(io::Error::other(why)),
            _ => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        gate.close(FEWEST);
        Ok(Self { gate, orders, news })
    }

    /// Fills the queues that leave, and opens the gate in the end.
    ///
    /// # Errors
    /// A queue is not full in time: a request may be lost.
    pub(crate) async fn fill(&mut self) -> Result<(), UblkError> {
        if let Err(error) = self.read().await {
            tracing::warn!(%error, "the process that reads from the disk");
        }
        let (id, held, is_full) = (self.gate.device(), self.gate.held(), self.gate.is_full());
        self.gate.open();
        if is_full { Ok(()) } else { Err(UblkError::NotFull { id, held }) }
    }

    /// Has the other process read from the disk once all queues are quiet, for the time to fill
    /// them.
    async fn read(&mut self) -> io::Result<()> {
        let mut until = None;
        while until.is_none_or(|until| Instant::now() < until) {
            if until.is_none() && self.gate.have_all_asked() {
                until = Some(Instant::now() + FILL);
                self.orders.write_all(READ)?;
            }
            tokio::select! {
                line = self.news.next_line() => match line? {
                    Some(line) => self.on_news(&line),
                    None => return Err(io::ErrorKind::UnexpectedEof.into()),
                },
                () = tokio::time::sleep(STEP) => {}
            }
        }
        Ok(())
    }

    fn on_news(&self, line: &str) {
        match LimitNews::parse(line) {
            Some(LimitNews::Refused(queue)) => self.gate.refused(queue),
            Some(LimitNews::NoCpu(queue)) => self.gate.has_no_cpu(queue),
            Some(LimitNews::Failed(why)) => tracing::warn!("handing the disk over: {why}"),
            Some(LimitNews::Limited) | None => {}
        }
    }
}

impl Drop for RequestLimit {
    fn drop(&mut self) {
        self.gate.open();
    }
}

/// Starts the other process. Blocks until it has left the one that this process has to reap.
fn start(device: u32, usual: u16, cpus: &[CpuList]) -> io::Result<(ChildStdin, ChildStdout)> {
    // An earlier program may have kept its inherited descriptors.
    rblk_runtime::close_lent_on_exec()?;
    let mut first = Command::new("/proc/self/exe")
        .arg("limit-requests")
        .args([device, FEWEST.into(), usual.into()].map(|number| number.to_string()))
        .args(cpus.iter().map(CpuList::to_string))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let pipes = first.stdin.take().zip(first.stdout.take());
    let status = first.wait()?;
    match pipes {
        Some(pipes) if status.success() => Ok(pipes),
        _ => Err(io::Error::other(format!("its process: {status}"))),
    }
}
