//! [`KernelRelease`]: the release of the running kernel, and what it lacks for a test.

use std::fmt;

/// The file of the running kernel's release.
const OSRELEASE: &str = "/proc/sys/kernel/osrelease";

/// Major and minor number of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelRelease(pub u32, pub u32);

impl KernelRelease {
    /// The first release that gives a disk another size while it is in use (`UPDATE_SIZE`).
    pub const RESIZES_DISKS: Self = Self(6, 16);

    /// The first release that loses no request of a ublk server that ends while requests come: the
    /// driver looks at them when the server's node is closed.
    pub const ENDS_SERVERS: Self = Self(6, 16);

    /// The first release with Soft-RoCE devices in network namespaces: a [far host](super::FarHost)
    /// is one.
    pub const HAS_FAR_HOSTS: Self = Self(7, 1);

    /// The first release whose ublk driver takes data from the memory of another program
    /// (`SHMEM_ZC`).
    pub const SHARES_MEMORY: Self = Self(7, 1);

    /// The release of the running kernel.
    ///
    /// # Panics
    /// The kernel does not say it.
    #[must_use]
    pub fn running() -> Self {
        let text = Self::text();
        let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
        let mut number = || numbers.next()?.ok();
        let release = number().zip(number());
        let (major, minor) = release.unwrap_or_else(|| panic!("{OSRELEASE}: {text}"));
        Self(major, minor)
    }

    /// The release of the running kernel, in its own words.
    ///
    /// # Panics
    /// The kernel does not say it.
    #[must_use]
    pub fn text() -> String {
        let text = std::fs::read_to_string(OSRELEASE);
        text.unwrap_or_else(|e| panic!("{OSRELEASE}: {e}")).trim().to_owned()
    }

    /// Whether the running kernel is older. Then the calling test is skipped, in a line that
    /// `cargo xtask test` reads: it counts the test as skipped, not as passed. `why` says what the
    /// kernel cannot do.
    ///
    /// # Panics
    /// The kernel does not say its release; the thread is not a test's.
    #[must_use]
    pub fn is_missing(self, why: &str) -> bool {
        let is_older = Self::running() < self;
        if is_older {
            let thread = std::thread::current();
            let test = thread.name().expect("libtest names the thread of a test");
            println!("\nskipped here: {test}: {why}, which came with Linux {self}");
        }
        is_older
    }
}

impl fmt::Display for KernelRelease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}
