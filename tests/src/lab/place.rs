//! [`run`]: one test of the lab, from looking for the devices to proving that nothing is left.

use std::ffi::OsStr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::leftovers;
use super::process::{Finished, Running};
use super::usage::rdma_resources;

const HOW: &str = "Run the lab suite with `cargo xtask test`, or one test of it with `cargo xtask lab -- TEST-BINARY \
                   --test-threads=1 --nocapture NAME`; RBLK_SKIP_LAB=1 leaves it out";

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The lab as one test sees it.
#[derive(Debug)]
pub struct Lab {
    test: &'static str,
    programs: PathBuf,
    dir: PathBuf,
    rdma_host: String,
}

/// Runs one test: prepares, runs, cleans up, and proves that nothing is left. Without the lab it
/// fails, unless `RBLK_SKIP_LAB=1` asks it not to.
///
/// # Panics
/// As `body` does; or something is left; or there is no lab.
pub fn run(test: &'static str, body: impl FnOnce(&Lab)) {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let lab = match Lab::find(test) {
        Ok(lab) => lab,
        Err(why) if std::env::var("RBLK_SKIP_LAB").is_ok_and(|v| v == "1") => {
            println!("{test}: skipped, as RBLK_SKIP_LAB=1 asks: {why}");
            return;
        }
        Err(why) => panic!("{test} cannot run here: {why}. {HOW}"),
    };
    leftovers::sweep();
    std::fs::create_dir_all(&lab.dir)
        .unwrap_or_else(|e| panic!("making {}: {e}", lab.dir.display()));
    let before = rdma_resources();
    let since = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| body(&lab)));
    let took = since.elapsed();
    // A test that failed has left something, most likely.
    let patience = Duration::from_secs(if outcome.is_ok() { 10 } else { 1 });
    let found = leftovers::find(&before, patience);
    leftovers::sweep();
    match outcome {
        Err(panic) => {
            println!("{test}: FAILED after {took:.1?}; its logs are in {}", lab.dir.display());
            if !found.is_empty() {
                println!("{test}: and it left: {}", found.join("; "));
            }
            resume_unwind(panic);
        }
        Ok(()) => {
            println!("{test}: passed in {took:.1?}");
            let _ = std::fs::remove_dir_all(&lab.dir);
            assert!(found.is_empty(), "{test} left: {}", found.join("; "));
        }
    }
}

impl Lab {
    fn find(test: &'static str) -> Result<Self, String> {
        let id = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        if !id.lines().any(|l| l.split_whitespace().take(3).eq(["Uid:", "0", "0"])) {
            return Err("it needs root".to_owned());
        }
        if !Path::new("/dev/ublk-control").exists() {
            return Err("there is no /dev/ublk-control (modprobe ublk_drv)".to_owned());
        }
        let devices = std::fs::read_dir("/sys/class/infiniband").map_or(0, Iterator::count);
        if devices == 0 {
            return Err("there is no RDMA device in /sys/class/infiniband".to_owned());
        }
        let rdma_host = ["RBLK_LAB_RDMA_ADDR", "RBLK_TEST_RDMA_ADDR"]
            .into_iter()
            .find_map(|name| std::env::var(name).ok().filter(|v| !v.is_empty()))
            .ok_or("neither RBLK_LAB_RDMA_ADDR nor RBLK_TEST_RDMA_ADDR has the address of the RDMA device")?;
        let programs = programs()?;
        let scratch =
            std::env::var_os("RBLK_LAB_SCRATCH").map_or_else(std::env::temp_dir, PathBuf::from);
        Ok(Self { test, programs, dir: scratch.join(test), rdma_host })
    }

    /// Name of the test.
    #[must_use]
    pub fn test(&self) -> &'static str {
        self.test
    }

    /// A path in the test's own directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The host part of the addresses: the RDMA device's.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.rdma_host
    }

    /// The target's RDMA address.
    #[must_use]
    pub fn rdma(&self) -> String {
        format!("rdma://{}", self.rdma_host)
    }

    /// The target's TCP address.
    #[must_use]
    pub fn tcp(&self) -> String {
        format!("tcp://{}", self.rdma_host)
    }

    /// How many times as long as usual: 1, or more with `RBLK_LONG=1`.
    #[must_use]
    pub fn long(&self, factor: u64) -> u64 {
        if std::env::var("RBLK_LONG").is_ok_and(|v| v == "1") { factor } else { 1 }
    }

    /// How often to do something: `usual` times, or `long` times with `RBLK_LONG=1`.
    #[must_use]
    pub fn times(&self, usual: usize, long: usize) -> usize {
        if self.long(2) > 1 { long } else { usual }
    }

    /// A sparse file of that size.
    ///
    /// # Panics
    /// It cannot be made.
    #[must_use]
    pub fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        let made = std::fs::File::create(&path).and_then(|file| file.set_len(bytes));
        made.unwrap_or_else(|e| panic!("making {}: {e}", path.display()));
        path
    }

    /// A program of the project, to be given arguments.
    #[must_use]
    pub fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.join(name));
        command.current_dir("/");
        command
    }

    /// Runs `rblk-initiator`.
    ///
    /// # Panics
    /// It does not end within `deadline`.
    #[must_use]
    pub fn initiator<S: AsRef<OsStr>>(&self, arguments: &[S], deadline: Duration) -> Finished {
        let mut command = self.program("rblk-initiator");
        command.args(arguments);
        Running::start(command).finish(deadline)
    }
}

/// Where the programs are: `RBLK_BIN_DIR`, or beside this test's own binary.
fn programs() -> Result<PathBuf, String> {
    let named = std::env::var_os("RBLK_BIN_DIR").map(PathBuf::from);
    let beside =
        std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.parent()?.to_path_buf()));
    let dir = named.or(beside).ok_or("RBLK_BIN_DIR does not say where the programs are")?;
    for name in ["rblk-target", "rblk-targetd", "rblk-initiator", "rblk-initiatord"] {
        if !dir.join(name).exists() {
            return Err(format!(
                "{} is not there; build it with `cargo build -p rblk-target -p rblk-initiator`, or name another \
                 directory with RBLK_BIN_DIR",
                dir.join(name).display()
            ));
        }
    }
    std::path::absolute(&dir).map_err(|e| e.to_string())
}
