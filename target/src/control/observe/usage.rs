//! The use of a target's limited resources: sessions, connections, open files, memory. Read for
//! each status, from files of the kernel that do not block.

use std::fs;
use std::sync::OnceLock;

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{SysconfVar, sysconf};

use crate::control::Control;
use crate::memory::demand::HostMemory;
use rblk_operate::target::status::UsageStatus;

/// The present use.
pub(in crate::control) fn of(control: &Control) -> UsageStatus {
    let sessions = control.core.sessions();
    UsageStatus {
        sessions: sessions.iter().count(),
        sessions_max: sessions.max(),
        connections: sessions
            .iter()
            .map(crate::control::peers::session::Session::connections)
            .sum(),
        files: open_files(),
        files_max: getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(limit, _)| limit),
        memory_bytes: resident_bytes(),
        memory_max_bytes: memory_max(),
    }
}

/// Linux 6.2 and later report it as the size of the directory, without a walk.
fn open_files() -> Option<u64> {
    fs::metadata("/proc/self/fd").ok().map(|directory| directory.len()).filter(|count| *count > 0)
}

fn resident_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_ascii_whitespace().nth(1)?.parse().ok()?;
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten()?;
    pages.checked_mul(u64::try_from(page).ok()?)
}

/// Read once: it does not change in practice while a process runs.
fn memory_max() -> Option<u64> {
    static MAX: OnceLock<Option<u64>> = OnceLock::new();
    *MAX.get_or_init(|| {
        let host = HostMemory::read();
        host.total_bytes.into_iter().chain(host.cgroup.map(|(limit, _)| limit)).min()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_and_files() {
        let (memory, max) = (resident_bytes().unwrap(), memory_max().unwrap());
        assert!(memory > 1 << 20 && memory < max, "{memory} {max}");
        let before = open_files();
        let files: Vec<_> = (0..5).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        // Other tests of this process open files, too.
        assert!(before.is_none() || open_files().unwrap() >= files.len() as u64);
    }
}
