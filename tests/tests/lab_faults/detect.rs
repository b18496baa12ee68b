//! A dead path is found in time.

use std::time::{Duration, SystemTime};

use rblk_tests::lab::{
    CpuWaits, DEADLINE, FarHost, MountFlags, Mounted, StallMeter, Target, Witness, run, until,
};

use super::{MIB, endless_fio, serve_file, wait_for_io};

/// Longer than elsewhere: what a busy machine takes of each step is the same for any `--detect`,
/// and must not be more than what a detection is late by that waits for one beat too many.
const DETECT: Duration = Duration::from_secs(8);
/// What is allowed on top of `--detect` until a loss is reported.
const REPORT: Duration = Duration::from_millis(500);
/// Cuts that may say nothing, because the machine gave the mount too little time meanwhile.
const SPOILT: usize = 8;
/// What the mount may lose of its time in a cut that says something.
const LOST_MOST: Duration = Duration::from_secs(4);

/// What came of a cut.
#[derive(Debug)]
struct Cut {
    /// How long after it the loss was reported; none when the path had been lost before.
    took: Option<Duration>,
    /// For how long of that the machine stood still.
    stood: Duration,
    /// For how long of that the mount's threads could have gone on, and others had the CPUs.
    waited: Duration,
}

impl Cut {
    /// At most that much of the time was not the mount's.
    fn lost(&self) -> Duration {
        self.stood + self.waited
    }

    /// Whether it was reported too late for the time that the mount had. A thread that could go on
    /// while the whole machine stood still is in both figures.
    fn is_late(&self) -> bool {
        self.took.is_some_and(|took| took > DETECT + REPORT + self.stood.max(self.waited))
    }
}

/// Cuts the cable until the loss is reported.
fn cut(mounted: &Mounted<'_>, far: &FarHost, witness: &Witness) -> Cut {
    let (begun, waits) = (witness.now(), CpuWaits::start(mounted.pid()));
    let cut = far.cut();
    let status = until("the loss to be reported", DEADLINE, || {
        mounted.look().filter(|status| status.state != "connected")
    });
    let (stood, waited) = (witness.lost_since(&begun), waits.so_far());
    let at = status.lost_at_unix_ms.map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms));
    let at = at.unwrap_or_else(SystemTime::now);
    let took = at.duration_since(cut.at).ok();
    drop(cut);
    mounted.wait_connected();
    Cut { took, stood, waited }
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn detect_is_kept() {
    run("detect_is_kept", |lab| {
        let far = FarHost::new(lab);
        let target = Target::start(lab, &serve_file(lab, 512 * MIB).on(&far));
        let flags = MountFlags::new(format!("rdma://{}", far.host()), "v0");
        let mounted = Mounted::new(lab, &flags.flag("--detect", "8s"));
        let witness = Witness::start();
        let meter = StallMeter::start(mounted.device());
        let fio = endless_fio(&mounted).start();
        let wanted = lab.times(3, 50);
        let mut cuts: Vec<Cut> = Vec::new();
        for _ in 0..wanted + SPOILT {
            let begun = witness.now();
            wait_for_io(&mounted, &meter);
            let cut = cut(&mounted, &far, &witness);
            println!("{}: {cut:.2?}", lab.test());
            // A machine that is busy with others lengthens what is measured, and for long it ends
            // paths itself: then a cut proves nothing, either way.
            if cut.took.is_none() {
                assert!(!witness.lost_since(&begun).is_zero(), "the path was lost before the cut");
            } else if cut.lost() < LOST_MOST {
                cuts.push(cut);
            }
            if cuts.len() == wanted {
                break;
            }
        }
        let late: Vec<_> = cuts.iter().filter(|cut| cut.is_late()).collect();
        assert!(late.is_empty(), "reported too late: {late:?}");
        assert!(cuts.len() == wanted, "the machine was too busy: {} cuts count", cuts.len());
        wait_for_io(&mounted, &meter);
        let _ = fio.stop(DEADLINE).ok();
        assert_eq!(mounted.status().total.errors, 0);
        mounted.umount();
        assert_eq!(target.counts().get("protocol_errors"), 0);
    });
}
