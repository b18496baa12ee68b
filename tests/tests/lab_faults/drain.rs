//! A drained target causes no repeated requests.

use std::time::Instant;

use rblk_tests::lab::{DEADLINE, MountFlags, Mounted, StallMeter, Target, Witness, run};

use super::{MIB, endless_fio, serve_file, wait_for_io};

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn drain_replays_nothing() {
    run("drain_replays_nothing", |lab| {
        let target_flags = serve_file(lab, 512 * MIB).flag("--drain-timeout", "20s");
        let mut target = Target::start(lab, &target_flags);
        // A drain is announced, so no loss has to be detected. Requests under way must be answered
        // within the mount's time limit for them, at most 2 s.
        let mount_flags = MountFlags::new(lab.rdma(), "v0").flag("--detect", "20s");
        let mounted = Mounted::new(lab, &mount_flags);
        let node = mounted.node();
        let witness = Witness::start();
        let meter = StallMeter::start(mounted.device());
        let fio = endless_fio(&mounted).with("iodepth", 4).start();
        for round in 0..lab.times(2, 5) {
            witness.judge(&format!("{}: {round}", lab.test()), || {
                wait_for_io(&mounted, &meter);
                let replayed = mounted.status().total.replayed;
                let _ = meter.longest();
                let since = Instant::now();
                target.terminate();
                let ended = target.wait(DEADLINE);
                let took = since.elapsed();
                assert_eq!(ended.code(), Some(0), "{}", target.log());
                target = Target::start(lab, &target_flags);
                let away = since.elapsed();
                wait_for_io(&mounted, &meter);
                println!(
                    "{}: {round}: drained in {took:.2?}, back after {away:.2?}, no answer for {:.2?}",
                    lab.test(),
                    meter.longest()
                );
                match mounted.status().total.replayed - replayed {
                    0 => Ok(()),
                    again => Err(format!("{again} requests were sent again")),
                }
            });
        }
        let _ = fio.stop(DEADLINE).ok();
        assert_eq!(mounted.node(), node);
        mounted.umount();
    });
}
