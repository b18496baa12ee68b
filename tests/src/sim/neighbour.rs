//! [`Neighbour`]: another host, which reads its own volume through the same devices and the same
//! memory.
//!
//! Memory that a mount's connections used, and that the target frees too early, goes to the
//! neighbour next. While connections are being destroyed, the neighbour reads as much as it can,
//! and checks every byte.

pub mod volume;

use rblk_initiator::engine::io::IoOp;
use rblk_protocol::{AccessMode, ConnectionKind, Epoch, Tag};
use rblk_rig::inprocess::{Join, Outcome, QueueId, QueueOptions};
use rblk_rig::seed::Random;
use rblk_target::volume::ids::AdmissionId;

use super::plan::Plan;
use super::site::Site;
use volume::{BYTES, SESSION, VOLUME, image};

const DEPTH: u16 = 4;

/// See the module.
#[derive(Debug)]
pub struct Neighbour {
    image: Vec<u8>,
    io_max_bytes: u32,
    block_bytes: u32,
    random: Random,
    queue: Option<QueueId>,
    connected: bool,
    // By tag: offset and length of the read.
    reads: [Option<(usize, usize)>; DEPTH as usize],
}

impl Neighbour {
    /// The neighbour of a plan, if it has one, not connected yet.
    #[must_use]
    pub fn of(plan: &Plan) -> Option<Self> {
        plan.neighbour.then(|| Self {
            image: image(plan.seed),
            io_max_bytes: plan.io_max_bytes,
            block_bytes: plan.block_bytes,
            random: Random::new(plan.seed ^ 0x6569_6768),
            queue: None,
            connected: false,
            reads: [None; DEPTH as usize],
        })
    }

    /// The target is gone.
    pub fn lose(&mut self) {
        self.connected = false;
    }

    /// Whether it waits for answers.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.reads.iter().any(Option::is_some)
    }

    /// Connects if it is not connected, and reads while connections are being destroyed.
    ///
    /// # Panics
    /// The connection fails.
    pub fn turn(&mut self, site: &mut Site) {
        if !site.is_up() || site.is_draining() {
            return;
        }
        let options = QueueOptions {
            depth: DEPTH,
            io_max_bytes: self.io_max_bytes,
            ..QueueOptions::default()
        };
        let rig = &mut site.rig;
        let queue = *self
            .queue
            .get_or_insert_with(|| rig.add_engine(VOLUME, options, None).expect("a queue"));
        let lost = !rig.take_path_ends(queue).is_empty() && !rig.is_connected(queue);
        if lost || !self.connected {
            self.connected = true;
            rig.open(SESSION, VOLUME, AccessMode::ReadOnly);
            let kind = ConnectionKind::Io { queue: 0 };
            let join = Join { admission: AdmissionId(0), session: SESSION, epoch: Epoch(1), kind };
            rig.connect_queue(queue, &[join]).expect("a path");
            let _ = rig.take_path_ends(queue);
        }
        if rig.undestroyed() == 0 {
            return;
        }
        for tag in 0..DEPTH {
            if self.reads[usize::from(tag)].is_some() {
                continue;
            }
            let block = self.block_bytes as usize;
            let blocks = 1 + self.random.index(self.io_max_bytes as usize / block);
            let first = self.random.index(BYTES / block - blocks + 1);
            let (at, len) = (first * block, blocks * block);
            let io = rig.request(queue, IoOp::Read, at as u64, len as u64);
            rig.submit(queue, Tag(tag), io).expect("a free tag");
            self.reads[usize::from(tag)] = Some((at, len));
        }
    }

    /// Takes an outcome of its own. A read may fail after an op of the store failed.
    ///
    /// # Panics
    /// A read returned wrong bytes.
    pub fn take(&mut self, outcome: &Outcome, store_failed: bool, site: &Site) -> bool {
        if self.queue != Some(outcome.queue) {
            return false;
        }
        let read = self.reads[outcome.tag.index()].take();
        let (at, len) = read.expect("what was asked for");
        if outcome.result < 0 {
            assert!(store_failed, "the neighbour's read of {at} failed: {}", outcome.result);
            return true;
        }
        assert_eq!(usize::try_from(outcome.result), Ok(len), "the neighbour's read of {at}");
        let data = site.rig.buffer(outcome.queue, outcome.tag, len);
        assert!(data == self.image[at..at + len], "the neighbour read other bytes at {at}");
        true
    }

    /// Leaves for good.
    pub fn leave(&mut self, site: &mut Site) {
        if let Some(queue) = self.queue.take() {
            site.rig.drop_queue(queue, false);
        }
        self.reads = [None; DEPTH as usize];
    }
}
