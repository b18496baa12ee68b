use super::*;
use crate::result::SystemInfo;

fn put(run: &mut Run, system: &str, cell: &Cell, iops: f64, mean_ns: f64) {
    run.add_cell(cell.clone());
    let mut sample = Sample {
        system: system.into(),
        cell: cell.key.clone(),
        round: 1,
        iops,
        #[expect(clippy::cast_precision_loss, reason = "small")]
        bytes_per_s: iops * cell.block_bytes as f64,
        ..Sample::default()
    };
    sample.latency.mean_ns = mean_ns;
    run.set_sample(sample);
}

fn perf(tool: &str, bytes: u64, qps: u32) -> Perf {
    Perf { tool: tool.into(), bytes, qps, round: 1, ..Perf::default() }
}

fn find<'a>(verdicts: &'a [Verdict], part: &str) -> &'a Verdict {
    verdicts.iter().find(|verdict| verdict.what.contains(part)).unwrap()
}

#[test]
fn an_empty_run_meets_nothing() {
    let verdicts = verdicts(&Run::default());
    assert!(verdicts.iter().all(|verdict| verdict.state == UNKNOWN), "{verdicts:#?}");
    for (goal, _) in GOALS {
        assert!(verdicts.iter().any(|verdict| verdict.goal == goal), "{goal}");
    }
}

#[test]
fn depth_32_needs_the_smaller_of_two() {
    let mut run = Run::default();
    let cell = gate_cell(GATE[2]);
    put(&mut run, system::NVME_RDMA, &cell, 100.0, 0.0);
    assert!((needed(&run, &cell) - 1.5).abs() < 1e-9);
    put(&mut run, system::UBLK_NULL, &cell, 140.0, 0.0);
    assert!((needed(&run, &cell) - 1.26).abs() < 1e-9);
    put(&mut run, system::RBLK_VERBS, &cell, 126.1, 0.0);
    assert_eq!(find(&ahead(&run), "randread QD32").state, MET);
    put(&mut run, system::RBLK_VERBS, &cell, 125.9, 0.0);
    assert_eq!(find(&ahead(&run), "randread QD32").state, SHORT);
    // The bound is never below that of the other cells.
    put(&mut run, system::UBLK_NULL, &cell, 90.0, 0.0);
    assert!((needed(&run, &cell) - 1.0).abs() < 1e-9);
}

#[test]
fn the_floor_at_depth_1_is_a_sum() {
    let mut run = Run::default();
    let cell = gate_cell(GATE[0]);
    put(&mut run, system::RBLK_VERBS, &cell, 1.0, 427_000.0);
    put(&mut run, system::UBLK_NULL, &cell, 1.0, 289_000.0);
    for (tool, bytes) in [("ib_send_lat", 64), ("ib_write_lat", 4096)] {
        run.perftest.push(Perf { mean_us: Some(49.0), ..perf(tool, bytes, 1) });
    }
    // 1.1 x 387 us = 425.7 us.
    assert_eq!(find(&ahead(&run), "randread QD1: mean").state, SHORT);
    put(&mut run, system::RBLK_VERBS, &cell, 1.0, 425_000.0);
    assert_eq!(find(&ahead(&run), "randread QD1: mean").state, MET);
}

/// A wire with two QPs carries more than with one.
#[test]
fn the_wire_is_measured_with_as_many_qps() {
    let mut run = Run::default();
    put(&mut run, system::RBLK_VERBS, &gate_cell(GATE[4]), 960.0, 0.0);
    for (qps, mib) in [(0, 100.0), (2, 120.0)] {
        run.perftest.push(Perf { mib_per_s: Some(mib), ..perf("ib_write_bw", 128 << 10, qps) });
    }
    let value = |run: &Run| {
        let verdict = find(&wire(run), "ib_write_bw").clone();
        (verdict.value, verdict.what.rsplit_once('(').unwrap().1.to_owned())
    };
    // Of a run from before: against one QP.
    assert_eq!(value(&run), ("1.20×".to_owned(), "perftest with one QP)".to_owned()));
    for (qps, wanted) in [(2, ("1.00×", "2 QPs each)")), (3, ("-", "3 QPs each)"))] {
        let key = system::RBLK_VERBS.into();
        run.set_system(SystemInfo { key, qps, ..SystemInfo::default() });
        assert_eq!(value(&run), (wanted.0.to_owned(), wanted.1.to_owned()));
    }
}

#[test]
fn the_worst_cell_decides() {
    let mut run = Run::default();
    for (gate, ours) in GATE.into_iter().zip([10.0, 90.0, 120.0, 99.0, 130.0, 140.0]) {
        let cell = gate_cell(gate);
        put(&mut run, system::RBLK_TCP, &cell, ours, 0.0);
        put(&mut run, system::NVME_TCP, &cell, 100.0, 0.0);
    }
    let verdicts = tcp(&run);
    let verdict = find(&verdicts, "nvme-tcp");
    // Depth 1 does not count here.
    assert_eq!(verdict.state, SHORT);
    assert!(verdict.value.contains("4k randwrite QD32"), "{verdict:?}");
    assert_eq!(find(&verdicts, "NBD").state, UNKNOWN);
}

#[test]
fn numbers_have_three_digits() {
    let told = [0.03125, 1.5, 387.2, 12926.0, 0.0, 2.0].map(plain);
    assert_eq!(told, ["0.0312", "1.5", "387", "12926", "0", "2"]);
}
