//! A dead path is detected in time.

use std::time::{Duration, SystemTime};

use rblk_tests::lab::{
    CpuWaits, DEADLINE, FarHost, KernelFeature, MountFlags, Mounted, StallMeter, Target, Witness,
    run, until,
};

use super::{MIB, endless_fio, serve_file, wait_for_io};

/// Longer than in other tests. The delay by a busy machine does not depend on `--detect`, and must
/// stay below the delay of a detection that waits for one beat too many.
const DETECT: Duration = Duration::from_secs(8);
/// The time allowed on top of `--detect` until a loss is reported.
const REPORT: Duration = Duration::from_millis(500);
/// Most cuts that prove nothing, because the machine gave the mount too little time.
const SPOILT: usize = 8;
/// The time that the mount may lose in a cut that still proves something.
const LOST_MOST: Duration = Duration::from_secs(4);

/// The result of a cut.
#[derive(Debug)]
struct Cut {
    /// The time from the cut to the report; none if the path had been lost before.
    took: Option<Duration>,
    /// How long the machine stood still in that time.
    stood: Duration,
    /// How long the mount's threads were ready in that time without a CPU.
    waited: Duration,
}

impl Cut {
    /// An upper bound of the time that the mount lost.
    fn lost(&self) -> Duration {
        self.stood + self.waited
    }

    /// Whether the report was late, measured by the mount's own time. Both figures include the time
    /// in which a ready thread had no CPU because the whole machine stood still.
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
    if KernelFeature::FAR_HOST.is_missing() {
        return;
    }
    run("detect_is_kept", |lab| {
        let far = FarHost::new(lab);
        let target = Target::start(lab, &serve_file(lab, 512 * MIB).on(&far));
        let flags = MountFlags::new(format!("rdma://{}", far.host()), "v0");
        let mounted = Mounted::new(lab, &flags.flag("--detect", "8s"));
        let witness = Witness::start();
        let meter = StallMeter::start(mounted.device());
        let fio = endless_fio(&mounted).start();
        let wanted = lab.times(2, 5);
        let mut cuts: Vec<Cut> = Vec::new();
        for _ in 0..wanted + SPOILT {
            let begun = witness.now();
            wait_for_io(&mounted, &meter);
            let cut = cut(&mounted, &far, &witness);
            println!("{}: {cut:.2?}", lab.test());
            // A busy machine lengthens the measured time, and a long pause ends paths itself: then
            // a cut proves nothing, either way.
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
