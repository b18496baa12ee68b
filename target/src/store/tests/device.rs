//! A real block device.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::time::Duration;

use super::*;
use crate::store::at_path::AtPath;
use crate::store::protection::Protection;

/// A loop device over a file, gone when dropped.
pub(super) struct LoopDevice(pub(super) PathBuf);

impl LoopDevice {
    pub(super) fn attach(file: &Path, block_size: &str) -> Self {
        let out =
            Command::new("losetup").args(["-f", "--show", "-b", block_size]).arg(file).output();
        match out {
            Ok(out) if out.status.success() => {
                Self(PathBuf::from(String::from_utf8(out.stdout).unwrap().trim()))
            }
            other => panic!("cannot make a loop device: {other:?}"),
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // Resets the device for the next user of its number.
        let _ = Command::new("blockdev").arg("--setrw").arg(&self.0).status();
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_device_that_was_detached_is_another_attachment() {
    let directory = directory();
    let file = file(directory.path(), "disk", MIB as u64);
    let attachment = |device: &LoopDevice| {
        let backing = Backing::open(&device.0, &options(4096, Direct::Off)).unwrap();
        backing.attachment().expect("the kernel counts attachments")
    };
    let device = LoopDevice::attach(&file, "4096");
    let first = attachment(&device);
    assert_eq!(attachment(&device), first, "opened again");
    drop(device);
    assert_ne!(attachment(&LoopDevice::attach(&file, "4096")), first);
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_block_device() {
    let directory = directory();
    let file = file(directory.path(), "disk", 64 * MIB as u64);
    let device = LoopDevice::attach(&file, "4096");
    let error = Backing::open(&device.0, &options(512, Direct::Required)).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misaligned);
    assert!(
        error.to_string().contains("blocks of 4096 bytes, the volume has block_size 512"),
        "{error}"
    );

    let backing = Arc::new(Backing::open(&device.0, &options(4096, Direct::Required)).unwrap());
    assert_eq!((backing.kind(), backing.size_bytes()), (BackingKind::BlockDevice, 64 * MIB as u64));
    assert!(backing.direct() && backing.alignment() == 4096);
    check_memory_alignment(&backing);
    assert!(backing.can_discard() && backing.discard_granularity() >= 512, "{backing:?}");
    let error = Backing::open(&device.0, &options(4096, Direct::Required)).unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Locked);
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");

    let region = region(8 * MIB);
    let mut store = uring(&region, 16, &backing);
    let bytes = 4 * MIB32;
    region.write(0, &pattern(7, 0, 4 * MIB));
    let fua = write_from(8 * MIB as u64, &[segment(0, bytes)], true);
    let zeroes = |at: usize, may_unmap| zeroes(at as u64, MIB as u64, may_unmap);
    assert_eq!(store.run(&[fua, write(0, 0, bytes)]), [Ok(bytes), Ok(bytes)]);
    assert_eq!(store.run_one(flush()), Ok(0));
    let blocks = fs::metadata(&file).unwrap().blocks();
    let discard = discard(0, 4 * MIB as u64);
    let changes = [discard, zeroes(8 * MIB, false), zeroes(9 * MIB, true)];
    assert_eq!(store.run(&changes), [Ok(0), Ok(0), Ok(0)]);
    assert!(backing.can_discard(), "the kernel refused discard");
    assert!(fs::metadata(&file).unwrap().blocks() < blocks, "discard reached the file below");
    assert_eq!(store.run_one(read(8 * MIB as u64, 4 * MIB, bytes)), Ok(bytes));
    let mut got = vec![1; 4 * MIB];
    region.read(4 * MIB, &mut got);
    assert!(
        got[..2 * MIB].iter().all(|&b| b == 0) && got[2 * MIB..] == pattern(7, 2 * MIB, 2 * MIB)
    );
    assert_eq!(store.run_one(read(64 * MIB as u64, 0, 4096)), Err(Errno::EINVAL));
    drop(store);
    drop(backing);
    Backing::open(&device.0, &patient(Direct::Required)).unwrap();
}

/// A child of another test may have the device open until it runs its program.
fn patient(direct: Direct) -> OpenOptions {
    OpenOptions { lock_wait: Duration::from_secs(20), ..options(4096, direct) }
}

#[test]
#[ignore = "needs root: `cargo xtask test` runs it"]
fn as_root_a_read_only_device_is_not_opened_for_writing() {
    let directory = directory();
    let file = file(directory.path(), "disk", 4 * MIB as u64);
    let device = LoopDevice::attach(&file, "4096");
    let blockdev = |flag: &str| {
        assert!(Command::new("blockdev").arg(flag).arg(&device.0).status().unwrap().success());
    };
    let backing = Backing::open(&device.0, &patient(Direct::Preferred)).unwrap();
    assert_eq!(AtPath::look(&backing), AtPath::Same);
    blockdev("--setro");
    let look = AtPath::look(&backing);
    assert_eq!(look, AtPath::ReadOnly(Protection::Device));
    let text = look.describe(&backing);
    assert!(text.starts_with("its device ") && text.contains("is read-only"), "{text}");
    drop(backing);
    let error = Backing::open(&device.0, &patient(Direct::Preferred)).unwrap_err();
    assert!(matches!(error, StoreError::ReadOnly { .. }), "{error}");
    let read_only = OpenOptions { read_only: true, ..patient(Direct::Preferred) };
    assert_eq!(AtPath::look(&Backing::open(&device.0, &read_only).unwrap()), AtPath::Same);
    blockdev("--setrw");
    Backing::open(&device.0, &patient(Direct::Preferred)).unwrap();
}
