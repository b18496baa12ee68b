//! [`KeyTable`]: which memory the keys of a protection domain stand for; [`KeyCopy`]: the copy of
//! one poller.

use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use rblk_protocol::width::wide;

use crate::region::Region;
use crate::work::{Access, Lkey, Rkey, Sge};

/// Low bits of a key: its index in the table. The other bits are a generation. The lowest of them
/// tells rkeys from lkeys.
const INDEX_BITS: u32 = 16;
/// The highest index.
pub(super) const INDEX_MAX: u32 = (1 << INDEX_BITS) - 1;

/// A registered region, with its keys.
#[derive(Clone, Debug)]
pub(super) struct KeyEntry {
    lkey: Lkey,
    rkey: Rkey,
    access: Access,
    // Address of the first byte in WRs.
    base: u64,
    region: Arc<Region>,
}

impl KeyEntry {
    /// The entry of an index. `generation` makes its keys differ from those that the index had
    /// before.
    pub(super) fn new(
        index: u32,
        generation: u32,
        access: Access,
        (base, region): (u64, &Arc<Region>),
    ) -> Self {
        let generation = (generation & 0x7fff) << (INDEX_BITS + 1);
        Self {
            lkey: Lkey(generation | index),
            rkey: Rkey(generation | (1 << INDEX_BITS) | index),
            access,
            base,
            region: Arc::clone(region),
        }
    }

    /// Key for our own WRs.
    pub(super) fn lkey(&self) -> Lkey {
        self.lkey
    }

    /// Key for the peer.
    pub(super) fn rkey(&self) -> Rkey {
        self.rkey
    }

    fn pointer(&self, addr: u64, len: u32) -> Option<NonNull<u8>> {
        let offset = usize::try_from(addr.checked_sub(self.base)?).ok()?;
        self.region.pointer(offset, wide(len))
    }

    fn place(&self, addr: u64) -> Option<(Arc<Region>, usize)> {
        let offset = usize::try_from(addr.checked_sub(self.base)?).ok()?;
        Some((Arc::clone(&self.region), offset))
    }
}

/// The access that a peer requests to an MR.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Right {
    Read,
    Write,
}

/// The live keys of a protection domain.
#[derive(Clone, Default, Debug)]
pub(super) struct KeyTable {
    entries: Vec<Option<KeyEntry>>,
    // The sink of a READ needs the right of remote write (iWARP).
    remote_sinks: bool,
}

impl KeyTable {
    /// No keys yet. `remote_sinks` says that the sink of a READ needs the right of remote write.
    pub(super) fn new(remote_sinks: bool) -> Self {
        Self { entries: Vec::new(), remote_sinks }
    }

    #[inline]
    fn entry(&self, key: u32) -> Option<&KeyEntry> {
        self.entries.get(wide(key & INDEX_MAX))?.as_ref()
    }

    /// Where the bytes of an SGE are, if key, bounds and rights are good. Valid while the table is
    /// borrowed.
    #[inline]
    pub(super) fn local(&self, sge: Sge, write: bool) -> Option<NonNull<u8>> {
        let entry = self.entry(sge.lkey.0).filter(|e| e.lkey == sge.lkey)?;
        if write && !entry.access.local_write {
            return None;
        }
        entry.pointer(sge.addr, sge.len)
    }

    /// Whether a READ may land there, if it may be written at all: on a device with the rules of
    /// iWARP only where the peer may write, too.
    pub(super) fn is_sink(&self, sge: Sge) -> bool {
        !self.remote_sinks || self.entry(sge.lkey.0).is_some_and(|entry| entry.access.remote_write)
    }

    /// Whether others look at the bytes of an SGE while a READ lands in them.
    pub(super) fn is_live(&self, sge: Sge) -> bool {
        self.entry(sge.lkey.0).is_some_and(|entry| entry.access.live)
    }

    /// Where the bytes that a peer named are, if key, bounds and rights are good. Valid while the
    /// table is borrowed.
    #[inline]
    pub(super) fn remote(
        &self,
        key: Rkey,
        addr: u64,
        len: u32,
        right: Right,
    ) -> Option<NonNull<u8>> {
        let entry = self.entry(key.0).filter(|e| e.rkey == key)?;
        let allowed = match right {
            Right::Read => entry.access.remote_read,
            Right::Write => entry.access.remote_write,
        };
        if allowed { entry.pointer(addr, len) } else { None }
    }

    /// The region and offset of an SGE that may be written to.
    pub(super) fn local_place(&self, sge: Sge) -> Option<(Arc<Region>, usize)> {
        self.local(sge, true)?;
        self.entry(sge.lkey.0)?.place(sge.addr)
    }

    /// The region and offset of a write by a peer.
    pub(super) fn remote_place(
        &self,
        key: Rkey,
        addr: u64,
        len: u32,
    ) -> Option<(Arc<Region>, usize)> {
        self.remote(key, addr, len, Right::Write)?;
        self.entry(key.0)?.place(addr)
    }

    /// Sets the MR behind the keys of an index. `None` revokes the keys.
    pub(super) fn set(&mut self, index: usize, entry: Option<KeyEntry>) {
        if self.entries.len() <= index {
            self.entries.resize(index + 1, None);
        }
        self.entries[index] = entry;
    }
}

/// One poller's copy of the table.
#[derive(Debug)]
pub(super) struct KeyCopy(RwLock<KeyTable>);

impl KeyCopy {
    pub(super) fn new(table: KeyTable) -> Self {
        Self(RwLock::new(table))
    }

    /// The keys as of now. No region is deregistered while the guard lives.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, KeyTable> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The keys as of now. `None` while they are being changed.
    pub(super) fn try_read(&self) -> Option<RwLockReadGuard<'_, KeyTable>> {
        self.0.try_read().ok()
    }

    /// As [`KeyTable::set`]. Waits for a turn of the poller at most: turns never block.
    pub(super) fn set(&self, index: usize, entry: Option<KeyEntry>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).set(index, entry);
    }
}
