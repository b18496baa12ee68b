//! [`accept`]: takes connect requests from every listener, and makes a listener anew that broke: by
//! the removal of its device, or of its address.

use std::time::Duration;

use rblk_fabric::{Address, Incoming, Listener};
use tokio::sync::mpsc;
use tokio::time::sleep;

/// Pause between two tries to make a listener anew.
const PAUSE: Duration = Duration::from_secs(1);
/// Requests that wait for control, at most.
const WAITING_MAX: usize = 64;

/// Takes connect requests from every listener, each in a task of its own.
pub(crate) fn accept(listeners: Vec<Listener>) -> mpsc::Receiver<Incoming> {
    let (sender, incoming) = mpsc::channel(WAITING_MAX);
    for listener in listeners {
        tokio::spawn(accept_by(listener, sender.clone()));
    }
    incoming
}

async fn accept_by(mut listener: Listener, sender: mpsc::Sender<Incoming>) {
    loop {
        match listener.accept().await {
            Ok(connection) => {
                if sender.send(connection).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                let address = listener.address().clone();
                tracing::error!(%address, %error, "the listener broke; making it anew");
                // It holds the address.
                drop(listener);
                tokio::select! {
                    new = anew(&address) => listener = new,
                    () = sender.closed() => return,
                }
            }
        }
    }
}

async fn anew(address: &Address) -> Listener {
    let mut last = String::new();
    loop {
        sleep(PAUSE).await;
        match Listener::bind(address).await {
            Ok(listener) => {
                tracing::info!(%address, "listening again");
                return listener;
            }
            Err(error) => {
                // Each reason once: a device may be away for long.
                let text = error.to_string();
                if text != last {
                    tracing::warn!(%address, error = text, "cannot listen again yet");
                }
                last = text;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;
    use std::os::fd::RawFd;

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
            let port = listener.address().port;
            let incoming = accept(vec![listener]);
            tokio::task::yield_now().await;
            // From now on the kernel refuses to accept by it.
            shutdown(descriptor(port), Shutdown::Both).unwrap();
            let connect = || TcpStream::connect(("127.0.0.1", port)).is_ok();
            let again = async {
                while !connect() {
                    sleep(Duration::from_millis(20)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(20), again).await.expect("it listens again");
            drop(incoming);
        });
    }
}
