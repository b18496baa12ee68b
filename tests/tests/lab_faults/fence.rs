//! Hosts that stop and come back after another host took their volume: their later writes have no
//! effect.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rblk_tests::lab::{
    Aligned, DEADLINE, Frozen, Lab, MountFlags, Mounted, Target, pattern, run, until,
};

use super::{MIB, PATIENCE, serve_file};

const EBADE: i32 = 52;
/// Bytes of every write.
const LEN: usize = 16 << 10;
/// The number of places, written over and over.
const PLACES: u64 = 64;

/// A writer that continues after errors.
struct Stubborn {
    stop: Arc<AtomicBool>,
    // The start of each write, and 0 or its errno.
    ends: Arc<Mutex<Vec<(Instant, i32)>>>,
    thread: Option<JoinHandle<()>>,
}

impl Stubborn {
    fn start(device: &Path) -> Self {
        let (stop, ends) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let file = Aligned::open(device, true, 0).expect("opening");
        let (stopped, told) = (Arc::clone(&stop), Arc::clone(&ends));
        let thread = std::thread::spawn(move || {
            for number in 0.. {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let begun = Instant::now();
                let result =
                    Aligned::write_at(&file, &pattern(1 << 20 | number, LEN), place(number));
                let errno = result.err().map_or(0, |e| e.raw_os_error().unwrap_or(-1));
                let told: &Mutex<Vec<(Instant, i32)>> = &told;
                told.lock().unwrap_or_else(PoisonError::into_inner).push((begun, errno));
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        Self { stop, ends, thread: Some(thread) }
    }

    /// The results of the writes that began after `since`: 0 or an errno each.
    fn ends(&self, since: Instant) -> Vec<i32> {
        let ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.iter().filter(|(at, _)| *at >= since).map(|(_, errno)| *errno).collect()
    }

    fn stop(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the writer");
        }
    }
}

impl Drop for Stubborn {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn place(number: u64) -> u64 {
    number % PLACES * MIB / 4
}

fn content(number: u64) -> Vec<u8> {
    pattern(2 << 20 | number, LEN)
}

/// Fills all places with the data of B.
fn write_all(mounted: &Mounted<'_>) {
    let file = Aligned::open(mounted.device(), true, 0).expect("opening");
    for number in 0..PLACES {
        Aligned::write_at(&file, &content(number), place(number)).expect("writing");
    }
    file.sync_all().expect("fsync");
}

/// Checks that all places have the data of B.
fn check_all(path: &Path) {
    let file = Aligned::open(path, false, 0).expect("opening");
    for number in 0..PLACES {
        let found = Aligned::read_at(&file, LEN, place(number)).expect("reading");
        assert!(found == content(number), "place {number} of {} was overwritten", path.display());
    }
}

/// The target ends the connections of a host that is silent for 4 times `detect` and 2 s.
fn host(lab: &Lab, host: &'static str, detect: &str) -> MountFlags {
    MountFlags::new(lab.rdma(), "v0").name(host).host(host).flag("--detect", detect)
}

/// A wakes up and is fenced: every request of A fails, and A unmounts in good order. A write from
/// before the fence may have been acknowledged then, and A only learns that now.
fn wakes_up_fenced(target: &Target<'_>, a: Mounted<'_>, frozen: Frozen, writer: Stubborn) {
    let since = Instant::now();
    drop(frozen);
    until("A's writes to end", PATIENCE, || (writer.ends(since).len() >= 20).then_some(()));
    let ends = writer.ends(since);
    assert!(ends.iter().all(|errno| *errno == EBADE), "writes of the fenced host: {ends:?}");
    let status = a.status();
    assert_eq!(status.state, "fenced", "{status:?}");
    println!("A says: {}", status.last_loss.unwrap_or_default());
    let error = Aligned::open(a.device(), false, 0)
        .and_then(|file| Aligned::read_at(&file, LEN, 0))
        .expect_err("a read of the fenced host");
    assert_eq!(error.raw_os_error(), Some(EBADE), "{error}");
    writer.stop();
    assert!(target.status().fencings > 0, "the target does not say that it fenced somebody");
    a.umount();
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn fence_a_stopped_host() {
    run("fence_a_stopped_host", |lab| {
        for restart in [false, true] {
            let target_flags = serve_file(lab, 64 * MIB);
            let mut target = Target::start(lab, &target_flags);
            let a = Mounted::new(lab, &host(lab, "alice", "10s"));
            let writer = Stubborn::start(a.device());
            let begun = Instant::now();
            until("A to write", DEADLINE, || (writer.ends(begun).len() > 20).then_some(()));
            let frozen = a.freeze();
            // A refusal names the holder. Only `--take-over` gets the volume.
            let refused =
                host(lab, "bob", "10s").try_mount(lab).fails_with(5, &["in use", "alice"]);
            println!("{}: B is told: {}", lab.test(), refused.trim());
            let since = Instant::now();
            let b = Mounted::new(lab, &host(lab, "bob", "10s").switch("--take-over"));
            println!("{}: B had it after {:.2?}", lab.test(), since.elapsed());
            write_all(&b);
            if restart {
                target.kill();
                target = Target::start(lab, &target_flags);
                b.wait_connected();
            }
            wakes_up_fenced(&target, a, frozen, writer);
            check_all(b.device());
            check_all(&lab.path("v0.img"));
            // B alone has the volume: its own return does not fence it.
            write_all(&b);
            b.umount();
        }
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn fence_after_the_lease() {
    run("fence_after_the_lease", |lab| {
        let target = Target::start(lab, &serve_file(lab, 64 * MIB).flag("--lease", "2s"));
        let a = Mounted::new(lab, &host(lab, "alice", "500ms"));
        let writer = Stubborn::start(a.device());
        let begun = Instant::now();
        until("A to write", DEADLINE, || (writer.ends(begun).len() > 20).then_some(()));
        let frozen = a.freeze();
        // No take-over: A's lease has ended, so B mounts a free volume.
        let since = Instant::now();
        let bob = host(lab, "bob", "500ms");
        let b = until("A's lease to end", PATIENCE, || Mounted::try_new(lab, &bob).ok());
        println!("{}: B had it after {:.2?}", lab.test(), since.elapsed());
        write_all(&b);
        b.umount();
        wakes_up_fenced(&target, a, frozen, writer);
        check_all(&lab.path("v0.img"));
    });
}
