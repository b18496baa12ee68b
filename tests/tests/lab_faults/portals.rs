//! Several addresses of one target: over to another one, and back.

use std::time::Duration;

use rblk_tests::lab::{DEADLINE, FarHost, Mounted, StallMeter, Target, run, until};

use super::{DETECT, MIB, PATIENCE, SLACK, endless_fio, flags, serve_file, wait_for_io};

#[test]
fn fail_over_and_back() {
    run("fail_over_and_back", |lab| {
        let far = FarHost::with_cables(lab, 2);
        let _target = Target::start(lab, &serve_file(lab, 512 * MIB).on(&far));
        let [one, two] = [0, 1].map(|cable| far.hosts()[cable].clone());
        let flags = flags(format!("rdma://{one}")).path(&format!("rdma://{two}"));
        let mounted = Mounted::new(lab, &flags.flag("--failback", "1s"));
        let node = mounted.node();
        let meter = StallMeter::start(mounted.device());
        let fio = endless_fio(&mounted).start();
        let uses = |host: &str| {
            mounted.look().filter(|s| s.state == "connected" && s.address.contains(host))
        };
        for round in 0..lab.times(2, 25) {
            wait_for_io(&mounted, &meter);
            assert!(uses(&one).is_some(), "the first address is the one that is preferred");
            let _ = meter.longest();
            let cut = far.cut_cable(0);
            until("the other address to be used", DEADLINE, || uses(&two));
            wait_for_io(&mounted, &meter);
            let over = meter.longest();
            let replayed = mounted.status().total.replayed;
            // Back when it is there again, and not before; nothing is lost on the way.
            std::thread::sleep(Duration::from_secs(2));
            assert!(uses(&two).is_some(), "it went back to a cable that is cut");
            drop(cut);
            until("the first address to be used again", PATIENCE, || uses(&one));
            wait_for_io(&mounted, &meter);
            let back = meter.longest();
            println!(
                "{}: {round}: no answer for {over:.2?} on the way over, {back:.2?} on the way back",
                lab.test()
            );
            assert!(over <= DETECT + SLACK, "a stall of {over:?}");
            assert!(back <= DETECT + SLACK, "a stall of {back:?} on the way back");
            assert_eq!(mounted.status().total.replayed, replayed, "going back is no fault");
        }
        // The one that is not used may go.
        let lost = mounted.status().total.paths_lost;
        let cut = far.cut_cable(1);
        std::thread::sleep(2 * DETECT);
        assert_eq!(mounted.status().total.paths_lost, lost, "a loss of what is not used");
        drop(cut);
        let _ = fio.stop(DEADLINE).ok();
        assert_eq!(mounted.node(), node);
        assert_eq!(mounted.status().total.errors, 0);
        mounted.umount();
    });
}
