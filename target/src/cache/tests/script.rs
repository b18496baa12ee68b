//! [`Script`]: a store that keeps its ops until a test ends them, in any order and with any result.

use std::sync::Arc;

use nix::errno::Errno;
use rblk_fabric::Region;

use crate::store::{Op, OpDone, OpKind, Segment, Store};
use crate::volume::ids::VolumeIndex;

/// See the module. The store reads a write's bytes when it ends: until then they are lent.
pub(super) struct Script {
    region: Arc<Region>,
    volumes: Vec<Vec<u8>>,
    pending: Vec<(Op, Vec<Segment>)>,
    done: Vec<OpDone>,
    /// Limit of pending ops; more are refused.
    pub(super) capacity: usize,
    /// The same for each volume.
    pub(super) most_of_one: usize,
    /// Number of ops accepted so far.
    pub(super) accepted: usize,
    /// Number of ops refused so far.
    pub(super) refused: usize,
}

impl Script {
    pub(super) fn new(region: &Arc<Region>) -> Self {
        Self {
            region: Arc::clone(region),
            volumes: Vec::new(),
            pending: Vec::new(),
            done: Vec::new(),
            capacity: usize::MAX,
            most_of_one: usize::MAX,
            accepted: 0,
            refused: 0,
        }
    }

    pub(super) fn add_volume(&mut self, bytes: Vec<u8>) {
        self.volumes.push(bytes);
    }

    pub(super) fn ops(&self) -> Vec<OpKind> {
        self.pending.iter().map(|(op, _)| op.kind).collect()
    }

    /// The volumes of the pending ops.
    pub(super) fn volumes(&self) -> Vec<VolumeIndex> {
        self.pending.iter().map(|(op, _)| op.volume).collect()
    }

    pub(super) fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let offset = usize::try_from(offset).unwrap();
        self.volumes[0][offset..offset + len].to_vec()
    }

    pub(super) fn finish(&mut self, at: usize) {
        let (op, memory) = self.pending.remove(at);
        let (offset, len) = op.kind.range();
        let offset = usize::try_from(offset).unwrap();
        let end = offset + usize::try_from(len).unwrap();
        let mut range = &mut self.volumes[usize::from(op.volume.0)][offset..end];
        let mut moved = 0;
        match op.kind {
            OpKind::Read { len, .. } | OpKind::Write { len, .. } => {
                for segment in &memory {
                    let (part, rest) = range.split_at_mut(segment.len as usize);
                    match op.kind {
                        OpKind::Read { .. } => self.region.write(segment.offset, part),
                        _ => self.region.read(segment.offset, part),
                    }
                    range = rest;
                }
                assert!(range.is_empty(), "segments of another length: {op:?}");
                moved = len;
            }
            OpKind::Discard { .. } | OpKind::WriteZeroes { .. } => range.fill(0),
            OpKind::Flush => {}
        }
        self.done.push(OpDone { token: op.token, result: Ok(moved) });
    }

    pub(super) fn finish_with(&mut self, at: usize, result: Result<u32, Errno>) {
        let (op, _) = self.pending.remove(at);
        self.done.push(OpDone { token: op.token, result });
    }
}

impl Store for Script {
    fn submit(&mut self, op: Op, memory: &[Segment]) -> Result<(), Op> {
        let of_one = self.pending.iter().filter(|(other, _)| other.volume == op.volume).count();
        if self.pending.len() >= self.capacity || of_one >= self.most_of_one {
            self.refused += 1;
            return Err(op);
        }
        let (offset, len) = op.kind.range();
        let (from, to) = (offset, offset + len);
        for (other, _) in &self.pending {
            let (offset, len) = other.kind.range();
            let reads = !op.kind.changes() && !other.kind.changes();
            let apart = to <= offset || offset + len <= from || other.volume != op.volume;
            assert!(reads || apart, "{op:?} while {other:?} is in flight");
        }
        self.accepted += 1;
        self.pending.push((op, memory.to_vec()));
        Ok(())
    }

    fn reap(&mut self, out: &mut Vec<OpDone>) {
        out.append(&mut self.done);
    }

    fn in_flight(&self) -> usize {
        self.pending.len() + self.done.len()
    }
}
