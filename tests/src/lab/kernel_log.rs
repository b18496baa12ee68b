//! [`KernelLog`]: the kernel's messages since a mark.

use std::sync::atomic::{AtomicU32, Ordering};

use super::Lab;
use super::process::start;
use super::wait::DEADLINE;

/// Messages of the block layer, the page cache and ext4 about a block device that failed.
const COMPLAINTS: [&str; 6] = [
    "I/O error",
    "EXT4-fs error",
    "EXT4-fs warning",
    "lost async page write",
    "lost sync page write",
    "Aborting journal",
];

/// The kernel's log from a mark on.
#[derive(Debug)]
pub struct KernelLog {
    mark: String,
}

impl KernelLog {
    /// Writes the mark.
    ///
    /// # Panics
    /// The log cannot be written.
    #[must_use]
    pub fn mark(lab: &Lab) -> Self {
        static MARKS: AtomicU32 = AtomicU32::new(1);
        let mark = format!("rblk test {} {}", lab.test(), MARKS.fetch_add(1, Ordering::Relaxed));
        // A line without an end can be read only when the next one follows.
        std::fs::write("/dev/kmsg", format!("{mark}\n"))
            .unwrap_or_else(|e| panic!("/dev/kmsg: {e}"));
        Self { mark }
    }

    /// The messages since the mark.
    ///
    /// # Panics
    /// The log cannot be read, or no longer has the mark.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let text = start(&["dmesg"]).finish(DEADLINE).ok();
        let (_, since) = text
            .rsplit_once(&self.mark)
            .unwrap_or_else(|| panic!("no `{}` in the kernel's log any more", self.mark));
        since.lines().skip(1).map(str::to_owned).collect()
    }

    /// Lines that say that a block device, or a file system on one, failed.
    #[must_use]
    pub fn complaints(&self) -> Vec<String> {
        let is_one = |line: &String| COMPLAINTS.iter().any(|text| line.contains(text));
        self.lines().into_iter().filter(is_one).collect()
    }
}
