//! [`Fio`]: runs of fio(1), their JSON understood.

use std::path::Path;
use std::time::Duration;

use super::process::{Finished, Running, start};
use super::wait::until;
use super::{Lab, Target};

/// fio's exit code when it was told to end.
const INTERRUPTED: i32 = 128;
/// Bytes that show that I/O goes on.
const MOVED: u64 = 512 << 10;

/// A run of fio with direct I/O on one device, to be completed and started.
#[derive(Clone, Debug)]
pub struct Fio {
    words: Vec<String>,
}

/// The results of a run.
#[derive(Debug)]
pub struct FioResult {
    /// fio's exit code.
    pub code: i32,
    /// Reads that ended.
    pub reads: u64,
    /// Writes that ended.
    pub writes: u64,
    /// Errors that fio counted over all its jobs.
    pub errors: u64,
    /// The run's duration.
    pub took: Duration,
    text: String,
}

/// A run in progress.
#[derive(Debug)]
pub struct RunningFio {
    running: Running,
}

impl Fio {
    /// A run on `device` with `rw` being fio's word for the pattern.
    #[must_use]
    pub fn new(device: &Path, rw: &str) -> Self {
        let words = [
            "fio".to_owned(),
            "--name=job".to_owned(),
            format!("--filename={}", device.display()),
            "--direct=1".to_owned(),
            "--ioengine=libaio".to_owned(),
            format!("--rw={rw}"),
            "--randrepeat=0".to_owned(),
            "--group_reporting".to_owned(),
            "--output-format=json".to_owned(),
        ];
        Self { words: words.to_vec() }
    }

    /// Any option with its value.
    #[must_use]
    pub fn with(mut self, option: &str, value: impl std::fmt::Display) -> Self {
        self.words.push(format!("--{option}={value}"));
        self
    }

    /// Random writes of mixed sizes over `bytes` of each of two jobs, on one CPU each so that both
    /// queues have work, and every byte checked.
    #[must_use]
    pub fn verify(device: &Path, bytes: u64) -> Self {
        Self::new(device, "randwrite")
            .with("bsrange", "4k-1M")
            .with("iodepth", 32)
            .with("numjobs", 2)
            .with("size", bytes)
            .with("offset_increment", bytes)
            .with("cpus_allowed", "0-1")
            .with("cpus_allowed_policy", "split")
            .with("verify", "crc32c")
            .with("do_verify", 1)
            .with("verify_fatal", 1)
            .with("verify_state_save", 0)
    }

    /// Random writes until fio is told to stop. Each pass writes all, and reads all back. The first
    /// wrong byte ends it. Sizes and pauses are the caller's.
    #[must_use]
    pub fn verifying(file: &Path) -> Self {
        Self::new(file, "randwrite")
            .with("iodepth", 8)
            .with("loops", 1_000_000)
            .with("fsync", 32)
            .with("verify", "crc32c")
            .with("do_verify", 1)
            .with("verify_fatal", 1)
            .with("verify_state_save", 0)
    }

    /// A run on the volume `v0` of an address, by the engine that has no block device: random
    /// writes until fio is told to stop, with every byte verified. The guest has the files of its
    /// host, so its fio is the one that the engine was built for.
    ///
    /// # Panics
    /// The engine is not beside the programs.
    #[must_use]
    pub fn endless_by_engine(lab: &Lab, address: &str) -> Self {
        let engine = lab.programs().join("librblk_fio.so");
        let at = engine.display();
        assert!(engine.exists(), "no {at}: cargo xtask fio-engine --profile lab --out {at}");
        let config = lab.path("engine.toml");
        let text = format!("target = ['{address}']\nvolume = 'v0'\ndetect = '2s'\n");
        std::fs::write(&config, text).expect("a configuration");
        let [_, key_file, _, target_key] =
            <[String; 4]>::try_from(lab.proofs()).expect("two flags with their values");
        // fio takes a colon for the end of a name.
        let name = format!("{address}/v0").replace(':', "\\:");
        Self::new(Path::new(&name), "randwrite")
            .with("ioengine", format!("external:{at}"))
            .with("thread", 1)
            .with("rblk_sleep", 1)
            .with("rblk_config", config.display())
            .with("rblk_key_file", key_file)
            .with("rblk_target_key", target_key)
            .with("bsrange", "4k-128k")
            .with("iodepth", 16)
            .with("size", "100%")
            .with("rate", "2M,2M")
            .with("verify", "crc32c")
            .with("verify_backlog", 32)
            .with("verify_fatal", 1)
            .with("verify_state_save", 0)
    }

    /// Runs fio to the end.
    ///
    /// # Panics
    /// The run does not end within `deadline`.
    #[must_use]
    pub fn run(&self, deadline: Duration) -> FioResult {
        self.start().finish(deadline)
    }

    /// Starts fio.
    #[must_use]
    pub fn start(&self) -> RunningFio {
        RunningFio { running: start(&self.words) }
    }
}

impl RunningFio {
    /// Whether it still runs.
    #[must_use]
    pub fn is_running(&mut self) -> bool {
        self.running.is_running()
    }

    /// Waits until fio has written to a target, and read again, since now.
    ///
    /// # Panics
    /// fio ends, or neither happens within `deadline`.
    pub fn wait_for_io(&mut self, target: &Target<'_>, deadline: Duration) {
        let mut moved = || {
            assert!(self.is_running(), "fio has ended");
            let total = target.status().total;
            (total.written_bytes, total.read_bytes)
        };
        let (written, read) = moved();
        until("fio to go on", deadline, || {
            let (now_written, now_read) = moved();
            (now_written > written + MOVED && now_read > read + MOVED).then_some(())
        });
    }

    /// Interrupts fio and waits for its end.
    ///
    /// # Panics
    /// fio does not end within `deadline`, or had ended before.
    #[must_use]
    pub fn stop(mut self, deadline: Duration) -> FioResult {
        let was_running = self.is_running();
        super::process::signal("INT", &self.running.pid().to_string());
        let mut result = FioResult::of(&self.running.finish(deadline));
        assert!(was_running, "fio had ended: {}", result.text);
        if result.code == INTERRUPTED {
            result.code = 0;
        }
        result
    }

    /// Waits for the end of fio.
    ///
    /// # Panics
    /// fio does not end within `deadline`, counted from now.
    #[must_use]
    pub fn finish(self, deadline: Duration) -> FioResult {
        FioResult::of(&self.running.finish(deadline))
    }
}

impl FioResult {
    fn of(finished: &Finished) -> Self {
        let text = finished.to_string();
        // Complaints may come before the document.
        let document =
            finished.stdout.find("\n{").map_or(&*finished.stdout, |at| &finished.stdout[at..]);
        let json: serde_json::Value = serde_json::from_str(document).unwrap_or_default();
        let jobs = json["jobs"].as_array().map_or(&[][..], Vec::as_slice);
        let sum = |of: &dyn Fn(&serde_json::Value) -> &serde_json::Value| {
            jobs.iter().map(|job| of(job).as_u64().unwrap_or(0)).sum()
        };
        Self {
            code: finished.code(),
            reads: sum(&|job| &job["read"]["total_ios"]),
            writes: sum(&|job| &job["write"]["total_ios"]),
            errors: sum(&|job| &job["error"]) + sum(&|job| &job["total_err"]),
            took: finished.took,
            text,
        }
    }

    /// The result itself, if fio met no error.
    ///
    /// # Panics
    /// fio failed. The message has all of fio's output.
    pub fn ok(self) -> Self {
        assert!(
            self.code == 0 && self.errors == 0 && self.reads + self.writes > 0,
            "fio failed: {}",
            self.text
        );
        self
    }
}
