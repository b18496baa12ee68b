//! [`LoopDisk`] and [`Mapped`]: disks for volumes of targets. A test can make them fail, fill them
//! and watch them.
//!
//! losetup and dmsetup make the disks; the kernel modules are loaded at the first use. All names
//! start with [`PREFIX`], which nothing else uses, so that disks left by a test are found and
//! removed.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Once;

use super::Lab;
use super::process::start;
use super::wait::DEADLINE;

/// How names of devices, and of files below [`MEMORY`], begin.
const PREFIX: &str = "rblklab-";
/// dmsetup makes the device nodes itself: udev may not run.
const DMSETUP: &[&str] = &["env", "DM_DISABLE_UDEV=1", "dmsetup"];
/// A file system in memory.
const MEMORY: &str = "/dev/shm";

/// The modules for the kinds of tables that tests use.
const MODULES: [&str; 6] =
    ["dm-mod", "dm-flakey", "dm-log-writes", "dm-multipath", "dm-round-robin", "dm-thin-pool"];
static MODULES_LOADED: Once = Once::new();

/// Loads the modules that the kernel has as modules.
fn load_modules() {
    for module in MODULES {
        // A failure is no news yet: the kernel may have the part built in. If the kernel does not
        // have the part at all, `dmsetup create` fails and names the kind of table.
        let _ = start(&["modprobe", "-q", module]).finish(DEADLINE);
    }
}

/// The kinds of tables that the kernel has, such as `linear`.
pub(super) fn kinds() -> Vec<String> {
    MODULES_LOADED.call_once(load_modules);
    let text = sh(&[DMSETUP, &["targets"]].concat());
    text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

/// A command of the host that must work.
fn sh(words: &[&str]) -> String {
    start(words).finish(DEADLINE).ok()
}

/// A disk of 512-byte sectors, backed by memory. Drop removes it.
#[derive(Debug)]
pub struct LoopDisk {
    device: PathBuf,
    file: PathBuf,
    bytes: u64,
}

impl LoopDisk {
    /// A disk of zeros.
    ///
    /// # Panics
    /// The disk cannot be made.
    #[must_use]
    pub fn new(lab: &Lab, name: &str, bytes: u64) -> Self {
        let file = Path::new(MEMORY).join(format!("{PREFIX}{}-{name}", lab.test()));
        let made = std::fs::File::create(&file).and_then(|file| file.set_len(bytes));
        made.unwrap_or_else(|e| panic!("making {}: {e}", file.display()));
        let said = sh(&["losetup", "--find", "--show", &file.display().to_string()]);
        Self { device: PathBuf::from(said.trim()), file, bytes }
    }

    /// The block device.
    #[must_use]
    pub fn device(&self) -> &Path {
        &self.device
    }

    /// The bytes of memory that it uses.
    ///
    /// # Panics
    /// The memory is gone.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        let metadata = self.file.metadata();
        metadata.unwrap_or_else(|e| panic!("{}: {e}", self.file.display())).blocks() * 512
    }

    /// Its size in sectors of 512 bytes.
    #[must_use]
    pub fn sectors(&self) -> u64 {
        self.bytes / 512
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        let _ = start(&["losetup", "-d", &self.device.display().to_string()]).finish(DEADLINE);
        let _ = std::fs::remove_file(&self.file);
    }
}

/// A device of the device mapper. Dropped, it is removed.
#[derive(Debug)]
pub struct Mapped {
    name: String,
    table: PathBuf,
}

impl Mapped {
    /// A device with this table, as in dmsetup(8): lines of first sector, sectors, kind and the
    /// arguments of the kind.
    ///
    /// # Panics
    /// The device cannot be made.
    #[must_use]
    pub fn new(lab: &Lab, name: &str, table: &str) -> Self {
        MODULES_LOADED.call_once(load_modules);
        let mapped = Self { name: format!("{PREFIX}{name}"), table: lab.path(name) };
        mapped.dmsetup(&["create"], Some(table));
        mapped
    }

    /// Replaces the table by another one of the same size. Requests in flight first complete with
    /// the old table.
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn load(&self, table: &str) {
        self.stage(table);
        self.dmsetup(&["suspend", "--nolockfs"], None);
        self.dmsetup(&["resume"], None);
    }

    /// Hands the kernel another table of the same size, for the next [`resume`](Self::resume) to
    /// put in force.
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn stage(&self, table: &str) {
        self.dmsetup(&["load"], Some(table));
    }

    /// Holds requests until [`resume`](Self::resume).
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn suspend(&self) {
        self.dmsetup(&["suspend", "--noflush", "--nolockfs"], None);
    }

    /// Releases the requests that it holds.
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn resume(&self) {
        self.dmsetup(&["resume"], None);
    }

    /// `major:minor`, as tables and messages name a device.
    ///
    /// # Panics
    /// The device is missing.
    #[must_use]
    pub fn numbers(&self) -> String {
        let device = self.device();
        let found = std::fs::metadata(&device);
        let rdev = found.unwrap_or_else(|e| panic!("{}: {e}", device.display())).rdev();
        format!("{}:{}", libc::major(rdev), libc::minor(rdev))
    }

    /// Requests in flight.
    ///
    /// # Panics
    /// The kernel does not tell.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        let path = format!("/sys/dev/block/{}/inflight", self.numbers());
        let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        text.split_whitespace().filter_map(|n| n.parse::<u64>().ok()).sum()
    }

    /// Sends a message to the device's kind.
    ///
    /// # Panics
    /// The kind rejects the message.
    pub fn message(&self, text: &str) {
        let words: Vec<&str> = text.split(' ').collect();
        sh(&[DMSETUP, &["message", &self.name, "0"], &words].concat());
    }

    /// The block device.
    #[must_use]
    pub fn device(&self) -> PathBuf {
        Path::new("/dev/mapper").join(&self.name)
    }

    /// Removes the device after its requests have completed.
    ///
    /// # Panics
    /// A process has the device open.
    pub fn remove(self) {
        sh(&[DMSETUP, &["remove", "--retry", &self.name]].concat());
    }

    fn dmsetup(&self, words: &[&str], table: Option<&str>) {
        let path = self.table.display().to_string();
        let mut all = [DMSETUP, words, &[&self.name]].concat();
        if let Some(table) = table {
            std::fs::write(&self.table, table).unwrap_or_else(|e| panic!("writing {path}: {e}"));
            all.push(&path);
        }
        sh(&all);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        remove(&self.name);
    }
}

fn remove(name: &str) {
    if Path::new("/dev/mapper").join(name).exists() {
        let _ =
            start(&[DMSETUP, &["remove", "--force", "--retry", name]].concat()).finish(DEADLINE);
    }
}

/// Devices and files of this kind that exist, in words.
pub(super) fn left() -> Vec<String> {
    let mut left = Vec::new();
    for dir in ["/dev/mapper", MEMORY] {
        let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let names = names.filter_map(|entry| entry.file_name().into_string().ok());
        left.extend(names.filter(|n| n.starts_with(PREFIX)).map(|name| format!("{dir}/{name}")));
    }
    left
}

/// Removes these devices and files.
pub(super) fn sweep() {
    for path in left() {
        match path.strip_prefix("/dev/mapper/") {
            Some(name) => remove(name),
            None => {
                let loops = start(&["losetup", "-n", "-O", "NAME", "-j", &path]).finish(DEADLINE);
                for device in loops.stdout.lines() {
                    let _ = start(&["losetup", "-d", device.trim()]).finish(DEADLINE);
                }
                let _ = std::fs::remove_file(&path);
            }
        }
    }
}
