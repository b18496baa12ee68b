//! [`Watchdog`]: the signs of life of a daemon for the service manager, which ends a service that
//! gives none for `WatchdogSec=` and starts it again. Does nothing in a process without a service
//! manager, or for a unit without that setting.
//!
//! The thread whose hang matters owns it: the one that runs the sessions of the target, or the
//! mount. A sign is sent from the loop of that thread and from nowhere else, so a loop that stands
//! still gives none. Nothing in the loop waits for a store or for the other end, so a slow store
//! and an absent target do not keep a sign back. A step that does wait, such as the end of a disk,
//! is announced by [`Watchdog::allow`].

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use tokio::time::Instant;

/// Signs in the time after which the service manager ends the service.
const SIGNS: u32 = 3;

/// The signs of life of this process.
#[derive(Debug)]
pub struct Watchdog {
    service: Option<WatchedService>,
}

#[derive(Debug)]
struct WatchedService {
    address: SocketAddr,
    limit: Duration,
    next: Instant,
}

impl Watchdog {
    /// The watchdog of this process, by the variables that the service manager sets. It gives the
    /// first sign, which also ends what an [`allow`](Self::allow) of the program before this one
    /// allowed: an exec keeps variables and process.
    #[must_use]
    pub fn of_service() -> Self {
        let variable = |name: &str| std::env::var(name).ok();
        Self::of(variable, std::process::id())
    }

    fn of(variable: impl Fn(&str) -> Option<String>, pid: u32) -> Self {
        let service = || {
            let limit: u64 = variable("WATCHDOG_USEC")?.parse().ok().filter(|limit| *limit > 0)?;
            // The variables of a parent that did not remove them.
            let of = variable("WATCHDOG_PID").and_then(|of| of.parse::<u32>().ok());
            let is_ours = of.is_none_or(|of| of == pid);
            let socket = variable("NOTIFY_SOCKET").filter(|_| is_ours)?;
            let address = match socket.strip_prefix('@') {
                Some(name) => SocketAddr::from_abstract_name(name),
                None => SocketAddr::from_pathname(socket),
            };
            let (address, next) = (address.ok()?, Instant::now());
            Some(WatchedService { address, limit: Duration::from_micros(limit), next })
        };
        let mut watchdog = Self { service: service() };
        watchdog.allow_again();
        watchdog
    }

    /// Ends when the next sign is due; never without a watchdog. Cancel safe.
    pub async fn due(&self) {
        match &self.service {
            Some(service) => tokio::time::sleep_until(service.next).await,
            None => std::future::pending().await,
        }
    }

    /// Gives a sign.
    pub fn sign(&mut self) {
        self.tell(|_| "WATCHDOG=1".to_owned());
    }

    /// Announces a step in which this thread may wait, for `longest` at most: that is the time to
    /// the next sign.
    pub fn allow(&mut self, longest: Duration) {
        self.tell(|limit| format!("WATCHDOG_USEC={}", longest.max(limit).as_micros()));
    }

    /// Ends such a step.
    fn allow_again(&mut self) {
        self.tell(|limit| format!("WATCHDOG_USEC={}\nWATCHDOG=1", limit.as_micros()));
    }

    fn tell(&mut self, message: impl FnOnce(Duration) -> String) {
        let Some(service) = &mut self.service else { return };
        // A sign that the service manager does not take is given again soon.
        let _ = send(&service.address, &message(service.limit));
        service.next = Instant::now() + service.limit / SIGNS;
    }
}

/// Does not wait: the service manager itself may wait for a disk that this process serves.
fn send(address: &SocketAddr, message: &str) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.connect_addr(address)?;
    socket.send(message.as_bytes()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The socket of a service manager, and the messages in it.
    struct Manager {
        socket: UnixDatagram,
        name: String,
        _dir: tempfile::TempDir,
    }

    impl Manager {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("notify");
            let socket = UnixDatagram::bind(&path).unwrap();
            socket.set_nonblocking(true).unwrap();
            Self { socket, name: path.to_str().unwrap().to_owned(), _dir: dir }
        }

        fn watchdog(&self, usec: &str, of: &str) -> Watchdog {
            let variable = |name: &str| match name {
                "NOTIFY_SOCKET" => Some(self.name.clone()),
                "WATCHDOG_USEC" => Some(usec.to_owned()),
                "WATCHDOG_PID" => Some(of.to_owned()),
                _ => None,
            };
            Watchdog::of(variable, 7)
        }

        fn heard(&self) -> Vec<String> {
            let mut bytes = [0; 200];
            let mut one = || self.socket.recv(&mut bytes).ok().map(|n| bytes[..n].to_vec());
            let mut heard = Vec::new();
            while let Some(message) = one() {
                heard.push(String::from_utf8(message).unwrap());
            }
            heard
        }
    }

    #[tokio::test]
    async fn signs_come_three_times_in_the_limit() {
        let manager = Manager::new();
        let mut watchdog = manager.watchdog("300000", "7");
        assert_eq!(manager.heard(), ["WATCHDOG_USEC=300000\nWATCHDOG=1"]);
        let begun = Instant::now();
        for _ in 0..3 {
            watchdog.due().await;
            watchdog.sign();
        }
        assert!(begun.elapsed() >= Duration::from_millis(300), "{:?}", begun.elapsed());
        assert_eq!(manager.heard(), ["WATCHDOG=1"; 3]);
        watchdog.allow(Duration::from_secs(60));
        // Never less than the unit allows.
        watchdog.allow(Duration::from_millis(1));
        assert_eq!(manager.heard(), ["WATCHDOG_USEC=60000000", "WATCHDOG_USEC=300000"]);
    }

    #[tokio::test]
    async fn a_process_that_is_not_watched_gives_no_signs() {
        let manager = Manager::new();
        for (usec, of) in [("3000000", "8"), ("0", "7"), ("", "7"), ("x", "7")] {
            let mut watchdog = manager.watchdog(usec, of);
            watchdog.sign();
            assert!(watchdog.service.is_none(), "{usec:?} {of}");
            let due = tokio::time::timeout(Duration::from_millis(10), watchdog.due());
            assert!(due.await.is_err(), "{usec:?} {of}");
        }
        Watchdog::of(|_| None, 7).sign();
        assert_eq!(manager.heard(), [""; 0]);
    }

    #[tokio::test]
    async fn a_service_manager_that_stands_still_holds_nobody_up() {
        let manager = Manager::new();
        let mut watchdog = manager.watchdog("3000000", "7");
        (0..10_000).for_each(|_| watchdog.sign());
        drop(manager);
        watchdog.sign();
    }
}
