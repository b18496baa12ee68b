//! Ping-pong: one message after the other, each waited for.

use std::time::{Duration, Instant};

use rblk_fabric::{SendOp, WcOpcode};

use super::control::Control;
use super::end::{Broken, End, at};
use super::job::{Job, Kind, Offer, SMALL};
use crate::histogram::Histogram;
use crate::result::Wait;
use rblk_fabric::Address;

/// Every how many sends one is signaled.
const INTERVAL: u32 = 16;
/// What is done before anything is counted, at least.
const WARM_UP: u32 = 16;

/// Measures one kind. Half of each round trip, or a whole one where there is no half.
pub(super) fn measure(
    control: &Control,
    address: &Address,
    kind: Kind,
    bytes: u32,
    wait: Wait,
    time: Duration,
) -> Result<Histogram, Broken> {
    let job = Job { kind, wait, bytes, depth: 1, time, buffer: super::job::NOWHERE };
    let (mut end, offer) = control.connect(address, job)?;
    let place = end.incoming(0);
    match kind {
        Kind::SendPing => end.recv(bytes, [place, place])?,
        // What comes by WRITE needs no RECV; one tells of the end.
        _ => end.recv(SMALL, [end.small_in(), end.small_in()])?,
    }
    let halves = matches!(kind, Kind::SendPing | Kind::WritePing);
    let mut pinger = Pinger { end: &mut end, offer, round: 0 };
    measure_rounds(time, halves, || pinger.ping())
}

/// Times rounds: some to warm up, then for `time`.
pub(super) fn measure_rounds<E>(
    time: Duration,
    halves: bool,
    mut round: impl FnMut() -> Result<(), E>,
) -> Result<Histogram, E> {
    let mut histogram = Histogram::new();
    let begin = Instant::now();
    for done in 0_u32.. {
        if done >= WARM_UP && begin.elapsed() >= time / 10 {
            break;
        }
        round()?;
    }
    let begin = Instant::now();
    let mut before = begin;
    while before.duration_since(begin) < time {
        round()?;
        let now = Instant::now();
        let ns = u64::try_from(now.duration_since(before).as_nanos()).unwrap_or(u64::MAX);
        histogram.record(if halves { ns / 2 } else { ns });
        before = now;
    }
    Ok(histogram)
}

struct Pinger<'e> {
    end: &'e mut End,
    offer: Offer,
    round: u64,
}

impl Pinger<'_> {
    fn ping(&mut self) -> Result<(), Broken> {
        let job = self.end.job();
        self.round += 1;
        match job.kind {
            Kind::SendPing => {
                let from = self.end.outgoing(0);
                let wr = self.end.wr(SendOp::Send, from, job.bytes, INTERVAL);
                self.end.post(&[wr])?;
                await_message(self.end)?;
                let place = self.end.incoming(0);
                self.end.recv(job.bytes, [place])
            }
            Kind::CommandPing => {
                let from = self.end.small_out();
                let wr = self.end.wr(SendOp::Send, from, SMALL, INTERVAL);
                self.end.post(&[wr])?;
                await_message(self.end)?;
                let place = self.end.small_in();
                self.end.recv(SMALL, [place])
            }
            Kind::WritePing => {
                let mark = mark(self.round);
                write(self.end, self.offer.buffer, mark)?;
                await_mark(self.end, mark)
            }
            _ => {
                let to = self.end.incoming(0);
                let wr = self.end.wr(SendOp::Read(self.offer.buffer), to, job.bytes, 1);
                self.end.post(&[wr])?;
                loop {
                    if self.end.turn()?.iter().any(|c| c.opcode == WcOpcode::Read) {
                        return Ok(());
                    }
                }
            }
        }
    }
}

/// The server's part of SENDs and commands. Ends with the connection.
pub(super) fn answer(end: &mut End) -> Result<(), Broken> {
    let job = end.job();
    loop {
        await_message(end)?;
        let (from, to) = (end.outgoing(0), end.incoming(0));
        let wr = if job.kind == Kind::CommandPing {
            let place = end.small_in();
            end.recv(SMALL, [place])?;
            end.wr(SendOp::WriteWithImm(job.buffer, 1), from, job.bytes, INTERVAL)
        } else {
            end.recv(job.bytes, [to])?;
            end.wr(SendOp::Send, from, job.bytes, INTERVAL)
        };
        end.post(&[wr])?;
    }
}

/// The server's part of WRITEs. Ends with the connection.
pub(super) fn answer_writes(end: &mut End) -> Result<(), Broken> {
    for round in 1.. {
        let mark = mark(round);
        await_mark(end, mark)?;
        write(end, end.job().buffer, mark)?;
    }
    Ok(())
}

/// The last byte of a round's message: never that of the round before, and never 0.
fn mark(round: u64) -> u8 {
    (round % 255 + 1).to_le_bytes()[0]
}

fn write(end: &mut End, to: rblk_fabric::RemoteBuffer, mark: u8) -> Result<(), Broken> {
    let bytes = end.job().bytes;
    let from = end.outgoing(0);
    end.set_last_byte(from, mark);
    let wr = end.wr(SendOp::Write(at(to, 0)), from, bytes, INTERVAL);
    end.post(&[wr])
}

/// Waits for a message: one RECV.
fn await_message(end: &mut End) -> Result<(), Broken> {
    loop {
        let came = |opcode| matches!(opcode, WcOpcode::Recv | WcOpcode::RecvWithImm);
        if end.turn()?.iter().any(|c| came(c.opcode)) {
            return Ok(());
        }
    }
}

/// Waits for a WRITE. The CQ is looked at as well: the software provider works only then.
fn await_mark(end: &mut End, mark: u8) -> Result<(), Broken> {
    let place = end.incoming(0);
    loop {
        if end.last_byte(place) == mark {
            return Ok(());
        }
        end.turn()?;
    }
}
