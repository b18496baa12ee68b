//! [`Serving`]: the volume in the poll group of a member: its cache, and the ops of its blocks.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use rblk_target::volume::Volume;

use super::BLOCKS;
use super::air::{Air, Event, Io, Purpose, Timer, ToHost};
use super::cluster::{Answer, Call};
use super::member::{Member, is_fenced};

/// A request of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct MemberOp {
    pub connection: u64,
    pub op: u64,
    pub io: Io,
}

#[derive(Clone, Debug, Default)]
struct Block {
    cached: Option<u64>,
    is_dirty: bool,
    // The request that the store works for.
    current: Option<MemberOp>,
    // The value that is being written back.
    writing: Option<u64>,
    waiting: VecDeque<MemberOp>,
}

impl Block {
    fn is_busy(&self) -> bool {
        self.current.is_some() || self.writing.is_some()
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Serving {
    pub image: u64,
    pub volume: Arc<Volume>,
    blocks: Vec<Block>,
    // Each with the dirty blocks that it waits for.
    flushes: Vec<(MemberOp, BTreeSet<usize>)>,
    // Requests that came while nothing proved the lock.
    kept: Vec<MemberOp>,
    is_let_go: bool,
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

impl Member {
    fn answer(&mut self, air: &mut Air, op: MemberOp, value: u64) {
        let Some(connection) = self.connections.get_mut(&op.connection) else { return };
        connection.ops.remove(&op.op);
        if !connection.is_dying {
            air.to_host(
                (self.whose.member, connection.host),
                op.connection,
                ToHost::Io(op.op, value),
            );
        }
    }

    /// Begins a request, or keeps it while another client may have the image.
    pub(super) fn begin_op(&mut self, air: &mut Air, op: MemberOp) {
        let Some(serving) = self.serving.as_mut().filter(|it| !it.is_let_go) else { return };
        let silent = self.images.get(&serving.image).is_none_or(|it| it.is_silent(air.now));
        if silent {
            return serving.kept.push(op);
        }
        let write_back = serving.volume.cache == rblk_target::volume::CacheMode::WriteBack;
        let image = serving.image;
        match op.io {
            Io::Read(at) => {
                let block = &mut serving.blocks[at];
                match (block.cached, block.current.is_some()) {
                    (Some(value), false) => self.answer(air, op, value),
                    (_, true) => block.waiting.push_back(op),
                    (None, false) => {
                        block.current = Some(op);
                        self.store(air, image, at, (Call::Read(at), Some(op.op)));
                    }
                }
            }
            Io::Write(at, value) => {
                let block = &mut serving.blocks[at];
                if block.current.is_some() {
                    block.waiting.push_back(op);
                } else if write_back {
                    (block.cached, block.is_dirty) = (Some(value), true);
                    self.answer(air, op, 0);
                    let delay = air.random.within(20, 3_000);
                    air.after(delay, Event::Timer(self.whose, Timer::WriteBack(image)));
                } else {
                    block.current = Some(op);
                    self.store(air, image, at, (Call::Write(at, value), Some(op.op)));
                }
            }
            Io::Flush => {
                let dirty = (0..BLOCKS).filter(|at| serving.blocks[*at].is_dirty);
                let dirty: BTreeSet<usize> = dirty.collect();
                if dirty.is_empty() {
                    return self.answer(air, op, 0);
                }
                serving.flushes.push((op, dirty));
                self.write_all_back(air);
            }
        }
    }

    fn store(&mut self, air: &mut Air, image: u64, at: usize, (call, op): (Call, Option<u64>)) {
        let Some(it) = self.images.get_mut(&image) else { return };
        it.ops += 1;
        let client = it.client.clone();
        air.call(self.whose, &client, call, Purpose::Data(image, at, op));
    }

    /// Requests that were kept begin, if the lock is proven again.
    pub(super) fn end_silence(&mut self, air: &mut Air) {
        let Some(serving) = &mut self.serving else { return };
        let silent = self.images.get(&serving.image).is_none_or(|it| it.is_silent(air.now));
        if !silent && !serving.kept.is_empty() {
            for op in std::mem::take(&mut serving.kept) {
                self.begin_op(air, op);
            }
        }
    }

    /// It is time to write dirty blocks.
    pub(super) fn write_back(&mut self, air: &mut Air, image: u64) {
        if self.serving.as_ref().is_some_and(|serving| serving.image == image) {
            self.write_all_back(air);
        }
    }

    /// Begins to write every dirty block that is not being written.
    pub(super) fn write_all_back(&mut self, air: &mut Air) {
        let Some(serving) = self.serving.as_mut().filter(|it| !it.is_let_go) else { return };
        let image = serving.image;
        let mut calls = Vec::new();
        for (at, block) in serving.blocks.iter_mut().enumerate() {
            if let (true, None, Some(value)) = (block.is_dirty, block.writing, block.cached) {
                block.writing = Some(value);
                calls.push((at, Call::Write(at, value)));
            }
        }
        for (at, call) in calls {
            self.store(air, image, at, (call, None));
        }
    }

    /// An op of the store has ended.
    pub(super) fn data_done(
        &mut self,
        air: &mut Air,
        image: u64,
        (at, op): (usize, Option<u64>),
        answer: &Answer,
    ) {
        if is_fenced(answer) {
            // Its end shows when the poll groups have let the image go.
            return self.lose(air, image);
        }
        if self.images.get(&image).is_none_or(|it| it.is_lost) {
            return;
        }
        let Some(serving) = self.serving.as_mut().filter(|it| it.image == image) else { return };
        if serving.is_let_go {
            return;
        }
        let block = &mut serving.blocks[at];
        if op.is_none() {
            let written = block.writing.take();
            if written == block.cached {
                block.is_dirty = false;
                return self.end_flushes(air, at);
            }
            return self.write_all_back(air);
        }
        let Some(current) = block.current.take() else { return };
        let value = match (current.io, answer) {
            (Io::Write(_, value), _) => value,
            (_, Answer::Value(value)) => *value,
            (io, answer) => unreachable!("{io:?}: {answer:?}"),
        };
        block.cached = Some(value);
        let waiting = std::mem::take(&mut block.waiting);
        self.answer(air, current, value);
        for op in waiting {
            self.begin_op(air, op);
        }
    }

    fn end_flushes(&mut self, air: &mut Air, at: usize) {
        let Some(serving) = &mut self.serving else { return };
        for (_, blocks) in &mut serving.flushes {
            blocks.remove(&at);
        }
        let ended: Vec<MemberOp> =
            serving.flushes.extract_if(.., |it| it.1.is_empty()).map(|it| it.0).collect();
        for op in ended {
            self.answer(air, op, 0);
        }
    }
}
