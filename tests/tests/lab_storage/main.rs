//! The lab suite of storage: the block cache, and the data that must survive deaths, with the real
//! programs, on disks of a real kernel that fail, fill up and forget.
//!
//! Run like `lab/`. Tests print figures for readers. Bounds on them are wide, and no time is
//! judged.

#![forbid(unsafe_code)]

mod cache;
mod changes;
mod crashes;
mod deaths;
mod failures;
mod group;
mod grow;
mod limits;
mod lost_writes;
mod mirror;
mod standby;

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use rblk_config::{ByteSize, CacheMode, TargetConfig, VolumeConfig};
use rblk_tests::lab::{
    Aligned, DEADLINE, Lab, MountFlags, Mounted, Target, TargetFlags, start, until,
};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const MODES: [CacheMode; 2] = [CacheMode::WriteThrough, CacheMode::WriteBack];

/// Time for a run of fio over some tens of MiB.
const FIO_DEADLINE: Duration = Duration::from_secs(240);
/// A write-back delay that never ends.
const NEVER: &str = "1h";

/// Bytes of memory.
fn size(bytes: u64) -> usize {
    usize::try_from(bytes).expect("it fits in memory")
}

/// A command of the host that must work.
fn sh(words: &[&str]) -> String {
    start(words).finish(2 * DEADLINE).ok()
}

/// A target with the one volume `v0` on `path`, without read-ahead.
fn config(path: &Path, cache: CacheMode, arena: u64) -> TargetConfig {
    let mut volume = VolumeConfig::file("v0", path);
    volume.cache = Some(cache);
    volume.read_ahead = ByteSize(0);
    TargetConfig {
        arena: ByteSize(arena),
        max_io: ByteSize(256 * KIB),
        volumes: vec![volume],
        ..TargetConfig::default()
    }
}

fn with_delay(config: TargetConfig, delay: &str) -> TargetConfig {
    TargetConfig { write_back_delay: delay.parse().expect("a duration"), ..config }
}

fn serve<'l>(lab: &'l Lab, config: &TargetConfig) -> Target<'l> {
    Target::start(lab, &TargetFlags::default().config(lab, config))
}

fn mount(lab: &Lab) -> Mounted<'_> {
    Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"))
}

fn open(device: &Path) -> File {
    Aligned::open(device, true, 0).unwrap_or_else(|e| panic!("opening {}: {e}", device.display()))
}

/// The dirty bytes at the target, after the last requests are counted. Unflushed blocks would be
/// written back by themselves only much later.
fn dirty_bytes(target: &Target<'_>) -> u64 {
    let dirty = || target.counts().get("dirty_bytes");
    until("the dirty bytes to be counted", DEADLINE, || {
        let before = dirty();
        std::thread::sleep(Duration::from_millis(100));
        (dirty() == before).then_some(before)
    })
}

/// The errno of an operation that must fail.
fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    let error = result.expect_err("it had to fail");
    error.raw_os_error().unwrap_or_else(|| panic!("{error} has no errno"))
}
