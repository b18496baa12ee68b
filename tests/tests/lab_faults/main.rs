//! The lab suite of faults: links that are cut, targets and initiators that die, hosts that stop,
//! with the real programs on a real kernel. Users of the device see a stall, never an error, a
//! lost or a stale block.
//!
//! Run like `lab/`. `RBLK_LONG=1` repeats each fault more often. Bounds on times are those of the
//! documentation, measured from outside the programs. Pauses of the machine itself are subtracted,
//! and a window that a pause spoilt is repeated a few times at most.

#![forbid(unsafe_code)]

mod cards;
mod detect;
mod doctor;
mod drain;
mod engine;
mod fence;
mod flips;
mod give_up;
mod in_use;
mod interruptions;
mod leaks;
mod portals;
mod providers;
mod recovery;
mod shared_memory;
mod stale;
mod storm;
mod target_upgrade;
mod two_ways;
mod writer;

use std::time::{Duration, Instant};

use rblk_tests::lab::{Fio, Lab, MountFlags, Mounted, StallMeter, TargetFlags, start, until};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// The `--detect` of these tests.
const DETECT: Duration = Duration::from_secs(2);
/// A stall may last this much longer than the fault and its detection.
const SLACK: Duration = Duration::from_secs(2);
/// Time for a stall to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A command of the host that must work.
fn sh(words: &[&str]) -> String {
    start(words).finish(PATIENCE).ok()
}

/// A target with the one file volume `v0`.
fn serve_file(lab: &Lab, bytes: u64) -> TargetFlags {
    TargetFlags::default().file("v0", &lab.image("v0.img", bytes))
}

/// A mount of `v0` that detects a loss in time.
fn flags(address: String) -> MountFlags {
    MountFlags::new(address, "v0").flag("--detect", "2s")
}

/// fio that writes and verifies until it is told to stop.
fn endless_fio(mounted: &Mounted<'_>) -> Fio {
    checking_fio(mounted)
        .with("bsrange", "4k-128k")
        .with("rate", "2M,2M")
        .with("verify_backlog", 32)
}

/// fio with small requests at a steady rate, 5 ms apart: a longer pause has another cause than fio.
fn steady_fio(mounted: &Mounted<'_>) -> Fio {
    checking_fio(mounted).with("bs", "4k").with("rate_iops", "100,100").with("verify_backlog", 1)
}

fn checking_fio(mounted: &Mounted<'_>) -> Fio {
    Fio::new(mounted.device(), "randwrite")
        .with("iodepth", 16)
        .with("size", "100%")
        .with("verify", "crc32c")
        .with("verify_fatal", 1)
        .with("verify_state_save", 0)
}

/// Waits until requests are answered continually.
fn wait_for_io(mounted: &Mounted<'_>, meter: &StallMeter) {
    let lively = Duration::from_millis(300);
    let begun = Instant::now();
    until("I/O to go on", PATIENCE, || (meter.silent_for() < lively).then_some(()));
    until("I/O to be at work", PATIENCE, || {
        (begun.elapsed() > lively && meter.silent_for() < lively).then_some(())
    });
    assert_eq!(mounted.status().total.errors, 0, "requests failed");
}
