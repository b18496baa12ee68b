//! Checks whether a new program will find its memory when it replaces this one. After the
//! replacement no process is left that could serve instead.

use rblk_fabric::{DeviceCaps, PageKind};

use super::{Demand, HostMemory, HugePool, NotEnoughMemory};

/// The memory that a process gives back when a new program replaces it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct GivenBack {
    /// Bytes in ordinary pages.
    bytes: u64,
    /// Huge pages.
    huge_pages: u64,
}

impl GivenBack {
    /// The host after this memory is given back.
    fn to(self, host: &HostMemory) -> HostMemory {
        let add = |bytes: u64| bytes.saturating_add(self.bytes);
        let huge = host.huge.map(|pool| {
            let free = pool.free.saturating_add(self.huge_pages).min(pool.total);
            HugePool { free, ..pool }
        });
        HostMemory { available_bytes: host.available_bytes.map(add), huge, ..host.clone() }
    }
}

impl Demand {
    /// The memory that a process with this demand gives back; its arena has such pages.
    #[must_use]
    pub(crate) fn given_back(&self, pages: PageKind) -> GivenBack {
        // Over TCP, the number of written pages of a volume in memory is unknown.
        let volumes = if self.rdma { self.volume_bytes() } else { 0 };
        match pages {
            PageKind::Huge2MiB => GivenBack { bytes: volumes, huge_pages: self.huge_pages() },
            PageKind::Normal => {
                GivenBack { bytes: volumes.saturating_add(self.arena_bytes()), huge_pages: 0 }
            }
        }
    }

    /// Whether a program with this demand can replace one that gives `back` its memory, and can
    /// serve by these devices.
    ///
    /// # Errors
    /// [`NotEnoughMemory`].
    pub(crate) fn follows<'d>(
        &self,
        back: GivenBack,
        host: &HostMemory,
        devices: impl IntoIterator<Item = &'d DeviceCaps>,
    ) -> Result<(), NotEnoughMemory> {
        self.check(&back.to(host))?;
        devices.into_iter().try_for_each(|caps| self.registers_with(caps))
    }
}

#[cfg(test)]
mod tests {
    use rblk_config::{ByteSize, HugePages, TargetConfig};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn demand(arena: u64, hugepages: HugePages) -> Demand {
        let listen = vec!["tcp://[::1]:1".to_owned()];
        let arena = ByteSize(arena);
        Demand::of(&TargetConfig { listen, arena, hugepages, ..TargetConfig::default() }, 1)
    }

    fn host(available: u64, huge: Option<HugePool>) -> HostMemory {
        HostMemory {
            total_bytes: Some(64 * GIB),
            available_bytes: Some(available),
            huge,
            cgroup: None,
        }
    }

    #[test]
    fn given_back_memory_counts() {
        let (now, host) = (demand(8 * GIB, HugePages::Never), host(4 * GIB, None));
        let back = now.given_back(PageKind::Normal);
        let follows = |arena| demand(arena, HugePages::Never).follows(back, &host, []);
        assert!(follows(8 * GIB).is_ok(), "the same again fits however little is free");
        assert!(follows(12 * GIB).is_ok());
        let error = follows(13 * GIB).unwrap_err().to_string();
        assert!(error.contains("an arena of 13GiB: 12GiB"), "{error}");
        assert!(error.contains("lower `arena` to \"10752MiB\""), "{error}");
    }

    #[test]
    fn huge_pages_are_given_back_as_such() {
        let pool = HugePool { total: 4096, free: 0 };
        let (required, host) = (demand(8 * GIB, HugePages::Required), host(GIB, Some(pool)));
        let back = required.given_back(PageKind::Huge2MiB);
        assert!(required.follows(back, &host, []).is_ok());
        let error = demand(9 * GIB, HugePages::Required).follows(back, &host, []).unwrap_err();
        assert!(error.to_string().contains("4608 huge pages of 2 MiB: 4096 are free"), "{error}");
        // An arena of ordinary pages does not change the pool.
        let back = required.given_back(PageKind::Normal);
        assert!(required.follows(back, &host, []).is_err());
    }
}
