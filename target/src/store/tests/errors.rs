//! Refusals and faults: an impossible op gets an error, and no other op is affected.

use std::fs;
use std::process::Command;

use super::*;

#[test]
fn ops_out_of_range_are_refused() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    on_both(&path, |engine, region| {
        let end = MIB as u64;
        let huge = u64::MAX - 511;
        for op in [
            read(end, 0, 512),
            write(end - 512, 0, 1024),
            read(huge, 0, 4096),
            read(0, region.len() - 512, 1024),
            write(0, usize::MAX - 100, 512),
            discard(end - 512, 1024),
            discard(512, u64::MAX),
            zeroes(0, end + 512, false),
        ] {
            assert_eq!(engine.run_one(op.clone()), Err(Errno::EINVAL), "{op:?}");
        }
        assert_eq!(engine.run_one(read(0, 0, 0)), Ok(0));
        assert_eq!(engine.run_one(discard(end, 0)), Ok(0));
    });
    assert_eq!(fs::metadata(&path).unwrap().len(), MIB as u64);
}

#[test]
fn read_only_backing_refuses_changes() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    let options = OpenOptions { read_only: true, ..options(512, Direct::Preferred) };
    let backing = Arc::new(Backing::open(&path, &options).unwrap());
    assert!(backing.read_only() && !backing.can_discard() && !backing.can_zero_fast());
    let region = region(MIB);
    let changes = [write(0, 0, 512), discard(0, 512), zeroes(0, 512, true)];
    let all = |engine: &mut dyn Engine| {
        for op in &changes {
            assert_eq!(engine.run_one(op.clone()), Err(Errno::EROFS));
        }
        assert_eq!(engine.run_one(read(0, 0, 512)), Ok(512));
        assert_eq!(engine.run_one(flush()), Ok(0));
    };
    all(&mut uring(&region, 4, &backing));
    all(&mut sync(&region, &backing));
}

#[test]
fn file_that_shrank_is_an_io_error() {
    let directory = directory();
    let path = file(directory.path(), "disk", MIB as u64);
    for (size, direct) in [
        (8192, Direct::Preferred),
        (8192, Direct::Off),
        (5000, Direct::Preferred),
        (5000, Direct::Off),
    ] {
        File::options().write(true).open(&path).unwrap().set_len(MIB as u64).unwrap();
        let backing = Arc::new(Backing::open(&path, &options(512, direct)).unwrap());
        File::options().write(true).open(&path).unwrap().set_len(size).unwrap();
        let region = region(MIB);
        let check = |engine: &mut dyn Engine| {
            assert_eq!(engine.run_one(read(0, 0, 4096)), Ok(4096));
            assert_eq!(
                engine.run_one(read(4096, 0, 16384)),
                Err(Errno::EIO),
                "across the end at {size}"
            );
            assert_eq!(engine.run_one(read(65536, 0, 4096)), Err(Errno::EIO), "past the end");
            let scattered = [segment(8192, 2048), segment(0, 512), segment(16384, 13824)];
            assert_eq!(
                engine.run_one(read_into(4096, &scattered)),
                Err(Errno::EIO),
                "across the end at {size}, into several segments"
            );
        };
        let mut store = uring(&region, 4, &backing);
        check(&mut store);
        assert_eq!(store.counters().errors, 3);
        check(&mut sync(&region, &backing));
        assert!(matches!(
            backing.refresh_size(),
            Err(StoreError::Shrank { .. } | StoreError::NotWholeBlocks { .. })
        ));
        assert_eq!(backing.size_bytes(), MIB as u64);
    }
}

#[test]
fn grown_file_is_served_after_a_refresh() {
    let directory = directory();
    let path = file(directory.path(), "disk", 4096);
    let backing = Arc::new(Backing::open(&path, &options(512, Direct::Preferred)).unwrap());
    let region = region(MIB);
    let mut store = uring(&region, 4, &backing);
    File::options().write(true).open(&path).unwrap().set_len(8192).unwrap();
    assert_eq!(store.run_one(read(4096, 0, 4096)), Err(Errno::EINVAL));
    assert_eq!(backing.refresh_size().unwrap(), 8192);
    assert_eq!(store.run_one(read(4096, 0, 4096)), Ok(4096));
}

/// A tmpfs of 1 MiB, gone when dropped.
pub(super) struct SmallDisk(pub(super) TempDir);

impl SmallDisk {
    pub(super) fn mount() -> Self {
        let directory = directory();
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(directory.path());
        assert!(mount.status().unwrap().success(), "cannot mount a tmpfs");
        Self(directory)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_full_disk_is_an_error_of_that_write() {
    let disk = SmallDisk::mount();
    let path = file(disk.0.path(), "disk", 8 * MIB as u64);
    on_both(&path, |engine, _| {
        assert_eq!(engine.run_one(write(0, 0, 4 * MIB32)), Err(Errno::ENOSPC));
        assert_eq!(engine.run_one(discard(0, 8 * MIB as u64)), Ok(0));
        let scattered = [segment(4 * MIB, 1536), segment(0, 3 * MIB32), segment(5 * MIB, 512)];
        assert_eq!(engine.run_one(write_from(0, &scattered, false)), Err(Errno::ENOSPC));
        assert_eq!(engine.run_one(discard(0, 8 * MIB as u64)), Ok(0));
        assert_eq!(engine.run_one(write(0, 0, 65536)), Ok(65536));
        // Zeroes must be written here, and do not fit.
        assert_eq!(engine.run_one(zeroes(0, 8 * MIB as u64, false)), Err(Errno::ENOSPC));
        assert_eq!(engine.run_one(zeroes(0, 8 * MIB as u64, true)), Ok(0));
    });
}

#[test]
fn ranges_are_64_bit() {
    const TIB: u64 = 1 << 40;
    let directory = directory();
    let path = file(directory.path(), "disk", 3 * TIB);
    on_both(&path, |engine, region| {
        let at = 2 * TIB + 12288;
        region.write(0, &pattern(9, 0, 4096));
        assert_eq!(engine.run_one(write(at, 0, 4096)), Ok(4096));
        assert_eq!(engine.run_one(read(at, 4096, 4096)), Ok(4096));
        let mut got = [0; 4096];
        region.read(4096, &mut got);
        assert!(got[..] == pattern(9, 0, 4096));
        assert_eq!(engine.run_one(discard(512, 3 * TIB - 512)), Ok(0));
        assert_eq!(engine.run_one(read(at, 4096, 4096)), Ok(4096));
        region.read(4096, &mut got);
        assert_eq!(got, [0; 4096]);
    });
}
