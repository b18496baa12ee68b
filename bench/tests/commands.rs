//! `rblk-bench` as people run it: several commands into one folder, and the report of them all.
//!
//! Nothing is said of the numbers, but that they are there. What needs root, devices and peers is
//! in the lab's tests.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rblk_bench::result::Run;

/// A command that takes longer is stuck.
const LIMIT: Duration = Duration::from_secs(180);

/// Runs rblk-bench in `dir`; gives its exit code, stdout and stderr.
fn bench(dir: &Path, words: &[&str]) -> (Option<i32>, String, String) {
    let (out, err) = (dir.join("stdout"), dir.join("stderr"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_rblk-bench"))
        .args(words)
        .current_dir(dir)
        .stdin(Stdio::null())
        .stdout(File::create(&out).unwrap())
        .stderr(File::create(&err).unwrap())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("rblk-bench {words:?} does not end:\n{}", fs::read_to_string(&err).unwrap());
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let read = |file: &Path| fs::read_to_string(file).unwrap();
    (status.code(), read(&out), read(&err))
}

#[test]
fn several_commands_make_one_report() {
    let dir = tempfile::tempdir().unwrap();
    let cost = ["cost", "--sizes", "4KiB", "--ios", "256", "--out", "run"];
    let (code, table, err) = bench(dir.path(), &cost);
    assert_eq!(code, Some(0), "{err}");
    assert!(table.contains("messages"), "{table}");
    let time = ["cost", "--time", "--depths", "1", "--ios", "256", "--out", "run"];
    let (code, _, err) = bench(dir.path(), &time);
    assert_eq!(code, Some(0), "{err}");
    let (code, json, err) = bench(dir.path(), &["report", "run", "--output", "json"]);
    assert_eq!(code, Some(0), "{err}");
    let run: Run = serde_json::from_str(&json).unwrap();
    assert_eq!(run.id, "run");
    assert_eq!(run.commands.len(), 2, "{:?}", run.commands);
    assert!(!run.commands.iter().flatten().any(|word| word == "--out"), "{:?}", run.commands);
    let costs = run.cost.as_ref().unwrap();
    assert!(costs.costs.iter().all(|cost| cost.initiator.messages > 0.0), "{costs:?}");
    assert!(json.contains("\"engine_ns\""), "{json}");
    // The answer is the file.
    let kept: Run =
        serde_json::from_slice(&fs::read(dir.path().join("run/run.json")).unwrap()).unwrap();
    assert_eq!(kept, run);

    // Drawn again, with a note.
    fs::write(dir.path().join("run/notes.txt"), "3: counted twice\n").unwrap();
    let (code, table, err) = bench(dir.path(), &["report", "run"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(table.contains("4 KiB: messages"), "{table}");
    let page = fs::read_to_string(dir.path().join("run/report.html")).unwrap();
    assert!(page.contains("3: counted twice") && page.contains("\"costs\":["));
    let (code, _, err) = bench(dir.path(), &["report", "run/run.json", "--out", "again"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(dir.path().join("again/report.html").is_file());
}

/// The whole check, on the software provider: everything but what only a device has.
#[test]
fn a_device_is_checked() {
    let dir = tempfile::tempdir().unwrap();
    let words =
        ["hw-check", "tcp://127.0.0.1", "--quick", "--output", "json", "--report", "report"];
    let (code, json, err) = bench(dir.path(), &words);
    assert_eq!(code, Some(0), "{err}{json}");
    let all: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(all["failures"], 0, "{json}");
    let sections = all["sections"].as_array().unwrap();
    let parts: Vec<&str> = sections.iter().map(|one| one["part"].as_str().unwrap()).collect();
    let want = "device queues registration connects verbs drain wakes streams random hands";
    assert_eq!(parts.join(" "), want);
    let figure = |part: &str, name: &str| {
        let section = sections.iter().find(|one| one["part"] == part).unwrap();
        let value = section["figures"][name].as_f64();
        value.unwrap_or_else(|| panic!("{part} has no {name}: {section}"))
    };
    // 3 rounds of 16 RECVs, 16 WRITEs and at least one READ.
    assert!(figure("drain", "outstanding") >= 99.0, "{json}");
    assert_eq!(figure("drain", "rounds_data_after_destroy"), 0.0, "{json}");
    assert_eq!(figure("wakes", "round_trips"), 2000.0, "{json}");
    assert_eq!(figure("wakes", "lost"), 0.0, "{json}");
    for name in ["write_4096_p50_ns", "read_131072_bytes_per_s_2_qps"] {
        assert!(figure("streams", name) > 0.0, "{json}");
    }
    assert!(figure("connects", "destroy_median_us_of_24") > 0.0, "{json}");
    assert!(figure("random", "normal_reads_per_s") > 0.0, "{json}");
    // What was said is what was kept.
    let kept = fs::read_to_string(dir.path().join("report")).unwrap();
    assert_eq!(kept, json);

    let (code, table, err) =
        bench(dir.path(), &["hw-check", "tcp://127.0.0.1", "--only", "device,hands"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(table.contains("\nhands ") && !table.contains("\ndrain "), "{table}");
    assert!(table.contains("not run"), "{table}");
    // An address that leads nowhere is a failure with a mend.
    let (code, table, err) = bench(dir.path(), &["hw-check", "tcp://no.such.host.invalid"]);
    assert_eq!(code, Some(1), "{table}");
    assert!(table.contains("FAIL  address"), "{table}");
    assert!(err.contains("something failed"), "{err}");
}

#[test]
fn what_is_no_run_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let (code, _, err) = bench(dir.path(), &["report", "nowhere"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("there is no run in nowhere"), "{err}");
    fs::write(dir.path().join("run.json"), "{]").unwrap();
    let (code, _, err) = bench(dir.path(), &["report", "."]);
    assert_eq!(code, Some(1));
    assert!(err.contains("is no run"), "{err}");
    let (code, _, err) = bench(dir.path(), &["compare", "--cells", "nonsense", "--out", "x"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("nonsense"), "{err}");
}

#[test]
fn the_kept_runs_are_drawn() {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("results");
    let dir = tempfile::tempdir().unwrap();
    for run in fs::read_dir(&results).unwrap().flatten().filter(|run| run.path().is_dir()) {
        let path = run.path().display().to_string();
        let (code, table, err) = bench(dir.path(), &["report", &path, "--out", "drawn"]);
        assert_eq!(code, Some(0), "{err}");
        assert!(table.contains("IOPS, median (spread)"), "{table}");
    }
}
