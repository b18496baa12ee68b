//! Ping-pong over plain UDP and TCP sockets: what the network and the kernel cost without a
//! provider.
//!
//! The server sends back what it receives: over UDP each datagram; over TCP messages whose length
//! is in the first bytes of the connection. It keeps no data, never sends more than it received,
//! and serves one TCP client at a time.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::control::GRACE;
use super::ping::measure_rounds;
use crate::histogram::Histogram;
use crate::interrupt;
use crate::result::Wait;

/// Largest message in bytes.
const BYTES_MAX: usize = 64 << 10;
/// How long one wait is: between two, deadline and interrupts are looked at.
const NAP: Duration = Duration::from_millis(100);
/// Longest use of the TCP echo by one client.
const CLIENT_LIMIT: Duration = Duration::from_secs(100);
/// Datagrams may get lost: how often one is sent, each after [`NAP`] more.
const TRIES: u32 = 20;
/// "rfe1", and then how the server waits; in front of every datagram and of a TCP connection.
const MAGIC: u32 = 0x3165_6672;
/// Bytes in front: magic, wait, length (TCP).
const HEAD: usize = 12;

/// What carries the messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Carrier {
    /// Datagrams.
    Udp,
    /// A stream, with TCP_NODELAY.
    Tcp,
}

impl Carrier {
    /// The word for it.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Udp => "UDP",
            Self::Tcp => "TCP",
        }
    }
}

/// Both servers, each on a thread of its own. Dropped, they end.
#[derive(Debug)]
pub(super) struct Echo {
    udp_port: u16,
    tcp_port: u16,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Echo {
    /// Listens at free ports.
    pub(super) fn start(ip: IpAddr) -> Result<Self> {
        let udp = UdpSocket::bind((ip, 0)).with_context(|| format!("no UDP socket at {ip}"))?;
        let tcp = TcpListener::bind((ip, 0)).with_context(|| format!("no TCP socket at {ip}"))?;
        let (udp_port, tcp_port) = (udp.local_addr()?.port(), tcp.local_addr()?.port());
        udp.set_read_timeout(Some(NAP))?;
        tcp.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (stop_udp, stop_tcp) = (Arc::clone(&stop), Arc::clone(&stop));
        let spawn = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let threads = vec![
            spawn("echo-udp").spawn(move || echo_datagrams(&udp, &stop_udp))?,
            spawn("echo-tcp").spawn(move || echo_streams(&tcp, &stop_tcp))?,
        ];
        Ok(Self { udp_port, tcp_port, stop, threads })
    }

    /// Port of the datagrams.
    pub(super) fn udp_port(&self) -> u16 {
        self.udp_port
    }

    /// Port of the streams.
    pub(super) fn tcp_port(&self) -> u16 {
        self.tcp_port
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn head(wait: Wait, bytes: usize) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&MAGIC.to_le_bytes());
    head[4] = u8::from(wait == Wait::Events);
    head[8..].copy_from_slice(&u32::try_from(bytes).unwrap_or(0).to_le_bytes());
    head
}

/// How to wait, and the length, of a head that is one.
fn parse(head: &[u8]) -> Option<(Wait, usize)> {
    let head: &[u8; HEAD] = head.first_chunk()?;
    let word = |at: usize| head[at..].first_chunk().map_or(0, |b| u32::from_le_bytes(*b));
    let wait = if head[4] == 1 { Wait::Events } else { Wait::Polling };
    (word(0) == MAGIC).then(|| (wait, usize::try_from(word(8)).unwrap_or(usize::MAX)))
}

fn echo_datagrams(socket: &UdpSocket, stop: &AtomicBool) {
    let mut buffer = vec![0; BYTES_MAX];
    let mut polling = false;
    let mut quiet_since = Instant::now();
    while !stop.load(Ordering::Relaxed) && !interrupt::is_set() {
        match socket.recv_from(&mut buffer) {
            Ok((len, from)) => {
                let Some((wait, _)) = parse(&buffer[..len]) else { continue };
                let _ = socket.send_to(&buffer[..len], from);
                quiet_since = Instant::now();
                if polling != (wait == Wait::Polling) {
                    polling = wait == Wait::Polling;
                    let _ = socket.set_nonblocking(polling);
                }
            }
            // Who was polled for has left.
            Err(_) if polling && quiet_since.elapsed() > NAP => {
                polling = false;
                let _ = socket.set_nonblocking(false);
            }
            Err(_) if polling => std::thread::yield_now(),
            Err(_) => {}
        }
    }
}

fn echo_streams(listener: &TcpListener, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) && !interrupt::is_set() {
        match listener.accept() {
            // A client that breaks off has what it wanted.
            Ok((stream, _)) => drop(echo_stream(stream, stop)),
            Err(_) => std::thread::sleep(NAP / 10),
        }
    }
}

fn echo_stream(mut stream: TcpStream, stop: &AtomicBool) -> Result<()> {
    let deadline = Instant::now() + CLIENT_LIMIT;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(NAP))?;
    stream.set_write_timeout(Some(GRACE))?;
    let mut head = [0; HEAD];
    let going = || {
        let go = Instant::now() < deadline && !stop.load(Ordering::Relaxed);
        go && !interrupt::is_set()
    };
    read_whole(&mut stream, &mut head, going)?;
    let (wait, bytes) = parse(&head).context("not ours")?;
    ensure!((1..=BYTES_MAX).contains(&bytes), "messages of that size");
    stream.set_nonblocking(wait == Wait::Polling)?;
    let mut buffer = vec![0; bytes];
    loop {
        read_whole(&mut stream, &mut buffer, going)?;
        write_whole(&mut stream, &buffer, going)?;
    }
}

fn read_whole(
    stream: &mut TcpStream,
    mut buffer: &mut [u8],
    going: impl Fn() -> bool,
) -> Result<()> {
    let mut looks = 0_u32;
    while !buffer.is_empty() {
        match stream.read(buffer) {
            Ok(0) => bail!("the connection ended"),
            Ok(count) => buffer = &mut buffer[count..],
            Err(error) => again(&error, &mut looks, &going)?,
        }
    }
    Ok(())
}

fn write_whole(stream: &mut TcpStream, mut bytes: &[u8], going: impl Fn() -> bool) -> Result<()> {
    let mut looks = 0_u32;
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(0) => bail!("the connection ended"),
            Ok(count) => bytes = &bytes[count..],
            Err(error) => again(&error, &mut looks, &going)?,
        }
    }
    Ok(())
}

/// Goes on after a look in vain, or a wait that took its time.
fn again(error: &std::io::Error, looks: &mut u32, going: impl Fn() -> bool) -> Result<()> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
        _ => bail!("{error}"),
    }
    *looks += 1;
    if looks.is_multiple_of(64) {
        ensure!(going(), "nothing came within the deadline");
    }
    std::thread::yield_now();
    Ok(())
}

/// Measures half of a round trip.
pub(super) fn measure(
    carrier: Carrier,
    to: SocketAddr,
    bytes: u32,
    wait: Wait,
    time: Duration,
) -> Result<Histogram> {
    let bytes = usize::try_from(bytes)?.clamp(HEAD, BYTES_MAX);
    let deadline = Instant::now() + time + GRACE;
    let going = || Instant::now() < deadline && !interrupt::is_set();
    match carrier {
        Carrier::Tcp => {
            let mut stream = TcpStream::connect_timeout(&to, GRACE)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(NAP))?;
            stream.set_write_timeout(Some(GRACE))?;
            stream.write_all(&head(wait, bytes))?;
            stream.set_nonblocking(wait == Wait::Polling)?;
            let (out, mut back) = (vec![7; bytes], vec![0; bytes]);
            measure_rounds(time, true, || {
                write_whole(&mut stream, &out, going)?;
                read_whole(&mut stream, &mut back, going)
            })
        }
        Carrier::Udp => {
            let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
            let socket = UdpSocket::bind((any, 0))?;
            socket.connect(to)?;
            socket.set_read_timeout(Some(NAP))?;
            socket.set_nonblocking(wait == Wait::Polling)?;
            let mut out = vec![7; bytes];
            out[..HEAD].copy_from_slice(&head(wait, bytes));
            let mut back = vec![0; bytes];
            let mut number = 0_u32;
            measure_rounds(time, true, || {
                // The length of a datagram is its own: the field has its number.
                number = number.wrapping_add(1);
                out[8..HEAD].copy_from_slice(&number.to_le_bytes());
                datagram_round(&socket, &out, &mut back, wait, going)
            })
        }
    }
}

/// Sends a datagram until it comes back.
fn datagram_round(
    socket: &UdpSocket,
    out: &[u8],
    back: &mut [u8],
    wait: Wait,
    going: impl Fn() -> bool,
) -> Result<()> {
    for _ in 0..TRIES {
        let sent = Instant::now();
        socket.send(out)?;
        loop {
            match socket.recv(back) {
                // One of an earlier round is not what is waited for.
                Ok(len) if len == out.len() && back[..HEAD] == out[..HEAD] => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => bail!("{error}"),
                Err(_) if sent.elapsed() >= NAP => break,
                Err(_) if wait == Wait::Polling => std::thread::yield_now(),
                Err(_) => {}
            }
        }
        ensure!(going(), "nothing came within the deadline");
    }
    bail!("{TRIES} datagrams in a row got lost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_read_back_and_others_refused() {
        for wait in [Wait::Polling, Wait::Events] {
            assert_eq!(parse(&head(wait, 4096)), Some((wait, 4096)));
        }
        assert_eq!(parse(&head(Wait::Polling, 64)[..HEAD - 1]), None);
        assert_eq!(parse(b"GET / HTTP/1.0"), None);
    }

    #[test]
    fn both_carriers_come_back() {
        let ip: IpAddr = [127, 0, 0, 1].into();
        let echo = Echo::start(ip).unwrap();
        for (carrier, port) in [(Carrier::Udp, echo.udp_port()), (Carrier::Tcp, echo.tcp_port())] {
            for wait in [Wait::Polling, Wait::Events] {
                let time = Duration::from_millis(20);
                let histogram = measure(carrier, (ip, port).into(), 64, wait, time).unwrap();
                assert!(histogram.count() > 0, "{carrier:?} {wait:?}");
            }
        }
    }

    #[test]
    fn strangers_get_nothing() {
        let ip: IpAddr = [127, 0, 0, 1].into();
        let echo = Echo::start(ip).unwrap();
        let mut stranger = TcpStream::connect((ip, echo.tcp_port())).unwrap();
        stranger.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        stranger.set_read_timeout(Some(GRACE)).unwrap();
        let mut answer = Vec::new();
        // Closed, with or without what it said being read.
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.is_empty());
    }
}
