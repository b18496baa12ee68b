//! [`Register`]: the judge of what hosts read: the values that each block may have.
//!
//! A block may have the value that was acknowledged last, or one of a write without an answer. When
//! a target says by another verifier that writes may be lost, the block may have any value since
//! the last FLUSH that covered it. A host that holds the volume no longer gets no answer at all.

use std::collections::BTreeSet;

use rblk_protocol::WriteVerifier;

use super::BLOCKS;

/// A mount of the volume, counted over all hosts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct MountId(pub u64);

#[derive(Clone, Debug, Default)]
struct Block {
    allowed: BTreeSet<u64>,
    // Acknowledged values, the durable one first, with the time of each. The latest time: a FLUSH
    // says nothing of the value, which may be lost.
    history: Vec<(u64, u64)>,
    is_doubtful: bool,
}

/// A read under way.
#[derive(Clone, Debug)]
pub struct Reading {
    block: usize,
    valid: BTreeSet<u64>,
}

/// See the module.
#[derive(Debug)]
pub struct Register {
    blocks: Vec<Block>,
    readings: Vec<(u64, Reading)>,
    reads: u64,
    values: u64,
    /// The mount that has the volume, and since when.
    pub holder: Option<(MountId, u64)>,
    verifier: Option<WriteVerifier>,
    /// Changes of the verifier.
    pub losses: u64,
    is_durable_at_once: bool,
}

impl Register {
    /// Every block is 0. `is_durable_at_once`: the targets cache no writes.
    #[must_use]
    pub fn new(is_durable_at_once: bool) -> Self {
        let block =
            Block { allowed: BTreeSet::from([0]), history: vec![(0, 0)], is_doubtful: false };
        Self {
            blocks: vec![block; BLOCKS],
            readings: Vec::new(),
            reads: 0,
            values: 0,
            holder: None,
            verifier: None,
            losses: 0,
            is_durable_at_once,
        }
    }

    fn is_holder(&self, mount: MountId) -> bool {
        self.holder.is_some_and(|(holder, _)| holder == mount)
    }

    fn allow(&mut self, block: usize, values: &[u64]) {
        self.blocks[block].allowed.extend(values);
        for (_, reading) in self.readings.iter_mut().filter(|(_, it)| it.block == block) {
            reading.valid.extend(values);
        }
    }

    /// A target lets a mount have the volume. One that has it already learns of a loss when it
    /// [hears](Self::heard) of that: the answer may get lost, and the mount may go on elsewhere.
    pub fn opened(&mut self, mount: MountId, verifier: WriteVerifier, now: u64) {
        if !self.is_holder(mount) {
            self.holder = Some((mount, now));
            self.judge(verifier);
        }
    }

    /// A mount hears that it has the volume.
    pub fn heard(&mut self, mount: MountId, verifier: WriteVerifier) {
        if self.is_holder(mount) {
            self.judge(verifier);
        }
    }

    fn judge(&mut self, verifier: WriteVerifier) {
        if self.verifier.is_some_and(|known| known != verifier) {
            self.losses += 1;
            for block in 0..BLOCKS {
                let values: Vec<u64> = self.blocks[block].history.iter().map(|it| it.0).collect();
                self.allow(block, &values);
                self.blocks[block].history.iter_mut().for_each(|(_, at)| *at = u64::MAX);
                self.blocks[block].is_doubtful = true;
            }
        }
        self.verifier = Some(verifier);
    }

    /// A new value.
    pub fn value(&mut self) -> u64 {
        self.values += 1;
        self.values
    }

    /// A host writes.
    pub fn writes(&mut self, mount: MountId, block: usize, value: u64) {
        if self.is_holder(mount) {
            self.allow(block, &[value]);
        }
    }

    /// A write is acknowledged.
    pub fn written(&mut self, mount: MountId, block: usize, value: u64, now: u64) {
        if !self.is_holder(mount) {
            return;
        }
        self.allow(block, &[value]);
        let it = &mut self.blocks[block];
        let before = std::mem::replace(&mut it.allowed, BTreeSet::from([value]));
        it.is_doubtful = false;
        if self.is_durable_at_once {
            it.history.clear();
        } else {
            // Writes without an answer may have reached the image, and are there if this is lost.
            let known = |value: &u64| it.history.iter().any(|(known, _)| known == value);
            let unknown: Vec<u64> = before.into_iter().filter(|value| !known(value)).collect();
            it.history.extend(unknown.into_iter().map(|value| (value, now)));
        }
        it.history.retain(|(known, _)| *known != value);
        it.history.push((value, now));
    }

    /// A FLUSH that began then has ended.
    pub fn flushed(&mut self, mount: MountId, began: u64) {
        if !self.is_holder(mount) {
            return;
        }
        for block in &mut self.blocks {
            let last = block.history.iter().rposition(|(_, at)| *at < began).unwrap_or(0);
            block.history.drain(..last);
        }
    }

    /// A host reads. Returns the number of the read.
    pub fn reads(&mut self, block: usize) -> u64 {
        self.reads += 1;
        let valid = self.blocks[block].allowed.clone();
        self.readings.push((self.reads, Reading { block, valid }));
        self.reads
    }

    /// A read ends without a value.
    pub fn dropped(&mut self, read: u64) {
        self.readings.retain(|(number, _)| *number != read);
    }

    /// A read ends with a value, while no write of the mount to the block is under way.
    ///
    /// # Errors
    /// The value is stale, or was lost.
    pub fn has_read(&mut self, mount: MountId, read: u64, value: u64) -> Result<(), String> {
        let at = self.readings.iter().position(|(number, _)| *number == read).expect("it began");
        let Reading { block, valid } = self.readings.swap_remove(at).1;
        if !valid.contains(&value) {
            return Err(format!("block {block} has the value {value}, and may have {valid:?}"));
        }
        if self.is_holder(mount) {
            let it = &mut self.blocks[block];
            it.allowed = BTreeSet::from([value]);
            let at = it.history.last().map_or(0, |last| last.1);
            if it.is_doubtful {
                // The target had nothing of it in memory.
                it.history = vec![(value, 0)];
            } else if it.history.iter().all(|(known, _)| *known != value) {
                it.history.push((value, at));
            }
            it.is_doubtful = false;
        }
        Ok(())
    }
}
