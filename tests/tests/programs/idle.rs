//! Disks without I/O, and their target: how often their processes wake.
//!
//! The kernel counts the wake-ups of each thread, as voluntary context switches. Only the counts
//! matter; they have room for a busy machine.

use std::path::Path;
use std::time::Duration;

use rblk_tests::guest::Served;
use rblk_tests::program::Target;

const DISKS: u64 = 3;
/// `detect` of the disks. A disk without I/O has a heart-beat every 2 s then.
const DETECT: &str = "1s";
/// A disk without I/O for 10 s is idle; the rest is for the last heart-beat of a disk in use.
const REST: Duration = Duration::from_secs(12);
const WATCHED: Duration = Duration::from_secs(8);
const HEART_BEATS: u64 = 8 / 2 + 1;
/// Wake-ups for a heart-beat: its time has come, and its answer has come. The count has room for
/// twice as many.
const EACH: u64 = 2 * 2;
/// A target with connections looks at its devices once a second.
const LOOKS: u64 = 8 + 1;

/// The wake-ups of all threads of a process since its start.
fn wakes(pid: u32) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let each = threads.flatten().map(|thread| {
        // A thread may end meanwhile.
        let status = std::fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        let count = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        count.map_or(0, |count| count.trim().parse::<u64>().unwrap())
    });
    each.sum()
}

fn serve(dir: &Path, target: &Target, disk: u64) -> Served {
    let dir = dir.join(disk.to_string());
    std::fs::create_dir(&dir).unwrap();
    let args = ["--queues", "1", "--max-io", "64KiB", "--detect", DETECT];
    Served::start(&dir, &target.address.to_string(), &format!("v{disk}"), &args)
}

#[test]
fn disks_without_io_wake_for_their_heart_beats_only() {
    let dir = tempfile::tempdir().unwrap();
    let volumes: Vec<_> = (0..DISKS).map(|disk| format!("v{disk}=1MiB")).collect();
    let volumes: Vec<_> = volumes.iter().flat_map(|volume| ["--memory", volume]).collect();
    let target = Target::start(dir.path(), &volumes);
    let disks: Vec<_> = (0..DISKS).map(|disk| serve(dir.path(), &target, disk)).collect();
    std::thread::sleep(REST);
    let count = || -> (Vec<u64>, u64) {
        (disks.iter().map(|disk| wakes(disk.pid())).collect(), target.status().total.sleeps)
    };
    let before = count();
    std::thread::sleep(WATCHED);
    let after = count();
    for (disk, (before, after)) in before.0.iter().zip(&after.0).enumerate() {
        let wakes = after - before;
        assert!(wakes <= HEART_BEATS * EACH, "disk {disk}: {wakes} wake-ups");
        assert!(wakes > 0, "disk {disk} has no heart-beat");
    }
    let wakes = after.1 - before.1;
    // Each poll group looks at its own devices.
    let groups = u64::try_from(target.status().poll_groups.len()).unwrap();
    let bound = LOOKS * groups + DISKS * HEART_BEATS * EACH;
    assert!(wakes <= bound, "the target: {wakes} wake-ups, with {groups} poll groups");
}
