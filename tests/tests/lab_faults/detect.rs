//! A dead path is found in time.

use std::time::{Duration, SystemTime};

use rblk_tests::lab::{DEADLINE, FarHost, Mounted, StallMeter, Target, Witness, run, until};

use super::{DETECT, MIB, endless_fio, flags, serve_file, wait_for_io};

/// What is allowed on top of `--detect` until a loss is reported.
const REPORT: Duration = Duration::from_millis(500);
/// Cuts that may say nothing, because the machine stood still meanwhile.
const SPOILT: usize = 20;

/// Cuts the cable, and returns how long it took until the loss was reported; none when the path had been lost
/// before.
fn time_of_loss(mounted: &Mounted<'_>, far: &FarHost) -> Option<Duration> {
    let cut = far.cut();
    let status = until("the loss to be reported", DEADLINE, || {
        mounted.look().filter(|status| status.state != "connected")
    });
    let at = status.lost_at_unix_ms.map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms));
    let at = at.unwrap_or_else(SystemTime::now);
    let took = at.duration_since(cut.at).ok();
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
        let witness = Witness::start();
        let meter = StallMeter::start(mounted.device());
        let fio = endless_fio(&mounted).start();
        let wanted = lab.times(3, 50);
        let mut times = Vec::new();
        for _ in 0..wanted + SPOILT {
            let begun = witness.now();
            wait_for_io(&mounted, &meter);
            let took = time_of_loss(&mounted, &far);
            // A machine that stands still lengthens what is measured, and for long it ends paths itself: then a cut
            // proves nothing, either way.
            let lost = witness.lost_since(&begun);
            match took {
                Some(took) if lost < DETECT / 4 => times.push((took, lost)),
                None if lost.is_zero() => panic!("the path was lost before the cut"),
                _ => println!(
                    "{}: {took:.2?} does not count: the machine stood still for {lost:.2?}",
                    lab.test()
                ),
            }
            if times.len() == wanted {
                break;
            }
        }
        println!(
            "{}: losses were reported after {times:.2?} (of which it stood still)",
            lab.test()
        );
        let late: Vec<_> =
            times.iter().filter(|(time, lost)| *time > DETECT + REPORT + *lost).collect();
        assert!(late.is_empty(), "reported too late: {late:?}");
        assert!(times.len() == wanted, "the machine was too busy: {} cuts count", times.len());
        wait_for_io(&mounted, &meter);
        let _ = fio.stop(DEADLINE).ok();
        assert_eq!(mounted.status().total.errors, 0);
        mounted.umount();
        assert_eq!(target.counts().get("protocol_errors"), 0);
    });
}
