//! The ownership of the buffers of a program's queue, in any order of events: a buffer that a
//! device may still write to is in no other hands, in no other request, and in mapped memory.
//!
//! The queue is the one of `rblk-client`, the target is the real one, and the network is the
//! in-memory one whose devices touch memory until their QPs are destroyed. A seed decides every
//! step. The test notes a buffer's bytes when the program gets it. They must stay the same until
//! the program gives it away: late RDMA, or a second user of the memory, would change them.

use std::collections::HashMap;
use std::sync::Arc;

use rblk_client::{Buffer, Queue, Request};
use rblk_fabric::soft::network::{Conditions, FaultyWire};
use rblk_initiator::front::program::detached::{Detached, Ended};
use rblk_protocol::{BlockSize, ConnectionKind, QueueDepth, VolumeHandle};
use rblk_rig::inprocess::{QueueOptions, RigOptions};
use rblk_rig::seed::Random;
use rblk_tests::bed::{Bed, STORE, pattern};

const DEPTH: u16 = 4;
const SPARE: usize = 3;
const DATA_MAX: usize = 16 << 10;
const ACTIONS: u32 = 700;
const SEEDS: u64 = 60;
const EIO: i32 = 5;

/// A buffer in the program's hands, with its bytes.
struct Held {
    buffer: Buffer,
    holds: Vec<u8>,
}

impl Held {
    fn of(buffer: Buffer) -> Self {
        let mut holds = vec![0; buffer.capacity()];
        buffer.read(0, &mut holds);
        Self { buffer, holds }
    }

    fn check(&self) {
        let mut found = vec![0; self.holds.len()];
        self.buffer.read(0, &mut found);
        assert!(found == self.holds, "somebody else wrote to a buffer in the program's hands");
    }
}

#[derive(Default)]
struct Totals {
    answered: u64,
    failed: u64,
    landed: u64,
    blocked: u64,
    dropped_under_way: u64,
    unmapped: u64,
}

struct World {
    bed: Bed,
    random: Random,
    // `None`: control died, and its QPs with it.
    control: Option<Detached>,
    queue: Option<Queue>,
    wires: Vec<FaultyWire>,
    // The path is gone, or about to end.
    lost: bool,
    // The address of each buffer under way, by token.
    under_way: HashMap<u64, usize>,
    held: Vec<Held>,
    dead: Vec<Ended>,
    tokens: u64,
    totals: Totals,
}

fn options() -> QueueOptions {
    QueueOptions { depth: DEPTH, io_max_bytes: 16 << 10, ..QueueOptions::default() }
}

fn new_queue() -> (Detached, Queue) {
    let depth = QueueDepth::new(DEPTH).unwrap();
    Detached::new(depth, DATA_MAX, SPARE, BlockSize::new(512).unwrap()).unwrap()
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let delay_min = random.below(10);
        let conditions = Conditions {
            fragment: random.chance(500),
            delay_min,
            delay_max: delay_min + random.below(30),
            buffer: 1 << random.within(10, 17),
        };
        let rig = RigOptions { seed, conditions, late_rdma: true, ..RigOptions::default() };
        let (control, queue) = new_queue();
        Self {
            bed: Bed::new(&rig),
            random,
            control: Some(control),
            queue: Some(queue),
            wires: Vec::new(),
            lost: true,
            under_way: HashMap::new(),
            held: Vec::new(),
            dead: Vec::new(),
            tokens: 0,
            totals: Totals::default(),
        }
    }

    fn act(&mut self) {
        match self.random.below(1000) {
            0..100 => self.take_buffer(),
            100..300 => self.submit(),
            300..600 => self.poll(),
            600..840 => {
                for _ in 0..self.random.below(60) {
                    self.bed.rig.step();
                }
            }
            840..880 => {
                let at = self.random.index(self.held.len().max(1));
                if at < self.held.len() {
                    drop(self.held.swap_remove(at));
                }
            }
            880..888 => {
                self.lost = true;
                self.wires.iter().for_each(FaultyWire::cut);
            }
            888..894 => self.lose(Detached::disconnect),
            894..900 => self.lose(|control| control.fail(Some(EIO))),
            900..940 if self.lost || self.random.chance(100) => self.connect(),
            940..985 => self.destroy_one(),
            985..992 => self.drop_queue(),
            992..994 => drop(self.control.take_if(|_| self.random.chance(300))),
            _ => {}
        }
        self.take_ends();
        self.check();
    }

    fn lose(&mut self, how: impl Fn(&Detached)) {
        self.lost = true;
        self.control.iter().for_each(how);
    }

    fn take_buffer(&mut self) {
        let Some(mut buffer) = self.queue.as_mut().and_then(Queue::buffer) else { return };
        buffer.write(0, &pattern(self.random.below(u64::MAX), DATA_MAX));
        self.held.push(Held::of(buffer));
    }

    fn submit(&mut self) {
        let Some(queue) = &mut self.queue else { return };
        let Some(Held { buffer, holds }) = self.held.pop() else { return };
        let begin = buffer.as_ptr().addr();
        let offset = self.random.below(64) * 512;
        let len = (1 + self.random.index(DATA_MAX / 512)) * 512;
        let request = match self.random.chance(600) {
            true => Request::read(buffer, offset, len),
            false => Request::write(buffer, offset, len),
        };
        self.tokens += 1;
        match queue.submit(request.with_token(self.tokens)) {
            Ok(()) => assert!(self.under_way.insert(self.tokens, begin).is_none()),
            // The buffer comes back unchanged.
            Err(refused) => {
                let buffer = refused.request.into_buffer().expect("its buffer");
                self.held.push(Held { buffer, holds });
            }
        }
    }

    fn poll(&mut self) {
        let Some(queue) = &mut self.queue else { return };
        let mut done = Vec::new();
        // Without control a poll fails, and requests under way stay there.
        let polled = queue.poll(&mut done);
        assert!(polled.is_ok() || self.control.is_none(), "{polled:?}");
        for done in done {
            let begin = self.under_way.remove(&done.token).expect("a request of ours");
            let buffer = done.buffer.expect("a read or a write");
            assert_eq!(buffer.as_ptr().addr(), begin, "the buffer of the request");
            match done.result {
                Ok(_) => self.totals.answered += 1,
                Err(_) => self.totals.failed += 1,
            }
            self.held.push(Held::of(buffer));
        }
    }

    /// The next epoch, as after a LOGIN: the queue gets a path after the target has destroyed its
    /// ends of the old paths.
    fn connect(&mut self) {
        let Some(control) = &self.control else { return };
        let Some(memory) = control.memory() else { return };
        control.disconnect();
        let rig = &mut self.bed.rig;
        rig.new_epoch(self.bed.session).expect("the target lets go");
        let kind = ConnectionKind::Io { queue: 0 };
        let join = rig.join_by_hand(self.bed.session, kind).expect("a new epoch");
        let volume = VolumeHandle(u32::from(STORE.0) + 1);
        let (path, wires) = rig.path(&[join], volume, options(), &memory).expect("a path");
        control.connect(path);
        if self.random.chance(800) {
            control.fail(None);
        }
        (self.wires, self.lost) = (wires, false);
    }

    fn take_ends(&mut self) {
        let Some(control) = &mut self.control else { return };
        self.dead.extend(std::iter::from_fn(|| control.next_end()));
    }

    /// The kernel has destroyed the QPs of one path.
    fn destroy_one(&mut self) {
        let at = self.random.index(self.dead.len().max(1));
        if at < self.dead.len() {
            let Ended { dead, undestroyed, .. } = self.dead.swap_remove(at);
            drop(dead);
            drop(undestroyed);
        }
    }

    /// Drops the queue with its requests under way. Sometimes another queue takes its place.
    fn drop_queue(&mut self) {
        let Some(queue) = self.queue.take() else {
            // The next queue begins after the old one is gone entirely.
            self.held.clear();
            self.dead.clear();
            if let Some(control) = &self.control {
                assert!(control.memory().is_none(), "still mapped when nobody can touch it");
                self.totals.unmapped += 1;
            }
            let (control, queue) = new_queue();
            (self.control, self.queue, self.lost) = (Some(control), Some(queue), true);
            return;
        };
        self.totals.dropped_under_way += u64::from(queue.under_way() > 0);
        drop(queue);
        self.under_way.clear();
    }

    fn check(&self) {
        self.held.iter().for_each(Held::check);
        let mut begins: Vec<_> = self.held.iter().map(|held| held.buffer.as_ptr().addr()).collect();
        begins.extend(self.under_way.values());
        let all = begins.len();
        begins.sort_unstable();
        begins.dedup();
        assert_eq!(begins.len(), all, "two have one buffer");
        if let (Some(queue), true) = (&self.queue, self.control.is_some()) {
            assert_eq!(queue.under_way(), self.under_way.len());
        }
        if let Some(control) = &self.control
            && self.dead.iter().any(|ended| !ended.dead.connections.is_empty())
        {
            assert!(control.memory().is_some(), "unmapped under a device");
        }
    }

    /// Drops everything, in an order that the seed decides, and checks that nothing is left.
    fn end(mut self) -> Totals {
        let mut parts = [0, 1, 2, 3];
        for at in 0..parts.len() {
            let with = self.random.index(parts.len());
            parts.swap(at, with);
        }
        let memory = {
            let memory = self.control.as_ref().and_then(Detached::memory);
            memory.map(|memory| Arc::downgrade(&memory))
        };
        for part in parts {
            match part {
                0 => drop(self.queue.take()),
                1 => self.held.clear(),
                2 => {
                    self.take_ends();
                    self.dead.clear();
                }
                _ => drop(self.control.take()),
            }
            self.held.iter().for_each(Held::check);
            for _ in 0..100 {
                self.bed.rig.step();
            }
            self.held.iter().for_each(Held::check);
        }
        let left = memory.is_some_and(|memory| memory.upgrade().is_some());
        assert!(!left, "the memory is still mapped when nobody can touch it");
        self.totals.landed = self.bed.rig.network().landed();
        self.totals.blocked = self.bed.rig.target_counts().stale_rdma_blocked;
        self.totals
    }
}

#[test]
fn no_order_of_events_gives_a_buffer_away_that_a_device_may_touch() {
    let mut sum = Totals::default();
    for seed in rblk_tests::storm::seeds(SEEDS) {
        println!("seed {seed}");
        let mut world = World::new(seed);
        world.connect();
        for _ in 0..ACTIONS {
            world.act();
        }
        let totals = world.end();
        sum.answered += totals.answered;
        sum.failed += totals.failed;
        sum.landed += totals.landed;
        sum.blocked += totals.blocked;
        sum.dropped_under_way += totals.dropped_under_way;
        sum.unmapped += totals.unmapped;
    }
    let Totals { answered, failed, landed, blocked, dropped_under_way, unmapped } = sum;
    println!(
        "{answered} answered, {failed} failed, {landed} landed late, {blocked} blocked, \
         {dropped_under_way} queues dropped with requests, {unmapped} memories unmapped"
    );
    let least = [answered, failed, landed, blocked, dropped_under_way, unmapped].into_iter().min();
    assert!(least >= Some(20), "the seeds hit too little");
}
