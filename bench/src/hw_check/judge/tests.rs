use rblk_operate::doctor::Verdict::{Fail, Ok, Skip, Warn};

use super::*;

const MS: Duration = Duration::from_millis(1);

fn facts() -> DeviceFacts {
    DeviceFacts {
        max_qps: 131_072,
        max_wrs: 32_768,
        max_sges: 30,
        max_cqs: 1 << 20,
        max_cq_entries: 1 << 22,
        max_mrs: 1 << 24,
        max_mr_bytes: u64::MAX,
        max_pds: 1 << 23,
        max_reads_out: 16,
        max_reads_in: 16,
        vectors: 16,
        port: 1,
        is_active: true,
        mtu: 4096,
        max_mtu: 4096,
        ..DeviceFacts::default()
    }
}

fn card() -> Card {
    Card {
        state: "4: ACTIVE".to_owned(),
        rate: "100 Gb/sec (4X EDR)".to_owned(),
        link_layer: "Ethernet".to_owned(),
        gid_type: "RoCE v2".to_owned(),
        interface: "ens1".to_owned(),
        interface_mtu: Some(1500),
        numa_node: Some(1),
        cpus: "8-15".to_owned(),
        ..Card::default()
    }
}

#[test]
fn a_port_that_is_down_fails() {
    let found = port(&card(), Some(&facts()));
    assert_eq!(
        (found[0].verdict, found[0].found.as_str()),
        (Ok, "active Ethernet 100 Gb/sec (4X EDR)")
    );
    let down = DeviceFacts { is_active: false, ..facts() };
    assert_eq!(port(&card(), Some(&down))[0].verdict, Fail);
    let card = Card { state: "1: DOWN".to_owned(), ..card() };
    assert_eq!(port(&card, None)[0].verdict, Fail);
}

#[test]
fn small_packets_are_warned_of() {
    assert_eq!(mtu(&facts(), &card(), false).verdict, Ok);
    let small = mtu(&DeviceFacts { mtu: 1024, ..facts() }, &card(), false);
    assert_eq!(small.verdict, Warn);
    assert!(small.fix.unwrap().contains("ip link set ens1 mtu 4200"));
    assert_eq!(mtu(&DeviceFacts { mtu: 2048, ..facts() }, &card(), false).verdict, Ok);
    // It has no more.
    assert_eq!(
        mtu(&DeviceFacts { mtu: 1024, max_mtu: 1024, ..facts() }, &card(), false).verdict,
        Ok
    );
    assert_eq!(mtu(&DeviceFacts { mtu: 0, ..facts() }, &card(), false).verdict, Skip);
    assert_eq!(mtu(&facts(), &card(), true).verdict, Skip);
}

#[test]
fn roce_v1_is_warned_of() {
    assert_eq!(gid(&card(), Some(3), true).verdict, Ok);
    let old = Card { gid_type: "IB/RoCE v1".to_owned(), ..card() };
    assert_eq!(gid(&old, Some(2), true).verdict, Warn);
    assert_eq!(gid(&old, Some(2), false).verdict, Skip);
}

#[test]
fn a_narrow_slot_is_warned_of() {
    let link = |speed, width| Pcie { speed, max_speed: 16.0, width, max_width: 16 };
    assert_eq!(pcie(Some(&link(16.0, 16))).verdict, Ok);
    assert_eq!(pcie(Some(&link(16.0, 8))).verdict, Warn);
    assert_eq!(pcie(Some(&link(8.0, 16))).verdict, Warn);
    assert_eq!(pcie(None).verdict, Skip);
}

#[test]
fn an_unknown_node_matters_where_there_are_two() {
    let two = Host { numa_nodes: 2, ..Host::default() };
    let one = Host { numa_nodes: 1, ..Host::default() };
    let lost = Card { numa_node: None, ..card() };
    let verdicts = |card: &Card, host: &Host, facts: &DeviceFacts, soft| {
        let found = near(card, host, facts, soft);
        (found[0].verdict, found[1].verdict)
    };
    assert_eq!(verdicts(&card(), &two, &facts(), false), (Ok, Ok));
    assert_eq!(verdicts(&lost, &two, &facts(), false), (Warn, Ok));
    assert_eq!(verdicts(&lost, &one, &facts(), false), (Skip, Ok));
    let single = DeviceFacts { vectors: 1, ..facts() };
    assert_eq!(verdicts(&lost, &two, &single, true), (Skip, Ok));
    assert_eq!(verdicts(&card(), &two, &single, false), (Ok, Warn));
}

#[test]
fn limits_of_the_process_are_warned_of() {
    let host = Host { memlock: Some((8 << 20, 8 << 20)), ..Host::default() };
    let verdicts = |host: &Host| rights(host).iter().map(|f| f.verdict).collect::<Vec<_>>();
    assert_eq!(verdicts(&host), [Warn, Ok]);
    assert_eq!(verdicts(&Host { locks_beyond: true, ..host.clone() }), [Ok, Ok]);
    let free = Host { memlock: Some((u64::MAX, u64::MAX)), ..Host::default() };
    assert_eq!(verdicts(&free), [Ok, Ok]);
    let cgroup = Some("hca_handle=2 hca_object=40".to_owned());
    assert_eq!(verdicts(&Host { cgroup, ..free }), [Ok, Warn]);
    assert_eq!(verdicts(&Host::default()), [Skip, Ok]);
}

#[test]
fn small_devices_are_warned_of() {
    let bad = |facts: &DeviceFacts| {
        let found = limits(facts);
        let bad = found.into_iter().filter(|f| f.verdict != Ok);
        bad.map(|f| (f.subject, f.verdict)).collect::<Vec<_>>()
    };
    assert!(bad(&facts()).is_empty());
    let small = DeviceFacts { max_qps: 100, max_mr_bytes: 1 << 30, max_sges: 3, ..facts() };
    let names = [("QPs", Warn), ("MR size", Warn), ("SGEs", Warn)];
    assert_eq!(bad(&small), names.map(|(name, verdict)| (name.to_owned(), verdict)));
    let reads = |count| bad(&DeviceFacts { max_reads_in: count, ..facts() });
    assert_eq!(reads(1), [("READ depth".to_owned(), Warn)]);
    assert_eq!(reads(0), [("READ depth".to_owned(), Fail)]);
}

#[test]
fn a_queue_that_is_smaller_than_asked_for_fails() {
    let asked = QpLimits {
        send_wrs: 512,
        recv_wrs: 512,
        send_sges: 4,
        recv_sges: 1,
        inline_bytes: 256,
        reads_out: 16,
        reads_in: 16,
    };
    let granted = QpFacts {
        send_wrs: 1024,
        recv_wrs: 512,
        send_sges: 4,
        inline_bytes: 220,
        mtu: 4096,
        ack_timeout: 14,
        retries: 6,
        ..QpFacts::default()
    };
    let good = queue(512, &asked, Some(&granted));
    assert_eq!(good.verdict, Ok);
    assert!(good.found.contains("220 B inline"), "{}", good.found);
    assert!(good.found.contains("67.1ms x 6"), "{}", good.found);
    let short = QpFacts { recv_wrs: 511, ..granted };
    assert_eq!(queue(512, &asked, Some(&short)).verdict, Fail);
    let sges = QpFacts { send_sges: 2, ..granted };
    assert_eq!(queue(512, &asked, Some(&sges)).verdict, Warn);
    assert_eq!(queue(1024, &asked, None).verdict, Warn);
    assert_eq!(queue(512, &asked, Some(&QpFacts::default())).verdict, Ok);
}

#[test]
fn slow_steps_are_warned_of_on_cards() {
    assert_eq!(registration("r", 4 << 30, 5000 * MS, false).verdict, Warn);
    assert_eq!(registration("r", 4 << 30, 3000 * MS, false).verdict, Ok);
    assert_eq!(registration("r", 4 << 30, 5000 * MS, true).verdict, Ok);
    let times = StepTimes::of(vec![3 * MS, MS, 1200 * MS]);
    assert_eq!(times, StepTimes { median: 3 * MS, max: 1200 * MS });
    assert_eq!(StepTimes::of(Vec::new()), StepTimes::default());
    assert_eq!(step("connect", 100, times, false).verdict, Warn);
    assert_eq!(step("connect", 100, times, true).verdict, Ok);
    let verdicts = [100, 600, 5100].map(|ms| stall(100, ms * MS, false).verdict);
    assert_eq!(verdicts, [Ok, Warn, Fail]);
    assert_eq!(stall(100, 9000 * MS, true).verdict, Ok);
}

#[test]
fn bytes_after_destruction_fail_and_nothing_earlier_does() {
    let seen = Drained { outstanding: 48, before: 48, ..Drained::default() };
    assert!(drained(&seen).iter().all(|f| f.verdict == Ok));
    let late =
        Drained { before: 8, late: 40, delay: 3 * MS, changed_late: 2, changed_flushed: 1, ..seen };
    let found = drained(&late);
    assert!(found.iter().all(|f| f.verdict == Ok), "{found:?}");
    assert!(found[0].found.starts_with("40 of 48 completions came after"), "{found:?}");
    assert!(found[0].found.contains("3.00ms"), "{found:?}");
    let verdicts = |seen: &Drained| drained(seen).iter().map(|f| f.verdict).collect::<Vec<_>>();
    assert_eq!(verdicts(&Drained { missing: 3, ..seen }), [Ok, Warn, Ok]);
    assert_eq!(verdicts(&Drained { changed_destroyed: 1, ..seen }), [Ok, Fail]);
}

#[test]
fn one_lost_wake_up_fails() {
    assert_eq!(wakes(1000, 1900, 0).verdict, Ok);
    assert_eq!(wakes(1000, 1900, 1).verdict, Fail);
    assert_eq!(wakes(1000, 0, 0).verdict, Warn);
}

#[test]
fn bandwidth_is_judged_by_the_link() {
    assert_eq!(bandwidth("READ", 11e9, Some(100.0)).verdict, Ok);
    assert_eq!(bandwidth("READ", 5e9, Some(100.0)).verdict, Warn);
    assert_eq!(bandwidth("READ", 5.0, None).verdict, Ok);
}

#[test]
fn counters_of_trouble_are_told_from_others() {
    let of = |names: &[&str]| {
        counters(&names.iter().map(|name| ((*name).to_owned(), 7)).collect::<Vec<_>>())
    };
    let good = ["rx_write_requests", "port_xmit_data", "sent_pkts", "np_cnp_sent", "lifespan"];
    assert_eq!(of(&good).verdict, Ok);
    for name in [
        "out_of_sequence",
        "rnr_nak_retry_err",
        "local_ack_timeout_err",
        "packet_seq_err",
        "rx_prio3_pause",
        "tx_discards_phy",
        "RetransSegs",
        "out_of_seq_request",
        "send_rnr_err",
        "retry_exceeded_err",
        "completer_retry_err",
    ] {
        let found = of(&["sent_pkts", name]);
        assert_eq!((found.verdict, found.found), (Warn, format!("{name} +7")));
    }
}

#[test]
fn huge_pages_are_advised_where_they_help() {
    let verdicts = |normal, huge, soft| {
        random(normal, huge, soft).iter().map(|f| f.verdict).collect::<Vec<_>>()
    };
    assert_eq!(verdicts(100.0, None, false), [Ok]);
    assert_eq!(verdicts(100.0, Some(110.0), false), [Ok, Ok]);
    assert_eq!(verdicts(100.0, Some(130.0), false), [Ok, Warn]);
    assert_eq!(verdicts(100.0, Some(130.0), true), [Ok, Ok]);
    assert_eq!(verdicts(0.0, Some(0.0), false), [Ok, Ok]);
}

#[test]
fn sizes_in_words() {
    assert_eq!(
        [0, 1023, 1024, 1536, 64 << 30, u64::MAX].map(bytes_words),
        ["0 B", "1023 B", "1 KiB", "1.5 KiB", "64 GiB", "any size"]
    );
}
