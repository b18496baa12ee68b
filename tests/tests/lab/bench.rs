//! `rblk-bench`: it measures everything and leaves nothing. Nothing may be left before it.

use rblk_tests::lab::{Bench, run};

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn bench_compare_smoke() {
    run("bench_compare_smoke", |lab| {
        let bench = Bench::new(lab);
        let before = bench.left();
        assert!(before.is_empty(), "there was before: {}", before.join("; "));
        let compared = bench.compare("whole");
        for system in &compared.systems {
            assert_eq!(system.error, None, "{} was not measured", system.key);
            for cell in &compared.cells {
                let sample = compared.sample(&system.key, &cell.key, 1);
                let sample = sample.unwrap_or_else(|| panic!("no {} {}", system.key, cell.key));
                assert!(sample.iops > 0.0 && sample.errors == 0, "{sample:?}");
                assert!(sample.latency.p50 > 0 && !sample.latency.bins.is_empty(), "{sample:?}");
                assert!(lab.path("whole").join(&sample.raw).exists(), "{}", sample.raw);
            }
        }
        // All known systems but the one that only spins.
        assert_eq!((compared.systems.len(), compared.cells.len()), (7, 2));
        // Each command of a mount is one message, and the kernel counts system calls here.
        if bench.may_probe() {
            let ours = compared.sample("rblk-verbs", "randread-4k-qd1-j1-q1", 1).expect("ours");
            let initiator = ours.initiator.expect("counters of the mount");
            let messages = initiator.messages.expect("messages");
            assert!((0.99..1.05).contains(&messages), "{messages} messages");
            assert!(initiator.syscalls.is_some_and(|calls| calls > 0.0), "{initiator:?}");
        } else {
            println!("{}: skipped: the costs of I/Os, on this kernel", lab.test());
        }
        let left = bench.left();
        assert!(left.is_empty(), "a whole run left {}", left.join("; "));

        bench.kill_amid("killed");
        let left = bench.left();
        println!("{}: a killed run left {} things", lab.test(), left.len());
        for part in ["/sys/class/nvme", "nvmet/ports", "ublkb", "connected", "module", "process"] {
            assert!(left.iter().any(|what| what.contains(part)), "no {part} in {left:?}");
        }
        println!("{}", bench.clean_up().ok().trim());
        let left = bench.left();
        assert!(left.is_empty(), "clean-up left {}", left.join("; "));
    });
}
