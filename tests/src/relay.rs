//! [`Relay`]: an address of a target that a test takes away and gives back, or that passes small
//! packets only. TCP connections through it go on while it takes no new ones.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rblk_fabric::Address;

use crate::program::{FreePort, free_port};

/// Bytes that a packet of Ethernet has room for.
const SMALL: usize = 1400;
const STEP: Duration = Duration::from_millis(5);

#[derive(Debug, Default)]
struct State {
    listens: AtomicBool,
    passes_small_only: AtomicBool,
    is_over: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
}

/// See the module.
#[derive(Debug)]
pub struct Relay {
    /// Its address.
    pub address: Address,
    state: Arc<State>,
    listener: Option<JoinHandle<()>>,
    // Keeps other processes from getting the port.
    _port: FreePort,
}

impl Relay {
    /// A relay to a target. It does not listen yet.
    ///
    /// # Panics
    /// The target has no port of this host, or no thread can be had.
    #[must_use]
    pub fn new(target: &Address) -> Self {
        let port = free_port();
        let own = SocketAddr::from((Ipv4Addr::LOCALHOST, port.number));
        let to = SocketAddr::from((Ipv4Addr::LOCALHOST, target.port));
        let state = Arc::new(State::default());
        let of_thread = Arc::clone(&state);
        let listener = std::thread::spawn(move || listen(own, to, &of_thread));
        let address = format!("tcp://{own}").parse().expect("an address");
        Self { address, state, listener: Some(listener), _port: port }
    }

    /// Starts to listen.
    ///
    /// # Panics
    /// The relay does not listen in time.
    pub fn listen(&self) {
        self.state.listens.store(true, Ordering::SeqCst);
        let own = ("127.0.0.1", self.address.port);
        crate::program::wait_for("a listening relay", || TcpStream::connect(own).ok());
    }

    /// Refuses new connections.
    ///
    /// # Panics
    /// The relay takes connections until the deadline.
    pub fn refuse(&self) {
        self.state.listens.store(false, Ordering::SeqCst);
        let own = ("127.0.0.1", self.address.port);
        crate::program::wait_for("a closed relay", || TcpStream::connect(own).err());
    }

    /// Silences each connection from its first large packet on, in either direction.
    pub fn pass_small_only(&self) {
        self.state.passes_small_only.store(true, Ordering::SeqCst);
    }

    /// Ends every connection.
    pub fn cut(&self) {
        let mut streams = self.state.streams.lock().unwrap_or_else(PoisonError::into_inner);
        for stream in streams.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::SeqCst);
        self.cut();
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}

fn listen(own: SocketAddr, to: SocketAddr, state: &Arc<State>) {
    let mut listener: Option<TcpListener> = None;
    while !state.is_over.load(Ordering::SeqCst) {
        let wanted = state.listens.load(Ordering::SeqCst);
        if wanted != listener.is_some() {
            listener = wanted.then(|| {
                let listener = TcpListener::bind(own).expect("the port of the relay");
                listener.set_nonblocking(true).expect("a socket");
                listener
            });
        }
        match listener.as_ref().map(TcpListener::accept) {
            Some(Ok((near, _))) => connect(near, to, state),
            _ => std::thread::sleep(STEP),
        }
    }
}

fn connect(near: TcpStream, to: SocketAddr, state: &Arc<State>) {
    let Ok(far) = TcpStream::connect(to) else { return };
    let _ = near.set_nonblocking(false);
    for stream in [&near, &far] {
        let _ = stream.set_nodelay(true);
    }
    let clone = |stream: &TcpStream| stream.try_clone().expect("a descriptor");
    let kept = [clone(&near), clone(&far)];
    state.streams.lock().unwrap_or_else(PoisonError::into_inner).extend(kept);
    let is_mute = Arc::new(AtomicBool::new(false));
    for (from, to) in [(clone(&near), clone(&far)), (far, near)] {
        let (state, is_mute) = (Arc::clone(state), Arc::clone(&is_mute));
        std::thread::spawn(move || pass(from, to, &state, &is_mute));
    }
}

/// Passes bytes on until the connection ends.
fn pass(mut from: TcpStream, mut to: TcpStream, state: &State, is_mute: &AtomicBool) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut bytes) {
        if len > SMALL && state.passes_small_only.load(Ordering::SeqCst) {
            is_mute.store(true, Ordering::SeqCst);
        }
        // A lost packet is never acknowledged, and no later byte of the stream arrives.
        if !is_mute.load(Ordering::SeqCst) && to.write_all(&bytes[..len]).is_err() {
            break;
        }
    }
    if !is_mute.load(Ordering::SeqCst) {
        let _ = to.shutdown(Shutdown::Both);
    }
}
