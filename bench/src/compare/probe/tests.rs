use rblk_operate::mount::queue_counts::QueueCounts;
use rblk_operate::target::group_counts::StatsSnapshot;

use super::*;

#[test]
fn calls_are_divided_by_the_ios_of_their_window() {
    let threads = [HashSet::from([1, 2]), HashSet::from([7])];
    assert_eq!(sums(&[(1, 10), (2, 5), (7, 3), (9, 100)], &threads), [15, 3]);
    let called = |calls, ios: u64| Called { calls: [calls, 2 * calls], seen: ios };
    // 0.5, then a window with few I/Os, then 0.7, then one without any.
    let all =
        [called(100, 0), called(150, 100), called(180, 101), called(250, 201), called(260, 201)];
    let ios = |before: &u64, after: &u64| after.checked_sub(*before);
    assert_eq!(calls_per_io(&all, 0, ios), Some(0.7));
    assert_eq!(calls_per_io(&all, 1, ios), Some(1.4));
    assert_eq!(calls_per_io(&all[3..], 0, ios), None);
    assert_eq!(calls_per_io(&all[..1], 0, ios), None);
}

#[test]
fn a_disk_counts_reads_and_writes() {
    assert_eq!(
        ios_of("     120        1     8192       10       30        2 16384 5 0 1 2 0 0\n"),
        150
    );
    assert_eq!(ios_of("120 1"), 120);
    assert_eq!(ios_of(""), 0);
}

#[test]
fn both_kinds_of_switches_count() {
    let status = "Name:\tx\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t545\n";
    assert_eq!(switches(status), 695);
}

#[test]
fn waiting_is_not_busy() {
    let stat = "cpu  100 10 50 1000 200 5 5 30 100 0\ncpu0 1 2 3\n";
    assert!((busy(stat).unwrap() - 2.0).abs() < 1e-9);
    assert_eq!(busy("nothing"), None);
}

#[test]
fn what_is_spent_is_divided_by_what_was_answered() {
    let look = |ios: u64, at| Look {
        at,
        busy: ios as f64,
        initiator: Some(Usage { cpu_ns: ios * 1000, switches: ios * 2 }),
        target: None,
        counters: Counters {
            initiator: Some(QueueCounts { reads: ios, sends: ios, ..QueueCounts::default() }),
            target: Some(StatsSnapshot {
                reads: ios,
                rdma_writes_with_imm: ios,
                send_doorbells: ios / 2,
                ..StatsSnapshot::default()
            }),
        },
    };
    let begun = Instant::now();
    let spent = look(300, begun + Duration::from_secs(100)).since(&look(100, begun), None);
    assert!((spent.cpu.busy - 2.0).abs() < 1e-9);
    let (i, t) = (spent.initiator.unwrap(), spent.target.unwrap());
    assert_eq!((i.messages, i.switches, i.cpu_ns), (Some(1.0), Some(2.0), Some(1000.0)));
    assert_eq!((t.messages, t.doorbells, t.cpu_ns), (Some(1.0), Some(0.5), None));
    assert_eq!(spent.counters["target"]["send_doorbells"], 0.5);
}

#[test]
fn this_process_has_usage() {
    assert!(Usage::of(std::process::id()).is_some());
    assert!(busy_seconds() > 0.0);
}
