//! Bytes on block devices: patterns, aligned memory, and attributes in sysfs.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Memory that direct I/O takes.
#[derive(Debug)]
pub struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// `len` zeros.
    #[must_use]
    pub fn zeros(len: usize) -> Self {
        let bytes = vec![0; len + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        Self { bytes, start, len }
    }

    /// A copy of `data`.
    #[must_use]
    pub fn of(data: &[u8]) -> Self {
        let mut aligned = Self::zeros(data.len());
        aligned.as_mut().copy_from_slice(data);
        aligned
    }

    /// Writes `data` to a file opened for direct I/O.
    ///
    /// # Errors
    /// The system's.
    pub fn write_at(file: &File, data: &[u8], offset: u64) -> io::Result<()> {
        file.write_all_at(Self::of(data).as_ref(), offset)
    }

    /// Reads from a file opened for direct I/O.
    ///
    /// # Errors
    /// The system's.
    pub fn read_at(file: &File, len: usize, offset: u64) -> io::Result<Vec<u8>> {
        let mut aligned = Self::zeros(len);
        file.read_exact_at(aligned.as_mut(), offset)?;
        Ok(aligned.as_ref().to_vec())
    }

    /// Opens a device for direct I/O. `flags` are more of open(2)'s.
    ///
    /// # Errors
    /// The system's.
    pub fn open(device: &Path, write: bool, flags: i32) -> io::Result<File> {
        OpenOptions::new().read(true).write(write).custom_flags(libc::O_DIRECT | flags).open(device)
    }
}

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl AsMut<[u8]> for Aligned {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// Bytes that depend on their place and on the seed: no two blocks of 8 bytes are alike.
#[must_use]
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    // A loop, since the lab's build is optimised little, and these bytes are made by the million.
    let mut bytes = Vec::with_capacity(len.next_multiple_of(8));
    for at in 0..len.div_ceil(8) as u64 {
        // splitmix64.
        let mut word = (seed << 40 ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bytes.extend_from_slice(&(word ^ word >> 27).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// The identity of a device node: a node that was removed and made again has another inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Node {
    /// The device behind it.
    pub rdev: u64,
    /// The node itself.
    pub inode: u64,
}

impl Node {
    /// The node of a device.
    ///
    /// # Panics
    /// The path is missing, or is no block device.
    #[must_use]
    pub fn of(device: &Path) -> Self {
        let found = std::fs::metadata(device);
        let found = found.unwrap_or_else(|e| panic!("{}: {e}", device.display()));
        assert!(found.file_type().is_block_device(), "{}", device.display());
        Self { rdev: found.rdev(), inode: found.ino() }
    }
}

/// The attributes of a block device in sysfs.
#[derive(Debug)]
pub struct Sysfs(PathBuf);

impl Sysfs {
    /// The attributes of a device such as `/dev/ublkb0`.
    #[must_use]
    pub fn of(device: &Path) -> Self {
        Self(Path::new("/sys/block").join(device.file_name().unwrap_or_default()))
    }

    /// An attribute of the disk, such as `queue/fua`.
    ///
    /// # Panics
    /// The disk has no such attribute.
    #[must_use]
    pub fn text(&self, name: &str) -> String {
        let path = self.0.join(name);
        let text =
            std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        text.trim().to_owned()
    }

    /// Path of an attribute.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A numeric attribute.
    ///
    /// # Panics
    /// The disk has no such attribute, or the value is no number.
    #[must_use]
    pub fn number(&self, name: &str) -> u64 {
        let text = self.text(name);
        text.parse().unwrap_or_else(|_| panic!("{name} is `{text}`, not a number"))
    }

    /// Sets an attribute.
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn set(&self, name: &str, value: &str) {
        let path = self.0.join(name);
        std::fs::write(&path, value)
            .unwrap_or_else(|e| panic!("{} = {value}: {e}", path.display()));
    }
}

/// How often a file of ext4 was synchronised, by fsync or by a write that asks for it, while `work`
/// ran. `None` where the kernel cannot trace that.
pub fn file_syncs(work: impl FnOnce()) -> Option<usize> {
    let tracing = Path::new("/sys/kernel/tracing");
    let switch = tracing.join("events/ext4/ext4_sync_file_enter/enable");
    let on = std::fs::write(tracing.join("trace"), "").and_then(|()| std::fs::write(&switch, "1"));
    work();
    on.ok()?;
    let text = std::fs::read_to_string(tracing.join("trace")).unwrap_or_default();
    let _ = std::fs::write(&switch, "0");
    Some(text.lines().filter(|line| line.contains("ext4_sync_file_enter:")).count())
}
