//! [`Crowd`]: connections from many loopback addresses that say a hello and nothing else, and come
//! again when the target ends or refuses them.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rblk_protocol::width::narrow;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::wire::Hello;

/// Addresses that a crowd is spread over.
const ADDRESSES: u16 = 64;
/// A pause of each member before it comes again.
const PAUSE: Duration = Duration::from_millis(20);
/// Bytes of the reply before the hello in it.
const REPLY: usize = 16;
/// Where the reply has its verdict, and the value that lets the peer in.
const VERDICT: (usize, u8) = (10, 1);

/// Members with a thread of their own, until it is dropped.
#[derive(Debug)]
pub struct Crowd {
    stop: Arc<AtomicBool>,
    inside: Arc<AtomicU64>,
    refused: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// The request of the framing over TCP, with this hello in it.
fn request(hello: &Hello) -> Vec<u8> {
    let hello = hello.bytes();
    let mut bytes = b"rblkSOFT".to_vec();
    bytes.extend(1_u16.to_le_bytes());
    bytes.extend([4, 1]);
    bytes.extend(5000_u32.to_le_bytes());
    bytes.extend([narrow(hello.len()), 0, 0, 0]);
    bytes.extend(hello);
    bytes
}

async fn connect(from: Ipv4Addr, port: u16) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    // Otherwise connections in TIME_WAIT soon use up the ports of this address.
    socket.set_zero_linger()?;
    socket.bind(SocketAddr::V4(SocketAddrV4::new(from, 0)))?;
    socket.connect(SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))).await
}

/// One visit: says the hello, and stays until the target ends it. Returns whether it was let in.
async fn visit(from: Ipv4Addr, port: u16, request: &[u8]) -> std::io::Result<bool> {
    let mut stream = connect(from, port).await?;
    stream.write_all(request).await?;
    let mut reply = [0; REPLY];
    stream.read_exact(&mut reply).await?;
    let is_in = reply[VERDICT.0] == VERDICT.1;
    let mut rest = [0; 256];
    while is_in && stream.read(&mut rest).await? > 0 {}
    Ok(is_in)
}

impl Crowd {
    /// Starts `members` members that send `hello` to the target at this port. With `spread` they
    /// have 64 addresses of 127.1.0.0/16, else the address of this host.
    ///
    /// # Panics
    /// No thread can be made.
    #[must_use]
    pub fn start(port: u16, members: u16, spread: bool, hello: &Hello) -> Self {
        let [inside, refused] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
        let stop = Arc::new(AtomicBool::new(false));
        let request: Arc<[u8]> = request(hello).into();
        let counts = (Arc::clone(&inside), Arc::clone(&refused));
        let stops = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async move {
                for member in 0..members {
                    let from = match spread {
                        true => Ipv4Addr::new(127, 1, 0, narrow(member % ADDRESSES + 1)),
                        false => Ipv4Addr::LOCALHOST,
                    };
                    let (request, counts) = (Arc::clone(&request), counts.clone());
                    tokio::spawn(async move {
                        loop {
                            match visit(from, port, &request).await {
                                Ok(false) => counts.1.fetch_add(1, Ordering::Relaxed),
                                // The target may end a visit by a reset.
                                Ok(true) | Err(_) => counts.0.fetch_add(1, Ordering::Relaxed),
                            };
                            tokio::time::sleep(PAUSE).await;
                        }
                    });
                }
                while !stops.load(Ordering::Relaxed) {
                    tokio::time::sleep(PAUSE).await;
                }
            });
        });
        Self { stop, inside, refused, thread: Some(thread) }
    }

    /// Visits that the target ended, and those that it refused.
    #[must_use]
    pub fn visits(&self) -> (u64, u64) {
        (self.inside.load(Ordering::Relaxed), self.refused.load(Ordering::Relaxed))
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic there is printed.
            let _ = thread.join();
        }
    }
}
