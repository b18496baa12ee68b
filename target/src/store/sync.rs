//! [`SyncStore`]: the blocking reference engine. Every op ends inside `submit`. Data passes through
//! a bounce buffer, so this file needs no unsafe code.

use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::fallocate;
use rblk_fabric::Region;
use rblk_protocol::width::{narrow, wide, wide64};

use super::backing::Backing;
use super::methods::Method;
use super::syncs::{Door, SyncLook};
use super::{Op, OpDone, OpKind, Segment, Store, StoreError, refusal};
use crate::volume::ids::VolumeIndex;

// Bytes zeroed by one write.
const ZERO_CHUNK: usize = 1 << 20;
// The strictest memory alignment of direct I/O that is accepted, see `Backing::memory_alignment`.
const PAGE: usize = 4096;

/// A store that carries out each op in `submit`, with plain system calls. It blocks.
#[derive(Debug)]
pub(crate) struct SyncStore {
    region: Arc<Region>,
    volumes: Box<[Option<Arc<Backing>>]>,
    capacity: usize,
    done: Vec<OpDone>,
    bounce: Vec<u8>,
    // Made when an op waits for the first time.
    door: Option<Door>,
}

impl SyncStore {
    /// A store for ops on `region`, with room for `volumes` volumes and for `capacity` ops that are
    /// not reaped.
    #[must_use]
    pub(crate) fn new(region: Arc<Region>, volumes: u16, capacity: usize) -> Self {
        let volumes = (0..volumes).map(|_| None).collect();
        Self {
            region,
            volumes,
            capacity,
            done: Vec::with_capacity(capacity),
            bounce: Vec::new(),
            door: None,
        }
    }

    /// Adds a volume.
    ///
    /// # Errors
    /// The index is taken or beyond the table.
    pub(crate) fn add_volume(
        &mut self,
        index: VolumeIndex,
        backing: Arc<Backing>,
    ) -> Result<(), StoreError> {
        let volumes = narrow(self.volumes.len());
        let place = self.volumes.get_mut(usize::from(index.0));
        match place.ok_or(StoreError::TableFull { index: index.0, volumes })? {
            Some(other) => Err(StoreError::Taken { index: index.0, path: other.path().to_owned() }),
            place @ None => {
                *place = Some(backing);
                Ok(())
            }
        }
    }

    // An aligned part of the bounce buffer.
    fn bounce(bounce: &mut Vec<u8>, len: usize) -> &mut [u8] {
        if bounce.len() < len + PAGE {
            bounce.resize(len + PAGE, 0);
        }
        // For bytes, `align_offset` always finds the offset, which is below PAGE.
        let start = bounce.as_ptr().align_offset(PAGE).min(PAGE);
        &mut bounce[start..start + len]
    }

    fn run(&mut self, backing: &Backing, kind: OpKind, memory: &[Segment]) -> io::Result<u32> {
        match kind {
            OpKind::Read { offset, len } => {
                let bounce = Self::bounce(&mut self.bounce, len as usize);
                read_all(backing, bounce, offset)?;
                let mut rest = &*bounce;
                for segment in memory {
                    let (part, after) = rest.split_at(segment.len as usize);
                    self.region.write(segment.offset, part);
                    rest = after;
                }
                Ok(len)
            }
            OpKind::Write { offset, len, fua } => {
                let bounce = Self::bounce(&mut self.bounce, len as usize);
                let mut rest = &mut *bounce;
                for segment in memory {
                    let (part, after) = rest.split_at_mut(segment.len as usize);
                    self.region.read(segment.offset, part);
                    rest = after;
                }
                backing.file().write_all_at(bounce, offset)?;
                if fua {
                    self.sync(backing)?;
                }
                Ok(len)
            }
            OpKind::Flush => self.sync(backing).map(|()| 0),
            OpKind::Discard { offset, len } => {
                let method = backing.methods().discard_by_call().ok_or(Errno::EOPNOTSUPP)?;
                let result = self.change(backing, method, offset, len);
                if result.as_ref().is_err_and(|error| is_refused(method, error)) {
                    backing.methods().refuse(method);
                }
                result.map(|()| 0)
            }
            OpKind::WriteZeroes { offset, len, may_unmap } => loop {
                let method = backing.methods().zero(may_unmap);
                match self.change(backing, method, offset, len) {
                    Err(error) if is_refused(method, &error) => backing.methods().refuse(method),
                    result => return result.map(|()| 0),
                }
            },
        }
    }

    // Makes all data of the backing durable, by its own sync or a shared one.
    fn sync(&mut self, backing: &Backing) -> io::Result<()> {
        let door = match &self.door {
            Some(door) => door,
            None => self.door.insert(Door::new()?),
        };
        let number = backing.syncs().join();
        loop {
            match backing.syncs().look(number, door) {
                SyncLook::Run => {
                    // Not `sync_data`, which goes on after EINTR: a second sync may succeed
                    // although the first one had the news of lost writes.
                    let result = nix::unistd::fdatasync(backing.file());
                    backing.syncs().end(result, door);
                }
                SyncLook::Wait => door.wait(),
                SyncLook::Over(result) => return Ok(result?),
            }
        }
    }

    fn change(
        &mut self,
        backing: &Backing,
        method: Method,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        if method == Method::WriteZeroes {
            let mut at = offset;
            while at < offset + len {
                let bytes = wide(offset + len - at).min(ZERO_CHUNK);
                let bounce = Self::bounce(&mut self.bounce, bytes);
                bounce.fill(0);
                backing.file().write_all_at(bounce, at)?;
                at += wide64(bytes);
            }
            return Ok(());
        }
        let (Ok(offset), Ok(len)) = (offset.try_into(), len.try_into()) else {
            return Err(Errno::EFBIG.into());
        };
        let result = loop {
            match fallocate(backing.file(), method.fallocate_mode(), offset, len) {
                Err(Errno::EINTR) => {}
                result => break result,
            }
        };
        Ok(result?)
    }
}

impl Store for SyncStore {
    fn submit(&mut self, op: Op, memory: &[Segment]) -> Result<(), Op> {
        if self.done.len() >= self.capacity {
            return Err(op);
        }
        let backing = self.volumes.get(usize::from(op.volume.0)).cloned().flatten();
        let refused = refusal(backing.as_deref(), self.region.len(), &op.kind, memory);
        let result = match (refused, backing) {
            (Some(result), _) => result,
            (None, Some(backing)) => {
                self.run(&backing, op.kind, memory).map_err(|error| errno_of(&error))
            }
            (None, None) => Err(Errno::ENXIO),
        };
        self.done.push(OpDone { token: op.token, result });
        Ok(())
    }

    fn reap(&mut self, out: &mut Vec<OpDone>) {
        out.append(&mut self.done);
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }
}

fn errno_of(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

fn is_refused(method: Method, error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|code| method.is_refused_by(Errno::from_raw(code)))
}

// A file that is shorter than the volume is an I/O error, at any alignment of its end.
fn read_all(backing: &Backing, mut out: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !out.is_empty() {
        match backing.file().read_at(out, offset) {
            Ok(bytes) if bytes == 0 || !bytes.is_multiple_of(backing.alignment() as usize) => {
                return Err(Errno::EIO.into());
            }
            Ok(bytes) => {
                out = &mut out[bytes..];
                offset += wide64(bytes);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
