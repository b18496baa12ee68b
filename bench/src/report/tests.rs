//! Reports of made-up runs: whole runs, parts of runs, and bad data.

use super::html::unbalanced;
use super::notes::Notes;
use super::*;
use crate::result::{
    Axis, Bandwidth, Cell, Cpu, CpuProfile, Fabric, FabricDevice, Family, FunctionShare, Idle,
    Latency, Pages, PerIo, Perf, PingPong, Place, Point, Registration, Sample, Scale, ScaleLine,
    ScalePlot, SystemInfo, ThreadShare, Unit, Wait, system,
};

/// Key, title, family, transport, and how fast it is against an imagined one.
const SYSTEMS: [(&str, &str, Family, &str, f64); 7] = [
    (system::RBLK_VERBS, "rblk verbs", Family::Rblk, "rdma", 1.4),
    (system::RBLK_TCP, "rblk tcp", Family::Rblk, "tcp", 1.1),
    (system::NVME_RDMA, "nvme-rdma", Family::Kernel, "rdma", 1.0),
    (system::NVME_TCP, "nvme-tcp", Family::Kernel, "tcp", 1.15),
    (system::NBD, "NBD (nbdkit)", Family::Kernel, "tcp", 0.6),
    (system::UBLK_NULL, "ublk null", Family::Floor, "", 1.7),
    (system::LOCAL, "local RAM disk", Family::Floor, "", 5.0),
];

fn wobble(n: usize) -> f64 {
    [0.97, 1.0, 1.05, 0.99, 1.02][n % 5]
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "made up"
)]
fn latency(mean_us: f64) -> Latency {
    let ns = |factor: f64| (mean_us * factor * 1000.0) as u64;
    let mut bins = Vec::new();
    for n in 0..120_u64 {
        let factor = 0.55 + n as f64 * 0.02 + (n as f64 / 70.0).powi(6);
        let count = (40_000.0 * (-((factor - 0.9) * 4.5).powi(2)).exp()) as u64 + (120 - n) / 8;
        bins.push((ns(factor), count));
    }
    Latency {
        mean_ns: mean_us * 1000.0,
        p50: ns(0.95),
        p90: ns(1.3),
        p95: ns(1.5),
        p99: ns(2.1),
        p999: ns(3.8),
        p9999: ns(9.0),
        max: ns(20.0),
        bins,
    }
}

#[expect(clippy::cast_precision_loss, reason = "made up")]
#[expect(clippy::too_many_lines, reason = "one arm for each event")]
fn compared(run: &mut Run) {
    let mut cells = Vec::new();
    for (rw, reads) in [("randread", 100), ("randwrite", 0)] {
        for depth in [1, 8, 32, 128] {
            cells.push(Cell::new(rw, 4 << 10, depth, 1, 1, reads));
        }
    }
    for (rw, bytes, depth) in [
        ("read", 128 << 10, 16),
        ("write", 128 << 10, 16),
        ("read", 1 << 20, 8),
        ("write", 1 << 20, 8),
    ] {
        cells.push(Cell::new(rw, bytes, depth, 1, 1, 100));
    }
    cells.push(Cell::new("randrw", 4 << 10, 32, 1, 1, 70));
    for jobs in [4, 16, 64] {
        cells.push(Cell::new("randread", 4 << 10, 8, jobs, 1, 100));
    }
    for (key, title, family, transport, speed) in SYSTEMS {
        run.set_system(SystemInfo {
            key: key.into(),
            title: title.into(),
            family,
            transport: transport.into(),
            detail: "256 MiB in memory, 1 queue, depth 128".into(),
            qps: if key.starts_with("rblk-verbs") { 2 } else { 0 },
            error: None,
        });
        for (n, cell) in cells.iter().enumerate() {
            run.add_cell(cell.clone());
            if cell.jobs > 1 && !key.starts_with("rblk-verbs") && key != system::NVME_RDMA {
                continue;
            }
            let outstanding = f64::from(cell.depth * cell.jobs);
            let large = cell.block_bytes > 4 << 10;
            let base = if large {
                118e6 / cell.block_bytes as f64
            } else {
                10_500.0 * outstanding / (outstanding + 6.0)
            };
            for round in 1..=3_u32 {
                let iops = base * speed * wobble(n + round as usize * 2 + key.len());
                run.set_sample(Sample {
                    system: key.into(),
                    cell: cell.key.clone(),
                    round,
                    seconds: 4.0,
                    iops,
                    bytes_per_s: iops * cell.block_bytes as f64,
                    latency: latency(outstanding / iops * 1e6),
                    cpu: Cpu { busy: 1.7, fio: 0.3, daemons: 0.6 },
                    initiator: key.starts_with("rblk").then(|| PerIo {
                        messages: Some(1.0),
                        syscalls: Some(if cell.depth == 1 { 4.0 } else { 0.4 }),
                        switches: Some(1.1),
                        ..PerIo::default()
                    }),
                    target: key.starts_with("rblk").then(|| PerIo {
                        messages: Some(1.0),
                        syscalls: Some(0.3),
                        switches: Some(0.2),
                        ..PerIo::default()
                    }),
                    load_before: 0.05,
                    raw: format!("raw/{key}-{}-{round}.json", cell.key),
                    ..Sample::default()
                });
            }
        }
    }
    run.set_system(SystemInfo {
        key: "rnbd".into(),
        title: "RNBD".into(),
        family: Family::Kernel,
        error: Some("this kernel has no module rnbd_client: <not built>".into()),
        ..SystemInfo::default()
    });
    for round in 1..=3 {
        for (tool, bytes, qps, mean_us, mib_per_s) in [
            ("ib_send_lat", 64, 1, Some(49.0), None),
            ("ib_write_lat", 4 << 10, 1, Some(49.5), None),
            ("ib_write_bw", 128 << 10, 1, None, Some(120.0)),
            ("ib_read_bw", 128 << 10, 1, None, Some(131.0)),
            ("ib_write_bw", 128 << 10, 2, None, Some(160.0)),
            ("ib_read_bw", 128 << 10, 2, None, Some(171.0)),
        ] {
            let perf = Perf {
                tool: tool.into(),
                bytes,
                round,
                qps,
                mean_us,
                mib_per_s,
                ..Perf::default()
            };
            run.perftest.push(perf);
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "made up")]
fn measured_fabric() -> Fabric {
    let mut device = FabricDevice {
        address: "rdma://10.9.0.1".into(),
        title: "rxe0".into(),
        ..FabricDevice::default()
    };
    for pages in [Pages::Normal, Pages::Huge] {
        for shift in (12..=28).step_by(2) {
            let bytes = 1_u64 << shift;
            let each = if pages == Pages::Huge { 12.0 } else { 95.0 };
            device.registration.push(Registration {
                bytes,
                pages,
                register_ns: 9_000.0 + bytes as f64 / 4096.0 * each,
                deregister_ns: 4_000.0,
                ..Registration::default()
            });
        }
    }
    for (what, mean) in
        [("UDP", 21.0), ("TCP", 26.0), ("SEND", 49.0), ("WRITE", 47.0), ("READ", 88.0)]
    {
        for wait in [Wait::Polling, Wait::Events] {
            for bytes in [64, 4096] {
                let error = (what == "WRITE" && wait == Wait::Events)
                    .then(|| "nothing is notified of a WRITE".into());
                let factor = if wait == Wait::Events { 2.2 } else { 1.0 };
                device.pingpong.push(PingPong {
                    what: what.into(),
                    bytes,
                    wait,
                    latency: latency(mean * factor),
                    error,
                });
            }
        }
    }
    for what in ["SEND", "WRITE", "READ"] {
        for shift in (6..=20).step_by(2) {
            let bytes = 1_u64 << shift;
            let rate = 120e6 * bytes as f64 / (bytes as f64 + 3000.0);
            device.bandwidth.push(Bandwidth {
                what: what.into(),
                bytes,
                depth: 64,
                bytes_per_s: rate,
                messages_per_s: rate / bytes as f64,
            });
        }
    }
    for (bytes, mib) in [(4096, 70.0), (131_072, 117.0)] {
        let mib_per_s = Some(mib);
        device.perftest.push(Perf {
            tool: "ib_write_bw".into(),
            bytes,
            mib_per_s,
            ..Perf::default()
        });
    }
    let error = Some("no such device".into());
    Fabric {
        devices: vec![
            device,
            FabricDevice { address: "rdma://10.9.0.7".into(), error, ..FabricDevice::default() },
        ],
    }
}

fn measured_scale() -> Scale {
    let line = |label: &str, slope, flagged, points: &[(f64, f64)]| ScaleLine {
        label: label.into(),
        slope,
        flagged,
        points: points
            .iter()
            .map(|(x, y)| Point { x: *x, y: *y, low: y * 0.97, high: y * 1.04 })
            .collect(),
    };
    let plot = |key: &str, title: &str, x: (&str, Unit), y: (&str, Unit), lines| ScalePlot {
        key: key.into(),
        title: title.into(),
        x: Axis { label: x.0.into(), unit: x.1, log: true },
        y: Axis { label: y.0.into(), unit: y.1, log: false },
        lines,
        note: "Everything else held fixed.".into(),
        error: None,
    };
    Scale {
        plots: vec![
            plot(
                "iops-by-volumes",
                "IOPS against volumes",
                ("volumes", Unit::Count),
                ("IOPS", Unit::Iops),
                vec![line(
                    system::RBLK_TCP,
                    None,
                    false,
                    &[(1.0, 4400.0), (10.0, 9000.0), (100.0, 9900.0)],
                )],
            ),
            plot(
                "memory-by-sessions",
                "Memory of the target against sessions",
                ("sessions", Unit::Count),
                ("memory", Unit::Bytes),
                vec![line(
                    "resident",
                    Some(0.92),
                    false,
                    &[(1.0, 2e7), (10.0, 3e7), (100.0, 1.2e8), (1000.0, 9e8)],
                )],
            ),
            plot(
                "connect-by-sessions",
                "Time to connect against sessions",
                ("sessions", Unit::Count),
                ("time", Unit::Nanoseconds),
                vec![line(
                    "all of them",
                    Some(1.2),
                    true,
                    &[(1.0, 2e6), (10.0, 2e7), (100.0, 3e8), (1000.0, 6e9)],
                )],
            ),
        ],
        idle: Some(Idle {
            volumes: 100,
            seconds: 60.0,
            initiator_percent: 0.61,
            target_percent: 0.2,
            place: "UML".into(),
        }),
    }
}

/// A run that has everything.
fn whole() -> Run {
    let mut run = Run { id: "full, lab".into(), began_unix: 1_795_261_140, ..Run::default() };
    run.place = Place {
        host: "guest".into(),
        kernel: "7.2.12+deb14-amd64".into(),
        cpu: "QEMU TCG CPU".into(),
        cpus: 2,
        commit: "5e52f20".into(),
        lab: true,
        facts: vec![],
    };
    run.commands =
        vec![vec!["rblk-bench".into(), "compare".into(), "--cells".into(), "full".into()]];
    compared(&mut run);
    run.fabric = Some(measured_fabric());
    run.scale = Some(measured_scale());
    run.profiles.push(profile(&run));
    run
}

/// Of the first cell, with a thread whose name and functions are no words of a page.
fn profile(run: &Run) -> CpuProfile {
    let function = |name: &str, kernel, share| FunctionShare { name: name.into(), kernel, share };
    let thread = |name: &str, share, functions| ThreadShare { name: name.into(), share, functions };
    CpuProfile {
        system: system::RBLK_VERBS.into(),
        cell: run.cells[0].key.clone(),
        threads: vec![
            thread(ThreadShare::IDLE, 0.5, vec![function("pv_native_safe_halt", true, 0.5)]),
            thread(
                "poll-group",
                0.3,
                vec![
                    function("crc32_le", true, 0.125),
                    function("<a::B<c> as d::E>::f", false, 0.0625),
                ],
            ),
            thread("few", 0.009, vec![function("seldom", false, 0.009)]),
        ],
    }
}

fn page_of(run: &Run) -> String {
    let notes = Notes::parse("Quiet host.\n2: CPU-bound, see profile/a.txt.\n");
    let page = whole::write(run, &notes);
    assert_eq!(unbalanced(&page), None, "{page}");
    page
}

#[test]
fn a_whole_run_is_one_page() {
    let run = whole();
    let page = page_of(&run);
    for id in [
        "ratios",
        "goals",
        "systems",
        "latency",
        "processors",
        "profile",
        "fabric",
        "scale",
        "place",
    ] {
        assert!(page.contains(&format!("<h2 id=\"{id}\">")), "{id}");
    }
    // One file: nothing is fetched, and nothing runs.
    for word in ["<script", "src=", "@import", "url("] {
        assert!(!page.contains(word), "{word}");
    }
    assert!(
        page.contains("not measured: this kernel has no module"),
        "the system that is missing is said"
    );
    assert!(page.contains("href=\"profile/a.txt\""));
    assert!(page.contains("crc32_le (k) 12.5 %, &lt;a::B&lt;c&gt; as d::E&gt;::f 6.2 %"));
    assert!(!page.contains("pv_native_safe_halt") && !page.contains("seldom"));
    assert!(page.find("id=\"ratios\"") < page.find("id=\"goals\""), "ratios come first");
    // To look at the page: RBLK_BENCH_DRAW=DIR.
    if let Some(dir) = std::env::var_os("RBLK_BENCH_DRAW") {
        let folder = RunFolder::open(dir.as_ref()).unwrap();
        folder.save(&run).unwrap();
        draw(&run, &folder).unwrap();
    }
}

#[test]
fn parts_of_a_run_are_pages_too() {
    let mut parts = vec![Run::default()];
    parts.push(Run { fabric: None, scale: None, ..whole() });
    parts.push(Run { samples: vec![], ..whole() });
    parts.push(Run { systems: vec![], ..whole() });
    parts.push(Run { cells: vec![], perftest: vec![], ..whole() });
    parts.push(Run { fabric: Some(measured_fabric()), ..Run::default() });
    parts.push(Run { scale: Some(measured_scale()), ..Run::default() });
    parts.push(Run {
        fabric: Some(Fabric::default()),
        scale: Some(Scale::default()),
        ..Run::default()
    });
    for run in &parts {
        let page = page_of(run);
        assert!(!page.contains("NaN") && !page.contains("inf"), "{page}");
        assert!(!table::text(run).is_empty());
    }
    assert_eq!(table::text(&Run::default()), "nothing was measured\n");
}

#[test]
fn names_of_others_do_no_harm() {
    let mut run = whole();
    let evil = "</title><script>alert(1)</script>\" onload=\"x";
    for info in &mut run.systems {
        info.title = evil.into();
        info.detail = evil.into();
    }
    for cell in &mut run.cells {
        cell.rw = evil.into();
    }
    run.id = evil.into();
    run.place.kernel = evil.into();
    run.samples[0].raw = evil.into();
    let page = page_of(&run);
    assert!(!page.contains("<script"), "{page}");
}

#[test]
fn numbers_that_are_none_do_no_harm() {
    let mut run = whole();
    for sample in &mut run.samples {
        sample.iops = f64::NAN;
        sample.bytes_per_s = f64::INFINITY;
        sample.latency.mean_ns = -1.0;
    }
    for plot in &mut run.scale.as_mut().unwrap().plots {
        plot.lines[0].points[0] = Point { x: f64::NAN, y: f64::NAN, low: f64::NAN, high: f64::NAN };
    }
    page_of(&run);
    assert!(!table::text(&run).is_empty());
}

#[test]
fn the_terminal_has_the_ratios_first() {
    let text = table::text(&whole());
    let first = text.lines().nth(1).unwrap();
    assert!(
        first.starts_with("4k randread QD1") && first.contains('×') && first.ends_with("met"),
        "{text}"
    );
    assert!(text.contains("not measured: RNBD (peer): this kernel"), "{text}");
    assert!(text.contains("WORSE THAN LINEAR"), "{text}");
}

#[test]
fn figures_of_one_round_are_marked_and_counted() {
    let mut run = whole();
    let page = page_of(&run);
    assert!(page.contains(" · 3 rounds · "), "every figure has three");
    assert!(!page.contains(" n=1"));
    let kept = run.samples[0].cell.clone();
    run.samples.retain(|sample| sample.round == 1 || sample.cell == kept);
    let systems =
        run.samples.iter().filter(|sample| sample.cell == kept && sample.round == 1).count();
    let figures = run.samples.iter().filter(|sample| sample.round == 1).count();
    let page = page_of(&run);
    let text = format!("1 to 3 rounds: {} of {figures} figures have one", figures - systems);
    assert!(page.contains(&text), "{text}");
    assert!(
        page.contains(" n=1</text>") && page.contains(" single\""),
        "bars of one round are pale"
    );
}

#[test]
fn the_tiles_have_the_worst_cell_and_say_what_the_wire_is() {
    let page = page_of(&whole());
    for text in [
        "nvme-rdma: 4k writes, one at a time",
        "of the wire, 128k reads, 2 QPs each",
        "of the wire, 128k writes, 2 QPs each",
    ] {
        assert!(page.contains(text), "{text}");
    }
}

#[test]
fn a_direct_run_is_one_chart_against_the_fastest_peer() {
    let mut run = Run::default();
    let cell = Cell::new("randread", 4096, 1, 1, 1, 100);
    run.add_cell(cell.clone());
    let systems = [
        (system::RBLK_ENGINE_TCP, Family::Rblk, 300.0),
        (system::NBDKIT_TCP, Family::Kernel, 100.0),
        (system::NBDKIT_UNIX, Family::Kernel, 150.0),
    ];
    for (key, family, iops) in systems {
        run.set_system(SystemInfo { key: key.to_owned(), family, ..SystemInfo::default() });
        let (system, cell) = (key.to_owned(), cell.key.clone());
        run.set_sample(Sample { system, cell, round: 1, iops, ..Sample::default() });
    }
    let svg = chart(&run).unwrap();
    assert!(svg.starts_with("<svg xmlns=") && svg.contains("<style>"), "{svg}");
    assert!(svg.contains(&number::ratio(2.0)) && !svg.contains(&number::ratio(3.0)), "{svg}");
    assert!(page_of(&run).contains("ratio-best"));
    assert!(chart(&Run::default()).is_err());
}
