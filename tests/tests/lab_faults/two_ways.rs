//! Two ways of a block device, of which one fails again and again, while fio verifies.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use rblk_tests::lab::{
    CableFault, Cards, CpuWaits, DEADLINE, FarHost, Fio, KernelFeature, Lab, LatencyLog, Mounted,
    StallMeter, Target, Witness, run, until,
};

use super::{DETECT, MIB, PATIENCE, flags, serve_file, wait_for_io};

/// A way fails so often, or as often as it comes back.
const EVERY: Duration = Duration::from_secs(5);

/// A mount with two ways to a far host, on the machine whose CPUs are watched.
struct TwoWays<'l> {
    lab: &'l Lab,
    far: &'l FarHost,
    mounted: Mounted<'l>,
    meter: StallMeter,
    witness: Witness,
}

/// A fault, and what it cost.
struct Round {
    cable: usize,
    how: CableFault,
    at: SystemTime,
    /// How long the mount was kept off its CPUs until the loss was told.
    kept_off: Duration,
}

impl TwoWays<'_> {
    fn told(&self, line: &str) -> usize {
        self.mounted.log().matches(line).count()
    }

    fn until_told(&self, line: &str, count: usize) {
        until(line, PATIENCE, || (self.told(line) >= count).then_some(()));
    }

    /// fio with requests of all sizes, each of which is verified.
    fn fio(&self, log: &Path) -> Fio {
        let fio = Fio::new(self.mounted.device(), "randwrite")
            .with("bsrange", "4k-1M")
            .with("iodepth", 32)
            .with("size", "100%")
            .with("rate", "4M,4M")
            .with("verify", "crc32c")
            .with("verify_backlog", 32)
            .with("verify_fatal", 1)
            .with("verify_state_save", 0);
        LatencyLog::ask(fio, log)
    }

    /// A run in which nothing fails.
    fn calm(&self, lasts: Duration) -> LatencyLog {
        let log = self.lab.path("calm");
        let fio = self.fio(&log).start();
        std::thread::sleep(lasts);
        let _ = fio.stop(DEADLINE).ok();
        LatencyLog::take(&log)
    }

    /// A way fails, and comes back.
    fn fail(&self, cable: usize, how: CableFault) -> Round {
        let (lost, joined) = ("lost a path", "one more path carries requests");
        let (losses, joins) = (self.told(lost), self.told(joined));
        let (begun, stopped) = (Instant::now(), self.witness.now());
        let waits = CpuWaits::start(self.mounted.pid());
        let broken = self.far.break_cable(cable, how);
        let at = broken.at;
        self.until_told(lost, losses + 1);
        let kept_off = self.witness.lost_since(&stopped).max(waits.so_far());
        wait_for_io(&self.mounted, &self.meter);
        drop(broken);
        self.until_told(joined, joins + 1);
        wait_for_io(&self.mounted, &self.meter);
        std::thread::sleep(EVERY.saturating_sub(begun.elapsed()));
        Round { cable, how, at, kept_off }
    }

    /// The rounds of a run, and the requests that were sent again.
    fn fail_in_turn(&self, kinds: &[CableFault], rounds: usize) -> (LatencyLog, Vec<Round>, u64) {
        let log = self.lab.path("failing");
        let replayed = self.mounted.status().total.replayed;
        let fio = self.fio(&log).start();
        wait_for_io(&self.mounted, &self.meter);
        let kind = kinds.iter().cycle();
        let rounds =
            (0..rounds).zip(kind).map(|(round, how)| self.fail(round / kinds.len() % 2, *how));
        let rounds: Vec<Round> = rounds.collect();
        let result = fio.stop(DEADLINE).ok();
        let again = self.mounted.status().total.replayed - replayed;
        println!("{}: {} writes, {} reads checked", self.lab.test(), result.writes, result.reads);
        (LatencyLog::take(&log), rounds, again)
    }

    /// What users of the disk felt. It is told and bounds nothing.
    fn tell(&self, calm: &LatencyLog, log: &LatencyLog, rounds: &[Round], again: u64) {
        let test = self.lab.test();
        let ends = rounds.iter().skip(1).map(|round| round.at).chain([SystemTime::now()]);
        for (round, end) in rounds.iter().zip(ends) {
            let Round { cable, how, at, kept_off } = round;
            let longest = log.longest_between(*at, end);
            let beyond = longest.saturating_sub(DETECT + *kept_off);
            println!(
                "{test}: cable {cable} {how:?}: a request took {longest:.2?}, the mount was kept \
                 off its CPUs for {kept_off:.2?}: {beyond:.2?} beyond detect"
            );
        }
        // Those that were sent again are among the slowest.
        let others = log.p99_without(usize::try_from(again).unwrap_or(usize::MAX));
        let before = calm.p99_without(0);
        println!(
            "{test}: p99 of {} requests of the other way {others:.2?}, without faults {before:.2?} \
             ({} requests): {:.2} times; {again} sent again",
            log.len() as u64 - again.min(log.len() as u64),
            calm.len(),
            others.as_secs_f64() / before.as_secs_f64().max(f64::MIN_POSITIVE),
        );
    }
}

/// Ways fail by turns. No request fails, fio reads what it wrote, and the mount is never without a
/// way.
fn ways_fail_in_turn(
    lab: &Lab,
    scheme: &str,
    kinds: &[CableFault],
    (rounds, cards): (usize, &str),
) {
    let cards = (!cards.is_empty()).then(|| Cards::new(lab, cards));
    let environment = || cards.as_ref().map(Cards::environment).unwrap_or_default();
    let far = FarHost::with_cables(lab, 2);
    let served = serve_file(lab, 512 * MIB).environment(environment());
    let target = Target::start(lab, &served.on(&far));
    let [one, two] = [0, 1].map(|cable| format!("{scheme}://{}", far.hosts()[cable]));
    let flags = flags(one).path(&two).flag("--paths", "all").environment(environment());
    // A way that falls often is tried ever more seldom.
    let mounted = Mounted::new(lab, &flags.reconnect_delay("20ms"));
    let (meter, witness) = (StallMeter::start(mounted.device()), Witness::start());
    let node = mounted.node();
    let ways = TwoWays { lab, far: &far, mounted, meter, witness };
    ways.until_told("one more path carries requests", 1);
    let calm = ways.calm(Duration::from_secs(if rounds > 10 { 60 } else { 6 }));
    let (log, found, again) = ways.fail_in_turn(kinds, rounds);
    ways.tell(&calm, &log, &found, again);
    let TwoWays { mounted, .. } = ways;
    assert_eq!(mounted.log().matches("lost the target").count(), 0, "{}", mounted.log());
    assert_eq!((mounted.node(), mounted.status().total.errors), (node, 0));
    mounted.umount();
    assert_eq!(target.counts().get("protocol_errors"), 0);
}

const BY_RDMA: [CableFault; 3] = [CableFault::Cut, CableFault::Silent, CableFault::Stalled];
const BY_TCP: [CableFault; 4] =
    [CableFault::Cut, CableFault::Silent, CableFault::Stalled, CableFault::NoAddress];

macro_rules! failing_ways {
    ($($name:ident: $scheme:literal, $kinds:ident, $usual:literal, $long:literal, $cards:literal),* $(,)?) => {$(
        #[test]
        #[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
        fn $name() {
            if KernelFeature::FAR_HOST.is_missing() {
                return;
            }
            let name = stringify!($name);
            run(name, |lab| {
                let rounds = (lab.times($usual, $long), $cards);
                ways_fail_in_turn(lab, $scheme, &$kinds, rounds);
            });
        }
    )*};
}

failing_ways! {
    one_of_two_ways_fails_again_and_again: "rdma", BY_RDMA, 3, 120, "",
    one_of_two_ways_by_tcp_fails_again_and_again: "tcp", BY_TCP, 4, 120, "",
    // Cards that give completions late, in another order, and take long to destroy a QP.
    one_of_two_late_cards_fails_again_and_again: "rdma", BY_RDMA, 3, 30,
        "round late=1000 shuffle slow-destroy=300",
}
