//! [`KernelFeature`]: what some kernels of the lab lack.

use std::path::Path;

use rblk_operate::doctor::KernelVersion;

use super::process::start;
use super::wait::DEADLINE;

/// Something that a test needs, and the kernels that have it.
#[derive(Debug, Clone, Copy)]
pub struct KernelFeature {
    name: &'static str,
    of: Of,
}

#[derive(Debug, Clone, Copy)]
enum Of {
    /// This kernel, and later ones.
    Since(KernelVersion),
    /// Kernels that were configured with this module.
    Module(&'static str),
}

impl KernelFeature {
    /// A disk that is in use gets another size (`UPDATE_SIZE`).
    pub const RESIZE_IN_USE: Self = Self::new("the resize of a disk in use", 6, 16);
    /// The driver sees the end of a server when its node is closed (`QUIESCE` came with it): a disk
    /// is handed over without a limit of its requests.
    pub const SEES_END: Self = Self::new("a driver that sees the end of a server", 6, 16);
    /// The kernel lives on if system calls are counted in an emulator.
    pub const COUNTED_CALLS: Self = Self::new("the count of system calls in an emulator", 7, 0);
    /// A [far host](super::FarHost) is a network namespace with Soft-RoCE.
    pub const FAR_HOST: Self = Self::new("Soft-RoCE in a network namespace", 7, 1);
    /// The ublk driver takes data from the memory of another program (`SHMEM_ZC`).
    pub const SHARED_MEMORY: Self = Self::new("a disk with shared memory", 7, 1);

    /// Replication below a target.
    pub const DRBD: Self = Self { name: "DRBD", of: Of::Module("drbd") };
    /// A mirror above mounts.
    pub const RAID_1: Self = Self { name: "RAID 1 of md", of: Of::Module("raid1") };

    const fn new(name: &'static str, major: u32, minor: u32) -> Self {
        Self { name, of: Of::Since(KernelVersion(major, minor)) }
    }

    /// Whether the running kernel has it. A module is loaded.
    ///
    /// # Panics
    /// The kernel does not say its release.
    #[must_use]
    pub fn is_there(self) -> bool {
        match self.of {
            Of::Since(since) => KernelVersion::running().expect("the kernel's release") >= since,
            Of::Module(name) => {
                let loaded = start(&["modprobe", "-q", name]).finish(DEADLINE).code() == 0;
                loaded || Path::new("/sys/module").join(name).exists()
            }
        }
    }

    /// Whether the running kernel lacks it. Then the calling test must return: this function has
    /// printed the line by which `cargo xtask test` counts the test as skipped, not as passed.
    ///
    /// # Panics
    /// The kernel does not say its release; the thread is not a test's.
    #[must_use]
    pub fn is_missing(self) -> bool {
        let is_there = self.is_there();
        if !is_there {
            let thread = std::thread::current();
            let test = thread.name().expect("libtest names the thread of a test");
            let why = match self.of {
                Of::Since(KernelVersion(major, minor)) => {
                    format!("came with Linux {major}.{minor}")
                }
                Of::Module(module) => format!("is the module {module}, which this kernel lacks"),
            };
            println!("\nskipped here: {test}: needs {}, which {why}", self.name);
        }
        !is_there
    }
}
