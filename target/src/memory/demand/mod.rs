//! The memory of the arena: the demand of a configuration, whether the host can meet it, and the
//! kind of pages.
//!
//! Contract: a configuration that cannot work is refused with numbers and a fix before any memory
//! is allocated. The kernel's own answer comes late and kills the process: pages are pinned while
//! devices and rings register them. The host's values are read into [`HostMemory`]; the decision
//! is pure. A value that cannot be read causes no refusal.
//!
//! The arena is always pinned: by the RDMA device, or else by the rings of the poll groups. Only an
//! RDMA device pins volumes in memory; over TCP their pages count once they were written.

mod host_memory;
mod successor;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rblk_config::{BackingConfig, ByteSize, HugePages, TargetConfig};
use rblk_fabric::{Address, DeviceCaps, PageKind, Region, RegionError, Scheme};
use rblk_protocol::limits;
use rblk_protocol::width::{wide, wide64};
use serde::{Deserialize, Serialize};

use crate::memory::arena::MIN_EXTENT_BYTES;

pub use host_memory::{HostMemory, HugePool};
pub(crate) use successor::GivenBack;

/// Bytes of a reserved huge page.
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Each poll group has at least this many largest extents.
const SHARE_EXTENTS_MIN: u64 = 4;

/// The reason why the memory of a configuration cannot be allocated.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotEnoughMemory {
    /// This process may not lock that much memory.
    #[error(
        "the memlock limit of {limit} bytes is below the {needed} bytes that this configuration registers with the RDMA device: \
         raise it with `ulimit -l unlimited` or LimitMEMLOCK=infinity in the unit, lower `arena`, or serve tcp:// only"
    )]
    Memlock {
        /// RLIMIT_MEMLOCK.
        limit: u64,
        /// Arena and volumes.
        needed: u64,
    },
    /// The host, or the cgroup, does not have that much memory.
    #[error("cannot allocate {what} of {}: {room}; {fix}", Human(*needed))]
    Room {
        /// The purpose of the memory.
        what: &'static str,
        /// Bytes needed.
        needed: u64,
        /// The limit.
        room: MemoryBound,
        /// The proposed change.
        fix: String,
    },
    /// `hugepages = "required"`, and too few are free.
    #[error(
        "hugepages = \"required\", and the arena of {} needs {needed} huge pages of 2 MiB: {free} are free, {} are missing; \
         reserve them with `sysctl vm.nr_hugepages={}`, lower `arena`, or write hugepages = \"auto\"",
        Human(needed * HUGE_PAGE_BYTES), needed - free, total + (needed - free)
    )]
    HugePages {
        /// Pages of the arena.
        needed: u64,
        /// Pages that are neither used nor reserved.
        free: u64,
        /// Pages of the pool.
        total: u64,
    },
    /// `hugepages = "required"`, and the kernel has no huge pages of 2 MiB.
    #[error(
        "hugepages = \"required\", but this kernel has no huge pages of 2 MiB; write hugepages = \"auto\""
    )]
    NoHugePages,
    /// A device cannot register the memory.
    #[error(
        "{device} registers at most {} at once, and {what} has {}: lower it to \"{}\" or serve by another device",
        Human(*limit), Human(*needed), ByteSize(limit / (1 << 20) * (1 << 20))
    )]
    Device {
        /// The device.
        device: String,
        /// `arena`, or the volume.
        what: String,
        /// Its largest MR in bytes.
        limit: u64,
        /// Bytes to register.
        needed: u64,
    },
    /// The system refused the allocation.
    #[error("the arena: {0}")]
    Region(#[from] RegionError),
}

/// A bound of this process's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum MemoryBound {
    /// The memory of the host that is free or can be made free, in bytes.
    Available(u64),
    /// The limit of a cgroup, and the file with this limit.
    Cgroup(u64, PathBuf),
}

impl MemoryBound {
    fn bytes(&self) -> u64 {
        match self {
            Self::Available(bytes) | Self::Cgroup(bytes, _) => *bytes,
        }
    }
}

impl fmt::Display for MemoryBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Available(bytes) => {
                write!(f, "{} of this host's memory are available", Human(*bytes))
            }
            Self::Cgroup(bytes, file) => {
                write!(f, "{} limits this process to {}", file.display(), Human(*bytes))
            }
        }
    }
}

/// Bytes in human form: `4GiB`. Rounded, so never for a configured value.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Human(pub u64);

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shift, unit) = match self.0 {
            0..1024 => return write!(f, "{} bytes", self.0),
            1024..0x10_0000 => (10, "KiB"),
            0x10_0000..0x4000_0000 => (20, "MiB"),
            0x4000_0000..0x100_0000_0000 => (30, "GiB"),
            _ => (40, "TiB"),
        };
        // Whole tenths, rounded down: a size reported as fitting really fits.
        let tenths = (u128::from(self.0) * 10) >> shift;
        match tenths % 10 {
            0 => write!(f, "{}{unit}", tenths / 10),
            rest => write!(f, "{}.{rest}{unit}", tenths / 10),
        }
    }
}

/// The memory demand of a configuration.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Demand {
    /// Arena bytes of each poll group.
    share: u64,
    /// The minimum of `share`, whatever `arena` is.
    share_min: u64,
    groups: u64,
    /// Names and bytes of the volumes in memory.
    volumes: Vec<(String, u64)>,
    /// Whether an RDMA device registers the memory.
    rdma: bool,
    hugepages: HugePages,
}

impl Demand {
    /// The demand of a configuration with this many poll groups, at least one.
    #[must_use]
    pub(crate) fn of(config: &TargetConfig, groups: usize) -> Self {
        let groups = wide64(groups.max(1));
        let extent = config.max_io.0.max(MIN_EXTENT_BYTES.into());
        // Whole largest extents for each poll group.
        let share = (config.arena.0 / groups / extent).max(SHARE_EXTENTS_MIN) * extent;
        let volumes = config.volumes.iter().filter_map(|volume| match volume.backing() {
            Ok(BackingConfig::Memory { size }) => Some((volume.name.clone(), size.0)),
            _ => None,
        });
        let is_rdma = |a: &String| a.parse::<Address>().is_ok_and(|a| a.scheme == Scheme::Rdma);
        Self {
            share,
            share_min: SHARE_EXTENTS_MIN * extent,
            groups,
            volumes: volumes.collect(),
            rdma: config.listen.iter().any(is_rdma),
            hugepages: config.hugepages,
        }
    }

    /// Arena bytes of each poll group: whole largest extents.
    #[must_use]
    pub(crate) fn share(&self) -> u64 {
        self.share
    }

    /// Bytes of the arena, all poll groups together.
    #[must_use]
    pub(crate) fn arena_bytes(&self) -> u64 {
        self.share.saturating_mul(self.groups)
    }

    /// Bytes registered with an RDMA device. 0 over TCP.
    #[must_use]
    pub(crate) fn registered_bytes(&self) -> u64 {
        let bytes = self.arena_bytes().saturating_add(self.volume_bytes());
        if self.rdma { bytes } else { 0 }
    }

    fn volume_bytes(&self) -> u64 {
        self.volumes.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    fn huge_pages(&self) -> u64 {
        self.arena_bytes().div_ceil(HUGE_PAGE_BYTES)
    }

    /// Whether a process with a limit of `limit` bytes of locked memory may register the memory.
    ///
    /// # Errors
    /// [`NotEnoughMemory::Memlock`].
    pub(crate) fn lockable(&self, limit: u64) -> Result<(), NotEnoughMemory> {
        let needed = self.arena_bytes().saturating_add(self.volume_bytes());
        if self.rdma && limit < needed {
            return Err(NotEnoughMemory::Memlock { limit, needed });
        }
        Ok(())
    }

    /// The kind of pages for the arena.
    ///
    /// # Errors
    /// Huge pages are required and too few are free.
    pub(crate) fn pages(&self, pool: Option<HugePool>) -> Result<PageKind, NotEnoughMemory> {
        let needed = self.huge_pages();
        match (self.hugepages, pool) {
            (HugePages::Never, _) | (HugePages::Auto, None) => Ok(PageKind::Normal),
            (_, Some(pool)) if pool.free >= needed => Ok(PageKind::Huge2MiB),
            (HugePages::Auto, Some(_)) => Ok(PageKind::Normal),
            (HugePages::Required, Some(HugePool { total, free })) => {
                Err(NotEnoughMemory::HugePages { needed, free, total })
            }
            (HugePages::Required, None) => Err(NotEnoughMemory::NoHugePages),
        }
    }

    /// Whether the pinned memory fits the host, with an arena of these pages.
    ///
    /// # Errors
    /// [`NotEnoughMemory::Room`].
    pub(crate) fn fits(&self, host: &HostMemory, pages: PageKind) -> Result<(), NotEnoughMemory> {
        // Reserved huge pages are not in MemAvailable, and no memory.max counts them.
        let arena = if pages == PageKind::Huge2MiB { 0 } else { self.arena_bytes() };
        let volumes = if self.rdma { self.volume_bytes() } else { 0 };
        let needed = arena.saturating_add(volumes);
        let Some(room) = host.room().filter(|room| room.bytes() < needed) else { return Ok(()) };
        let what = match (arena, volumes) {
            (_, 0) => "an arena",
            (0, _) => "volumes in memory",
            _ => "an arena and volumes in memory",
        };
        // An eighth stays for sessions, queues and other processes.
        let left = room.bytes().saturating_sub(room.bytes() / 8).saturating_sub(volumes);
        let arena_max = ByteSize(left / (1 << 20) * (1 << 20));
        let advice = if arena > 0 && arena_max.0 >= self.share_min * self.groups {
            format!("lower `arena` to \"{arena_max}\"")
        } else if volumes > 0 {
            "lower the sizes of the volumes in memory".to_owned()
        } else {
            "lower `max_io` or `poll_groups`, whose product is the least of an arena".to_owned()
        };
        let other = match room {
            MemoryBound::Available(_) => "free some",
            MemoryBound::Cgroup(..) => "raise MemoryMax= in the unit",
        };
        Err(NotEnoughMemory::Room { what, needed, room, fix: format!("{advice}, or {other}") })
    }

    /// A risk for later, if there is one, where the current check passes.
    #[must_use]
    pub(crate) fn warning(&self, host: &HostMemory) -> Option<String> {
        let (arena, volumes) = (self.arena_bytes(), self.volume_bytes());
        let total = host.total_bytes.into_iter().chain(host.cgroup.as_ref().map(|c| c.0)).min()?;
        let overcommitted = volumes > 0 && arena.saturating_add(volumes) > total;
        (overcommitted && !self.rdma).then(|| {
            format!(
                "the volumes in memory may grow to {}, and the arena takes {} of {}: the system kills the target when it \
                 runs out; lower the sizes",
                Human(volumes),
                Human(arena),
                Human(total)
            )
        })
    }

    /// Whether a device can register the memory.
    ///
    /// # Errors
    /// [`NotEnoughMemory::Device`].
    pub(crate) fn registers_with(&self, caps: &DeviceCaps) -> Result<(), NotEnoughMemory> {
        let arena = ("`arena`".to_owned(), self.arena_bytes());
        let volumes = self.volumes.iter().map(|(name, bytes)| (format!("volume `{name}`"), *bytes));
        for (what, needed) in std::iter::once(arena).chain(volumes) {
            let limit = caps.max_region_bytes;
            if needed > limit {
                let device = caps.name.clone();
                return Err(NotEnoughMemory::Device { device, what, limit, needed });
            }
        }
        Ok(())
    }

    /// All checks that are possible before the start: limits of the process, pages and room.
    ///
    /// # Errors
    /// [`NotEnoughMemory`].
    pub(crate) fn check(&self, host: &HostMemory) -> Result<(), NotEnoughMemory> {
        // Root's CAP_IPC_LOCK lifts the limit.
        if !nix::unistd::geteuid().is_root()
            && let Ok((limit, _)) = getrlimit(Resource::RLIMIT_MEMLOCK)
        {
            self.lockable(limit)?;
        }
        self.fits(host, self.pages(host.huge)?)?;
        if let Some(warning) = self.warning(host) {
            tracing::warn!("{warning}");
        }
        Ok(())
    }

    /// Allocates the arena, of huge pages where they are wanted and available.
    ///
    /// # Errors
    /// [`NotEnoughMemory`].
    pub(crate) fn allocate(&self, host: &HostMemory) -> Result<Arc<Region>, NotEnoughMemory> {
        let bytes = wide(self.arena_bytes());
        let huge = self.pages(host.huge)? == PageKind::Huge2MiB;
        let refused = match huge.then(|| Region::allocate(bytes, PageKind::Huge2MiB)) {
            Some(Ok(region)) => return Ok(region),
            // Another process was faster, or a cgroup limits huge pages.
            Some(Err(error)) if self.hugepages == HugePages::Required => return Err(error.into()),
            Some(Err(error)) => Some(error),
            None => None,
        };
        if let (HugePages::Auto, Some(pool)) = (self.hugepages, host.huge)
            && pool.total > 0
        {
            tracing::info!(
                needed = self.huge_pages(),
                free = pool.free,
                error = refused.map(|e| e.to_string()),
                "too few huge pages of 2 MiB: the arena is of ordinary ones"
            );
        }
        self.fits(host, PageKind::Normal)?;
        Ok(Region::allocate(bytes, PageKind::Normal)?)
    }
}

/// Raises the soft limits of locked memory and of open files to the hard ones, as far as permitted.
pub(crate) fn raise_limits() {
    for resource in [Resource::RLIMIT_MEMLOCK, Resource::RLIMIT_NOFILE] {
        if let Ok((soft, hard)) = getrlimit(resource)
            && soft < hard
        {
            let _ = setrlimit(resource, hard, hard);
        }
    }
}

/// Files that a target has open in addition to its connections: stores, rings, listeners, devices.
pub(crate) const FILES_BESIDES: u64 = 512;

/// Connections that the limit on open files allows; `None` if connections need no files.
#[must_use]
pub(crate) fn files_for_connections(config: &TargetConfig, limit: u64) -> Option<u64> {
    is_by_tcp(config).then(|| limit.saturating_sub(FILES_BESIDES))
}

/// Over tcp:// each connection is a socket.
fn is_by_tcp(config: &TargetConfig) -> bool {
    let is_tcp = |a: &String| a.parse::<Address>().is_ok_and(|a| a.scheme == Scheme::Tcp);
    config.listen.iter().any(is_tcp)
}

/// The warning when the limit on open files is below the need of `sessions_max` sessions.
#[must_use]
pub(crate) fn too_few_files(config: &TargetConfig, limit: u64) -> Option<String> {
    let of_session = u64::from(limits::QUEUES_MAX) + 1;
    let needed = u64::from(config.sessions_max) * of_session + FILES_BESIDES;
    (is_by_tcp(config) && limit < needed).then(|| {
        let fits = limit.saturating_sub(FILES_BESIDES) / of_session;
        format!(
            "at most {limit} files may be open, and {} sessions (sessions_max) of up to {of_session} connections take \
             {needed} over tcp://: further connections would be refused; raise it with LimitNOFILE={} in the unit or \
             `ulimit -n`, or lower sessions_max to {}",
            config.sessions_max,
            needed.next_power_of_two(),
            fits.max(1)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rblk_config::VolumeConfig;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn config(listen: &str, arena: u64, volumes: &[u64]) -> TargetConfig {
        TargetConfig {
            listen: vec![listen.to_owned()],
            arena: ByteSize(arena),
            volumes: volumes
                .iter()
                .enumerate()
                .map(|(i, bytes)| VolumeConfig::memory(format!("m{i}"), ByteSize(*bytes)))
                .chain([VolumeConfig::null("n", ByteSize(GIB)), VolumeConfig::file("f", "/f")])
                .collect(),
            ..TargetConfig::default()
        }
    }

    fn demand(listen: &str, arena: u64, volumes: &[u64]) -> Demand {
        Demand::of(&config(listen, arena, volumes), 1)
    }

    fn available(bytes: u64) -> HostMemory {
        HostMemory {
            total_bytes: Some(16 * GIB),
            available_bytes: Some(bytes),
            ..HostMemory::default()
        }
    }

    fn refusal<T: fmt::Debug>(result: Result<T, NotEnoughMemory>) -> String {
        result.unwrap_err().to_string()
    }

    const RDMA: &str = "rdma://192.0.2.1";
    const TCP: &str = "tcp://192.0.2.1";

    #[test]
    fn each_poll_group_has_whole_largest_extents() {
        let config = config(RDMA, 10 * MIB + 4096, &[]);
        for (groups, share, arena) in [(0, 10, 10), (1, 10, 10), (2, 5, 10), (3, 4, 12), (8, 4, 32)]
        {
            let demand = Demand::of(&config, groups);
            assert_eq!(
                (demand.share(), demand.arena_bytes()),
                (share * MIB, arena * MIB),
                "{groups}"
            );
        }
    }

    #[test]
    fn memlock_binds_rdma_only() {
        let limit = 64 * MIB;
        assert!(demand(TCP, GIB, &[GIB]).lockable(limit).is_ok());
        assert!(demand(RDMA, 60 * MIB, &[4 * MIB]).lockable(limit).is_ok());
        assert_eq!(
            refusal(demand(RDMA, 60 * MIB, &[4 * MIB + 4096]).lockable(limit)),
            "the memlock limit of 67108864 bytes is below the 67112960 bytes that this configuration registers with the \
             RDMA device: raise it with `ulimit -l unlimited` or LimitMEMLOCK=infinity in the unit, lower `arena`, or \
             serve tcp:// only"
        );
    }

    #[test]
    fn pinned_memory_must_be_available() {
        let fits = |demand: Demand, host: &HostMemory| demand.fits(host, PageKind::Normal);
        assert!(fits(demand(RDMA, 3 * GIB, &[GIB]), &available(4 * GIB)).is_ok());
        assert!(
            fits(demand(RDMA, 1 << 40, &[]), &HostMemory::default()).is_ok(),
            "nothing is known"
        );
        assert_eq!(
            refusal(fits(demand(RDMA, 3 * GIB, &[GIB, MIB]), &available(4 * GIB))),
            "cannot allocate an arena and volumes in memory of 4GiB: 4GiB of this host's memory are available; \
             lower `arena` to \"2559MiB\", or free some"
        );
        assert_eq!(
            refusal(fits(demand(RDMA, 8 * MIB, &[8 * GIB]), &available(4 * GIB))),
            "cannot allocate an arena and volumes in memory of 8GiB: 4GiB of this host's memory are available; \
             lower the sizes of the volumes in memory, or free some"
        );
        // Volumes over TCP are not pinned, the arena is.
        let tcp = demand(TCP, GIB, &[100 * GIB]);
        assert!(fits(tcp.clone(), &available(GIB)).is_ok());
        assert_eq!(
            refusal(fits(tcp.clone(), &available(GIB - 1))),
            "cannot allocate an arena of 1GiB: 1023.9MiB of this host's memory are available; \
             lower `arena` to \"896MiB\", or free some"
        );
        assert!(tcp.fits(&available(0), PageKind::Huge2MiB).is_ok(), "huge pages are apart");
        let many = Demand::of(&config(RDMA, 4 * MIB, &[]), 64);
        assert_eq!(
            refusal(fits(many, &available(255 * MIB))),
            "cannot allocate an arena of 256MiB: 255MiB of this host's memory are available; \
             lower `max_io` or `poll_groups`, whose product is the least of an arena, or free some"
        );
    }

    #[test]
    fn a_cgroup_counts_when_it_is_narrower() {
        let cgroup = |bytes| HostMemory {
            cgroup: Some((bytes, PathBuf::from("/sys/fs/cgroup/a/memory.max"))),
            ..available(4 * GIB)
        };
        let demand = demand(TCP, 2 * GIB, &[]);
        assert!(demand.fits(&cgroup(2 * GIB), PageKind::Normal).is_ok());
        assert_eq!(
            refusal(demand.fits(&cgroup(GIB), PageKind::Normal)),
            "cannot allocate an arena of 2GiB: /sys/fs/cgroup/a/memory.max limits this process to 1GiB; \
             lower `arena` to \"896MiB\", or raise MemoryMax= in the unit"
        );
    }

    #[test]
    fn volumes_that_outgrow_the_host_cause_a_warning() {
        let host = available(4 * GIB);
        assert_eq!(demand(TCP, GIB, &[15 * GIB]).warning(&host), None);
        assert_eq!(demand(TCP, 17 * GIB, &[]).warning(&host), None, "refused anyway");
        assert_eq!(demand(RDMA, GIB, &[16 * GIB]).warning(&host), None, "refused anyway");
        let warning = demand(TCP, GIB, &[16 * GIB]).warning(&host).unwrap();
        assert!(warning.contains("may grow to 16GiB") && warning.contains("of 16GiB"));
    }

    #[test]
    fn huge_pages_are_taken_where_enough_are_free() {
        let pool = |free| Some(HugePool { total: 100, free });
        let mut demand = demand(TCP, 8 * MIB, &[]);
        for (wanted, free, pages) in [
            (HugePages::Auto, pool(4), PageKind::Huge2MiB),
            (HugePages::Auto, pool(3), PageKind::Normal),
            (HugePages::Auto, None, PageKind::Normal),
            (HugePages::Never, pool(100), PageKind::Normal),
            (HugePages::Never, None, PageKind::Normal),
            (HugePages::Required, pool(4), PageKind::Huge2MiB),
        ] {
            demand.hugepages = wanted;
            assert_eq!(demand.pages(free).unwrap(), pages, "{wanted:?} {free:?}");
        }
        demand.hugepages = HugePages::Required;
        assert_eq!(
            refusal(demand.pages(pool(1))),
            "hugepages = \"required\", and the arena of 8MiB needs 4 huge pages of 2 MiB: 1 are free, 3 are missing; \
             reserve them with `sysctl vm.nr_hugepages=103`, lower `arena`, or write hugepages = \"auto\""
        );
        assert_eq!(
            refusal(demand.pages(None)),
            "hugepages = \"required\", but this kernel has no huge pages of 2 MiB; write hugepages = \"auto\""
        );
    }

    #[test]
    fn a_region_larger_than_the_device_takes() {
        let soft = rblk_fabric::soft::Device::tcp();
        assert!(demand(TCP, 1 << 40, &[]).registers_with(soft.caps()).is_ok());
        let caps =
            DeviceCaps { name: "x0".to_owned(), max_region_bytes: 2 * GIB, ..soft.caps().clone() };
        assert!(demand(RDMA, 2 * GIB, &[2 * GIB]).registers_with(&caps).is_ok());
        assert_eq!(
            refusal(demand(RDMA, 3 * GIB, &[]).registers_with(&caps)),
            "x0 registers at most 2GiB at once, and `arena` has 3GiB: lower it to \"2GiB\" or serve by another device"
        );
        let volume = refusal(demand(RDMA, GIB, &[GIB, 4 * GIB]).registers_with(&caps));
        assert!(volume.contains("volume `m1` has 4GiB"), "{volume}");
    }

    #[test]
    fn the_arena_uses_ordinary_pages_where_no_huge_ones_are() {
        let demand = demand(TCP, 8 * MIB, &[]);
        let region = demand.allocate(&available(GIB)).unwrap();
        assert_eq!((region.len() as u64, region.kind()), (8 * MIB, PageKind::Normal));
        assert!(demand.allocate(&available(MIB)).is_err());
    }

    #[test]
    fn sizes_for_people() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1KiB"),
            (MIB - 1, "1023.9KiB"),
            (256 * MIB, "256MiB"),
            (3 * GIB / 2, "1.5GiB"),
            (1 << 40, "1TiB"),
            (u64::MAX, "16777215.9TiB"),
        ] {
            assert_eq!(Human(bytes).to_string(), text);
        }
    }

    proptest! {
        /// An arena of the advised size is not refused.
        #[test]
        fn the_advice_helps(arena in 4u64..1 << 12, volume in 1u64..1 << 12, room in 1u64..1 << 12, groups in 1usize..9) {
            let volumes = [volume * MIB];
            let host = available(room * MIB);
            let demand = Demand::of(&config(RDMA, arena * MIB, &volumes), groups);
            if let Err(NotEnoughMemory::Room { fix, .. }) = demand.fits(&host, PageKind::Normal)
                && let Some(size) = fix.strip_prefix("lower `arena` to \"").and_then(|rest| rest.split('"').next())
            {
                let size: ByteSize = size.parse().unwrap();
                prop_assert!(size.0 < arena * MIB || arena * MIB < demand.arena_bytes());
                let lower = Demand::of(&config(RDMA, size.0, &volumes), groups);
                prop_assert!(lower.fits(&host, PageKind::Normal).is_ok(), "{fix}");
            }
        }
    }

    #[test]
    fn a_file_limit_that_sessions_exceed_is_reported() {
        let tcp = config("tcp://127.0.0.1", GIB, &[]);
        let said = too_few_files(&tcp, 65_536).unwrap();
        assert!(said.contains("LimitNOFILE=131072") && said.contains("lower sessions_max to 1000"));
        assert_eq!(too_few_files(&tcp, 131_072), None);
        let few = TargetConfig { sessions_max: 1000, ..tcp };
        assert_eq!(too_few_files(&few, 65_536), None);
        // QPs of a card are no files.
        assert_eq!(too_few_files(&config("rdma://127.0.0.1", GIB, &[]), 1024), None);
    }
}
