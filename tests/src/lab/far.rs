//! [`FarHost`]: a second host of sorts, joined to this one by cables that can be cut.
//!
//! The far host is a network namespace with a Soft-RoCE device on a virtual interface for each
//! [`Cable`]. A target runs there.

use std::time::SystemTime;

use super::Lab;
use super::cable::{Cable, make_host};
use super::process::start;
use super::wait::DEADLINE;

const SPACE: &str = "rblkfar";
/// Most cables.
const CABLES: usize = 2;

/// The host behind the cables. Drop removes it.
#[derive(Debug)]
pub struct FarHost {
    hosts: Vec<String>,
}

/// A cut cable. Drop mends it.
#[derive(Debug)]
pub struct Cut<'f> {
    far: &'f FarHost,
    cable: usize,
    /// A moment just before the cut.
    pub at: SystemTime,
}

impl FarHost {
    /// A far host with one cable and devices of the lab's kind: Soft-RoCE, or Soft-iWARP (siw).
    ///
    /// # Panics
    /// The kernel has no network namespaces for Soft-RoCE (before 7.1), or other things are
    /// missing.
    #[must_use]
    pub fn new(lab: &Lab) -> Self {
        Self::with_cables(lab, 1)
    }

    /// A far host with one or two cables. Each cable has its own addresses and devices.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    #[must_use]
    pub fn with_cables(lab: &Lab, cables: usize) -> Self {
        assert!((1..=CABLES).contains(&cables), "{cables} cables");
        make_host(SPACE);
        let mut host = Self { hosts: Vec::new() };
        for cable in 0..cables {
            let cable = Cable::of(cable, SPACE);
            cable.plug(if lab.is_iwarp() { "siw" } else { "rxe" });
            host.hosts.push(cable.host().to_owned());
        }
        host
    }

    /// Its name as a network namespace.
    #[must_use]
    pub fn space(&self) -> &'static str {
        SPACE
    }

    /// Its address on the first cable.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.hosts[0]
    }

    /// Its addresses, by cable.
    #[must_use]
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Cuts the first cable: both hosts still send, and neither hears anything.
    ///
    /// # Panics
    /// The bridge keeps its port.
    #[must_use]
    pub fn cut(&self) -> Cut<'_> {
        self.cut_cable(0)
    }

    /// Cuts one cable.
    ///
    /// # Panics
    /// The bridge keeps its port.
    #[must_use]
    pub fn cut_cable(&self, cable: usize) -> Cut<'_> {
        let at = SystemTime::now();
        Cable::of(cable, SPACE).cut();
        Cut { far: self, cable, at }
    }
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        let ended = Cable::of(self.cable, SPACE).mend();
        if ended.code() != 0 {
            println!("the cable to {} stays cut: {ended}", self.far.hosts[self.cable]);
        }
    }
}

impl Drop for FarHost {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("--- the cables, and what is connected through them");
            for words in ["rdma link show", "rdma resource show qp", "bridge link show", "ip neigh"]
            {
                let words: Vec<&str> = words.split(' ').collect();
                println!("{}", start(&words).finish(DEADLINE));
            }
        }
        take_down();
    }
}

/// Removes every part of the far host that exists.
pub(super) fn take_down() {
    for cable in 0..CABLES {
        Cable::of(cable, SPACE).take_down();
    }
    let _ = start(&["ip", "netns", "del", SPACE]).finish(DEADLINE);
}
