//! The table of kernels in docs/install.md: a mount on this kernel, and the verdict of `doctor`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rblk_operate::ublk_faults::{Certainty, judge, of_this_process};
use rblk_tests::lab::{
    DEADLINE, Fio, KernelLog, Lab, MountFlags, Mounted, Running, Target, run, run_last, until,
};
use serde_json::Value;

use super::{FIO_DEADLINE, MIB, endless_fio, serve_file};

/// The document, and the beginning of its table.
const DOCUMENT: &str = "docs/install.md";
const HEAD: &str = "| kernel | a disk | after a kill | in a pid namespace | `doctor` says |";
/// Set to `write`, it makes the test write the row of this kernel.
const WRITE: &str = "RBLK_KERNELS";
/// The exit code of a mount or a doctor that finds a bad kernel.
const HOST_LACKS: i32 = 7;
/// Time for a command to the driver, its cancellation, and a process that cannot end.
const BOUND: Duration = Duration::from_secs(60);

/// A row of the table.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Row(Vec<String>);

impl Row {
    fn parse(line: &str) -> Self {
        let line = line.trim().trim_start_matches('|').trim_end_matches('|');
        Self(line.split('|').map(|cell| cell.trim().to_owned()).collect())
    }

    fn text(&self) -> String {
        format!("| {} |", self.0.join(" | "))
    }

    /// The numbers of the release.
    fn release(&self) -> Vec<u32> {
        let numbers = self.0[0].split(|c: char| !c.is_ascii_digit());
        numbers.filter_map(|number| number.parse().ok()).take(3).collect()
    }

    /// Whether this row describes the kernel of the other one: the same release, or another of its
    /// series that does the same.
    fn covers(&self, other: &Self) -> bool {
        self.release()[..2] == other.release()[..2] && self.0[1..] == other.0[1..]
    }
}

/// The lines of the document around the table, and the rows of the table.
struct Table {
    before: Vec<String>,
    rows: Vec<Row>,
    after: Vec<String>,
}

impl Table {
    fn read(path: &Path) -> Self {
        let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{DOCUMENT}: {e}"));
        let mut lines = text.lines().map(str::to_owned);
        let mut before: Vec<String> = lines.by_ref().take_while(|line| line != HEAD).collect();
        before.extend([HEAD.to_owned(), lines.next().expect("the line below the head")]);
        let rest: Vec<String> = lines.collect();
        let end = rest.iter().position(|line| !line.starts_with('|')).expect("the table's end");
        let rows = rest[..end].iter().map(|line| Row::parse(line)).collect();
        Self { before, rows, after: rest[end..].to_vec() }
    }

    fn set(&mut self, row: Row) {
        self.rows.retain(|other| other.0[0] != row.0[0] && !other.covers(&row));
        self.rows.push(row);
        self.rows.sort_by_key(Row::release);
    }

    fn write(&self, path: &Path) {
        let rows: Vec<String> = self.rows.iter().map(Row::text).collect();
        let text = [&self.before[..], &rows, &self.after].concat().join("\n") + "\n";
        std::fs::write(path, text).unwrap_or_else(|e| panic!("{DOCUMENT}: {e}"));
    }
}

fn document() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(DOCUMENT)
}

fn release() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("the release");
    text.trim().to_owned()
}

/// The doctor's findings about the kernel that are not in order.
fn doctor(lab: &Lab) -> String {
    let mut command = lab.program("rblk-initiator");
    command.args(["doctor", "-o", "json"]);
    let said = Running::start(command).finish(DEADLINE);
    let report: Value =
        serde_json::from_str(&said.stdout).unwrap_or_else(|e| panic!("{e}: {said}"));
    let findings = report["findings"].as_array().expect("findings").iter();
    let about = findings.filter(|f| f["subject"] == "kernel" && f["verdict"] != "ok");
    let words: Vec<String> = about
        .map(|finding| {
            let text = |key: &str| finding[key].as_str().expect("a text");
            let (_, found) = text("found").split_once(": ").expect("a release");
            format!("{}: {found}", text("verdict"))
        })
        .collect();
    if words.is_empty() { "ok".to_owned() } else { words.join("; ") }
}

/// Writes and verifies, kills the process of the mount below running I/O, recovers, and verifies
/// again.
fn serves_and_recovers(mut mounted: Mounted) {
    Fio::verify(mounted.device(), 8 * MIB).run(FIO_DEADLINE).ok();
    let mut fio = endless_fio(&mounted).start();
    let writes = |mounted: &Mounted| mounted.counts().get("writes");
    until("fio to be at work", DEADLINE, || (writes(&mounted) > 20).then_some(()));
    mounted.kill_daemon();
    mounted.recover();
    until("fio to be at work again", DEADLINE, || (writes(&mounted) > 20).then_some(()));
    assert!(fio.is_running(), "fio saw an error");
    let _ = fio.stop(DEADLINE).ok();
    Fio::verify(mounted.device(), 8 * MIB).run(FIO_DEADLINE).ok();
    mounted.umount();
}

/// The row of this kernel, by what its mounts do.
fn row(lab: &Lab) -> Row {
    let log = KernelLog::mark(lab);
    let flags = MountFlags::new(lab.tcp(), "v0");
    let is_bad = of_this_process().iter().any(|fault| fault.certainty == Certainty::Certain);
    let namespace_is_bad =
        judge(&release(), true).iter().any(|fault| fault.certainty == Certainty::Certain);
    let [works, refused, nothing] = ["works", "refused", "-"].map(str::to_owned);
    let (disk, kill) = match Mounted::try_new(lab, &flags) {
        Ok(mounted) => {
            serves_and_recovers(mounted);
            (works.clone(), "recovers".to_owned())
        }
        Err(said) => {
            println!("{}", said.fails_with(HOST_LACKS, &["first good release is", "--any-kernel"]));
            (refused.clone(), nothing)
        }
    };
    assert_eq!(disk == refused, is_bad, "the mount and the faults differ");
    let said = flags.try_in_pid_namespace(lab);
    let namespace = if said.code() == 0 {
        works
    } else {
        println!("{}", said.fails_with(HOST_LACKS, &["first good release is", "--any-kernel"]));
        refused.clone()
    };
    assert_eq!(namespace == refused, namespace_is_bad, "the mount and the faults differ");
    if namespace == refused && disk != refused {
        // The kernel itself.
        let said = flags.switch("--any-kernel").try_in_pid_namespace(lab);
        println!("{}", said.fails_with(HOST_LACKS, &["START_DEV", "pid namespace of the host"]));
    }
    assert_eq!(log.complaints(), Vec::<String>::new(), "the kernel complains");
    let kernel = release().trim_end_matches("-amd64").to_owned();
    Row(vec![kernel, disk, kill, namespace, doctor(lab)])
}

#[test]
#[ignore = "needs the lab: ublk, RDMA and root; `cargo xtask test` runs it there"]
fn kernel_is_in_the_table() {
    run("kernel_is_in_the_table", |lab| {
        let (_, flags) = serve_file(lab, 64 * MIB);
        let _target = Target::start(lab, &flags);
        let row = row(lab);
        println!("{}", row.text());
        let mut table = Table::read(&document());
        if std::env::var(WRITE).as_deref() == Ok("write") {
            table.set(row);
            return table.write(&document());
        }
        assert!(
            table.rows.iter().any(|known| known.covers(&row)),
            "{DOCUMENT} has no row like this one; `{WRITE}=write` writes it:\n{}",
            row.text()
        );
    });
}

#[test]
#[ignore = "needs a kernel whose ublk fails, in the lab; `cargo xtask test --long` runs it there"]
fn only_bad_kernel_a_crash_is_reported_in_time() {
    run_last("only_bad_kernel_a_crash_is_reported_in_time", |lab| {
        assert!(
            of_this_process().iter().any(|fault| fault.certainty == Certainty::Certain),
            "ublk of {} is not known to fail",
            release()
        );
        let (_, flags) = serve_file(lab, 64 * MIB);
        let _target = Target::start(lab, &flags);
        // The lab ends a guest at the first crash otherwise.
        std::fs::write("/proc/sys/kernel/panic_on_oops", "0").expect("panic_on_oops");
        let log = KernelLog::mark(lab);
        let flags = MountFlags::new(lab.tcp(), "v0").switch("--any-kernel");
        // The second one meets the lock that the first one left.
        for name in ["first", "second"] {
            let said = flags.clone().name(name).try_mount(lab);
            assert!(said.took < BOUND, "{said}");
            let texts = ["ADD_DEV of a new ublk device did not finish within 10s", "dmesg"];
            let took = said.took;
            println!("{name}: after {took:.1?}: {}", said.fails_with(1, &texts).trim());
        }
        let lines = log.lines();
        let crash = lines.iter().find(|line| line.contains("BUG: kernel NULL pointer dereference"));
        println!("{}", crash.expect("a crash in the kernel's log"));
        assert!(
            lines.iter().any(|line| line.contains("RIP:") && line.contains("[ublk_drv]")),
            "{lines:#?}"
        );
        // The commands still answer.
        let list = lab.initiator(&["list"], BOUND);
        let took = list.took;
        println!("list after {took:.1?}: {}", list.ok().trim());
        println!("{}", doctor(lab));
    });
}

#[test]
fn a_row_is_replaced_in_order() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("x.md");
    let text = format!(
        "a\n{HEAD}\n| --- |\n| 6.12.95+deb12 | works | r | works | ok |\n\
         | 7.2.12+deb13 | works | r | works | ok |\n\nb\n"
    );
    std::fs::write(&path, &text).expect("a file");
    let mut table = Table::read(&path);
    let row = |line: &str| Row::parse(line);
    table.set(row("| 6.18.5+deb13 | refused | - | refused | FAIL |"));
    table.set(row("| 7.2.13+deb14 | works | r | works | ok |"));
    table.write(&path);
    let expected = text
        .replace("7.2.12+deb13", "7.2.13+deb14")
        .replace("| 7.2", "| 6.18.5+deb13 | refused | - | refused | FAIL |\n| 7.2");
    assert_eq!(std::fs::read_to_string(&path).expect("a file"), expected);
    assert!(table.rows[0].covers(&row("| 6.12.118 | works | r | works | ok |")));
    assert!(!table.rows[0].covers(&row("| 6.12.118 | works | r | refused | ok |")));
    assert!(!table.rows[1].covers(&row("| 6.18.15 | works | r | works | ok |")));
}
