//! [`Site`]: the device, its address, and the effort of the check.

use std::net::{IpAddr, ToSocketAddrs, UdpSocket};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use rblk_fabric::{Address, Device, Route, Scheme};

use super::args::{HwCheckArgs, Part};
use super::control::Control;
use crate::sysfs::{self, Gid};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effort {
    Quick,
    Usual,
    Long,
}

#[derive(Debug)]
pub(super) struct Site {
    pub(super) address: Address,
    /// Whether the address is one of this host, so that both ends can be here.
    pub(super) is_here: bool,
    pub(super) device: Device,
    pub(super) gid: Option<Gid>,
    pub(super) effort: Effort,
    pub(super) target: Option<String>,
    pub(super) programs: Option<PathBuf>,
    // After all fields with tasks on it.
    pub(super) control: Control,
}

impl Site {
    pub(super) fn find(args: &HwCheckArgs) -> Result<Self> {
        let address: Address = args.address.parse()?;
        let control = Control::start()?;
        let ip = ip_of(&address)?;
        let route = control.wait(Route::resolve(&address, &Control::options()))?;
        let device = route.device();
        drop(route);
        let gids = sysfs::gids();
        let of_device: Vec<Gid> =
            gids.into_iter().filter(|gid| gid.device == device.caps().name).collect();
        let effort = match (args.quick, args.long) {
            (true, _) => Effort::Quick,
            (_, true) => Effort::Long,
            _ => Effort::Usual,
        };
        Ok(Self {
            is_here: UdpSocket::bind((ip, 0)).is_ok(),
            gid: sysfs::gid_of(ip, &of_device).cloned(),
            address,
            device,
            effort,
            target: args.target.clone(),
            programs: args.programs.clone(),
            control,
        })
    }

    pub(super) fn is_rdma(&self) -> bool {
        self.address.scheme == Scheme::Rdma
    }

    pub(super) fn port(&self) -> u8 {
        let port = self.gid.as_ref().map_or(1, |gid| gid.port);
        u8::try_from(port).unwrap_or(1)
    }

    pub(super) fn by_effort<T>(&self, quick: T, usual: T, long: T) -> T {
        match self.effort {
            Effort::Quick => quick,
            Effort::Usual => usual,
            Effort::Long => long,
        }
    }

    /// Deadline of a part, far above its usual time: for calls that hang.
    pub(super) fn limit(&self, part: Part) -> Duration {
        let (quick, usual, long) = match part {
            Part::Device | Part::Hands => (60, 60, 60),
            Part::Queues | Part::Verbs => (120, 300, 300),
            Part::Registration => (120, 1800, 1800),
            Part::Connects => (180, 1200, 1200),
            Part::Drain => (120, 300, 1200),
            Part::Wakes => (120, 1200, 14_400),
            Part::Streams => (180, 600, 3600),
            Part::Random => (120, 900, 1800),
        };
        Duration::from_secs(self.by_effort(quick, usual, long))
    }

    pub(super) fn programs(&self) -> Result<PathBuf> {
        if let Some(dir) = &self.programs {
            return Ok(dir.clone());
        }
        let own = std::env::current_exe().context("where this program is")?;
        own.parent().map(PathBuf::from).context("this program is in no directory")
    }
}

fn ip_of(address: &Address) -> Result<IpAddr> {
    let all = (address.host.as_str(), address.port).to_socket_addrs();
    let first = all.with_context(|| format!("cannot resolve {}", address.host))?.next();
    Ok(first.with_context(|| format!("{} has no address", address.host))?.ip())
}
