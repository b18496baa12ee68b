//! The memory of the host, read from the kernel's own files. A value that they do not report is
//! `None`.

use std::path::{Component, Path, PathBuf};

use super::MemoryBound;

const HUGE_POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// The pool of huge pages of 2 MiB.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HugePool {
    /// All huge pages.
    pub total: u64,
    /// Huge pages that are neither used nor reserved.
    pub free: u64,
}

/// The memory of the host; `None` for a value that the kernel does not report.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct HostMemory {
    /// Total memory, in bytes.
    pub total_bytes: Option<u64>,
    /// Memory that is free or can be made free, in bytes.
    pub available_bytes: Option<u64>,
    /// The lowest limit of the process's own cgroup and its ancestors, in bytes, and the file with
    /// this limit.
    pub cgroup: Option<(u64, PathBuf)>,
    /// Huge pages.
    pub huge: Option<HugePool>,
}

impl HostMemory {
    /// Reads the current values of this host. Reads small files only.
    #[must_use]
    pub(crate) fn read() -> Self {
        let text = |path: &Path| std::fs::read_to_string(path).ok();
        let meminfo = text(Path::new("/proc/meminfo")).unwrap_or_default();
        let count = |name: &str| text(&Path::new(HUGE_POOL).join(name))?.trim().parse::<u64>().ok();
        let huge = || {
            let free = count("free_hugepages")?.saturating_sub(count("resv_hugepages")?);
            Some(HugePool { total: count("nr_hugepages")?, free })
        };
        let own = text(Path::new("/proc/self/cgroup")).unwrap_or_default();
        // If the memory controller is in cgroup version 1, version 2 has no such files, and this
        // finds no limit.
        let root = Path::new("/sys/fs/cgroup");
        let limits = limit_files(&own, root).into_iter().filter_map(|file| {
            let limit = parse_limit(&text(&file)?)?;
            Some((limit, file))
        });
        Self {
            total_bytes: meminfo_bytes(&meminfo, "MemTotal"),
            available_bytes: meminfo_bytes(&meminfo, "MemAvailable"),
            cgroup: limits.min_by_key(|(limit, _)| *limit),
            huge: huge(),
        }
    }

    /// Memory that this process may have, by the limits of the host and of the cgroup.
    #[must_use]
    pub(crate) fn bytes(&self) -> Option<u64> {
        let cgroup = self.cgroup.as_ref().map(|(bytes, _)| *bytes);
        self.total_bytes.into_iter().chain(cgroup).min()
    }

    /// The smaller of the host's and the cgroup's room.
    pub(super) fn room(&self) -> Option<MemoryBound> {
        let cgroup = self.cgroup.clone().map(|(bytes, file)| MemoryBound::Cgroup(bytes, file));
        let rooms = self.available_bytes.map(MemoryBound::Available).into_iter().chain(cgroup);
        rooms.min_by_key(MemoryBound::bytes)
    }
}

/// A value of `/proc/meminfo`, in bytes.
fn meminfo_bytes(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

/// The `memory.max` files of the process's version 2 cgroup and of its ancestors, without the root,
/// which has none. `own` is the text of `/proc/self/cgroup`.
fn limit_files(own: &str, root: &Path) -> Vec<PathBuf> {
    let Some(path) = own.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return Vec::new();
    };
    let path = Path::new(path);
    // A process outside of its cgroup namespace sees its path with dots: this path leads to no file
    // of its own.
    if path.components().any(|part| !matches!(part, Component::Normal(_))) {
        return Vec::new();
    }
    let own_and_above = path.ancestors().filter(|path| !path.as_os_str().is_empty());
    own_and_above.map(|path| root.join(path).join("memory.max")).collect()
}

/// A limit of a cgroup; `None` for `max`.
fn parse_limit(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn meminfo() {
        let text = "MemTotal:       24684096 kB\nMemFree:  1 kB\nMemAvailable:   23883592 kB\nHugePages_Total:   7\n";
        assert_eq!(meminfo_bytes(text, "MemTotal"), Some(24_684_096 * 1024));
        assert_eq!(meminfo_bytes(text, "MemAvailable"), Some(23_883_592 * 1024));
        assert_eq!(meminfo_bytes(text, "Mem"), None);
        assert_eq!(meminfo_bytes(text, "HugePages_Total"), None, "not a size");
        assert_eq!(meminfo_bytes("MemTotal: 18446744073709551615 kB", "MemTotal"), None);
    }

    #[test]
    fn cgroups() {
        let root = Path::new("/c");
        let files = |own| limit_files(own, root);
        assert_eq!(
            files("1:name=systemd:/x\n0::/system.slice/rblk-target.service\n"),
            [
                PathBuf::from("/c/system.slice/rblk-target.service/memory.max"),
                PathBuf::from("/c/system.slice/memory.max")
            ]
        );
        for none in ["", "0::/\n", "4:memory:/a\n", "0::/../../other\n", "0::/a/../b\n", "0:://a\n"]
        {
            assert!(files(none).is_empty(), "{none:?}");
        }
        assert_eq!(parse_limit("max\n"), None);
        assert_eq!(parse_limit("1073741824\n"), Some(1 << 30));
    }

    #[test]
    fn this_host_reports_its_memory() {
        let host = HostMemory::read();
        assert!(host.total_bytes.unwrap() >= host.available_bytes.unwrap());
        assert!(host.available_bytes.unwrap() > 0);
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,40}", number in ".{0,24}") {
            let _ = meminfo_bytes(&format!("MemTotal:{number}\n{text}"), "MemTotal");
            let _ = limit_files(&format!("0::{text}"), Path::new("/c"));
            let _ = parse_limit(&number);
        }
    }
}
