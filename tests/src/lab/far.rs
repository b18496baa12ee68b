//! [`FarHost`]: a second host of sorts, joined to this one by cables that can be cut.
//!
//! The far host is a network namespace with a Soft-RoCE device on a virtual interface for each
//! [`Cable`]. A target runs there.

use std::time::SystemTime;

use super::Lab;
use super::cable::{Cable, ip, make_host};
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

/// How a cable fails.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CableFault {
    /// Nothing comes through.
    Cut,
    /// The far host hears, and is not heard.
    Silent,
    /// Everything comes through seconds late, and some of it after the cable is mended.
    Stalled,
    /// The far host has lost the address. Not for RDMA: see [`FarHost`].
    NoAddress,
}

/// How late packets are on a cable that is [stalled](CableFault::Stalled).
const LATE: &str = "delay 3s";
/// How they are on a cable that was. Those under way stay late.
const IN_TIME: &str = "delay 0ms";

/// A cable that fails. Drop mends it.
#[derive(Debug)]
pub struct Cut<'f> {
    far: &'f FarHost,
    cable: usize,
    how: CableFault,
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
        // May be built in.
        let _ = start(&["modprobe", "-q", "sch_netem"]).finish(DEADLINE);
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

    /// The RDMA device of this host on a cable.
    #[must_use]
    pub fn near_device(cable: usize) -> String {
        let [near, _] = Cable::of(cable, SPACE).devices;
        near
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
        self.break_cable(cable, CableFault::Cut)
    }

    /// Has one cable fail.
    ///
    /// # Panics
    /// A command fails.
    #[must_use]
    pub fn break_cable(&self, cable: usize, how: CableFault) -> Cut<'_> {
        let at = SystemTime::now();
        let names = Cable::of(cable, SPACE);
        let [near, far] = &names.ports;
        match how {
            CableFault::Cut => ip(&format!("ip link set {far} nomaster")),
            // What a port of the bridge sends goes to the end on its side.
            CableFault::Silent => ip(&queue(near, "loss 100%")),
            CableFault::Stalled => [near, far].into_iter().for_each(|port| ip(&queue(port, LATE))),
            CableFault::NoAddress => ip(&names.far_address("del")),
        }
        Cut { far: self, cable, how, at }
    }
}

/// The command that has the packets of a port wait or vanish.
fn queue(port: &str, how: &str) -> String {
    format!("tc qdisc replace dev {port} root netem {how} limit 100000")
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        let names = Cable::of(self.cable, SPACE);
        let [near, far] = &names.ports;
        let commands = match self.how {
            CableFault::Cut => vec![format!("ip link set {far} master {}", names.bridge)],
            CableFault::Silent => vec![queue(near, IN_TIME)],
            CableFault::Stalled => [near, far].map(|port| queue(port, IN_TIME)).to_vec(),
            CableFault::NoAddress => vec![names.far_address("add"), names.far_neighbour()],
        };
        for command in commands {
            let ended = start(&command.split(' ').collect::<Vec<_>>()).finish(DEADLINE);
            if ended.code() != 0 {
                println!("the cable to {} stays cut: {ended}", self.far.hosts[self.cable]);
            }
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
