//! [`Serving`]: the volume in the poll group of a member: its cache, and the ops of its blocks.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use rblk_target::volume::Volume;

use super::BLOCKS;
use super::air::Io;

/// A request of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MemberOp {
    pub connection: u64,
    pub op: u64,
    pub io: Io,
}

/// One block of the volume.
#[derive(Clone, Debug, Default)]
pub(super) struct Block {
    pub cached: Option<u64>,
    pub is_dirty: bool,
    /// The request that the store works for.
    pub current: Option<MemberOp>,
    /// The value that is being written back.
    pub writing: Option<u64>,
    pub waiting: VecDeque<MemberOp>,
}

impl Block {
    pub(super) fn is_busy(&self) -> bool {
        self.current.is_some() || self.writing.is_some()
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Serving {
    pub image: u64,
    pub volume: Arc<Volume>,
    pub blocks: Vec<Block>,
    /// Each with the dirty blocks that it waits for.
    pub flushes: Vec<(MemberOp, BTreeSet<usize>)>,
    /// Requests that came while nothing proved the lock.
    pub kept: Vec<MemberOp>,
    pub is_let_go: bool,
}

impl Serving {
    pub(super) fn new(image: u64, volume: Arc<Volume>) -> Self {
        let blocks = vec![Block::default(); BLOCKS];
        let (flushes, kept) = (Vec::new(), Vec::new());
        Self { image, volume, blocks, flushes, kept, is_let_go: false }
    }

    pub(super) fn has_dirty(&self) -> bool {
        !self.is_let_go && self.blocks.iter().any(|block| block.is_dirty)
    }

    pub(super) fn is_busy(&self) -> bool {
        !self.is_let_go && self.blocks.iter().any(Block::is_busy)
    }

    /// The image is lost: nothing is answered any more.
    pub(super) fn let_go(&mut self) {
        self.is_let_go = true;
        self.blocks.fill(Block::default());
        self.flushes.clear();
        self.kept.clear();
    }

    /// Forgets the requests of a connection that have not begun. Returns them.
    pub(super) fn forget_waiting(&mut self, connection: u64) -> Vec<u64> {
        let mut gone = Vec::new();
        let mut is_of = |it: &MemberOp| {
            let is = it.connection == connection;
            if is {
                gone.push(it.op);
            }
            is
        };
        self.kept.retain(|it| !is_of(it));
        for block in &mut self.blocks {
            block.waiting.retain(|it| !is_of(it));
        }
        gone
    }
}
