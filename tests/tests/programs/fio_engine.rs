//! The engine of fio, with the installed fio and real targets over TCP: fio writes, reads back and
//! compares.
//!
//! The tests need fio and the source package of that fio. `RBLK_SKIP_FIO=1` skips them.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use rblk_tests::built;
use rblk_tests::program::{Target, wait_for};
use serde_json::Value;

const MIB: usize = 1 << 20;
/// Limit on one run of fio, in seconds. No run comes near it.
const LIMIT: &str = "120";

/// The engine, built once; none if this run skips the tests.
pub(super) fn engine() -> Option<PathBuf> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    if std::env::var("RBLK_SKIP_FIO").is_ok_and(|word| word == "1") {
        println!("skipped: RBLK_SKIP_FIO is set");
        return None;
    }
    let engine = BUILT.get_or_init(|| {
        // In the build directory: a static value is never dropped and could not remove a temporary
        // one.
        let engine = Path::new(env!("CARGO_TARGET_TMPDIR")).join("librblk_fio.so");
        let output = built::xtask("fio-engine").arg("--out").arg(&engine).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "no engine (RBLK_SKIP_FIO=1 goes without): {said}");
        engine
    });
    Some(engine.clone())
}

/// A target with a volume `v` in a file, and the arguments to start it again.
fn start(dir: &Path) -> (Target, Vec<String>) {
    let (image, file) = (dir.join("v.img"), dir.join("target.toml"));
    std::fs::write(&image, vec![0; 16 * MIB]).unwrap();
    let text = format!(
        "[[volume]]\nname = 'v'\nstore = 'file'\npath = '{}'\ncache = 'none'\n",
        image.display()
    );
    std::fs::write(&file, text).unwrap();
    let args = vec!["--config".to_owned(), file.display().to_string()];
    (Target::start(dir, &words(&args)), args)
}

fn words(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

/// A run of fio, which ends by itself.
pub(super) struct Fio {
    child: Child,
    results: PathBuf,
}

/// The results of a run.
pub(super) struct Results {
    pub(super) code: Option<i32>,
    said: String,
    jobs: Vec<Value>,
}

impl Fio {
    /// Starts fio on a volume with these arguments.
    pub(super) fn start(
        engine: &Path,
        dir: &Path,
        target: &Target,
        volume: &str,
        job: &[&str],
    ) -> Self {
        let results = dir.join("fio.json");
        let address = target.address.to_string().replace(':', "\\:");
        let mut command = Command::new("timeout");
        command.args(["--signal=KILL", LIMIT, "fio", "--thread", "--output-format=json"]);
        command.arg(format!("--ioengine=external:{}", engine.display()));
        command.arg(format!("--filename={address}/{volume}"));
        command.arg(format!("--output={}", results.display()));
        // Leaves the CPUs to other tests of this machine.
        command.args(["--rblk_sleep", "--name=job"]).args(job);
        command.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.stderr(std::fs::File::create(dir.join("fio.err")).unwrap()).spawn();
        Self { child: child.expect("fio is not installed: apt-get install fio"), results }
    }

    pub(super) fn end(mut self) -> Results {
        let code = self.child.wait().unwrap().code();
        let said = std::fs::read_to_string(&self.results).unwrap_or_default();
        let errors = std::fs::read_to_string(self.results.with_extension("err")).unwrap();
        // fio puts its complaints before the results.
        let json = said.find("\n{").map_or(said.as_str(), |at| &said[at..]);
        let json: Value = serde_json::from_str(json).unwrap_or_default();
        let jobs = json["jobs"].as_array().cloned().unwrap_or_default();
        Results { code, said: said + &errors, jobs }
    }
}

impl Results {
    /// Checks that every job ended well. Returns the requests of all jobs, by kind.
    #[track_caller]
    pub(super) fn assert_well(&self, kinds: &[&str]) -> Vec<u64> {
        assert_eq!(self.code, Some(0), "{}", self.said);
        assert!(!self.jobs.is_empty());
        for job in &self.jobs {
            assert_eq!((&job["error"], &job["total_err"]), (&0.into(), &Value::Null), "{job}");
        }
        let of = |kind: &&str| {
            self.jobs.iter().map(|job| job[*kind]["total_ios"].as_u64().unwrap_or(0)).sum()
        };
        kinds.iter().map(of).collect()
    }
}

#[test]
fn fio_reads_what_it_wrote() {
    let Some(engine) = engine() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (target, _) = start(dir.path());
    let run = |job: &[&str]| Fio::start(&engine, dir.path(), &target, "v", job).end();
    let verify = ["--rw=randwrite", "--bs=4k", "--size=4M", "--iodepth=16", "--verify=crc32c"];
    assert_eq!(run(&verify).assert_well(&["write", "read"]), [1024, 1024]);
    let mixed = ["--rw=randrw", "--bsrange=4k-64k", "--size=4M", "--iodepth=8", "--verify=sha256"];
    let behind = ["--verify_backlog=32", "--verify_async=2", "--fsync=16"];
    run(&[&mixed[..], &behind].concat()).assert_well(&[]);
    let pattern = ["--rw=write", "--bs=64k", "--size=4M", "--verify=pattern"];
    run(&[&pattern[..], &["--verify_pattern=0xc0ffee"]].concat()).assert_well(&[]);
    // Parallel jobs have a queue each, and later jobs have another session.
    let several = ["--rw=randread", "--bs=4k", "--size=2M", "--iodepth=4", "--numjobs=3"];
    let later = ["--name=later", "--stonewall", "--rw=randtrim", "--bs=8k", "--size=2M"];
    let found = run(&[&several[..], &later].concat()).assert_well(&["read", "trim"]);
    assert_eq!(found, [3 * 512, 256]);
    wait_for("the end of the sessions", || target.status().sessions.is_empty().then_some(()));
}

/// fio's comparison works: it finds a byte that another program changed.
#[test]
fn fio_finds_a_changed_byte() {
    let Some(engine) = engine() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (target, _) = start(dir.path());
    let run = |job: &[&str]| Fio::start(&engine, dir.path(), &target, "v", job).end();
    let job = ["--bs=4k", "--size=1M", "--iodepth=8", "--verify=crc32c", "--rw=write"];
    run(&[&job[..], &["--do_verify=0"]].concat()).assert_well(&[]);
    let image = dir.path().join("v.img");
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[100 * 4096 + 2000] ^= 1;
    std::fs::write(&image, bytes).unwrap();
    let results = run(&[&job[..], &["--verify_only"]].concat());
    assert_ne!(results.code, Some(0));
    assert!(results.said.contains("verify"), "{}", results.said);
}

/// Requests wait for a killed target, and are sent again.
#[test]
fn fio_finds_no_error_when_the_target_is_killed_and_started_again() {
    let Some(engine) = engine() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (mut target, args) = start(dir.path());
    let config = dir.path().join("mount.toml");
    let text = format!("target = ['{}']\nvolume = 'v'\nreconnect_delay = '20ms'\n", target.address);
    std::fs::write(&config, text).unwrap();
    // A limited rate, so that the target dies while there is more to write.
    let job = ["--rw=randwrite", "--bs=4k", "--size=8M", "--iodepth=16", "--rate_iops=1000"];
    let more = format!("--rblk_config={}", config.display());
    let job = [&job[..], &["--verify=crc32c", more.as_str()]].concat();
    let fio = Fio::start(&engine, dir.path(), &target, "v", &job);
    wait_for("some writes", || {
        let status = target.status_if_any()?;
        (status.total.written_bytes > 256 << 10).then_some(())
    });
    target.kill();
    target.start_again(dir.path(), &words(&args));
    let results = fio.end();
    assert_eq!(results.assert_well(&["write", "read"]), [2048, 2048]);
    let written = target.status().total.written_bytes;
    assert!(written > 1 << 20, "{written} bytes were written after the death of the target");
}

#[test]
fn jobs_that_the_engine_cannot_run_are_refused_with_the_reason() {
    let Some(engine) = engine() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (target, _) = start(dir.path());
    let refused = |volume: &str, job: &[&str], words: &str| {
        let results = Fio::start(&engine, dir.path(), &target, volume, job).end();
        assert_ne!(results.code, Some(0), "{}", results.said);
        assert!(results.said.contains(words), "{words}: {}", results.said);
    };
    refused("v", &["--rw=read", "--thread=0"], "set thread=1");
    refused("v", &["--rw=read", "--bs=1k", "--size=64k"], "bs is no multiple");
    refused("w", &["--rw=read"], "no volume `w`");
    let other =
        ["--rw=read", "--size=1M", "--name=b", "--rw=read", "--size=1M", "--rblk_take_over"];
    refused("v", &other, "the same options");
    refused("v", &["--rw=read", "--rblk_key_file=/none"], "target_keys");
    refused("v", &["--rw=read", "--rblk_target_key=x'y"], "quotes");
}
