//! The lab: real verbs and a real ublk device on a machine that may have neither.
//!
//! [`Lab::run`] boots a stock Debian kernel under QEMU with this machine's files as its root and
//! runs one command there as root. Everything it needs is fetched on first use into a cache
//! outside the source tree ([`cache`]); nothing is asked of the machine but apt and root rights.
//!
//! Contract of a run:
//! - the command's output (stdout and stderr merged) is copied as it comes, byte for byte;
//! - the result is the command's exit status, or the reason for none ([`End`]);
//! - when it returns, no guest is left, and what the guest wrote outside `/tmp`, `/run`,
//!   `/dev/shm` and the scratch disk is on this machine's disk.

mod accel;
pub(crate) mod apt;
pub(crate) mod cache;
mod engine;
mod guest;
pub(crate) mod host;
mod image;
mod initramfs;
mod kernel;
mod modules;
mod qemu;
mod record;
mod scratch;
mod step;

use std::ffi::OsString;
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, bail};

pub(crate) use accel::Accel;

/// Exit status of a run whose guest was killed at the time limit, as with `timeout(1)`.
pub(crate) const TIMED_OUT: u8 = 124;

/// Exit status of a run in which the lab, not the command, failed.
pub(crate) const FAILED: u8 = 125;

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End {
    /// The command ended with this status.
    Exited(i32),
    /// The guest was killed at the time limit.
    TimedOut,
    /// The guest died, or did not start the command, for this reason.
    Died(String),
    /// The emulator broke the guest's kernel: an `Oops: int3`, which the line of the console says.
    ///
    /// A kernel changes its own code while it runs: it puts a breakpoint over the first byte,
    /// writes the rest, and removes the breakpoint. QEMU's translator now and then runs the
    /// breakpoint on another CPU after that. No program in the guest can cause this.
    Broken(String),
}

impl End {
    /// The exit status of a program that ran the guest.
    pub(crate) fn status(&self) -> i32 {
        match self {
            End::Exited(status) => *status,
            End::TimedOut => i32::from(TIMED_OUT),
            End::Died(_) | End::Broken(_) => i32::from(FAILED),
        }
    }
}

/// The kernel that is booted when none is asked for.
pub(crate) const DEFAULT_KERNEL: &str = "7.2";

/// What a kernel says that met a breakpoint which nobody had set.
const BREAKPOINT: &str = "Oops: int3";

/// How often an emulated guest is booted, at most, until its command starts.
const BOOTS: u32 = 3;

/// The address of `rxe0` inside the guest.
const RDMA_ADDRESS: &str = "10.9.0.1";

/// What to boot, and for how long.
#[derive(Debug, Clone)]
pub(crate) struct Lab {
    /// Version prefix, such as `6.12`.
    pub(crate) kernel: String,
    /// Memory of the guest.
    pub(crate) mem: Size,
    /// Virtual CPUs.
    pub(crate) cpus: u32,
    /// Limit on the life of the guest, boot included.
    pub(crate) timeout: Duration,
    /// Size of the scratch disk; zero for none.
    pub(crate) scratch: Size,
    /// Whether RDMA modules are loaded and `rxe0` is made.
    pub(crate) rdma: bool,
    /// How the guest's CPUs are run.
    pub(crate) accel: Accel,
    /// Where a copy of the guest's console goes.
    pub(crate) keep_log: Option<PathBuf>,
    /// Directories that the command needs besides the current one, even below `/tmp` or `/run`.
    pub(crate) shares: Vec<PathBuf>,
}

impl Default for Lab {
    fn default() -> Self {
        const GIB: u64 = 1 << 30;
        Lab {
            kernel: DEFAULT_KERNEL.to_owned(),
            mem: Size(4 * GIB),
            cpus: 2,
            timeout: Duration::from_secs(600),
            scratch: Size(4 * GIB),
            rdma: true,
            accel: Accel::Auto,
            keep_log: None,
            shares: Vec::new(),
        }
    }
}

/// Fetches a kernel, unless it is in the cache. `Some`: the mirror has none of that version, and
/// why.
pub(crate) fn absence(version: &str) -> Result<Option<String>> {
    host::ensure_installed(host::PACKAGES)?;
    match kernel::Kernel::ensure(&cache::Cache::open()?, version) {
        Ok(_) => Ok(None),
        Err(error) => error.downcast::<kernel::NoKernel>().map(|none| Some(none.to_string())),
    }
}

/// Puts `vmlinux` and `initramfs.cpio` into `out`, by which a test boots a guest of its own whose
/// first process is the script `init`.
pub(crate) fn guest_files(version: &str, init: &Path, out: &Path) -> Result<()> {
    let cache = cache::Cache::open()?;
    let kernel = kernel::Kernel::ensure(&cache, version)?;
    let script = std::fs::read(init).with_context(|| format!("cannot read {}", init.display()))?;
    let archive = initramfs::of_guest(&kernel, &script)?;
    let put = |name: &str, make: &dyn Fn(&Path) -> std::io::Result<()>| {
        let path = out.join(name);
        make(&path).with_context(|| format!("cannot write {}", path.display()))
    };
    put("initramfs.cpio", &|path| std::fs::write(path, &archive))?;
    put("vmlinux", &|path| std::fs::copy(kernel.image(), path).map(drop))
}

impl Lab {
    /// Runs `command` in the guest with its output on this process's stdout.
    pub(crate) fn run(&self, command: &[OsString]) -> Result<i32> {
        Ok(self.run_into(command, std::io::stdout())?.status())
    }

    /// Runs `command` in the guest with its output in `output`.
    pub(crate) fn run_into(
        &self,
        command: &[OsString],
        output: impl Write + Send + 'static,
    ) -> Result<End> {
        if command.is_empty() {
            bail!("no command was given; write it after `--`, as in `cargo xtask lab -- uname -r`");
        }
        let task = guest::Task::here(command, &self.shares, self.rdma, self.scratch.0 > 0)?;
        host::ensure_installed(host::PACKAGES)?;
        let cache = cache::Cache::open()?;
        let kernel = kernel::Kernel::ensure(&cache, &self.kernel)?;
        let engine = self.accel.resolve(&cache, &kernel)?;
        let scratch = scratch::Disk::create(&cache, self.scratch.0)?;
        let machine = qemu::Machine {
            kernel: &kernel,
            engine,
            mem: self.mem.0,
            cpus: self.cpus,
            root: true,
            scratch: scratch.as_ref(),
            timeout: self.timeout,
        };
        let mut output = Some(output);
        let mut boots = 0;
        let (log, end) = loop {
            boots += 1;
            let log = cache.new_log(&kernel.release)?;
            let out = output.take().context("the guest's output cannot be passed on")?;
            let end = machine.run(&cache, &task, &log, out);
            match end {
                // Nothing of the command ran. The translator now and then breaks a kernel that
                // patches its own code.
                Ok((qemu::End::NotBooted, out))
                    if boots < BOOTS && engine != engine::Engine::Kvm =>
                {
                    eprintln!(
                        "lab: the guest died while booting, and is booted again; its console is in {}",
                        log.display()
                    );
                    output = out;
                }
                end => break (log, end.map(|(end, _)| end)),
            }
        };
        if let Some(copy) = &self.keep_log {
            std::fs::copy(&log, copy).with_context(|| {
                format!("cannot copy the guest's console to {} (--keep-log)", copy.display())
            })?;
        }
        Ok(match end? {
            qemu::End::Exited(status) => End::Exited(status),
            qemu::End::TimedOut => {
                eprintln!(
                    "lab: the guest was killed after {} s; give it longer with --timeout; its console is in {}",
                    self.timeout.as_secs(),
                    log.display()
                );
                End::TimedOut
            }
            qemu::End::NotBooted => died("the guest died while booting", engine, &log),
            qemu::End::Died(why) => died(&why, engine, &log),
        })
    }
}

/// Says why the lab failed, with the end of the guest's console.
fn died(why: &str, engine: engine::Engine, log: &Path) -> End {
    eprintln!("lab: {why}; the end of its console ({}):", log.display());
    eprintln!("{}", qemu::tail(log, 60));
    match qemu::fault(log) {
        Some(line) if engine != engine::Engine::Kvm && line.contains(BREAKPOINT) => {
            End::Broken(line)
        }
        Some(line) => End::Died(line),
        None => End::Died(why.to_owned()),
    }
}

/// A number of bytes, written with an optional binary suffix: `512M`, `4G`, `4GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, suffix) = text.split_at(digits);
        let shift = match suffix {
            "" => 0,
            "K" | "KiB" => 10,
            "M" | "MiB" => 20,
            "G" | "GiB" => 30,
            "T" | "TiB" => 40,
            _ => bail!("`{text}` is not a size; write it as 512M or 4G"),
        };
        let number: u64 = number
            .parse()
            .with_context(|| format!("`{text}` is not a size; write it as 512M or 4G"))?;
        number
            .checked_mul(1 << shift)
            .map(Size)
            .with_context(|| format!("the size {text} is too large"))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, suffix) in [(30, "G"), (20, "M"), (10, "K")] {
            if self.0 > 0 && self.0.is_multiple_of(1 << shift) {
                return write!(f, "{}{suffix}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_take_binary_suffixes() {
        for (text, bytes) in
            [("0", 0), ("512M", 512 << 20), ("4G", 4 << 30), ("4GiB", 4 << 30), ("1K", 1024)]
        {
            assert_eq!(text.parse::<Size>().unwrap(), Size(bytes), "{text}");
        }
        assert_eq!(Size(4 << 30).to_string(), "4G");
        assert_eq!(Size(1536 << 20).to_string(), "1536M");
    }

    #[test]
    fn a_bad_size_is_named() {
        for text in ["", "G", "4 G", "4g", "-1", "99999999999T"] {
            let error = format!("{:#}", text.parse::<Size>().unwrap_err());
            assert!(error.contains(text), "{error}");
        }
    }
}
