//! A target that is drained leaves nothing to be sent again.

use rblk_tests::lab::{DEADLINE, Mounted, StallMeter, Target, run};

use super::{MIB, endless_fio, flags, serve_file, wait_for_io};

#[test]
fn drain_replays_nothing() {
    run("drain_replays_nothing", |lab| {
        let target_flags = serve_file(lab, 512 * MIB).flag("--drain-timeout", "20s");
        let mut target = Target::start(lab, &target_flags);
        let mounted = Mounted::new(lab, &flags(lab.rdma()));
        let node = mounted.node();
        let meter = StallMeter::start(mounted.device());
        let fio = endless_fio(&mounted).start();
        for round in 0..lab.times(3, 25) {
            wait_for_io(&mounted, &meter);
            let _ = meter.longest();
            let since = std::time::Instant::now();
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
            assert_eq!(mounted.status().total.replayed, 0, "requests were sent again");
        }
        let _ = fio.stop(DEADLINE).ok();
        assert_eq!(mounted.node(), node);
        mounted.umount();
    });
}
