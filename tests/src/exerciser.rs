//! [`Exerciser`]: random I/O on one volume, held against a vector of bytes.
//!
//! Requests that overlap and of which one changes the volume are never outstanding together, so
//! every read has exactly one right answer, except in blocks that a failed request left unknown.

use std::ops::Range;

use rblk_initiator::engine::io::{Io, IoOp};
use rblk_protocol::Tag;
use rblk_rig::inprocess::{QueueId, QueueOptions, RigOptions};
use rblk_rig::seed::Random;
use rblk_target::volume::ids::VolumeIndex;

use crate::bed::{Bed, PATIENCE, VOLUME_BYTES};

const BLOCK: usize = 512;

#[derive(Debug)]
struct Flight {
    queue: QueueId,
    tag: Tag,
    op: IoOp,
    range: Range<usize>,
    data: Vec<u8>,
}

impl Flight {
    fn conflicts(&self, op: IoOp, range: &Range<usize>) -> bool {
        let changes = |op| matches!(op, IoOp::Write | IoOp::Discard | IoOp::WriteZeroes);
        (changes(self.op) || changes(op))
            && self.range.start < range.end
            && range.start < self.range.end
    }
}

/// Random I/O and its oracle.
#[derive(Debug)]
pub struct Exerciser {
    /// The rig under it.
    pub bed: Bed,
    /// The queues it uses.
    pub queues: Vec<QueueId>,
    /// Chooses the requests.
    pub random: Random,
    seed: u64,
    depth: u16,
    longest: usize,
    extent: usize,
    bytes: Vec<u8>,
    unknown: Vec<bool>,
    flights: Vec<Flight>,
    ended: usize,
    failed: usize,
}

impl Exerciser {
    /// For a volume with bytes, over `queues` queues of these options. The first `extent` bytes of
    /// the volume are used, so that requests meet.
    ///
    /// # Panics
    /// The rig cannot be made.
    #[must_use]
    pub fn new(
        rig: &RigOptions,
        volume: VolumeIndex,
        options: QueueOptions,
        queues: usize,
        extent: u64,
    ) -> Self {
        assert!(extent <= VOLUME_BYTES, "within the volume");
        let extent = usize::try_from(extent).expect("a small volume");
        let mut bed = Bed::new(rig);
        let queues = (0..queues).map(|_| bed.queue(volume, options)).collect();
        Self {
            bed,
            queues,
            random: Random::new(rig.seed ^ 0x5eed),
            seed: rig.seed,
            depth: options.depth,
            longest: options.io_max_bytes as usize,
            extent,
            bytes: vec![0; extent],
            unknown: vec![false; extent / BLOCK],
            flights: Vec::new(),
            ended: 0,
            failed: 0,
        }
    }

    /// Requests that ended.
    #[must_use]
    pub fn ended(&self) -> usize {
        self.ended
    }

    /// Requests that failed.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.failed
    }

    /// Requests outstanding.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.flights.len()
    }

    /// Starts a request if a tag and a range are free.
    ///
    /// # Panics
    /// The engine refuses it.
    pub fn begin(&mut self) {
        let queue = self.queues[self.random.index(self.queues.len())];
        let taken = |tag| self.flights.iter().any(|f| f.queue == queue && f.tag == tag);
        let Some(tag) = (0..self.depth).map(Tag).find(|tag| !taken(*tag)) else { return };
        let op = match self.random.below(20) {
            0 => IoOp::Flush,
            1 => IoOp::Discard,
            2 => IoOp::WriteZeroes,
            3..12 => IoOp::Write,
            _ => IoOp::Read,
        };
        let range = if op == IoOp::Flush {
            0..0
        } else {
            let longest = [BLOCK, 4096, 8192, self.longest][self.random.index(4)];
            let blocks = 1 + self.random.index(longest.min(self.longest) / BLOCK);
            let first = self.random.index(self.extent / BLOCK - blocks + 1);
            first * BLOCK..(first + blocks) * BLOCK
        };
        if self.flights.iter().any(|f| f.conflicts(op, &range)) {
            return;
        }
        let mut data = Vec::new();
        if op == IoOp::Write {
            data.resize(range.len(), 0);
            self.random.fill(&mut data);
            self.bed.rig.fill_buffer(queue, tag, &data);
        }
        let request = self.bed.rig.request(queue, op, range.start as u64, range.len() as u64);
        let io = Io { fua: self.random.chance(200), may_unmap: self.random.chance(500), ..request };
        self.bed.submit_io(queue, tag.0, io);
        self.flights.push(Flight { queue, tag, op, range, data });
    }

    /// Takes the outcomes and compares them with the oracle.
    ///
    /// # Panics
    /// A result or a byte is wrong.
    pub fn reap(&mut self) {
        for outcome in self.bed.rig.take_outcomes() {
            let at = self
                .flights
                .iter()
                .position(|f| f.queue == outcome.queue && f.tag == outcome.tag)
                .unwrap_or_else(|| panic!("seed {}: no request has {outcome:?}", self.seed));
            let flight = self.flights.swap_remove(at);
            self.ended += 1;
            let blocks = flight.range.start / BLOCK..flight.range.end / BLOCK;
            if outcome.result < 0 {
                self.failed += 1;
                if flight.op != IoOp::Read {
                    self.unknown[blocks].fill(true);
                }
                continue;
            }
            let moves = matches!(flight.op, IoOp::Read | IoOp::Write);
            let expected = if moves { flight.range.len() } else { 0 };
            assert_eq!(
                usize::try_from(outcome.result),
                Ok(expected),
                "seed {}: {:?} of {:?}",
                self.seed,
                flight.op,
                flight.range
            );
            match flight.op {
                IoOp::Read => self.check_read(&flight),
                IoOp::Write => {
                    self.bytes[flight.range].copy_from_slice(&flight.data);
                    self.unknown[blocks].fill(false);
                }
                IoOp::Discard | IoOp::WriteZeroes => {
                    self.bytes[flight.range].fill(0);
                    self.unknown[blocks].fill(false);
                }
                IoOp::Flush => {}
            }
        }
    }

    fn check_read(&self, flight: &Flight) {
        let got = self.bed.rig.buffer(flight.queue, flight.tag, flight.range.len());
        for (at, got) in flight.range.clone().step_by(BLOCK).zip(got.chunks(BLOCK)) {
            assert!(
                self.unknown[at / BLOCK] || got == &self.bytes[at..at + BLOCK],
                "seed {}: block {} of a read of {:?} after {} requests is {:02x?}.., not {:02x?}..",
                self.seed,
                at / BLOCK,
                flight.range,
                self.ended,
                &got[..8],
                &self.bytes[at..at + 8]
            );
        }
    }

    /// Runs until `requests` more requests have ended. Calls `between` before every step.
    ///
    /// # Panics
    /// No request ends any more, or a result is wrong.
    pub fn run(&mut self, requests: usize, mut between: impl FnMut(&mut Self)) {
        let until = self.ended + requests;
        let mut idle = 0;
        while self.ended < until {
            for _ in 0..self.random.below(4) {
                self.begin();
            }
            between(self);
            self.bed.rig.step();
            let before = self.ended;
            self.reap();
            idle = if self.ended > before { 0 } else { idle + 1 };
            assert!(
                idle < PATIENCE,
                "seed {}: stuck with {} requests outstanding after {}",
                self.seed,
                self.flights.len(),
                self.ended
            );
        }
    }

    /// Waits until no request is outstanding.
    ///
    /// # Panics
    /// A request does not end.
    pub fn settle(&mut self) {
        for _ in 0..PATIENCE {
            if self.flights.is_empty() {
                return;
            }
            self.bed.rig.step();
            self.reap();
        }
        panic!("seed {}: {} requests do not end", self.seed, self.flights.len());
    }

    /// Reads everything back, on every queue.
    ///
    /// # Panics
    /// A byte differs from the one written.
    pub fn check_all(&mut self) {
        self.settle();
        for queue in self.queues.clone() {
            for start in (0..self.extent).step_by(self.longest) {
                let range = start..(start + self.longest).min(self.extent);
                let len = range.len() as u64;
                self.bed.submit(queue, 0, IoOp::Read, start as u64, len);
                let (op, data) = (IoOp::Read, Vec::new());
                self.flights.push(Flight { queue, tag: Tag(0), op, range, data });
                self.settle();
            }
        }
    }
}
