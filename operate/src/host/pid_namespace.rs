//! Whether a process is in the first pid namespace of its kernel.

use std::path::Path;

/// The number of the first pid namespace (`PROC_PID_INIT_INO`).
const FIRST: &str = "pid:[4026531836]";

/// Whether this process is in a pid namespace below the first one, such as that of a container.
/// `root` is `/` on a real host. Without `/proc` the answer is no.
#[must_use]
pub fn is_own(root: &Path) -> bool {
    std::fs::read_link(root.join("proc/self/ns/pid"))
        .is_ok_and(|namespace| namespace != Path::new(FIRST))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_the_first_namespace_has_its_number() {
        let root = tempfile::tempdir().unwrap();
        assert!(!is_own(root.path()));
        let dir = root.path().join("proc/self/ns");
        std::fs::create_dir_all(&dir).unwrap();
        for (link, own) in [(FIRST, false), ("pid:[4026532198]", true)] {
            let _ = std::fs::remove_file(dir.join("pid"));
            symlink(link, dir.join("pid")).unwrap();
            assert_eq!(is_own(root.path()), own, "{link}");
        }
    }
}
