//! The memory that this process may lock.

use std::path::Path;

use nix::sys::resource::{Resource, getrlimit};

/// Bit of `CAP_IPC_LOCK` in a set of capabilities.
const CAP_IPC_LOCK: u32 = 14;

/// The hard limit of locked memory: the programs raise the soft limit to it. `None` if the system
/// does not say.
#[must_use]
pub fn hard_memlock() -> Option<u64> {
    getrlimit(Resource::RLIMIT_MEMLOCK).ok().map(|(_, hard)| hard)
}

/// Whether this process may lock memory beyond its limit (`CAP_IPC_LOCK`).
#[must_use]
pub fn can_lock_memory(root: &Path) -> bool {
    let text = std::fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
    has_capability(&text, CAP_IPC_LOCK)
}

/// Whether a `/proc/PID/status` has a capability in effect.
fn has_capability(status: &str, bit: u32) -> bool {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    set.is_some_and(|set| set >> bit & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_the_set_in_effect() {
        let status = "Name:\tx\nCapPrm:\tffffffffffffffff\nCapEff:\t0000000000004000\n";
        assert!(has_capability(status, CAP_IPC_LOCK));
        assert!(!has_capability(status, 13));
        for none in ["", "CapEff:\n", "CapEff:\tzz\n", "CapPrm:\tffff\n"] {
            assert!(!has_capability(none, CAP_IPC_LOCK), "{none:?}");
        }
    }
}
