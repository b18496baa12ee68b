//! What a TCP connection of this host moves without a protocol: the limit of every system over TCP.
//!
//! Two threads, each on a processor of its own, poll their ends and never sleep. One end plays a
//! target: it answers requests of the size of a command with answers of the size of the data, or
//! the other way round for writes, as many at once as are outstanding. Large blocks are a stream
//! instead, 1 MiB a call, because there the requests cost nothing.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::interrupt;
use crate::result::{Cell, Latency, Sample};

/// Blocks from this size on are measured as a stream.
const STREAMED: usize = 64 << 10;
/// Bytes of a call of a stream.
const CALL: usize = 1 << 20;
/// Bytes of a command, and of a message around data or without any.
const COMMAND: usize = 64;
const ANSWER: usize = 32;
/// Memory that the data is sent from: more than the caches hold.
const SOURCE: usize = 256 << 20;
/// Calls between two looks at the clock.
const CALLS: u32 = 256;

/// The messages of a cell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Load {
    /// Requests, each with an answer.
    Answered { request: usize, answer: usize, depth: usize },
    /// Bytes in one direction, for blocks of so many.
    Stream { block: usize },
}

impl Load {
    fn of(cell: &Cell) -> Result<Self> {
        let (block, depth) = (usize::try_from(cell.block_bytes)?, usize::try_from(cell.depth)?);
        let (request, answer) = if cell.read_percent == 100 {
            (COMMAND, ANSWER + block)
        } else {
            (COMMAND + block, ANSWER)
        };
        Ok(match block {
            STREAMED.. => Self::Stream { block },
            _ => Self::Answered { request, answer, depth },
        })
    }
}

/// Whether a cell is the load of one connection in one direction.
pub(crate) fn can(cell: &Cell) -> bool {
    cell.jobs == 1 && [0, 100].contains(&cell.read_percent)
}

/// Measures a cell on a connection of `ip` to itself.
pub(crate) fn run(cell: &Cell, ip: IpAddr, seconds: u32) -> Result<Sample> {
    let load = Load::of(cell)?;
    let listener = TcpListener::bind(SocketAddr::new(ip, 0)).context("a listener")?;
    let time = Duration::from_secs(seconds.into());
    let client = TcpStream::connect(listener.local_addr()?).context("a connection")?;
    let (server, _) = listener.accept().context("a connection")?;
    for end in [&client, &server] {
        end.set_nodelay(true)?;
        end.set_nonblocking(true)?;
    }
    let before = sched_getaffinity(Pid::from_raw(0)).context("sched_getaffinity")?;
    let processors = processors(&before)?;
    let (done, took) = std::thread::scope(|scope| {
        let serving = scope.spawn(|| -> Result<()> {
            let served = pin(&processors[0]).and_then(|()| serve(&server, load));
            // The other end takes that for the end.
            let _ = server.shutdown(Shutdown::Both);
            served
        });
        let asking = scope.spawn(|| -> Result<(u64, Duration)> {
            let asked = pin(&processors[1]).and_then(|()| ask(&client, load, time));
            let _ = client.shutdown(Shutdown::Both);
            asked
        });
        let asked = asking.join().ok().context("the measuring thread panicked")?;
        serving.join().ok().context("the answering thread panicked")??;
        asked
    })?;
    ensure!(done > 0, "the socket moved nothing");
    let iops = done as f64 / took.as_secs_f64();
    let mean_ns = f64::from(cell.depth) / iops * 1e9;
    Ok(Sample {
        seconds: took.as_secs_f64(),
        iops,
        bytes_per_s: iops * cell.block_bytes as f64,
        latency: Latency { mean_ns, ..Latency::default() },
        ..Sample::default()
    })
}

fn pin(processor: &CpuSet) -> Result<()> {
    sched_setaffinity(Pid::from_raw(0), processor).context("sched_setaffinity")
}

/// The first two processors of a set, each alone.
fn processors(set: &CpuSet) -> Result<[CpuSet; 2]> {
    let mut own = (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false));
    let (Some(first), Some(second)) = (own.next(), own.next()) else {
        anyhow::bail!("the limit of a socket needs two processors");
    };
    let alone = |cpu| {
        let mut set = CpuSet::new();
        set.set(cpu).map(|()| set)
    };
    Ok([alone(first)?, alone(second)?])
}

/// Bytes that a call moved; `None` when there are none now.
fn moved(call: std::io::Result<usize>) -> Result<Option<usize>> {
    match call {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) => {
            Ok(None)
        }
        // The other end is at its end.
        Err(error)
            if [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe].contains(&error.kind()) =>
        {
            Ok(Some(0))
        }
        Err(error) => Err(error.into()),
    }
}

/// Sends so many bytes. False when the other end has closed.
fn send(mut end: &TcpStream, bytes: &[u8]) -> Result<bool> {
    let mut rest = bytes;
    while !rest.is_empty() {
        match moved(end.write(rest))? {
            Some(0) => return Ok(false),
            Some(sent) => rest = &rest[sent..],
            None => {}
        }
    }
    Ok(true)
}

/// Sends `len` bytes from the memory of the data, from `at` on, and moves `at` on.
fn send_from(end: &TcpStream, source: &[u8], at: &mut usize, len: usize) -> Result<bool> {
    if *at + len > source.len() {
        *at = 0;
    }
    let from = *at;
    *at += len;
    send(end, &source[from..from + len])
}

/// The end of the target, until the other end closes.
fn serve(mut end: &TcpStream, load: Load) -> Result<()> {
    let (source, mut at) = (vec![1; SOURCE], 0);
    let Load::Answered { request, answer, .. } = load else {
        while send_from(end, &source, &mut at, CALL)? {}
        return Ok(());
    };
    let (mut buffer, mut have) = (vec![0; CALL], 0);
    loop {
        match moved(end.read(&mut buffer))? {
            Some(0) => return Ok(()),
            Some(bytes) => have += bytes,
            None => continue,
        }
        let requests = have / request;
        have %= request;
        if !send_from(end, &source, &mut at, requests * answer)? {
            return Ok(());
        }
    }
}

/// The end of the initiator. Returns the I/Os that it saw done, and the time.
fn ask(mut end: &TcpStream, load: Load, time: Duration) -> Result<(u64, Duration)> {
    let (request, answer, depth) = match load {
        Load::Answered { request, answer, depth } => (request, answer, depth),
        Load::Stream { block } => (0, block, 0),
    };
    let (source, mut at) = (vec![1; SOURCE.min(request * depth * 64)], 0);
    let mut buffer = vec![0; CALL.max(answer * depth)];
    let (mut done, mut have) = (0, 0);
    if !send_from(end, &source, &mut at, request * depth)? {
        return Ok((0, time));
    }
    let began = Instant::now();
    loop {
        for _ in 0..CALLS {
            let Some(bytes) = moved(end.read(&mut buffer))? else { continue };
            ensure!(bytes > 0, "the other end closed");
            have += bytes;
            let answers = have / answer;
            have %= answer;
            done += answers as u64;
            if !send_from(end, &source, &mut at, request * answers)? {
                anyhow::bail!("the other end closed");
            }
        }
        let took = began.elapsed();
        if took >= time {
            return Ok((done, took));
        }
        interrupt::check()?;
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn cell(rw: &str, bytes: u64, depth: u32, percent: u32) -> Cell {
        Cell::new(rw, bytes, depth, 1, 1, percent)
    }

    #[test]
    fn messages_are_those_of_the_cell() {
        let load = |cell| Load::of(&cell).unwrap();
        let answered = |request, answer, depth| Load::Answered { request, answer, depth };
        assert_eq!(load(cell("randread", 4096, 32, 100)), answered(64, 4128, 32));
        assert_eq!(load(cell("randwrite", 4096, 1, 0)), answered(4160, 32, 1));
        assert_eq!(load(cell("write", 128 << 10, 16, 0)), Load::Stream { block: 128 << 10 });
        assert!(can(&cell("read", 4096, 1, 100)));
        assert!(!can(&cell("randrw", 4096, 1, 70)));
    }

    #[test]
    fn a_socket_moves_something() {
        for cell in [cell("randread", 4096, 4, 100), cell("read", 128 << 10, 16, 100)] {
            match run(&cell, Ipv4Addr::LOCALHOST.into(), 0) {
                Ok(sample) => assert!(sample.iops > 0.0),
                // One processor, or nothing arrived in no time.
                Err(error) => eprintln!("{error:#}"),
            }
        }
    }
}
