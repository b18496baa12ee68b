//! Bandwidth: many messages at once, for some time.
//!
//! Only confirmed bytes count: a WRITE and a READ are confirmed by their completions, a SEND by a
//! small message of the receiver. The rate is that between the first and the last confirmation, so
//! the time that fills the pipe does not count.

use std::time::{Duration, Instant};

use rblk_fabric::{Address, SendOp, SendWr, WcOpcode};

use super::control::Control;
use super::end::{Broken, End, SEND_WRS, at};
use super::job::{Job, Kind, NOWHERE, Offer, SMALL, WINDOW_MAX};
use crate::result::{Bandwidth, Wait};

/// READs outstanding at most; the connection may allow fewer.
const READS_MAX: u16 = 16;
/// Messages outstanding at least, as far as anybody counts.
const DEPTH_MIN: u16 = 4;
/// RECVs for small messages: more than there can be at once.
const SMALL_RECVS: usize = 16;
/// Proofs that a rate is made of, at least.
const PROOFS_MIN: u64 = 4;

/// Measures one kind at one size, `depth` messages outstanding or as many as the window has room
/// for.
pub(super) fn measure(
    control: &Control,
    address: &Address,
    kind: Kind,
    bytes: u32,
    depth: u16,
    time: Duration,
) -> Result<Bandwidth, Broken> {
    let room = u16::try_from(WINDOW_MAX / bytes).unwrap_or(u16::MAX).max(DEPTH_MIN);
    let depth = if kind == Kind::ReadStream { depth.min(READS_MAX) } else { depth }.min(room);
    let job = Job { kind, wait: Wait::Polling, bytes, depth, time, buffer: NOWHERE };
    let (mut end, offer) = control.connect(address, job)?;
    let small = end.small_in();
    end.recv(SMALL, [small; SMALL_RECVS])?;
    let mut stream = Stream { offer, posted: 0, proved: 0, waiting: Vec::new() };
    stream.run(&mut end, time)
}

/// Messages between two proofs.
fn interval(depth: u16) -> u32 {
    u32::from((depth / 4).max(1))
}

struct Stream {
    offer: Offer,
    posted: u64,
    proved: u64,
    waiting: Vec<SendWr>,
}

impl Stream {
    fn run(&mut self, end: &mut End, time: Duration) -> Result<Bandwidth, Broken> {
        let job = end.job();
        // The device may serve fewer READs than were asked for.
        let depth = if job.kind == Kind::ReadStream {
            job.depth.min(end.reads_out.into()).max(1)
        } else {
            job.depth
        };
        let job = Job { depth, ..job };
        let every = interval(depth);
        let mut proofs = 0_u64;
        // The proof that the clock began at: when, and what was proved until then.
        let mut first: Option<(Instant, u64)> = None;
        // Send slots come back with signaled completions, which for SENDs are no proofs.
        let mut signaled = 0_u64;
        loop {
            let free_slots = u64::from(SEND_WRS) - (self.posted - signaled);
            let free = (u64::from(job.depth) - (self.posted - self.proved)).min(free_slots);
            for _ in 0..free {
                let wr = self.next(end, every);
                self.waiting.push(wr);
                self.posted += 1;
            }
            if !self.waiting.is_empty() {
                end.post(&self.waiting)?;
                self.waiting.clear();
            }
            let (mut done, mut small) = (0, 0);
            for completion in end.turn()? {
                match completion.opcode {
                    WcOpcode::Recv => small += 1,
                    _ => done += 1,
                }
            }
            signaled += done * u64::from(every);
            let proofs_now = if job.kind == Kind::SendStream { small } else { done };
            if small > 0 {
                let place = end.small_in();
                end.recv(SMALL, (0..small).map(|_| place))?;
            }
            if proofs_now == 0 {
                continue;
            }
            self.proved += proofs_now * u64::from(every);
            proofs += 1;
            let now = Instant::now();
            let Some((began, before)) = first else {
                // Twice around everything, so that both ends are at it.
                if self.proved >= 2 * u64::from(job.depth) {
                    first = Some((now, self.proved));
                    proofs = 0;
                }
                continue;
            };
            let took = now.duration_since(began);
            if took >= time && proofs >= PROOFS_MIN {
                return Ok(bandwidth(&job, took, self.proved - before));
            }
        }
    }

    fn next(&self, end: &mut End, every: u32) -> SendWr {
        let job = end.job();
        let place = end.incoming(self.posted);
        match job.kind {
            Kind::ReadStream => {
                end.wr(SendOp::Read(at(self.offer.buffer, place)), place, job.bytes, every)
            }
            Kind::WriteStream => {
                let from = end.outgoing(self.posted);
                end.wr(SendOp::Write(at(self.offer.buffer, place)), from, job.bytes, every)
            }
            _ => {
                let from = end.outgoing(self.posted);
                end.wr(SendOp::Send, from, job.bytes, every)
            }
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "53 bits are enough for a rate")]
fn bandwidth(job: &Job, took: Duration, messages: u64) -> Bandwidth {
    let messages_per_s = messages as f64 / took.as_secs_f64();
    Bandwidth {
        what: job.kind.word().to_owned(),
        bytes: job.bytes.into(),
        depth: job.depth.into(),
        bytes_per_s: messages_per_s * f64::from(job.bytes),
        messages_per_s,
    }
}

/// The server's part of SENDs: takes them and says so. Ends with the connection.
pub(super) fn receive(end: &mut End) -> Result<(), Broken> {
    let job = end.job();
    let every = u64::from(interval(job.depth));
    let mut came = 0_u64;
    loop {
        let mut places = [0; 64];
        let mut count = 0;
        for completion in end.turn()? {
            if completion.opcode == WcOpcode::Recv {
                places[count] = usize::try_from(completion.id.0).unwrap_or(0);
                count += 1;
            }
        }
        if count == 0 {
            continue;
        }
        // Before the word goes out that there is room again.
        end.recv(job.bytes, places[..count].iter().copied())?;
        let before = came / every;
        came += count as u64;
        for _ in before..came / every {
            let from = end.small_out();
            let wr = end.wr(SendOp::Send, from, SMALL, 1);
            end.post(&[wr])?;
        }
    }
}
