//! The kernel's settings of a disk: its scheduler, and the number of its requests (sysfs,
//! Documentation/ABI/stable/sysfs-block).
//!
//! A new disk has no scheduler: its requests go to the queue at once. The disk of the target sorts
//! requests itself; a scheduler here would add a thread to every request, and split batches.
//!
//! Kernels before 6.16 need two limits more:
//!
//! - One tag of each queue stays unused ([`tune_disk`]). They notice the death of a server at once
//!   by an idle fetch, and without one by a timer of 30 s.
//! - Before a hand-over, a disk has [`FEWEST`] requests for each queue ([`limit_requests`]), so
//!   that its server can hold them all ([`DiskFiller`](crate::front::ublk::DiskFiller)).
//!
//! A change waits in the kernel for the running requests, indefinitely if the target is lost at
//! that moment. So another process writes it: that holds nothing of this process, which can end.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::front::ublk::{Device, Features};

/// The fewest requests that the kernel takes as the limit of a queue (`BLKDEV_MIN_RQ`).
pub(crate) const FEWEST: u16 = 4;
/// Between two looks at the other process.
const STEP: Duration = Duration::from_millis(2);

/// Sets the scheduler and the number of requests of a new disk, in the background.
pub(crate) fn tune_disk(device: &mut Device) {
    let (id, requests) = (device.info().id, spared(device));
    std::thread::spawn(move || {
        if is_unsorted(id) && requests.is_none() {
            return;
        }
        // With a scheduler, `nr_requests` would be the number of the scheduler's tags.
        let script =
            "echo none >\"$0/scheduler\" && { [ -z \"$1\" ] || echo \"$1\" >\"$0/nr_requests\"; }";
        let requests = requests.map(|n| n.to_string()).unwrap_or_default();
        match write(script, id, &requests).and_then(|mut child| child.wait()) {
            Ok(status) if status.success() => {}
            how if !is_unsorted(id) => {
                tracing::warn!(
                    ?how,
                    "{}/scheduler: cannot set `none`; more CPU time is used",
                    queue(id)
                );
            }
            how => tracing::debug!(?how, "{}/nr_requests", queue(id)),
        }
    });
}

/// Ends the limit of a hand-over, in the background. The user's scheduler stays.
pub(crate) fn unlimit_requests(device: &mut Device) {
    let (id, requests) = (device.info().id, spared(device));
    if let Some(requests) = requests.filter(|_| is_unsorted(id)) {
        std::thread::spawn(move || {
            let how = write(LIMIT, id, &requests.to_string()).and_then(|mut child| child.wait());
            if !how.as_ref().is_ok_and(|status| status.success()) {
                tracing::warn!(?how, "{}/nr_requests: cannot set {requests}", queue(id));
            }
        });
    }
}

/// Limits a disk to [`FEWEST`] requests for each queue, for a server that is about to leave.
/// Returns whether the limit holds.
pub(crate) fn limit_requests(id: u32, within: Duration) -> bool {
    if !is_unsorted(id) {
        // The limit would be that of the scheduler, which may keep requests back.
        return false;
    }
    let end = Instant::now() + within;
    let Ok(mut child) = write(LIMIT, id, &FEWEST.to_string()) else { return false };
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success(),
            Ok(None) if Instant::now() < end => std::thread::sleep(STEP),
            _ => return false,
        }
    }
}

const LIMIT: &str = "echo \"$1\" >\"$0/nr_requests\"";

/// The number of requests of a queue with an unused tag. `None`: the kernel needs none, or cannot
/// spare one.
fn spared(device: &mut Device) -> Option<u16> {
    let depth = device.info().depth;
    let needs_one = !device.control().features().contains(Features::QUIESCE);
    (needs_one && depth > FEWEST).then(|| depth - 1)
}

fn queue(id: u32) -> String {
    format!("/sys/block/ublkb{id}/queue")
}

/// Whether the disk has no scheduler.
fn is_unsorted(id: u32) -> bool {
    std::fs::read_to_string(format!("{}/scheduler", queue(id))).is_ok_and(|s| s.contains("[none]"))
}

/// Runs a script with the directory of the disk as `$0` and a number as `$1`.
fn write(script: &str, id: u32, number: &str) -> std::io::Result<Child> {
    Command::new("/bin/sh")
        .args(["-c", script, &queue(id), number])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}
