//! Faults of every kind, one after the other, below a verifying fio and below a file system. Each
//! is a stall that ends with its cause.

use std::rc::Rc;
use std::time::{Duration, Instant};

use rblk_tests::lab::{
    DEADLINE, FarHost, FileSystem, KernelFeature, KernelLog, Lab, Mounted, RunningFio, StallMeter,
    Target, TargetFlags, Witness, run, until,
};

use super::writer::{Writer, check};
use super::{DETECT, MIB, SLACK, endless_fio, flags, serve_file, sh, wait_for_io};

/// A device, with all programs and links below it that can be interrupted.
struct Life<'l> {
    lab: &'l Lab,
    far: Option<&'l FarHost>,
    target_flags: TargetFlags,
    target: Option<Target<'l>>,
    mounted: Mounted<'l>,
    meter: StallMeter,
    witness: Rc<Witness>,
    /// Targets that died while a request was under way.
    died_interrupted: usize,
    /// Initiators that died.
    crashes: usize,
}

impl<'l> Life<'l> {
    fn new(lab: &'l Lab, far: Option<&'l FarHost>, bytes: u64) -> Self {
        let mut target_flags = serve_file(lab, bytes);
        let mut address = lab.rdma();
        if let Some(far) = far {
            target_flags = target_flags.on(far);
            address = format!("rdma://{}", far.host());
        }
        let target = Target::start(lab, &target_flags);
        let mounted = Mounted::new(lab, &flags(address));
        let meter = StallMeter::start(mounted.device());
        Self {
            lab,
            far,
            target_flags,
            target: Some(target),
            mounted,
            meter,
            witness: Rc::new(Witness::start()),
            died_interrupted: 0,
            crashes: 0,
        }
    }

    /// Interrupts I/O by `cause`, which returns after the repair. The stall must end soon after.
    /// After a failure for which the machine may be the reason, tries again.
    fn interrupt(&mut self, what: &str, mut cause: impl FnMut(&mut Self)) {
        let witness = Rc::clone(&self.witness);
        witness.judge(&format!("{}: {what}", self.lab.test()), || {
            wait_for_io(&self.mounted, &self.meter);
            let node = self.mounted.node();
            let (_, begun) = (self.meter.longest(), witness.now());
            let since = Instant::now();
            cause(self);
            let repaired = since.elapsed();
            wait_for_io(&self.mounted, &self.meter);
            let (stall, lost) = (self.meter.longest(), witness.lost_since(&begun));
            println!("{}: {what} for {repaired:.2?}: no answer for {stall:.2?}", self.lab.test());
            assert_eq!(self.mounted.node(), node, "the device is another one");
            if stall > repaired + DETECT + SLACK + lost {
                return Err(format!("a stall of {stall:?}"));
            }
            Ok(())
        });
    }

    fn cut(&mut self, time: Duration) {
        self.interrupt("the cable was cut", |life| {
            let cut = life.far.expect("a far host").cut();
            std::thread::sleep(time);
            drop(cut);
        });
    }

    fn restart_target(&mut self) {
        self.interrupt("the target was dead", |life| {
            let target = life.target.take().expect("a target");
            // At this rate most moments have no request under way, so the test waits for one.
            let frozen = target.freeze();
            let sent = life.mounted.status().total.sends;
            let interrupted = until("a request to be sent", DEADLINE, || {
                let status = life.mounted.status();
                // If the machine stands still, the path may be lost first.
                (status.total.sends > sent || status.state != "connected")
                    .then_some(status.total.sends > sent)
            });
            life.died_interrupted += usize::from(interrupted);
            target.kill();
            drop(frozen);
            life.target = Some(Target::start(life.lab, &life.target_flags));
        });
    }

    fn crash_initiator(&mut self) {
        self.interrupt("the initiator was dead", |life| {
            life.mounted.kill_daemon();
            life.mounted.recover();
            life.crashes += 1;
        });
    }

    fn fio(&self) -> RunningFio {
        endless_fio(&self.mounted).start()
    }

    fn end(self, fio: RunningFio) {
        let fio = fio.stop(DEADLINE).ok();
        let status = self.mounted.status();
        println!(
            "{}: {} writes and {} reads; {} requests were sent again",
            self.lab.test(),
            fio.writes,
            fio.reads,
            status.total.replayed
        );
        assert_eq!(status.total.errors, 0);
        self.mounted.umount();
    }
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn link_cut() {
    if KernelFeature::FAR_HOST.is_missing() {
        return;
    }
    run("link_cut", |lab| {
        let far = FarHost::new(lab);
        let mut life = Life::new(lab, Some(&far), 1024 * MIB);
        let fio = life.fio();
        // Shorter than the detection, a little longer, and long enough for the pauses between
        // attempts to grow.
        let times = [1000, 3000, 6000].map(Duration::from_millis);
        for time in times.into_iter().cycle().take(lab.times(3, 6)) {
            life.cut(time);
        }
        life.end(fio);
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn target_kill_restart() {
    run("target_kill_restart", |lab| {
        let mut life = Life::new(lab, None, 1024 * MIB);
        let fio = life.fio();
        let times = lab.times(3, 6);
        for _ in 0..2 * times {
            life.restart_target();
            if life.died_interrupted >= times {
                break;
            }
        }
        let interrupted = life.died_interrupted;
        assert!(
            interrupted >= times,
            "the machine was too busy: {interrupted} deaths while a request waited"
        );
        let replayed = life.mounted.status().total.replayed;
        assert!(replayed >= interrupted as u64, "{replayed} requests were sent again");
        life.end(fio);
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn initiator_kill_recover() {
    run("initiator_kill_recover", |lab| {
        let mut life = Life::new(lab, None, 1024 * MIB);
        let fio = life.fio();
        let times = lab.times(3, 6);
        for _ in 0..times {
            life.crash_initiator();
        }
        assert_eq!(life.mounted.status().recovered as usize, life.crashes);
        // A service restarts like this after a kill.
        let again = flags(lab.rdma());
        life.interrupt("the service was dead", |life| {
            life.mounted.kill_daemon();
            life.mounted.mount_again(&again);
        });
        life.end(fio);
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn ext4_sees_nothing() {
    if KernelFeature::FAR_HOST.is_missing() {
        return;
    }
    run("ext4_sees_nothing", |lab| {
        let far = FarHost::new(lab);
        let mut life = Life::new(lab, Some(&far), 128 * MIB);
        let device = life.mounted.dev();
        let dir = lab.path("mnt");
        sh(&["mkfs.ext4", "-q", "-F", &device]);
        let log = KernelLog::mark(lab);
        let fs = FileSystem::mount("ext4", &device, &dir, &[]);
        let writer = Writer::start(&dir);
        for _ in 0..lab.times(2, 4) {
            life.cut(Duration::from_secs(3));
            life.restart_target();
            life.crash_initiator();
        }
        let files = writer.stop();
        println!("{}: {} files written", lab.test(), files.end);
        assert_eq!(log.complaints(), Vec::<String>::new(), "the kernel complains");
        check(&dir, files.clone());
        fs.umount();
        sh(&["fsck.ext4", "-fn", &device]);
        life.mounted.umount();
        // The page cache may have served these reads; a new device has no page cache.
        life.mounted = Mounted::new(lab, &flags(format!("rdma://{}", far.host())));
        let fs = FileSystem::mount("ext4", &life.mounted.dev(), &dir, &["-o", "ro"]);
        check(&dir, files);
        fs.umount();
        assert_eq!(log.complaints(), Vec::<String>::new(), "the kernel complains");
        life.mounted.umount();
    });
}
