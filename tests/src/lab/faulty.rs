//! [`FaultyDisk`]: a disk of [`FaultyDisk::BYTES`] that works until a fault begins, and then loses
//! writes.
//!
//! The first chunk stays sound under every fault: a mount reads it, and a thin pool answers a FLUSH
//! only if the chunk at the start of the disk is mapped.
//!
//! The reader gets the bytes from below the fault, past every page cache.

use std::fmt;
use std::fs::File;
use std::io;
use std::path::PathBuf;

use super::disk::kinds;
use super::{Aligned, Lab, LoopDisk, Mapped, Sysfs};

const SECTOR: u64 = 512;
/// The allocation unit of a thin pool.
const CHUNK_SECTORS: u64 = 128;
const DISK_SECTORS: u64 = FaultyDisk::BYTES / SECTOR;
/// The smallest size that dm-thin recommends for metadata.
const METADATA_BYTES: u64 = 2 << 20;

/// How a disk loses writes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fault {
    /// dm-error: all I/O fails with EIO. A FLUSH passes, since dm-error gets none.
    Error,
    /// dm-flakey with `error_writes`: writes and FLUSHes fail with EIO. Reads work.
    Flakey,
    /// A thin pool runs full: a write to a new chunk fails with ENOSPC. All else works.
    Full,
}

impl Fault {
    /// All faults.
    pub const ALL: [Self; 3] = [Self::Error, Self::Flakey, Self::Full];

    /// The faults that the variable `RBLK_FAULTS` lists, such as `error,flakey`; without it, all.
    ///
    /// # Panics
    /// The list has an unknown name, or the kernel lacks the kind of table for a fault.
    #[must_use]
    pub fn asked_for() -> Vec<Self> {
        let faults = match std::env::var("RBLK_FAULTS") {
            Ok(names) => names.split(',').map(Self::named).collect(),
            Err(_) => Self::ALL.to_vec(),
        };
        let kinds = kinds();
        for fault in &faults {
            let kind = fault.kind();
            assert!(
                kinds.iter().any(|has| has == kind),
                "this kernel has no dm target `{kind}`, which the fault `{fault}` needs; \
                 RBLK_FAULTS=error,flakey leaves out the thin pool"
            );
        }
        faults
    }

    fn named(name: &str) -> Self {
        let found = Self::ALL.into_iter().find(|fault| fault.to_string() == name);
        found.unwrap_or_else(|| panic!("RBLK_FAULTS: no fault `{name}`; known are {:?}", Self::ALL))
    }

    /// The kind of device-mapper table that the fault needs.
    fn kind(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Flakey => "flakey",
            Self::Full => "thin-pool",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Error => "error",
            Self::Flakey => "flakey",
            Self::Full => "full",
        })
    }
}

/// A disk with a fault to come. Drop removes the disk.
#[derive(Debug)]
pub struct FaultyDisk {
    fault: Fault,
    // Fields are dropped in this order: each device before the one below it.
    store: Mapped,
    pool: Option<Mapped>,
    below: LoopDisk,
    // The pool uses it until the pool is removed.
    _metadata: Option<LoopDisk>,
}

impl FaultyDisk {
    /// Size of the disk.
    pub const BYTES: u64 = 16 << 20;
    /// The disk is made of chunks of this size. A thin pool gives room by the chunk.
    pub const CHUNK_BYTES: u64 = CHUNK_SECTORS * SECTOR;

    /// A sound disk of zeros. `room` is how many chunks fit before a thin pool is full; the other
    /// faults do not need `room`. A disk that is not `volatile` says that it has no cache, as disks
    /// with a battery do: the kernel sends no FLUSH to it.
    ///
    /// # Panics
    /// The disk cannot be made.
    #[must_use]
    pub fn new(lab: &Lab, name: &str, fault: Fault, room: u64, volatile: bool) -> Self {
        let below = LoopDisk::new(
            lab,
            name,
            match fault {
                Fault::Full => room * Self::CHUNK_BYTES,
                Fault::Error | Fault::Flakey => Self::BYTES,
            },
        );
        if !volatile {
            Sysfs::of(below.device()).set("queue/write_cache", "write through");
        }
        let disk = match fault {
            Fault::Full => Self::thin(lab, name, below),
            Fault::Error | Fault::Flakey => {
                let store = Mapped::new(lab, name, &sound(&below));
                store.stage(&broken(fault, &below));
                Self { fault, store, pool: None, below, _metadata: None }
            }
        };
        let first = disk.open().and_then(|file| Aligned::write_at(&file, &[0; 4096], 0));
        first.unwrap_or_else(|e| {
            panic!("{}: mapping the first chunk: {e}", disk.device().display())
        });
        disk
    }

    fn thin(lab: &Lab, name: &str, below: LoopDisk) -> Self {
        // A new loop disk has zeros only, which dm-thin takes for metadata to be made.
        let metadata = LoopDisk::new(lab, &format!("{name}-metadata"), METADATA_BYTES);
        let (meta, data) = (metadata.device().display(), below.device().display());
        let table = format!(
            "0 {} thin-pool {meta} {data} {CHUNK_SECTORS} 0 1 error_if_no_space\n",
            below.sectors()
        );
        let pool = Mapped::new(lab, &format!("{name}-pool"), &table);
        pool.message("create_thin 0");
        let table = format!("0 {DISK_SECTORS} thin {} 0\n", pool.device().display());
        let store = Mapped::new(lab, name, &table);
        Self { fault: Fault::Full, store, pool: Some(pool), below, _metadata: Some(metadata) }
    }

    /// The block device, with the fault.
    #[must_use]
    pub fn device(&self) -> PathBuf {
        self.store.device()
    }

    /// Begins the fault. The disk holds all I/O while `held` runs, and then releases it with the
    /// fault in force. A thin pool runs full by being written to, and only holds.
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn begin<T>(&self, held: impl FnOnce() -> T) -> T {
        self.store.suspend();
        let done = held();
        // This puts the staged table in force.
        self.store.resume();
        done
    }

    /// Ends the fault, as [`begin`](Self::begin) begins it. A thin pool stays full and only holds:
    /// a FLUSH of a full pool works.
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn mend<T>(&self, held: impl FnOnce() -> T) -> T {
        if self.fault != Fault::Full {
            self.store.stage(&sound(&self.below));
        }
        self.begin(held)
    }

    /// Writes back the dirty pages of the block device, as the kernel does by itself after a while.
    /// This caller gets an error; other open files have not reported it yet.
    ///
    /// # Errors
    /// The fault's: pages are lost.
    pub fn write_back(&self) -> io::Result<()> {
        File::options().write(true).open(self.device())?.sync_data()
    }

    /// The bytes of the disk. All other users must have closed the device, or close it soon.
    ///
    /// # Panics
    /// The bytes cannot be read, or another user keeps the device open.
    #[must_use]
    pub fn read_back(self) -> Vec<u8> {
        let path = if self.pool.is_some() {
            // Only the pool knows the places of the chunks. A full pool still reads.
            self.device()
        } else {
            // The end of the last use writes back dirty pages. The device goes only after that.
            self.store.remove();
            self.below.device().to_owned()
        };
        let len = usize::try_from(Self::BYTES).expect("it fits in memory");
        let bytes = Aligned::open(&path, false, 0).and_then(|file| Aligned::read_at(&file, len, 0));
        bytes.unwrap_or_else(|e| panic!("reading {}: {e}", path.display()))
    }

    fn open(&self) -> io::Result<File> {
        Aligned::open(&self.device(), true, 0)
    }
}

fn sound(below: &LoopDisk) -> String {
    format!("0 {DISK_SECTORS} linear {} 0\n", below.device().display())
}

fn broken(fault: Fault, below: &LoopDisk) -> String {
    let (device, rest) = (below.device().display(), DISK_SECTORS - CHUNK_SECTORS);
    let rest = match fault {
        // Down for an hour, and never up.
        Fault::Flakey => format!("{rest} flakey {device} {CHUNK_SECTORS} 0 3600 1 error_writes"),
        Fault::Error | Fault::Full => format!("{rest} error"),
    };
    format!("0 {CHUNK_SECTORS} linear {device} 0\n{CHUNK_SECTORS} {rest}\n")
}
