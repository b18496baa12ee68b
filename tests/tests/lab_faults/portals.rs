//! Several addresses of one target: the mount switches to another one, and back.

use std::time::Duration;

use rblk_operate::mount::mount_status::MountStatus;
use rblk_tests::lab::{
    DEADLINE, FarHost, KernelFeature, Mounted, StallMeter, Target, Witness, run, until,
};

use super::{DETECT, MIB, PATIENCE, SLACK, endless_fio, flags, serve_file, wait_for_io};

/// The state of a mount that is connected by an address of that host.
fn uses(mounted: &Mounted<'_>, host: &str) -> Option<MountStatus> {
    mounted.look().filter(|status| status.state == "connected" && status.address.contains(host))
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn fail_over_and_back() {
    if KernelFeature::FAR_HOST.is_missing() {
        return;
    }
    run("fail_over_and_back", |lab| {
        let far = FarHost::with_cables(lab, 2);
        let _target = Target::start(lab, &serve_file(lab, 512 * MIB).on(&far));
        let [one, two] = [0, 1].map(|cable| far.hosts()[cable].clone());
        let flags = flags(format!("rdma://{one}")).path(&format!("rdma://{two}"));
        let mounted = Mounted::new(lab, &flags.flag("--failback", "1s"));
        let node = mounted.node();
        let witness = Witness::start();
        let meter = StallMeter::start(mounted.device());
        let fio = endless_fio(&mounted).start();
        let uses = |host: &str| uses(&mounted, host);
        for round in 0..lab.times(2, 4) {
            witness.judge(&format!("{}: {round}", lab.test()), || {
                until("the first address, which is preferred, to be used", PATIENCE, || uses(&one));
                wait_for_io(&mounted, &meter);
                let (_, begun) = (meter.longest(), witness.now());
                let cut = far.cut_cable(0);
                until("the other address to be used", DEADLINE, || uses(&two));
                wait_for_io(&mounted, &meter);
                let (over, slow_over) = (meter.longest(), witness.lost_since(&begun));
                let begun = witness.now();
                let replayed = mounted.status().total.replayed;
                // The mount goes back when the cable is whole, and not before; no request is lost
                // on the way.
                for _ in 0..20 {
                    std::thread::sleep(Duration::from_millis(100));
                    assert!(uses(&one).is_none(), "it went back to a cable that is cut");
                }
                let losses = || mounted.log().matches("lost the target").count();
                let told = losses();
                drop(cut);
                until("the first address to be used again", PATIENCE, || uses(&one));
                wait_for_io(&mounted, &meter);
                let (back, slow_back) = (meter.longest(), witness.lost_since(&begun));
                println!(
                    "{}: {round}: no answer for {over:.2?} on the way over, {back:.2?} on the way back",
                    lab.test()
                );
                if over > DETECT + SLACK + slow_over {
                    return Err(format!("a stall of {over:?}"));
                }
                if back > DETECT + SLACK + slow_back {
                    return Err(format!("a stall of {back:?} on the way back"));
                }
                if losses() != told {
                    return Err("the log tells of going back as of a loss".to_owned());
                }
                match mounted.status().total.replayed - replayed {
                    0 => Ok(()),
                    again => Err(format!("{again} requests sent again: going back is no fault")),
                }
            });
        }
        // The unused cable may be cut.
        witness.judge(&format!("{}: the other cable is cut", lab.test()), || {
            until("the first address to be used", PATIENCE, || uses(&one));
            wait_for_io(&mounted, &meter);
            let lost = mounted.status().total.paths_lost;
            let cut = far.cut_cable(1);
            std::thread::sleep(2 * DETECT);
            let lost = mounted.status().total.paths_lost - lost;
            drop(cut);
            if lost == 0 { Ok(()) } else { Err("a loss of what is not used".to_owned()) }
        });
        let _ = fio.stop(DEADLINE).ok();
        assert_eq!(mounted.node(), node);
        assert_eq!(mounted.status().total.errors, 0);
        mounted.umount();
    });
}
