//! The kernel's settings of a disk: its scheduler, and the number of its requests (sysfs,
//! Documentation/ABI/stable/sysfs-block).
//!
//! A new disk has no scheduler: its requests go to the queue at once. The disk of the target sorts
//! requests itself; a scheduler here would add a thread to every request, and split batches.
//!
//! Before 6.16, one tag of each queue stays unused, too. Those kernels notice the death of a server
//! at once by an idle fetch, and without one by a timer of 30 s.
//!
//! A change waits in the kernel for the running requests, indefinitely if the target is lost at
//! that moment, and meanwhile a look at any setting waits, too (`sysfs_lock`). So this process
//! touches none: other processes do, which hold nothing of it.

use std::process::{Command, ExitStatus, Stdio};

use crate::front::ublk::{Device, Features};

/// The fewest requests that the kernel takes as the limit of a queue (`BLKDEV_MIN_RQ`).
pub(super) const FEWEST: u16 = 4;
/// Arguments: the directory of the settings, and the number of requests or nothing. With a
/// scheduler, `nr_requests` would be the number of the scheduler's tags.
const TUNE: &str = r#"
read -r scheduler <"$0/scheduler"
case $scheduler in
*"[none]"*) ;;
*) echo none >"$0/scheduler" || exit 3 ;;
esac
[ -z "$1" ] || echo "$1" >"$0/nr_requests""#;
/// The exit code of [`TUNE`] if the scheduler stays.
const SORTED: i32 = 3;

/// Sets the scheduler and the number of requests of a new disk, in the background.
pub(crate) fn tune_disk(device: &mut Device) {
    let (id, requests) = (device.info().id, usual_requests(device));
    std::thread::spawn(move || {
        let queue = directory(id);
        let requests = requests.map(|n| n.to_string()).unwrap_or_default();
        let how = Command::new("/bin/sh")
            .args(["-c", TUNE, &queue, &requests])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        match how.as_ref().map(ExitStatus::code) {
            Ok(Some(0)) => {}
            Ok(Some(SORTED)) | Err(_) => {
                tracing::warn!(?how, "{queue}/scheduler: cannot set `none`; more CPU time is used");
            }
            Ok(_) => tracing::debug!(?how, "{queue}/nr_requests"),
        }
    });
}

/// The number of requests of a queue with an unused tag. `None`: the kernel needs none, or cannot
/// spare one.
pub(crate) fn usual_requests(device: &mut Device) -> Option<u16> {
    let depth = device.info().depth;
    let needs_one = !device.control().features().contains(Features::QUIESCE);
    (needs_one && depth > FEWEST).then(|| depth - 1)
}

/// The directory of a disk's settings.
pub(super) fn directory(id: u32) -> String {
    format!("/sys/block/ublkb{id}/queue")
}
