//! `rblk-bench hw-check` on the device of the lab.

use rblk_tests::lab::{Bench, run};
use serde_json::Value;

/// A section of a check, by name.
fn section<'v>(all: &'v Value, part: &str) -> &'v Value {
    let sections = all["sections"].as_array().expect("sections");
    let found = sections.iter().find(|section| section["part"] == part);
    found.unwrap_or_else(|| panic!("no {part} in {all}"))
}

fn figure(all: &Value, part: &str, name: &str) -> f64 {
    let section = section(all, part);
    let value = section["figures"][name].as_f64();
    value.unwrap_or_else(|| panic!("no {name} in {section}"))
}

/// The verdict on a subject.
fn verdict(all: &Value, part: &str, subject: &str) -> String {
    let findings = section(all, part)["findings"].as_array().expect("findings");
    let found = findings.iter().find(|finding| finding["subject"] == subject);
    let found = found.unwrap_or_else(|| panic!("no `{subject}` in {findings:?}"));
    found["verdict"].as_str().expect("a verdict").to_owned()
}

/// The properties of the kernel's software devices are known, so the check must find them.
#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn bench_hw_check() {
    run("bench_hw_check", |lab| {
        let bench = Bench::new(lab);
        let report = lab.path("hw-check.json");
        let report_word = report.to_str().expect("a path that is text");
        let (finished, all) = bench.hw_check(&["--report", report_word]);
        assert_eq!(all["failures"], 0, "{finished}");
        assert_eq!(finished.code(), 0, "{finished}");
        let iwarp = all["transport"] == "iWARP";

        assert_eq!(verdict(&all, "device", "port"), "ok");
        assert!(figure(&all, "device", "max_qps") > 1000.0, "{finished}");
        // iWARP has no packets of its own.
        let mtu = figure(&all, "device", "mtu_bytes");
        assert!(iwarp || mtu >= 256.0, "{mtu}");
        for depth in [128, 512, 1024] {
            let granted = figure(&all, "queues", &format!("send_wrs_of_{depth}"));
            assert!(granted >= f64::from(depth), "{granted} WRs of {depth}");
        }
        for subject in ["WRITE and SEND", "READ", "inline", "gather", "a wrong key"] {
            assert_eq!(verdict(&all, "verbs", subject), "ok", "{subject}");
        }
        let imm = verdict(&all, "verbs", "WRITE_WITH_IMM");
        assert_eq!(imm, if iwarp { "skip" } else { "ok" });
        assert!(figure(&all, "drain", "outstanding") >= 99.0, "{finished}");
        assert_eq!(verdict(&all, "drain", "after destruction"), "ok");
        assert_eq!(figure(&all, "wakes", "round_trips"), 2000.0);
        assert!(figure(&all, "wakes", "sleeps") > 0.0, "{finished}");
        assert!(figure(&all, "connects", "connect_median_us_of_24") > 0.0, "{finished}");
        assert!(figure(&all, "streams", "read_131072_bytes_per_s_1_qps") > 0.0, "{finished}");
        assert_eq!(verdict(&all, "hands", "cable"), "skip");

        let kept = std::fs::read_to_string(&report).expect("the report");
        assert_eq!(serde_json::from_str::<Value>(&kept).expect("JSON"), all);

        // Runs one part alone.
        let (finished, all) = bench.hw_check(&["--only", "hands"]);
        assert_eq!(all["sections"].as_array().map(Vec::len), Some(1), "{finished}");
        let left = bench.left();
        assert!(left.is_empty(), "it left {}", left.join("; "));
    });
}
