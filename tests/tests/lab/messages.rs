//! What an I/O costs in messages, completions and packets, by the counters of both ends and of the device; and an idle
//! mount, which costs next to nothing.

use std::time::{Duration, Instant};

use rblk_tests::lab::{Counts, Fio, MountFlags, Mounted, Target, cpu_time, fabric_packets, run};

use super::{FIO_DEADLINE, MIB, serve_file};

/// One line of the table of messages: what `ios` I/Os cost.
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

#[test]
fn counters_prove_the_messages() {
    run("counters_prove_the_messages", |lab| {
        // A part of the volume for each case: what another one left in the cache may lie in pieces, and data in
        // many pieces takes more than one message.
        const PART: u64 = 64 * MIB;
        let (_, flags) = serve_file(lab, 6 * PART);
        let target = Target::start(lab, &flags);
        let mounted = Mounted::new(lab, &MountFlags::new(lab.rdma(), "v0"));
        let status = mounted.status();
        let (with_imm, is_iwarp) = (status.write_with_imm, status.transport == "iWARP");
        // Two requests next to each other must stay two.
        mounted.sysfs().set("queue/nomerges", "2");
        let ios = 200 * lab.long(10);
        let measure = |part: u64, rw: &str, bs: &str, depth: u32| {
            let before = (mounted.counts(), target.counts(), fabric_packets());
            let fio = Fio::new(mounted.device(), rw)
                .with("bs", bs)
                .with("iodepth", depth)
                .with("number_ios", ios)
                .with("offset", part * PART)
                .with("size", PART)
                .run(FIO_DEADLINE)
                .ok();
            assert_eq!(fio.reads + fio.writes, ios);
            Cost {
                ios,
                initiator: mounted.counts().since(&before.0),
                target: target.counts().since(&before.1),
                wire: fabric_packets().since(&before.2),
            }
        };
        Cost::print_head();
        let mut wire = Vec::new();
        let cases = [
            ("read 4k", "randread", "4k", 16),
            ("read 128k", "randread", "128k", 16),
            ("write 4k", "randwrite", "4k", 16),
            ("write 128k", "randwrite", "128k", 16),
            ("read 4k qd1", "randread", "4k", 1),
            ("write 4k qd1", "randwrite", "4k", 1),
        ];
        for (part, (case, rw, bs, depth)) in (0..).zip(cases) {
            let cost = measure(part, rw, bs, depth);
            cost.print(case);
            let (i, t) = (|name| cost.initiator.get(name), |name| cost.target.get(name));
            let in_capsule = case.starts_with("write 4k");
            let reads = if rw == "randread" { ios } else { 0 };
            let writes = ios - reads;
            // One command each, alone in its SEND or with others of its turn, and nothing failed.
            let commands = i("sends") - i("lists") + i("listed");
            assert_eq!((i("reads"), i("writes"), commands), (reads, writes, ios), "{case}");
            assert_eq!((t("reads"), t("writes")), (reads, writes), "{case}");
            assert_eq!(i("errors") + t("failed_commands"), 0, "{case}");
            // Answers: data and answer in one message where the device can, else two. What has no data may share.
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
                assert_eq!((i("lists"), t("lists")), (0, 0), "{case}: nobody waits for company");
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
            // A completion per message that answers, and few for SENDs.
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
        std::thread::sleep(Duration::from_secs(1));
        let used = || [cpu_time(target.pid()), cpu_time(mounted.pid())];
        let (since, before) = (Instant::now(), used());
        std::thread::sleep(Duration::from_secs(5));
        let (elapsed, after) = (since.elapsed(), used());
        for (who, after, before) in
            [("target", after[0], before[0]), ("initiator", after[1], before[1])]
        {
            let percent = 100.0 * (after - before).as_secs_f64() / elapsed.as_secs_f64();
            println!("{}: the idle {who} used {percent:.2} % of a CPU", lab.test());
            assert!(percent < 1.0, "the idle {who} used {percent:.2} % of a CPU");
        }
        mounted.umount();
    });
}
