//! [`Backing`]: the file or block device behind a volume, opened, locked and measured.
//!
//! Invariants: while a read-write backing lives, no other open description on this host holds its
//! lock; its size is a nonzero multiple of the block size; with [`Backing::direct`], every whole
//! block is aligned for direct I/O from memory aligned to [`Backing::memory_alignment`], at most 4
//! KiB.
//!
//! The lock belongs to the open description, so I/O that a killed process left in the kernel keeps
//! the lock. A process that gets the lock knows that its predecessor's I/O has ended.
//! [`OpenOptions::lock_wait`] covers that moment, and udev, which locks block devices during a
//! probe.
//!
//! A failed write of the page cache is a loss: acknowledged data is gone. The kernel reports it to
//! one caller of `fdatasync` and forgets it. So only the syncs of the backing call `fdatasync`, one
//! at a time (`syncs.rs`). A durable write (FUA) is a write, followed by such a sync: an error of
//! the write concerns that write alone, an error of the sync concerns all acknowledged data. A
//! durable write is one operation only with direct I/O on a block device that can make one write
//! durable, or has no volatile cache ([`Backing::has_own_fua`]).
//!
//! A program of the target that is replaced leaves its backings open, with their locks
//! ([`Backing::leave_open`]). The new program takes them over ([`Backing::go_on`]) and opens no
//! path: the file at the path does not matter.

use std::fs::{self, File, TryLockError};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::sys::stat::{major, minor};
use nix::unistd::{Whence, lseek};
use rblk_protocol::width::wide64;

use super::alignment::{Alignment, direct_alignment, probe_alignment};
#[cfg(test)]
use super::methods::Method;
use super::methods::{Methods, queue_attribute, queue_limit};
use super::protection::Protection;
use super::syncs::{Losses, Syncs};
use super::{BackingKind, Bounds, StoreError};
use crate::memory::arena::MIN_EXTENT_BYTES;
use crate::store::attachment::Attachment;
use crate::store::store_identity::{StoreIdentity, has_passing_inode};
use rblk_operate::target::store_room::StoreRoom;

// Time between two attempts to get the lock.
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Whether I/O bypasses the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Direct {
    /// Direct I/O or an error.
    Required,
    /// Direct I/O where the file or device can do it, see [`Backing::direct`].
    #[default]
    Preferred,
    /// Through the page cache.
    Off,
}

/// How to open a backing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenOptions {
    /// Open for reading only, with a shared lock.
    pub read_only: bool,
    /// Whether I/O bypasses the page cache.
    pub direct: Direct,
    /// Block size of the volume in bytes: a power of two from 512 to 65536.
    pub block_size: u32,
    /// Time to wait for the lock. A killed predecessor holds it until its last I/O has ended.
    pub lock_wait: Duration,
    /// When a flush is answered that failed.
    pub losses: Losses,
}

impl Default for OpenOptions {
    /// Read-write, direct I/O preferred, blocks of 4096 bytes, no waiting for the lock.
    fn default() -> Self {
        Self {
            read_only: false,
            direct: Direct::default(),
            block_size: 4096,
            lock_wait: Duration::ZERO,
            losses: Losses::default(),
        }
    }
}

/// A file or device that the previous program of the target left open, with its lock.
#[derive(Debug)]
pub(crate) struct LeftOpen {
    /// A copy of its descriptor.
    pub file: File,
    /// The size in force, in bytes.
    pub size_bytes: u64,
}

/// An open, locked file or block device. The stores of all threads that serve it share it.
#[derive(Debug)]
pub struct Backing {
    file: File,
    path: PathBuf,
    kind: BackingKind,
    read_only: bool,
    // The alignment of direct I/O; `None` without direct I/O.
    direct: Option<Alignment>,
    block_size: u32,
    size: AtomicU64,
    // Another program of the target shares the open description and its lock.
    is_shared: AtomicBool,
    has_own_fua: bool,
    identity: Option<StoreIdentity>,
    attachment: Option<Attachment>,
    syncs: Syncs,
    methods: Methods,
}

impl Backing {
    /// Opens, locks and measures the file or device at `path`.
    ///
    /// # Errors
    /// [`StoreError`] names the path, the value and the fix.
    pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<Self, StoreError> {
        let OpenOptions { read_only, block_size, lock_wait, .. } = *options;
        check_block_size(block_size)?;
        // Checked before the open: opening a pipe would wait for a writer.
        let kind = kind_of(path, &fs::metadata(path).map_err(open_error(path, read_only))?)?;
        let file = open_locked(path, kind, read_only, Instant::now() + lock_wait)?;
        Self::of_file((file, None), path, options)
    }

    /// Takes over a file or device that the previous program left open. It was opened at `path`,
    /// but the path is not opened again: the file may have been moved or deleted since. The size in
    /// force stays in force, even if the file's length has changed.
    ///
    /// Until [`Self::keep`], the lock outlives this value, for the previous program.
    ///
    /// # Errors
    /// [`StoreError`], if the file is open for reading only and the options ask for writing, or if
    /// another process has got its lock.
    pub(crate) fn go_on(
        left: LeftOpen,
        path: &Path,
        options: &OpenOptions,
    ) -> Result<Self, StoreError> {
        let LeftOpen { file, size_bytes } = left;
        check_block_size(options.block_size)?;
        let flags = flags_of(&file, path)?;
        // A volume that became read-only while it was served is still open for writing.
        let read_only = flags & OFlag::O_ACCMODE == OFlag::O_RDONLY;
        if read_only && !options.read_only {
            return Err(StoreError::ReadOnly { path: path.to_owned() });
        }
        // The description already has the lock: this changes nothing.
        match if read_only { file.try_lock_shared() } else { file.try_lock() } {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(StoreError::Locked { path: path.to_owned(), pid: None, comm: None });
            }
            Err(TryLockError::Error(source)) => return Err(io_error(path, "lock it")(source)),
        }
        // The previous user may have turned direct I/O on. This one turns it on again if needed.
        set_direct(&file, path, false)?;
        let options = OpenOptions { read_only, ..*options };
        Self::of_file((file, Some(size_bytes)), path, &options)
    }

    /// Makes a backing of an open, locked file. `size` is the size in force, if the file was taken
    /// over.
    fn of_file(
        (file, size): (File, Option<u64>),
        path: &Path,
        options: &OpenOptions,
    ) -> Result<Self, StoreError> {
        let OpenOptions { read_only, direct, block_size, losses, .. } = *options;
        let metadata = file.metadata().map_err(io_error(path, "look at it"))?;
        let kind = kind_of(path, &metadata)?;
        // Asked of the open file, because opening a read-only device for writing succeeds. A volume
        // that was served already stays in service, for its readers.
        if size.is_none() && !read_only && Protection::of(&file, kind).is_some() {
            return Err(StoreError::ReadOnly { path: path.to_owned() });
        }

        let mut backing = Self {
            path: path.to_owned(),
            kind,
            read_only,
            direct: None,
            block_size,
            size: AtomicU64::new(0),
            is_shared: AtomicBool::new(size.is_some()),
            has_own_fua: false,
            identity: match kind {
                BackingKind::File => StoreIdentity::of_file(&file, &metadata),
                BackingKind::BlockDevice => StoreIdentity::of_device(&metadata),
            },
            attachment: Attachment::of(match kind {
                BackingKind::File => metadata.dev(),
                BackingKind::BlockDevice => metadata.rdev(),
            }),
            syncs: Syncs::new(losses),
            methods: Methods::new(kind, read_only),
            file,
        };
        let size = size.map_or_else(|| backing.measure(), Ok)?;
        backing.size.store(size, Ordering::Relaxed);
        if direct != Direct::Off {
            match backing.make_direct() {
                Ok(alignment) => backing.direct = Some(alignment),
                Err(error) if direct == Direct::Required => return Err(error),
                Err(_) => {}
            }
        }
        backing.has_own_fua = backing.direct() && makes_writes_durable(kind, &metadata);
        // Another process may have written behind the end in force.
        let end = size.max(metadata.len());
        backing.methods.probe(&backing.file, backing.kind, end, block_size, &metadata);
        Ok(backing)
    }

    /// Makes the backing and its lock outlive an exec. Returns the number of its descriptor.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn leave_open(&self) -> io::Result<RawFd> {
        fcntl(&self.file, FcntlArg::F_SETFD(FdFlag::empty()))?;
        self.is_shared.store(true, Ordering::Relaxed);
        Ok(self.file.as_raw_fd())
    }

    /// No other program needs the backing any more: its lock ends with this value, or with an exec.
    pub(crate) fn keep(&self) {
        self.is_shared.store(false, Ordering::Relaxed);
        let _ = fcntl(&self.file, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
    }

    /// Device and inode of the open file, and the device number of a block device (else 0).
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn numbers(&self) -> io::Result<((u64, u64), u64)> {
        let metadata = self.file.metadata()?;
        let device = if self.is_file() { 0 } else { metadata.rdev() };
        Ok(((metadata.dev(), metadata.ino()), device))
    }

    /// The identity, which distinguishes the backing from another file or device at this path;
    /// `None` if it has none.
    #[must_use]
    pub(crate) fn identity(&self) -> Option<&StoreIdentity> {
        self.identity.as_ref()
    }

    /// The attachment of its disk when it was opened; `None` if the kernel does not count it.
    #[must_use]
    pub(crate) fn attachment(&self) -> Option<Attachment> {
        self.attachment
    }

    /// The path at which it was opened.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The kind of the backing.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn kind(&self) -> BackingKind {
        self.kind
    }

    /// Size in bytes, a nonzero multiple of the block size.
    #[must_use]
    pub(crate) fn size_bytes(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// The descriptor's number in this process.
    #[must_use]
    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Block size of the volume in bytes.
    #[must_use]
    pub(crate) fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Whether I/O bypasses the page cache.
    #[must_use]
    pub(crate) fn direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Bytes to which offsets and lengths must be aligned: 1 unless direct.
    #[must_use]
    pub(crate) fn alignment(&self) -> u32 {
        self.direct.map_or(1, |alignment| alignment.offset)
    }

    /// Bytes to which the address of every segment of I/O must be aligned, at most 4096: 1 unless
    /// direct. The lengths of the segments, and their sum, must be multiples of
    /// [`Self::alignment`].
    ///
    /// Where the kernel does not report it, this is an alignment that always suffices: the device's
    /// logical block, or 4096.
    #[must_use]
    pub(crate) fn memory_alignment(&self) -> u32 {
        self.direct.map_or(1, |alignment| alignment.memory)
    }

    /// The space of a file and of its file system; `None` for a device. May block as long as the
    /// file system does.
    pub(crate) fn room(&self) -> Option<StoreRoom> {
        if self.is_file() { StoreRoom::of(&self.file).ok() } else { None }
    }

    /// Whether the backing was opened for reading only.
    #[must_use]
    pub(crate) fn read_only(&self) -> bool {
        self.read_only
    }

    /// The reason why the backing takes no writes now, even if it was opened for writing.
    pub(super) fn protection(&self) -> Option<Protection> {
        Protection::of(&self.file, self.kind)
    }

    /// Whether the backing is a file of a file system without lasting inode numbers.
    pub(super) fn has_passing_inode(&self) -> bool {
        self.kind == BackingKind::File && has_passing_inode(&self.file)
    }

    /// Whether discard works, as far as known: found at open, and cleared by the first refusal.
    #[must_use]
    pub(crate) fn can_discard(&self) -> bool {
        self.methods.discard().is_some()
    }

    /// Whether zeroing a range is faster than writing zeroes, as far as known.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn can_zero_fast(&self) -> bool {
        // For a device without the command, the kernel writes zeroes.
        let method = self.methods.zero(self.kind == BackingKind::BlockDevice);
        let fast = match self.kind {
            BackingKind::File => method != Method::WriteZeroes,
            BackingKind::BlockDevice => method == Method::PunchHole,
        };
        fast && !self.read_only
    }

    /// Discards below this many bytes, or not aligned to it, free no space. 0: unknown.
    #[must_use]
    pub(crate) fn discard_granularity(&self) -> u32 {
        self.methods.discard_granularity()
    }

    /// Measures the size again, after the file or device has grown. Returns the new size in bytes.
    ///
    /// # Errors
    /// The backing shrank or is no longer a multiple of the block size; the old size stays in
    /// force.
    #[cfg(test)]
    pub(crate) fn refresh_size(&self) -> Result<u64, StoreError> {
        let (was, size) = (self.size_bytes(), self.measure()?);
        if size < was {
            return Err(StoreError::Shrank { path: self.path.clone(), was, size });
        }
        self.size.store(size, Ordering::Relaxed);
        Ok(size)
    }

    /// Whether the backing is a regular file, which can be resized.
    #[must_use]
    pub(crate) fn is_file(&self) -> bool {
        self.kind == BackingKind::File
    }

    /// Current length of the file or device in bytes. The size in force does not change.
    ///
    /// # Errors
    /// The length is 0 or not a multiple of the block size.
    pub(crate) fn measured(&self) -> Result<u64, StoreError> {
        self.measure()
    }

    /// Sets the size in force, and the length of a file. A device, and a file opened for reading
    /// only, must already have this length. New bytes of a file are a hole, which reads as zeroes.
    /// The file's length is durable afterwards. Returns the file's old length, if the file was made
    /// longer.
    ///
    /// # Errors
    /// An error of the system, or the file or device is too short. Then the size in force stays as
    /// it was, and a lengthened file gets its old length back.
    pub(crate) fn resize(&self, to: u64) -> Result<Option<u64>, StoreError> {
        let is_file = self.kind == BackingKind::File && !self.read_only;
        let was = self.size_bytes();
        // A volume that grows does not cut off bytes that others wrote behind the end in force.
        let grows = to > was;
        let measured = self.measure()?;
        let lengthens = is_file && measured < to;
        if lengthens || (is_file && !grows && measured != to) {
            self.file.set_len(to).map_err(io_error(&self.path, "change its size"))?;
        }
        let size = self.make_len_durable().and_then(|()| self.measure()).inspect_err(|_| {
            if lengthens {
                let _ = self.cut_back(measured, was);
            }
        })?;
        if size < to {
            return Err(StoreError::Shrank { path: self.path.clone(), was: to, size });
        }
        self.size.store(to, Ordering::Relaxed);
        Ok(lengthens.then_some(measured))
    }

    /// Undoes a [`Self::resize`] that made a file longer: sets the size in force to `size`, and the
    /// file's length to `len`. If data may have been written behind `len`, the file keeps its
    /// length and this returns false.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn cut_back(&self, len: u64, size: u64) -> Result<bool, StoreError> {
        self.size.store(size, Ordering::Relaxed);
        if self.is_hole_behind(len).map_err(io_error(&self.path, "look for its holes"))? {
            self.file.set_len(len).map_err(io_error(&self.path, "change its size"))?;
            self.make_len_durable()?;
            return Ok(true);
        }
        Ok(false)
    }

    // The configuration records the length of the file next. After a power failure the file must
    // have this length. Uses its own open file: if this sync failed on ours, it would consume the
    // error that belongs to a flush.
    fn make_len_durable(&self) -> Result<(), StoreError> {
        if self.kind != BackingKind::File || self.read_only {
            return Ok(());
        }
        let file = File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        let synced = file.and_then(|file| file.sync_all());
        synced.map_err(io_error(&self.path, "make its size durable"))
    }

    // Whether a file has only a hole behind `len` bytes. A file system that does not report holes
    // counts as "no".
    fn is_hole_behind(&self, len: u64) -> io::Result<bool> {
        // Each block of the file system is wholly data or wholly hole.
        let hole = len.next_multiple_of(MIN_EXTENT_BYTES.into());
        let from = i64::try_from(hole).map_err(io::Error::other)?;
        if lseek(&self.file, from, Whence::SeekData) != Err(Errno::ENXIO) {
            return Ok(false);
        }
        // Not by direct I/O, which would refuse a read of a few bytes.
        let file = File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))?;
        let mut rest = vec![0; usize::try_from(hole - len).map_err(io::Error::other)?];
        let mut at = 0;
        while at < rest.len() {
            match file.read_at(&mut rest[at..], len + wide64(at))? {
                0 => break,
                more => at += more,
            }
        }
        Ok(rest.iter().all(|byte| *byte == 0))
    }

    /// Whether a single write can be made durable without a sync: direct I/O on a block device that
    /// has FUA, or has no volatile cache.
    #[must_use]
    pub(crate) fn has_own_fua(&self) -> bool {
        self.has_own_fua
    }

    /// Whether a sync has failed: writes acknowledged before it may be lost. The system reports
    /// that once and to one caller only, and then counts the data as written. The backing remembers
    /// the failure, so every later flush fails too, as long as the backing is open.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn has_lost_writes(&self) -> bool {
        self.syncs.is_lost()
    }

    /// Answers the failed flushes that [`Losses::HeldUntilNoted`] held: the owner has recorded the
    /// loss. Has no effect without a loss.
    pub(crate) fn loss_noted(&self) {
        self.syncs.loss_noted();
    }

    pub(super) fn syncs(&self) -> &Syncs {
        &self.syncs
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn methods(&self) -> &Methods {
        &self.methods
    }

    fn measure(&self) -> Result<u64, StoreError> {
        let path = || self.path.clone();
        let size = match self.kind {
            BackingKind::File => self.file.metadata().map(|metadata| metadata.len()),
            // The end of a block device is its size, as from BLKGETSIZE64, but without the ioctl.
            BackingKind::BlockDevice => (&self.file).seek(SeekFrom::End(0)),
        }
        .map_err(io_error(&self.path, "measure it"))?;
        let block_size = self.block_size;
        if size == 0 {
            return Err(StoreError::Empty { path: path() });
        }
        if !size.is_multiple_of(block_size.into()) {
            let is_file = self.is_file();
            return Err(StoreError::NotWholeBlocks { path: path(), size, block_size, is_file });
        }
        Ok(size)
    }

    // Turns direct I/O on and returns its alignment; leaves it off when the volume's blocks are too
    // small.
    fn make_direct(&self) -> Result<Alignment, StoreError> {
        let path = || self.path.clone();
        let switch = |on| set_direct(&self.file, &self.path, on);
        let reported = direct_alignment(&self.file, self.kind);
        switch(true)?;
        let checked = match reported {
            Some(Alignment { memory, offset })
                if memory == 0 || offset == 0 || memory > MIN_EXTENT_BYTES =>
            {
                Err(StoreError::NoDirect { path: path() })
            }
            Some(alignment) => Ok(alignment),
            None => probe_alignment(&self.file).map_err(|source| StoreError::Io {
                path: path(),
                what: "read it with O_DIRECT",
                source,
            }),
        }
        .and_then(|required| {
            let (block_size, offset) = (self.block_size, required.offset);
            if block_size.is_multiple_of(offset) {
                Ok(required)
            } else {
                Err(StoreError::Misaligned { path: path(), block_size, required: offset })
            }
        });
        if checked.is_err() {
            switch(false)?;
        }
        checked
    }
}

impl Bounds for Backing {
    #[inline]
    fn read_only(&self) -> bool {
        Backing::read_only(self)
    }

    #[inline]
    fn size_bytes(&self) -> u64 {
        Backing::size_bytes(self)
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        // A ring's file table may keep the open description a little longer than this value. Every
        // op has ended by then, since stores hold the backing until then.
        if !self.is_shared.load(Ordering::Relaxed) {
            let _ = self.file.unlock();
        }
    }
}

fn check_block_size(block_size: u32) -> Result<(), StoreError> {
    let good = block_size.is_power_of_two() && (512..=65536).contains(&block_size);
    good.then_some(()).ok_or(StoreError::BlockSize { block_size })
}

fn flags_of(file: &File, path: &Path) -> Result<OFlag, StoreError> {
    let flags = fcntl(file, FcntlArg::F_GETFL)
        .map_err(|error| io_error(path, "read its flags")(error.into()))?;
    Ok(OFlag::from_bits_retain(flags))
}

// Turns direct I/O on or off.
fn set_direct(file: &File, path: &Path, on: bool) -> Result<(), StoreError> {
    let mut flags = flags_of(file, path)?;
    flags.set(OFlag::O_DIRECT, on);
    match fcntl(file, FcntlArg::F_SETFL(flags)) {
        Ok(_) => Ok(()),
        Err(Errno::EINVAL) => Err(StoreError::NoDirect { path: path.to_owned() }),
        Err(error) => Err(io_error(path, "set O_DIRECT")(error.into())),
    }
}

fn kind_of(path: &Path, metadata: &fs::Metadata) -> Result<BackingKind, StoreError> {
    let kind = metadata.file_type();
    let what = match () {
        () if kind.is_file() => return Ok(BackingKind::File),
        () if kind.is_block_device() => return Ok(BackingKind::BlockDevice),
        () if kind.is_dir() => "directory",
        () if kind.is_char_device() => "character device",
        () if kind.is_fifo() => "pipe",
        () if kind.is_socket() => "socket",
        () => "special file",
    };
    Err(StoreError::WrongType { path: path.to_owned(), what })
}

fn open_error(path: &Path, read_only: bool) -> impl Fn(io::Error) -> StoreError {
    move |source| {
        let path = path.to_owned();
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => StoreError::NotFound { path },
            Some(libc::EACCES | libc::EPERM) => StoreError::Permission {
                path,
                access: if read_only { "read" } else { "read and write" },
            },
            Some(libc::EROFS) => StoreError::ReadOnly { path },
            _ => StoreError::Io { path, what: "open it", source },
        }
    }
}

fn io_error(path: &Path, what: &'static str) -> impl Fn(io::Error) -> StoreError {
    move |source| StoreError::Io { path: path.to_owned(), what, source }
}

// Opens and locks the file, with retries until the deadline. std's file locks are flock(2) on
// Linux.
fn open_locked(
    path: &Path,
    kind: BackingKind,
    read_only: bool,
    deadline: Instant,
) -> Result<File, StoreError> {
    // Without O_CREAT, O_EXCL claims a device: the open fails while the device is mounted, and
    // afterwards the device cannot be mounted.
    let claim = if kind == BackingKind::BlockDevice && !read_only { libc::O_EXCL } else { 0 };
    let mut options = fs::OpenOptions::new();
    options.read(true).write(!read_only).custom_flags(libc::O_CLOEXEC | claim);
    loop {
        let refused = match options.open(path) {
            Ok(file) => match if read_only { file.try_lock_shared() } else { file.try_lock() } {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) => {
                    holder(path, |path| StoreError::Locked { path, pid: None, comm: None })
                }
                Err(TryLockError::Error(source)) => return Err(io_error(path, "lock it")(source)),
            },
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                holder(path, |path| StoreError::Claimed { path })
            }
            Err(error) => return Err(open_error(path, read_only)(error)),
        };
        if Instant::now() >= deadline {
            return Err(refused);
        }
        std::thread::sleep(LOCK_RETRY);
    }
}

// Finds the process that holds the lock, where /proc shows it.
fn holder(path: &Path, unknown: impl FnOnce(PathBuf) -> StoreError) -> StoreError {
    let Some(pid) = fs::metadata(path).ok().and_then(|metadata| lock_holder(&metadata)) else {
        return unknown(path.to_owned());
    };
    let comm = fs::read_to_string(format!("/proc/{pid}/comm")).ok();
    let comm = comm.map(|comm| comm.trim_end().to_owned());
    StoreError::Locked { path: path.to_owned(), pid: Some(pid), comm }
}

// The process that holds a flock on the file, from lines like
// `7: FLOCK  ADVISORY  WRITE 4242 fe:00:131 0 EOF`; waiters have `->` after the number.
fn lock_holder(metadata: &fs::Metadata) -> Option<u32> {
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let device = metadata.dev();
    let file = format!("{:02x}:{:02x}:{}", major(device), minor(device), metadata.ino());
    locks.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.nth(1)? == "FLOCK").then_some(())?;
        let pid = words.nth(2)?.parse().ok()?;
        (words.next()? == file && pid != 0).then_some(pid)
    })
}

// Whether this is a block device on which an error of a durable write concerns that write alone.
// Where the device has a volatile cache and no FUA, the kernel would flush the cache after the
// write, and an error of that flush would concern others' writes.
fn makes_writes_durable(kind: BackingKind, metadata: &fs::Metadata) -> bool {
    let device = metadata.rdev();
    let has_no_cache =
        || queue_attribute(device, "write_cache").is_some_and(|cache| cache == "write through");
    kind == BackingKind::BlockDevice && (queue_limit(device, "fua") == Some(1) || has_no_cache())
}
