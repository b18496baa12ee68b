//! Room on the disk for what a run builds: a full disk would end a later step with an error that
//! names one of ten thousand files.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use nix::sys::statvfs::statvfs;

const GIB: u64 = 1 << 30;
/// Room of the build directory at the end of a run on a clean checkout, with some to spare.
const BUILT: u64 = 12 * GIB;

/// Fails if the disk of the build directory has too little room for a run.
pub(crate) fn check(target: &Path) -> Result<()> {
    fs::create_dir_all(target).with_context(|| format!("cannot make {}", target.display()))?;
    let disk = statvfs(target).with_context(|| format!("cannot ask for {}", target.display()))?;
    let free = disk.blocks_available().saturating_mul(disk.fragment_size());
    let built = size(target);
    println!("{}: {} GiB built, {} GiB free", target.display(), built / GIB, free / GIB);
    let missing = missing(BUILT, built, free);
    if missing > 0 {
        bail!(
            "a run needs {} GiB more on the disk of {}; free them, or set CARGO_TARGET_DIR to a \
             directory on another disk",
            missing.div_ceil(GIB),
            target.display()
        );
    }
    Ok(())
}

/// Bytes that must become free. A build directory that was used for long holds more than `needed`.
fn missing(needed: u64, built: u64, free: u64) -> u64 {
    needed.saturating_sub(built).saturating_sub(free)
}

/// Bytes of the files below a directory. What goes away meanwhile has none.
fn size(directory: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(directory) else { return 0 };
    let sizes = entries.flatten().filter_map(|entry| {
        let about = entry.metadata().ok()?;
        Some(if about.is_dir() { size(&entry.path()) } else { about.len() })
    });
    sizes.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_needs_no_room_again() {
        assert_eq!(missing(BUILT, 0, BUILT), 0);
        assert_eq!(missing(BUILT, 0, BUILT - GIB), GIB);
        assert_eq!(missing(BUILT, 4 * GIB, BUILT - 5 * GIB), GIB);
        assert_eq!(missing(BUILT, 2 * BUILT, 0), 0);
    }

    #[test]
    fn every_file_below_counts() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("deps")).unwrap();
        fs::write(dir.path().join("a"), [0; 100]).unwrap();
        fs::write(dir.path().join("deps/b"), [0; 23]).unwrap();
        assert_eq!(size(dir.path()), 123);
        assert_eq!(size(&dir.path().join("missing")), 0);
    }
}
