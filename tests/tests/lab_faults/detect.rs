//! A dead path is found in time.

use std::time::{Duration, SystemTime};

use rblk_tests::lab::{DEADLINE, FarHost, Mounted, StallMeter, Target, run, until};

use super::{DETECT, MIB, endless_fio, flags, serve_file, wait_for_io};

/// What is allowed on top of `--detect` until a loss is reported.
const REPORT: Duration = Duration::from_millis(500);

/// Cuts the cable, and returns how long it took until the loss was reported.
fn time_of_loss(mounted: &Mounted<'_>, far: &FarHost) -> Duration {
    let cut = far.cut();
    let status = until("the loss to be reported", DEADLINE, || {
        mounted.look().filter(|status| status.state != "connected")
    });
    let at = status.lost_at_unix_ms.map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms));
    let at = at.unwrap_or_else(SystemTime::now);
    let took = at.duration_since(cut.at).expect("it is lost after the cut");
    drop(cut);
    mounted.wait_connected();
    took
}

#[test]
fn detect_is_kept() {
    run("detect_is_kept", |lab| {
        let far = FarHost::new(lab);
        let target = Target::start(lab, &serve_file(lab, 512 * MIB).on(&far));
        let mounted = Mounted::new(lab, &flags(format!("rdma://{}", far.host())));
        for loaded in [true] {
            let meter = StallMeter::start(mounted.device());
            let fio = loaded.then(|| endless_fio(&mounted).start());
            let mut times = Vec::new();
            for _ in 0..lab.times(3, 50) {
                if loaded {
                    wait_for_io(&mounted, &meter);
                }
                times.push(time_of_loss(&mounted, &far));
            }
            println!("{}: loaded: {loaded}; losses were reported after {times:.2?}", lab.test());
            let late: Vec<_> = times.iter().filter(|time| **time > DETECT + REPORT).collect();
            assert!(late.is_empty(), "reported too late: {late:?}");
            if let Some(fio) = fio {
                wait_for_io(&mounted, &meter);
                let _ = fio.stop(DEADLINE).ok();
            }
        }
        assert_eq!(mounted.status().total.errors, 0);
        mounted.umount();
        assert_eq!(target.counts().get("protocol_errors"), 0);
    });
}
