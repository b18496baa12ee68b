//! [`accept`]: takes connect requests from every listener, and makes a broken listener anew: it
//! breaks by the removal of its device, or of its address.
//!
//! The tasks end when control takes no more requests. The TCP sockets are left then
//! ([`Accepting::sockets`]): peers that come later wait in them for the next program.

use std::os::fd::OwnedFd;

use rblk_fabric::{Address, FabricError, Incoming, ListenOptions, Listener};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::control::observe::outages::{Outages, pause};

/// Requests that wait for control, at most.
const WAITING_MAX: usize = 64;

/// The tasks that accept.
#[derive(Debug, Default)]
pub(crate) struct Accepting(JoinSet<Option<(String, OwnedFd)>>);

impl Accepting {
    /// The sockets that are left, by address, when the receiver of the requests is closed.
    pub(crate) async fn sockets(mut self) -> Vec<(String, OwnedFd)> {
        let mut sockets = Vec::new();
        while let Some(ended) = self.0.join_next().await {
            sockets.extend(ended.ok().flatten());
        }
        sockets
    }
}

/// An address, and why it has no listener yet.
pub(crate) type Missing = (Address, FabricError);

/// Takes connect requests from every listener, each in a task of its own, and makes the missing
/// ones. Notes the missing ones in `outages`.
pub(crate) fn accept(
    listeners: Vec<Listener>,
    missing: Vec<Missing>,
    options: &ListenOptions,
    outages: &Outages,
) -> (mpsc::Receiver<Incoming>, Accepting) {
    let (sender, incoming) = mpsc::channel(WAITING_MAX);
    let mut accepting = Accepting::default();
    for listener in listeners {
        accepting.0.spawn(accept_by(listener, sender.clone(), options.clone(), outages.clone()));
    }
    for (address, error) in missing {
        let (sender, options, outages) = (sender.clone(), options.clone(), outages.clone());
        accepting.0.spawn(async move {
            let listener = tokio::select! {
                new = anew(&address, &error, &options, &outages) => new,
                () = sender.closed() => return None,
            };
            accept_by(listener, sender, options, outages).await
        });
    }
    (incoming, accepting)
}

/// Returns the socket of the listener, if it has one, when control takes no more requests.
async fn accept_by(
    mut listener: Listener,
    sender: mpsc::Sender<Incoming>,
    options: ListenOptions,
    outages: Outages,
) -> Option<(String, OwnedFd)> {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = sender.closed() => return left_of(listener),
        };
        match accepted {
            Ok(connection) => {
                if sender.send(connection).await.is_err() {
                    return left_of(listener);
                }
            }
            Err(error) => {
                let address = listener.address().clone();
                tracing::error!(%address, %error, "the listener broke; making it anew");
                // The old listener holds the address.
                drop(listener);
                tokio::select! {
                    new = anew(&address, &error, &options, &outages) => listener = new,
                    () = sender.closed() => return None,
                }
            }
        }
    }
}

fn left_of(listener: Listener) -> Option<(String, OwnedFd)> {
    let address = listener.address().to_string();
    Some((address, listener.into_socket()?.into()))
}

async fn anew(
    address: &Address,
    broke: &FabricError,
    options: &ListenOptions,
    outages: &Outages,
) -> Listener {
    let name = address.to_string();
    outages.begin(&name, broke.to_string());
    let mut tries = 0;
    loop {
        sleep(pause(tries)).await;
        match Listener::bind_with(address, options).await {
            Ok(listener) => {
                tracing::info!(%address, "listening again");
                outages.end(&name);
                return listener;
            }
            Err(error) => {
                // Each reason once: a device may be away for long.
                let error = error.to_string();
                if outages.failed(&name, error.clone()) {
                    tracing::warn!(%address, error, "cannot listen again yet");
                }
                tries = tries.saturating_add(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::RawFd;
    use std::time::Duration;

    use nix::sys::socket::{Shutdown, SockaddrIn, getsockname, shutdown};

    use super::*;

    /// The descriptor of this process that listens on a port of the loopback.
    fn descriptor(port: u16) -> RawFd {
        let is_it = |fd: &RawFd| getsockname::<SockaddrIn>(*fd).is_ok_and(|at| at.port() == port);
        (3..1024).find(is_it).expect("a listening socket")
    }

    #[test]
    fn a_listener_that_broke_is_made_anew() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = Listener::bind(
                &"tcp://127.0.0.1:1"
                    .parse::<Address>()
                    .map(|address| Address { port: 0, ..address })
                    .unwrap(),
            )
            .await
            .unwrap();
            let (port, name) = (listener.address().port, listener.address().to_string());
            let outages = Outages::default();
            let (incoming, _accepting) =
                accept(vec![listener], Vec::new(), &ListenOptions::default(), &outages);
            tokio::task::yield_now().await;
            assert_eq!(outages.of(&name), None);
            // The kernel refuses to accept by it now, and another program takes the port.
            shutdown(descriptor(port), Shutdown::Both).unwrap();
            let until = async |what: &str, is_so: &dyn Fn() -> bool| {
                let wait = async {
                    while !is_so() {
                        sleep(Duration::from_millis(5)).await;
                    }
                };
                tokio::time::timeout(Duration::from_secs(20), wait).await.expect(what);
            };
            let broken = || outages.of(&name).is_some();
            until("the outage to be told", &broken).await;
            let thief = TcpListener::bind(("127.0.0.1", port)).unwrap();
            let tried =
                || outages.of(&name).is_some_and(|o| o.tries > 0 && o.why.contains("in use"));
            until("why it stays away to be told", &tried).await;
            drop(thief);
            until("it to listen again", &|| outages.of(&name).is_none()).await;
            assert!(TcpStream::connect(("127.0.0.1", port)).is_ok());
            drop(incoming);
        });
    }

    #[test]
    fn an_address_that_is_missing_at_the_start_is_listened_on_later() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let thief = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = thief.local_addr().unwrap().port();
            let address: Address = format!("tcp://127.0.0.1:{port}").parse().unwrap();
            let error = Listener::bind(&address).await.unwrap_err();
            let (outages, missing) = (Outages::default(), vec![(address.clone(), error)]);
            let (incoming, accepting) =
                accept(Vec::new(), missing, &ListenOptions::default(), &outages);
            let name = address.to_string();
            let until = async |what: &str, is_so: &dyn Fn() -> bool| {
                let wait = async {
                    while !is_so() {
                        sleep(Duration::from_millis(5)).await;
                    }
                };
                tokio::time::timeout(Duration::from_secs(20), wait).await.expect(what);
            };
            until("the outage to be told", &|| outages.of(&name).is_some()).await;
            drop(thief);
            until("it to listen", &|| outages.of(&name).is_none()).await;
            assert!(TcpStream::connect(("127.0.0.1", port)).is_ok());
            drop(incoming);
            assert_eq!(accepting.sockets().await.len(), 1, "it is handed over as the others");
        });
    }

    #[test]
    fn a_peer_that_comes_between_two_programs_waits() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let address: Address = "tcp://127.0.0.1:1".parse().unwrap();
            let listener = Listener::bind(&Address { port: 0, ..address }).await.unwrap();
            let address = listener.address().clone();
            let (incoming, accepting) =
                accept(vec![listener], Vec::new(), &ListenOptions::default(), &Outages::default());
            tokio::task::yield_now().await;
            drop(incoming);
            let mut sockets = accepting.sockets().await;
            let (left, socket) = sockets.pop().expect("a socket");
            assert_eq!((left, sockets.len()), (address.to_string(), 0));
            let peer = TcpStream::connect(("127.0.0.1", address.port)).expect("it is let wait");
            let listener =
                Listener::go_on(socket.into(), &address, &ListenOptions::default()).unwrap();
            let (_incoming, accepting) =
                accept(vec![listener], Vec::new(), &ListenOptions::default(), &Outages::default());
            tokio::task::yield_now().await;
            // Accepted: the bytes are read, and the listener drops a peer that sends garbage.
            std::io::Write::write_all(&mut &peer, &[0xff; 64]).unwrap();
            peer.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            let said =
                tokio::task::spawn_blocking(move || std::io::Read::read(&mut &peer, &mut [0; 1]));
            let said = said.await.unwrap();
            assert!(
                !matches!(&said, Err(e) if e.kind() == std::io::ErrorKind::WouldBlock),
                "{said:?}"
            );
            drop(accepting);
        });
    }
}
