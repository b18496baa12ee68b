//! [`Backing`]: the file or block device behind a volume, opened, locked and measured.
//!
//! Invariants: while a read-write backing lives, no other open description anywhere on this host
//! holds its lock; its size is a nonzero multiple of the block size; with [`Backing::direct`] every
//! whole block is well aligned for direct I/O from memory aligned to [`Backing::memory_alignment`],
//! at most 4 KiB.
//!
//! The lock belongs to the open description, so I/O that a killed process left in the kernel keeps
//! the lock. A process that gets the lock knows that the I/O of its predecessor has ended.
//! [`OpenOptions::lock_wait`] covers that moment, and udev, which locks block devices for the time
//! of a probe.
//!
//! A write of the page cache that fails is a loss: data that was acknowledged is gone. The kernel
//! tells one caller of `fdatasync` and forgets it. So only the syncs of the backing call
//! `fdatasync`, one at a time (`syncs.rs`). A durable write (FUA) is a write and then
//! such a sync: an error of the write speaks of that write alone, an error of the sync speaks of
//! all that was acknowledged. A durable write is one operation only with direct I/O on a block
//! device that can make one write durable, or has no volatile cache ([`Backing::has_own_fua`]).
//!
//! A program of the target that makes room for another one leaves its backings open, with their
//! locks ([`Backing::leave_open`]). The other one goes on with them ([`Backing::go_on`]) and opens
//! no path: what lies at the path by then does not matter.

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
use super::room::StoreRoom;
use super::syncs::{Losses, Syncs};
use super::{BackingKind, StoreError};
use crate::memory::arena::MIN_EXTENT_BYTES;
use crate::store::store_identity::{StoreIdentity, has_passing_inode};

// Time between two tries to get the lock.
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Whether I/O passes by the page cache.
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
    /// Whether I/O passes by the page cache.
    pub direct: Direct,
    /// Block size of the volume in bytes: a power of two from 512 to 65536.
    pub block_size: u32,
    /// How long to wait for the lock. A killed predecessor holds it until its last I/O has ended.
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

/// A file or device that the program of the target before this one left open, with its lock.
#[derive(Debug)]
pub(crate) struct LeftOpen {
    /// A copy of its descriptor.
    pub file: File,
    /// The size that was in force, in bytes.
    pub size_bytes: u64,
}

/// An open, locked file or block device. Shared by the stores of all threads that serve it.
#[derive(Debug)]
pub struct Backing {
    file: File,
    path: PathBuf,
    kind: BackingKind,
    read_only: bool,
    // With direct I/O, what it must be aligned to.
    direct: Option<Alignment>,
    block_size: u32,
    size: AtomicU64,
    // Another program of the target has the open description, too, and with it the lock.
    is_shared: AtomicBool,
    has_own_fua: bool,
    identity: Option<StoreIdentity>,
    syncs: Syncs,
    methods: Methods,
}

impl Backing {
    /// Opens, locks and measures what is at `path`.
    ///
    /// # Errors
    /// [`StoreError`] names the path, the value and the fix.
    pub(crate) fn open(path: &Path, options: &OpenOptions) -> Result<Self, StoreError> {
        let OpenOptions { read_only, block_size, lock_wait, .. } = *options;
        check_block_size(block_size)?;
        // Looked at before it is opened: opening a pipe would wait for a writer.
        let kind = kind_of(path, &fs::metadata(path).map_err(open_error(path, read_only))?)?;
        let file = open_locked(path, kind, read_only, Instant::now() + lock_wait)?;
        Self::of_file((file, None), path, options)
    }

    /// Goes on with what the program before this one left open. It was opened at `path`, and
    /// nothing is looked for there: it may have been moved or deleted since. The size is the one
    /// that was in force, also if the file has another one by now.
    ///
    /// Until [`Self::keep`] its lock outlives this value, for the program before this one.
    ///
    /// # Errors
    /// [`StoreError`]. It is open for reading alone and the options want to write, or another
    /// process has got its lock.
    pub(crate) fn go_on(
        left: LeftOpen,
        path: &Path,
        options: &OpenOptions,
    ) -> Result<Self, StoreError> {
        let LeftOpen { file, size_bytes } = left;
        check_block_size(options.block_size)?;
        let flags = flags_of(&file, path)?;
        // A volume that became read-only while it was served is open for writing.
        let read_only = flags & OFlag::O_ACCMODE == OFlag::O_RDONLY;
        if read_only && !options.read_only {
            return Err(StoreError::ReadOnly { path: path.to_owned() });
        }
        // The description has the lock already: this changes nothing.
        match if read_only { file.try_lock_shared() } else { file.try_lock() } {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(StoreError::Locked { path: path.to_owned(), pid: None, comm: None });
            }
            Err(TryLockError::Error(source)) => return Err(io_error(path, "lock it")(source)),
        }
        // Its last user may have had direct I/O. It is turned on anew if this one wants it.
        set_direct(&file, path, false)?;
        let options = OpenOptions { read_only, ..*options };
        Self::of_file((file, Some(size_bytes)), path, &options)
    }

    /// Of a file that is open and locked, with the size in force, if there is one already.
    fn of_file(
        (file, size): (File, Option<u64>),
        path: &Path,
        options: &OpenOptions,
    ) -> Result<Self, StoreError> {
        let OpenOptions { read_only, direct, block_size, losses, .. } = *options;
        let metadata = file.metadata().map_err(io_error(path, "look at it"))?;
        let kind = kind_of(path, &metadata)?;
        // The open was asked, which a read-only device does not refuse. What was served already is
        // served on, for those who read.
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
        // Somebody may have put something behind the end in force.
        let end = size.max(metadata.len());
        backing.methods.probe(&backing.file, backing.kind, end, block_size, &metadata);
        Ok(backing)
    }

    /// From now on it outlives an exec, with its lock. Returns the number of its descriptor.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn leave_open(&self) -> io::Result<RawFd> {
        fcntl(&self.file, FcntlArg::F_SETFD(FdFlag::empty()))?;
        self.is_shared.store(true, Ordering::Relaxed);
        Ok(self.file.as_raw_fd())
    }

    /// No other program needs it any more: its lock ends with this value, or with an exec.
    pub(crate) fn keep(&self) {
        self.is_shared.store(false, Ordering::Relaxed);
        let _ = fcntl(&self.file, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
    }

    /// Device and inode of what is open, and, of a block device, its number (else 0).
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn numbers(&self) -> io::Result<((u64, u64), u64)> {
        let metadata = self.file.metadata()?;
        let device = if self.is_file() { 0 } else { metadata.rdev() };
        Ok(((metadata.dev(), metadata.ino()), device))
    }

    /// What distinguishes it from another file or device of the same path; `None` where nothing
    /// does.
    #[must_use]
    pub(crate) fn identity(&self) -> Option<&StoreIdentity> {
        self.identity.as_ref()
    }

    /// Where it is.
    #[must_use]
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What it is.
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

    /// The number of its descriptor in this process.
    #[must_use]
    pub(crate) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Block size of the volume in bytes.
    #[must_use]
    pub(crate) fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Whether I/O passes by the page cache.
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
    /// direct. The lengths of the segments must be multiples of [`Self::alignment`], as the whole
    /// must.
    ///
    /// Where the kernel does not tell, this is what is always enough: the device's logical block,
    /// or 4096.
    #[must_use]
    pub(crate) fn memory_alignment(&self) -> u32 {
        self.direct.map_or(1, |alignment| alignment.memory)
    }

    /// The space of a file and of its file system; `None` for a device. May block as long as the
    /// file system does.
    pub(crate) fn room(&self) -> Option<StoreRoom> {
        if self.is_file() { StoreRoom::of(&self.file).ok() } else { None }
    }

    /// Whether it was opened for reading only.
    #[must_use]
    pub(crate) fn read_only(&self) -> bool {
        self.read_only
    }

    /// What refuses writes to it now, though it may have been opened for writing.
    pub(super) fn protection(&self) -> Option<Protection> {
        Protection::of(&self.file, self.kind)
    }

    /// Whether it is a file of a file system whose inode numbers do not last.
    pub(super) fn has_passing_inode(&self) -> bool {
        self.kind == BackingKind::File && has_passing_inode(&self.file)
    }

    /// Whether discard works, as far as known: looked up when opened, taken back by the first
    /// refusal.
    #[must_use]
    pub(crate) fn can_discard(&self) -> bool {
        self.methods.discard().is_some()
    }

    /// Whether zeroing a range costs less than writing zeroes, as far as known.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn can_zero_fast(&self) -> bool {
        // A device without the command has its zeroes written by the kernel.
        let method = self.methods.zero(self.kind == BackingKind::BlockDevice);
        let fast = match self.kind {
            BackingKind::File => method != Method::WriteZeroes,
            BackingKind::BlockDevice => method == Method::PunchHole,
        };
        fast && !self.read_only
    }

    /// Discards of less than this many bytes, or not aligned to it, give no space back. 0: unknown.
    #[must_use]
    pub(crate) fn discard_granularity(&self) -> u32 {
        self.methods.discard_granularity()
    }

    /// Measures the size again, after the file or device has grown, and returns it in bytes.
    ///
    /// # Errors
    /// It shrank or is no longer a multiple of the block size; the old size stays in force.
    #[cfg(test)]
    pub(crate) fn refresh_size(&self) -> Result<u64, StoreError> {
        let (was, size) = (self.size_bytes(), self.measure()?);
        if size < was {
            return Err(StoreError::Shrank { path: self.path.clone(), was, size });
        }
        self.size.store(size, Ordering::Relaxed);
        Ok(size)
    }

    /// Whether it is a regular file, which can get another size.
    #[must_use]
    pub(crate) fn is_file(&self) -> bool {
        self.kind == BackingKind::File
    }

    /// Bytes that the file or device has now. The size in force stays as it is.
    ///
    /// # Errors
    /// It is empty or not a multiple of the block size.
    pub(crate) fn measured(&self) -> Result<u64, StoreError> {
        self.measure()
    }

    /// Makes a file so long, and has this size from now on. A device, and a file that is open for
    /// reading alone, must be that long already. Bytes that a file gets are a hole: they read as
    /// zeroes. The length of a file is durable then. Returns the length that it had, if it was made
    /// longer.
    ///
    /// # Errors
    /// The system's, or it is shorter than that; the size in force stays as it is, and a file that
    /// was made longer is as long as before.
    pub(crate) fn resize(&self, to: u64) -> Result<Option<u64>, StoreError> {
        let is_file = self.kind == BackingKind::File && !self.read_only;
        let was = self.size_bytes();
        // What somebody put behind the end in force is not cut off by a volume that grows.
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

    /// Undoes a [`Self::resize`] that made a file longer: the size in force is `size`, and the file
    /// has `len` bytes. It stays longer, and this returns false, if anything may have been written
    /// behind them.
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

    // The length of a file is kept in the configuration next. A power failure must not leave a file
    // of another length than that. By an open file of its own: a sync that fails by ours would take
    // the error from the flush that must be told of it.
    fn make_len_durable(&self) -> Result<(), StoreError> {
        if self.kind != BackingKind::File || self.read_only {
            return Ok(());
        }
        let file = File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        let synced = file.and_then(|file| file.sync_all());
        synced.map_err(io_error(&self.path, "make its size durable"))
    }

    // Whether a file has nothing but a hole behind so many bytes. A file system that tells no holes
    // says no.
    fn is_hole_behind(&self, len: u64) -> io::Result<bool> {
        // A block of a file system is data as a whole.
        let hole = len.next_multiple_of(MIN_EXTENT_BYTES.into());
        let from = i64::try_from(hole).map_err(io::Error::other)?;
        if lseek(&self.file, from, Whence::SeekData) != Err(Errno::ENXIO) {
            return Ok(false);
        }
        // Without direct I/O, which would refuse a few bytes.
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

    /// Whether one write can be made durable without a sync of the whole: direct I/O on a block
    /// device that has FUA, or no volatile cache.
    #[must_use]
    pub(crate) fn has_own_fua(&self) -> bool {
        self.has_own_fua
    }

    /// Whether a sync has failed: writes that were acknowledged before may be lost. The system
    /// reports that once and to one caller only, and then counts the data as written. So it is
    /// remembered here: every later flush fails too, as long as the backing is open.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn has_lost_writes(&self) -> bool {
        self.syncs.is_lost()
    }

    /// The owner has noted the loss: with [`Losses::HeldUntilNoted`] the flushes that failed are
    /// answered now. Without a loss it does nothing.
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
            // Where a block device ends is what BLKGETSIZE64 says, without the ioctl.
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

    // Turns direct I/O on and returns the alignment it needs; leaves it off when the blocks are too
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

impl Drop for Backing {
    fn drop(&mut self) {
        // A ring's file table may keep the open description a little longer than this value; every
        // op has ended by then, since stores hold the backing until it has.
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

// Opens and locks. Tries again until the deadline. std's file locks are flock(2) on Linux.
fn open_locked(
    path: &Path,
    kind: BackingKind,
    read_only: bool,
    deadline: Instant,
) -> Result<File, StoreError> {
    // Without O_CREAT, O_EXCL claims a device: it is refused while the device is mounted, and the
    // device cannot be mounted afterwards.
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

// Which process has it, where /proc tells.
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

// A block device whose error of a durable write speaks of that write alone. Where the device has a
// volatile cache and no FUA, the kernel would flush the cache behind the write, and an error of
// that flush would speak of others' writes.
fn makes_writes_durable(kind: BackingKind, metadata: &fs::Metadata) -> bool {
    let device = metadata.rdev();
    let has_no_cache =
        || queue_attribute(device, "write_cache").is_some_and(|cache| cache == "write through");
    kind == BackingKind::BlockDevice && (queue_limit(device, "fua") == Some(1) || has_no_cache())
}
