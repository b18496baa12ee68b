//! [`Counters`]: the counters of a store.

use nix::errno::Errno;

use crate::store::OpKind;

/// Events of a store since it was made. Ops count when they end, bytes only when they succeed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Calls of `io_uring_enter`.
    pub enters: u64,
    /// Calls that were allowed to sleep.
    pub sleeps: u64,
    /// Reads.
    pub reads: u64,
    /// Writes, with FUA or without.
    pub writes: u64,
    /// Writes with FUA.
    pub fua_writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Syncs that ended: flushes and durable writes share them.
    pub syncs: u64,
    /// Discards.
    pub discards: u64,
    /// Write-zeroes.
    pub write_zeroes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes discarded.
    pub discarded_bytes: u64,
    /// Bytes zeroed.
    pub zeroed_bytes: u64,
    /// Ops that ended with an error, including refused ones.
    pub errors: u64,
    /// Reads and writes that the kernel did only in part, counted each time.
    pub short: u64,
    /// Entries sent again after EAGAIN or EINTR.
    pub retried: u64,
    /// Watches that ended with an error.
    pub watch_errors: u64,
}

impl Counters {
    /// Counts the end of an op.
    pub(in crate::store) fn count(&mut self, kind: &OpKind, result: Result<u32, Errno>) {
        let (_, len) = kind.range();
        let (ops, bytes) = match *kind {
            OpKind::Read { .. } => (&mut self.reads, &mut self.read_bytes),
            OpKind::Write { fua, .. } => {
                self.fua_writes += u64::from(fua);
                (&mut self.writes, &mut self.written_bytes)
            }
            OpKind::Flush => (&mut self.flushes, &mut 0),
            OpKind::Discard { .. } => (&mut self.discards, &mut self.discarded_bytes),
            OpKind::WriteZeroes { .. } => (&mut self.write_zeroes, &mut self.zeroed_bytes),
        };
        *ops += 1;
        match result {
            Ok(_) => *bytes += len,
            Err(_) => self.errors += 1,
        }
    }
}
