//! A TCP proxy between two ends: it keeps what they say, and changes it.
#![allow(unreachable_pub, reason = "a module of a test file")]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};

use rblk_fabric::{Address, Scheme};

/// Who sends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sender {
    /// The end that connected.
    Connector,
    /// The end that listens.
    Listener,
}

/// What is done to a stream. `at` counts all bytes of the sender, from 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Flips a bit of this byte.
    Flip { at: usize },
    /// Forwards twice what is read together with this byte.
    Twice { at: usize },
    /// Forwards nothing of what is read together with this byte.
    Omit { at: usize },
    /// Forwards a few bytes a time.
    Crumbs,
}

impl Fault {
    /// The same, so many bytes later.
    pub fn behind(self, bytes: usize) -> Self {
        match self {
            Self::Flip { at } => Self::Flip { at: at + bytes },
            Self::Twice { at } => Self::Twice { at: at + bytes },
            Self::Omit { at } => Self::Omit { at: at + bytes },
            Self::Crumbs => Self::Crumbs,
        }
    }
}

#[derive(Debug, Default)]
struct Stream {
    // All that the sender sent.
    sent: Vec<u8>,
    fault: Option<Fault>,
}

type Shared = Arc<Mutex<Stream>>;

fn lock(shared: &Shared) -> MutexGuard<'_, Stream> {
    shared.lock().unwrap()
}

/// The proxy of one connection.
#[derive(Debug)]
pub struct Proxy {
    address: Address,
    streams: [Shared; 2],
}

impl Proxy {
    /// A proxy in front of `to`.
    pub fn new(to: &Address) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let address = Address { scheme: Scheme::Tcp, host: "127.0.0.1".to_owned(), port };
        let streams: [Shared; 2] = Default::default();
        let (to, shared) = (to.clone(), streams.clone());
        std::thread::spawn(move || {
            let (near, _) = listener.accept().unwrap();
            let far = TcpStream::connect((to.host.as_str(), to.port)).unwrap();
            for stream in [&near, &far] {
                stream.set_nodelay(true).unwrap();
            }
            let [from_connector, from_listener] = shared;
            let (near2, far2) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            std::thread::spawn(move || forward(near, far, &from_connector));
            std::thread::spawn(move || forward(far2, near2, &from_listener));
        });
        Self { address, streams }
    }

    /// Where to connect to.
    pub fn address(&self) -> Address {
        self.address.clone()
    }

    fn of(&self, from: Sender) -> &Shared {
        match from {
            Sender::Connector => &self.streams[0],
            Sender::Listener => &self.streams[1],
        }
    }

    /// Bytes that the sender has sent.
    pub fn sent(&self, from: Sender) -> usize {
        lock(self.of(from)).sent.len()
    }

    /// What the sender has sent.
    pub fn stream(&self, from: Sender) -> Vec<u8> {
        lock(self.of(from)).sent.clone()
    }

    /// What is done to the stream of the sender from now on.
    pub fn set(&self, from: Sender, fault: Fault) {
        lock(self.of(from)).fault = Some(fault);
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, shared: &Shared) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let count = from.read(&mut buffer).unwrap_or(0);
        if count == 0 {
            break;
        }
        let bytes = &mut buffer[..count];
        let (range, fault) = {
            let mut stream = lock(shared);
            let begin = stream.sent.len();
            stream.sent.extend(&*bytes);
            (begin..begin + count, stream.fault)
        };
        let written = match fault {
            Some(Fault::Flip { at }) if range.contains(&at) => {
                bytes[at - range.start] ^= 1;
                to.write_all(bytes)
            }
            Some(Fault::Twice { at }) if range.contains(&at) => {
                to.write_all(bytes).and_then(|()| to.write_all(bytes))
            }
            Some(Fault::Omit { at }) if range.contains(&at) => Ok(()),
            Some(Fault::Crumbs) => bytes.chunks(977).try_for_each(|crumb| to.write_all(crumb)),
            _ => to.write_all(bytes),
        };
        if written.is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
