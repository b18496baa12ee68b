//! The lab suite: the real programs, a real kernel, real verbs (Soft-RoCE or a card) and a real
//! block device.
//!
//! `cargo test` ignores these tests. `cargo xtask test` runs them in a guest; by hand:
//! `cargo xtask lab -- TEST-BINARY --ignored --test-threads=1 --nocapture [NAME]`. Tests whose
//! names start with `kernel_` depend on the kernel most, and also run on other kernels; those with
//! `only_bad_kernel_` run on a kernel whose ublk fails. `RBLK_LONG=1` makes each test longer.

#![forbid(unsafe_code)]

mod bench;
mod content;
mod encrypted;
mod ends;
mod hostile;
mod hw_check;
mod kernels;
mod messages;
mod refusals;
mod session;
mod two_devices;

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rblk_tests::lab::{DEADLINE, Fio, Lab, Mounted, RunningFio, TargetFlags, start, until};

const KIB: usize = 1 << 10;
const MIB: u64 = 1 << 20;

/// Time for a run of fio over some tens of MiB.
const FIO_DEADLINE: Duration = Duration::from_secs(180);

fn exists(device: &Path) -> bool {
    std::fs::metadata(device).is_ok_and(|m| m.file_type().is_block_device())
}

/// A command of the host that must work.
fn sh(words: &[&str]) -> String {
    start(words).finish(2 * DEADLINE).ok()
}

/// A target with the one file volume `v0`.
fn serve_file(lab: &Lab, bytes: u64) -> (PathBuf, TargetFlags) {
    let image = lab.image("v0.img", bytes);
    let flags = TargetFlags::default().file("v0", &image);
    (image, flags)
}

/// The writes of [`endless_fio`] before it verifies them.
const BACKLOG: u64 = 64;

/// fio that writes and verifies over and over until it is told to stop.
fn endless_fio(mounted: &Mounted) -> Fio {
    Fio::new(mounted.device(), "randwrite")
        .with("bsrange", "4k-256k")
        .with("iodepth", 16)
        .with("size", 40 * MIB)
        .with("loops", 1_000_000)
        .with("rate", "3M,3M")
        .with("verify", "crc32c")
        .with("verify_backlog", BACKLOG)
        .with("verify_fatal", 1)
        .with("verify_state_save", 0)
}

/// Stops fio after it has written and verified more blocks.
fn check_and_stop(fio: RunningFio, mounted: &Mounted) {
    let before = mounted.counts();
    until("fio to write and to check what it wrote", FIO_DEADLINE, || {
        let did = mounted.counts().since(&before);
        (did.get("writes") > 2 * BACKLOG && did.get("reads") > 2 * BACKLOG).then_some(())
    });
    let _ = fio.stop(DEADLINE).ok();
}
