//! The costs of an I/O in messages, completions and packets, by the counters of both ends and of
//! the device; and an idle mount, which costs next to nothing.

use std::time::{Duration, Instant};

use rblk_tests::lab::{
    Counts, DEADLINE, Fio, MountFlags, Mounted, Target, Witness, cpu_time, fabric_packets, run,
    until,
};

use super::{FIO_DEADLINE, MIB, serve_file};

/// The counters of both ends, and those of the target alone.
const COUNTED: [&str; 9] = [
    "reads",
    "writes",
    "sends",
    "signaled",
    "completions",
    "lists",
    "listed",
    "recvs",
    "in_capsule_writes",
];
const COUNTED_AT_TARGET: [&str; 5] =
    ["admin_commands", "rdma_writes", "rdma_writes_with_imm", "rdma_reads", "failed_commands"];

/// Repetitions of cases.
const REPEATS: u64 = 4;

/// One line of the table of messages: the costs of `ios` I/Os.
struct Cost {
    ios: u64,
    initiator: Counts,
    target: Counts,
    wire: Counts,
}

impl Cost {
    fn print_head() {
        println!(
            "{:<12} {:>5} | {:>6} {:>6} | {:>6} {:>6} {:>6} {:>6} | {:>6} {:>6} | {:>7} {:>6}",
            "per I/O",
            "I/Os",
            "i.SEND",
            "i.cqe",
            "t.SEND",
            "t.WR",
            "t.WRIM",
            "t.READ",
            "t.sig",
            "t.cqe",
            "packets",
            "errors"
        );
    }

    fn print(&self, case: &str) {
        let per = |n: u64| format!("{:.2}", n as f64 / self.ios as f64);
        let t = |name| per(self.target.get(name));
        let answers = self.target.get("sends") - self.target.get("admin_commands");
        println!(
            "{case:<12} {:>5} | {:>6} {:>6} | {:>6} {:>6} {:>6} {:>6} | {:>6} {:>6} | {:>7} {:>6}",
            self.ios,
            per(self.initiator.get("sends")),
            per(self.initiator.get("completions")),
            per(answers),
            t("rdma_writes"),
            t("rdma_writes_with_imm"),
            t("rdma_reads"),
            t("signaled"),
            t("completions"),
            per(self.wire.nonzero().filter(|(n, _)| *n == "sent_pkts").map(|(_, v)| v).sum()),
            self.initiator.get("errors") + self.target.get("failed_commands"),
        );
    }
}

/// The counters of both ends and of the device, after all work is counted: threads publish some
/// counts at the end of a turn, and count the last completions late.
fn settled(mounted: &Mounted, target: &Target, witness: &Witness) -> [Counts; 3] {
    let look = || [mounted.counts(), target.counts(), fabric_packets()];
    until("both ends to be still", DEADLINE, || {
        let (begun, before) = (witness.now(), look());
        std::thread::sleep(Duration::from_millis(100));
        let after = look();
        let same = |end: usize, name: &&str| before[end].get(name) == after[end].get(name);
        let still = COUNTED.iter().all(|name| same(0, name) && same(1, name))
            && COUNTED_AT_TARGET.iter().all(|name| same(1, name));
        // No thread lacked the CPU, either.
        (still && witness.lost_since(&begun).is_zero()).then_some(after)
    })
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
#[expect(clippy::too_many_lines, reason = "one case after another")]
fn counters_prove_the_messages() {
    run("counters_prove_the_messages", |lab| {
        // A part of the volume for each case: blocks that another case left in the cache may be
        // scattered, and scattered data takes more than one message.
        const PART: u64 = 64 * MIB;
        let cases = [
            ("read 4k", "randread", "4k", 16),
            ("read 128k", "randread", "128k", 16),
            ("write 4k", "randwrite", "4k", 16),
            ("write 128k", "randwrite", "128k", 16),
            ("read 4k qd1", "randread", "4k", 1),
            ("write 4k qd1", "randwrite", "4k", 1),
        ];
        let parts = cases.len() as u64 + REPEATS;
        let (_, flags) = serve_file(lab, parts * PART);
        let target = Target::start(lab, &flags);
        // No end sends KEEP_ALIVE, even if the machine stands still.
        let mount_flags = MountFlags::new(lab.rdma(), "v0").flag("--detect", "30s");
        let mounted = Mounted::new(lab, &mount_flags);
        let witness = Witness::start();
        let status = mounted.status();
        let (with_imm, is_iwarp) = (status.write_with_imm, status.transport == "iWARP");
        // The kernel must not merge two neighbouring requests.
        mounted.sysfs().set("queue/nomerges", "2");
        // fio reads and writes no block twice, and a part has 512 of 128 KiB.
        let ios = (200 * lab.long(10)).min(PART / (128 << 10));
        let measure = |part: u64, rw: &str, bs: &str, depth: u32| {
            let before = settled(&mounted, &target, &witness);
            let fio = Fio::new(mounted.device(), rw)
                .with("bs", bs)
                .with("iodepth", depth)
                .with("number_ios", ios)
                .with("offset", part * PART)
                .with("size", PART)
                .run(FIO_DEADLINE)
                .ok();
            assert_eq!(fio.reads + fio.writes, ios);
            let after = settled(&mounted, &target, &witness);
            let [initiator, target, wire] = [0, 1, 2].map(|at| after[at].since(&before[at]));
            Cost { ios, initiator, target, wire }
        };
        Cost::print_head();
        let mut wire = Vec::new();
        let mut parts = 0..parts;
        for (case, rw, bs, depth) in cases {
            let cost = loop {
                let part =
                    parts.next().expect("the machine was too busy: too many cases say nothing");
                let cost = measure(part, rw, bs, depth);
                cost.print(case);
                let [beats, lost] = ["beats", "paths_lost"].map(|name| cost.initiator.get(name));
                if (beats, lost) == (0, 0) {
                    break cost;
                }
                println!("{case}: {beats} beats and {lost} lost paths are in this, so once more");
            };
            let (i, t) = (|name| cost.initiator.get(name), |name| cost.target.get(name));
            let in_capsule = case.starts_with("write 4k");
            let reads = if rw == "randread" { ios } else { 0 };
            let writes = ios - reads;
            // One command each, alone in its SEND or with others of its turn, and no failure.
            let commands = i("sends") - i("lists") + i("listed");
            assert_eq!((i("reads"), i("writes"), commands), (reads, writes, ios), "{case}");
            assert_eq!((t("reads"), t("writes")), (reads, writes), "{case}");
            assert_eq!(i("errors") + t("failed_commands"), 0, "{case}");
            // Answers: data and answer in one message if the device can, else two. Answers without
            // data may share a message.
            let messages = t("sends") - t("admin_commands");
            let answers = messages - t("lists") + t("listed");
            if with_imm {
                assert_eq!(
                    (t("rdma_writes_with_imm"), t("rdma_writes"), answers),
                    (reads, 0, writes),
                    "{case}"
                );
                assert_eq!(i("immediates"), reads, "{case}");
            } else {
                assert_eq!(
                    (t("rdma_writes_with_imm"), t("rdma_writes"), answers),
                    (0, reads, ios),
                    "{case}"
                );
            }
            if depth == 1 {
                assert_eq!((i("lists"), t("lists")), (0, 0), "{case}: no request waits for others");
            }
            // Data of writes: in the command, or fetched by one READ.
            let fetched = if in_capsule { 0 } else { writes };
            // On iWARP only a READ proves that data has left, so there are some more.
            let proofs = t("rdma_reads") - fetched;
            assert!(
                proofs == 0 || is_iwarp && proofs <= ios / 16,
                "{case}: {proofs} READs too many"
            );
            assert_eq!(t("in_capsule_writes"), writes - fetched, "{case}");
            assert_eq!(i("in_capsule_writes"), writes - fetched, "{case}");
            assert_eq!(i("keyed_commands"), reads + fetched, "{case}");
            // A completion per answering message, and few for SENDs.
            let arrived = messages + t("rdma_writes_with_imm");
            assert_eq!(i("completions"), arrived + i("signaled"), "{case}");
            assert!(
                i("signaled") <= ios / 16 + 2,
                "{case}: {} of {ios} SENDs were signaled",
                i("signaled")
            );
            assert_eq!(i("copied_bytes"), 0, "{case}");
            wire.push((case, cost.wire));
        }
        println!("what the RDMA device counted, both ends together:");
        for (case, counts) in wire {
            let text: Vec<String> =
                counts.nonzero().map(|(name, value)| format!("{name} {value}")).collect();
            println!("{case:<12} {}", text.join(", "));
        }
        mounted.umount();
    });
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn idle_uses_no_cpu() {
    run("idle_uses_no_cpu", |lab| {
        let (_, flags) = serve_file(lab, 64 * MIB);
        let target = Target::start(lab, &flags);
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        Fio::new(mounted.device(), "randread")
            .with("bs", "4k")
            .with("size", "1M")
            .run(FIO_DEADLINE)
            .ok();
        let used = || [cpu_time(target.pid()), cpu_time(mounted.pid())];
        // The lowest result counts: pauses of the machine only add to the usage.
        let witness = Witness::start();
        let mut least = [f64::INFINITY; 2];
        for _ in 0..3 {
            std::thread::sleep(Duration::from_secs(1));
            let (begun, since, before) = (witness.now(), Instant::now(), used());
            std::thread::sleep(Duration::from_secs(5));
            let (elapsed, after) = (since.elapsed(), used());
            let elapsed = elapsed.saturating_sub(witness.lost_since(&begun));
            for (at, who) in ["target", "initiator"].into_iter().enumerate() {
                let used = (after[at] - before[at]).as_secs_f64();
                let percent = 100.0 * used / elapsed.as_secs_f64();
                println!("{}: the idle {who} used {percent:.2} % of a CPU", lab.test());
                least[at] = least[at].min(percent);
            }
            if least.iter().all(|percent| *percent < 1.0) {
                break;
            }
        }
        assert!(
            least.iter().all(|percent| *percent < 1.0),
            "the idle ends used {least:.2?} % of a CPU"
        );
        mounted.umount();
    });
}
