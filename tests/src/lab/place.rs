//! [`Lab`]: the lab as one test sees it: its devices, its programs and its directory.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use rblk_config::TargetConfig;

use super::keys::Keys;
use super::process::{Finished, Running};
use crate::long;

/// The lab as one test sees it.
#[derive(Debug)]
pub struct Lab {
    test: &'static str,
    programs: PathBuf,
    dir: PathBuf,
    rdma_host: String,
    keys: OnceLock<Keys>,
}

impl Lab {
    pub(super) fn find(test: &'static str) -> Result<Self, String> {
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
        let dir = scratch.join(test);
        Ok(Self { test, programs, dir, rdma_host, keys: OnceLock::new() })
    }

    /// The test's own directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
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

    /// Whether the devices are iWARP ones, as those of Soft-iWARP (siw) are (`node_type` of
    /// `enum rdma_node_type`: 4 is an RNIC).
    #[must_use]
    pub fn is_iwarp(&self) -> bool {
        let devices = std::fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
        let kinds = devices.map(|device| std::fs::read_to_string(device.path().join("node_type")));
        kinds.flatten().any(|kind| kind.starts_with('4'))
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

    /// How many times as much data as usual: 1, or more with `RBLK_LONG`.
    #[must_use]
    pub fn long(&self, factor: u64) -> u64 {
        if long::factor().is_some() { factor } else { 1 }
    }

    /// How often to do something: `usual` times, or N times `long` with `RBLK_LONG=N`.
    ///
    /// # Panics
    /// The number does not fit in memory.
    #[must_use]
    pub fn times(&self, usual: u64, long: u64) -> usize {
        usize::try_from(long::times(usual, long)).expect("a count")
    }

    /// A sparse file of that size.
    ///
    /// # Panics
    /// The file cannot be made.
    #[must_use]
    pub fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        let made = std::fs::File::create(&path).and_then(|file| file.set_len(bytes));
        made.unwrap_or_else(|e| panic!("making {}: {e}", path.display()));
        path
    }

    /// The flags with this host's keys: `--key-file` and `--target-key`.
    #[must_use]
    pub fn proofs(&self) -> Vec<String> {
        self.keys().of_host(None)
    }

    /// A file of that name with a configuration that lets in the hosts of the lab.
    ///
    /// # Panics
    /// The file cannot be written.
    #[must_use]
    pub fn configuration(&self, name: &str, mut config: TargetConfig) -> PathBuf {
        self.keys().let_in(&mut config);
        let (path, text) = (self.path(name), config.dump());
        let text = text.unwrap_or_else(|e| panic!("{name}: {e}"));
        std::fs::write(&path, text).unwrap_or_else(|e| panic!("writing {}: {e}", path.display()));
        path
    }

    /// The directory of the programs.
    #[must_use]
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// The keys of the target and of the hosts.
    pub(super) fn keys(&self) -> &Keys {
        self.keys.get_or_init(|| Keys::generate(&self.dir.join("keys")))
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
    /// The command does not end within `deadline`.
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
                "{} is not there; build it with `cargo build -p rblk-cli -p rblk-target -p rblk-initiator --features verbs`, or name another \
                 directory with RBLK_BIN_DIR",
                dir.join(name).display()
            ));
        }
    }
    std::path::absolute(&dir).map_err(|e| e.to_string())
}
