//! Devices that behave like cards of several makers, below verified I/O: with kills, and with one
//! of two devices that fails.

use std::path::Path;
use std::time::{Duration, Instant};

use rblk_tests::lab::{
    Cards, DEADLINE, Lab, MountFlags, Mounted, Plug, StallMeter, Target, run, start, until,
};

use super::{MIB, endless_fio, flags, serve_file, steady_fio, wait_for_io};

const TARGET: &str = "rblk-targetd";

/// Verified I/O on devices like those of a maker, at both ends, while each end is killed.
fn verify_under_kills(lab: &Lab, plan: &str) {
    let cards = Cards::new(lab, plan);
    let served = serve_file(lab, 256 * MIB).environment(cards.environment());
    let mut target = Some(Target::start(lab, &served));
    let mut mounted = Mounted::new(lab, &flags(lab.rdma()).environment(cards.environment()));
    let meter = StallMeter::start(mounted.device());
    let fio = endless_fio(&mounted).start();
    for _ in 0..lab.times(1, 2) {
        wait_for_io(&mounted, &meter);
        target.take().expect("a target").kill();
        target = Some(Target::start(lab, &served));
        wait_for_io(&mounted, &meter);
        mounted.kill_daemon();
        mounted.recover();
        wait_for_io(&mounted, &meter);
    }
    let result = fio.stop(DEADLINE).ok();
    println!("{}: {} writes, {} reads checked", lab.test(), result.writes, result.reads);
    mounted.umount();
}

/// The profiles of the makers, from the head of `cards.c`; irdma's accept is shorter.
pub(crate) const PROFILES: [(&str, &str); 4] = [
    ("mlx5", "round late=1000 shuffle"),
    // The driver of the real card waits in accept for up to 12 s; here the wait fits
    // `connect_timeout`.
    ("irdma", "inline=101 slow-accept=300"),
    ("bnxt", "late=1000 shuffle slow-modify=1"),
    ("cxgb4", "max-sges=4 read-sges=1 max-cqe=32767"),
];

macro_rules! verified_io {
    ($($name:ident: $profile:literal),* $(,)?) => {$(
        #[test]
        #[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
        fn $name() {
            let (maker, plan) = PROFILES[$profile];
            assert!(stringify!($name).ends_with(maker));
            run(stringify!($name), |lab| verify_under_kills(lab, plan));
        }
    )*};
}

verified_io! {
    verified_io_on_devices_like_mlx5: 0,
    verified_io_on_devices_like_irdma: 1,
    verified_io_on_devices_like_bnxt: 2,
    verified_io_on_devices_like_cxgb4: 3,
}

/// The whole conformance suite of the fabric, on devices like those of each maker.
#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn conformance_of_devices_like_cards() {
    run("conformance_of_devices_like_cards", |lab| {
        let suite = std::env::var("RBLK_LAB_CONFORMANCE").unwrap_or_else(|_| {
            panic!("RBLK_LAB_CONFORMANCE has no path of the test binary `verbs_conformance`")
        });
        for (maker, plan) in PROFILES {
            let cards = Cards::new(lab, plan);
            let begun = Instant::now();
            let mut words = vec!["env".to_owned(), "RBLK_CARDS_ALL=1".to_owned()];
            words.push(format!("RBLK_TEST_RDMA_ADDR={}", lab.host()));
            words.extend(cards.environment().iter().map(|(name, value)| format!("{name}={value}")));
            words.extend([suite.clone(), "--ignored".to_owned(), "--test-threads=1".to_owned()]);
            let output = start(&words).finish(4 * DEADLINE).ok();
            let took = begun.elapsed();
            assert!(output.contains("test result: ok. 2 passed"), "{maker}: {output}");
            // The library was preloaded.
            let program = suite.rsplit('/').next().unwrap_or_default();
            assert!(!cards.asked(program, "by").is_empty(), "{maker}: no call was seen");
            println!("{maker}: 2 passed in {took:.2?}");
        }
    });
}

/// Events of a device that break nothing: of its port, its addresses and its subnet.
const HARMLESS: &str = "9 10 11 12 13 17 18";
/// Events that break one CQ, or all.
const BREAK: [(&str, &str); 2] = [("0", "the CQ of CQ_ERR to be given up"), ("8", "DEVICE_FATAL")];

/// The device with the faults, and the mount that uses it.
struct Shaken<'a> {
    lab: &'a Lab,
    mounted: &'a Mounted<'a>,
    meter: &'a StallMeter,
    cards: &'a Cards,
}

impl Shaken<'_> {
    fn paths_lost(&self) -> u64 {
        self.mounted.counts().get("paths_lost")
    }

    /// The mount loses its path by the fault, and continues after `mend`.
    fn loses_its_path(&self, what: &str, by: impl FnOnce(), mend: impl FnOnce()) {
        let before = self.paths_lost();
        by();
        until(what, DEADLINE, || (self.paths_lost() > before).then_some(()));
        mend();
        wait_for_io(self.mounted, self.meter);
    }

    /// Sends the harmless events, then those that break CQs.
    fn tells(&self, file: &Path) {
        let told = || self.cards.asked(TARGET, "event").len();
        let tell = |events: &str| {
            let (all, new) = (told() + events.split(' ').count(), file.with_extension("new"));
            std::fs::write(&new, events).expect("a file");
            std::fs::rename(&new, file).expect("its name");
            until("the events to be taken", DEADLINE, || (told() >= all).then_some(()));
        };
        let before = self.paths_lost();
        tell(HARMLESS);
        wait_for_io(self.mounted, self.meter);
        assert_eq!(self.paths_lost(), before, "by events that end nothing");
        for (event, what) in BREAK {
            self.loses_its_path(what, || tell(event), || ());
        }
    }

    /// Polling any CQ of the device fails.
    fn breaks_down(&self, file: &Path) {
        let fail = || std::fs::write(file, "").expect("a file");
        let mend = || std::fs::remove_file(file).expect("the file");
        self.loses_its_path("the device to be lost", fail, mend);
        assert!(!self.cards.asked(TARGET, "fatal").is_empty(), "no CQ broke");
    }

    fn loses_its_address(&self, plug: &Plug) {
        self.loses_its_path(
            "the address to be lost",
            || plug.lose_address(),
            || plug.regain_address(),
        );
    }

    fn is_removed(&self, plug: &Plug) {
        let pull_out = || {
            let begun = Instant::now();
            plug.pull_out();
            println!("{}: the device was let go after {:.2?}", self.lab.test(), begun.elapsed());
        };
        self.loses_its_path("the removed device to be lost", pull_out, || plug.put_back());
    }
}

/// One of two devices reports errors, breaks down, loses its address, and is removed. Mounts by the
/// other device do not notice, and its own mounts continue when it is back. No program is started
/// again.
#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn one_of_two_devices_fails_and_comes_back() {
    run("one_of_two_devices_fails_and_comes_back", |lab| {
        let plug = Plug::new(lab, true);
        let [fails, events] = ["fails", "events"].map(|name| lab.path(name));
        let [device, file] = [Plug::NAME.to_owned(), fails.display().to_string()];
        let plan = format!("fatal@{device}={file} gone@{device}={file} pulled@{device}={file}");
        let plan = format!("{plan} event@{device}={}", events.display());
        let cards = Cards::new(lab, &plan);
        let plugged = format!("rdma://{}", Plug::HOST);
        let served = serve_file(lab, 256 * MIB).file("v1", &lab.image("v1.img", 256 * MIB));
        let served = served.flag("--listen", &plugged).environment(cards.environment());
        let target = Target::start(lab, &served);
        let pid = target.status().pid;
        let steady = Mounted::new(lab, &flags(lab.rdma()));
        let shaken = MountFlags::new(plugged, "v1").flag("--detect", "2s");
        let shaken = Mounted::new(lab, &shaken);
        let (meter, shaken_meter) =
            (StallMeter::start(steady.device()), StallMeter::start(shaken.device()));
        let jobs = [steady_fio(&steady).start(), endless_fio(&shaken).start()];
        wait_for_io(&steady, &meter);
        wait_for_io(&shaken, &shaken_meter);
        let before = steady.counts();
        let _ = meter.longest();
        std::thread::sleep(Duration::from_secs(1));
        let alone = meter.longest();
        let rig = Shaken { lab, mounted: &shaken, meter: &shaken_meter, cards: &cards };
        for _ in 0..lab.times(1, 2) {
            rig.tells(&events);
            rig.breaks_down(&fails);
            rig.loses_its_address(&plug);
            rig.is_removed(&plug);
        }
        let pause = meter.longest();
        let after = steady.counts().since(&before);
        let lost = shaken.counts().get("paths_lost");
        for job in jobs {
            let _ = job.stop(DEADLINE).ok();
        }
        println!(
            "{}: the device lost {lost} paths; the mount by the other had {} I/Os and no answer for {pause:.2?} at \
             most, before {alone:.2?}",
            lab.test(),
            after.get("reads") + after.get("writes"),
        );
        for none in ["paths_lost", "replayed", "errors"] {
            assert_eq!(after.get(none), 0, "{none} of the mount by the other device");
        }
        assert_eq!(target.status().pid, pid, "the target was started again");
        steady.umount();
        shaken.umount();
    });
}
