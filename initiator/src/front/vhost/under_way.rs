//! [`UnderWay`]: the guest's requests in progress. Each is one request to the target, or several:
//! its steps.
//!
//! A request with more steps than there are tags starts as many steps as possible, and the others
//! after answers. Until then no further request is taken from the ring.
//!
//! For a guest that does not flush, every change is durable before the answer: a write is sent with
//! FUA, and the last step of a DISCARD or WRITE_ZEROES is a FLUSH.

use std::collections::VecDeque;
use std::sync::Arc;

use rblk_fabric::Region;
use rblk_protocol::width::{narrow, wide64};
use rblk_protocol::{BlockSize, Tag};
use virtio_queue::DescriptorChain;
use vm_memory::GuestMemoryMmap;

use super::guest_memory::GuestMemory;
use super::guest_request::{
    DiskLimits, GuestOp, GuestRequest, GuestRequestStep, ID_BYTES, NoStatus,
};
use crate::engine::io::{Io, IoOp};
use crate::engine::path::DataPlace;
use crate::engine::{Engine, QueueStats};
use crate::queue::{EngineDriver, EngineDriverParts};

/// An unanswered request to the target.
#[derive(Clone, Copy, Debug)]
struct UnderTag {
    slot: u16,
    step: GuestRequestStep,
}

/// A request of the guest, and its unanswered steps.
#[derive(Debug, Default)]
struct GuestRequestSlot {
    request: GuestRequest,
    steps: u16,
    // A FLUSH must follow.
    owes_flush: bool,
}

/// The requests of a ring that are under way.
#[derive(Debug)]
pub(super) struct UnderWay {
    buffers: Arc<Region>,
    stride: usize,
    block_size: BlockSize,
    rules: DiskLimits,
    id: [u8; ID_BYTES],
    // Every change must be durable at once.
    durable: bool,
    slots: Vec<GuestRequestSlot>,
    free_slots: Vec<u16>,
    by_tag: Box<[Option<UnderTag>]>,
    free_tags: Vec<Tag>,
    // A request with steps that wait for a tag.
    stalled: Option<u16>,
    // Completed requests that the guest does not know of yet.
    done: VecDeque<u16>,
    // Requests that wait for their FLUSH to be sent.
    flushes: VecDeque<u16>,
    // The unanswered FLUSH of this end.
    own_flush: Option<Tag>,
}

impl UnderWay {
    /// No requests.
    pub(super) fn new(
        target: &EngineDriverParts,
        buffers: Arc<Region>,
        block_size: BlockSize,
        id: [u8; ID_BYTES],
    ) -> Self {
        let block = u64::from(block_size.bytes());
        let most = wide64(target.data_max);
        let rules = DiskLimits { block, step: (most - most % block).max(block) };
        let depth = target.depth.get();
        Self {
            buffers,
            stride: target.stride,
            block_size,
            rules,
            id,
            durable: false,
            slots: Vec::new(),
            free_slots: Vec::new(),
            by_tag: vec![None; usize::from(depth)].into(),
            free_tags: (0..depth).rev().map(Tag).collect(),
            stalled: None,
            done: VecDeque::new(),
            flushes: VecDeque::new(),
            own_flush: None,
        }
    }

    /// Makes room for a ring with so many requests. Nothing is under way.
    pub(super) fn make_room(&mut self, requests: u16) {
        self.slots.resize_with(usize::from(requests), GuestRequestSlot::default);
        self.free_slots = (0..requests).rev().collect();
        self.done = VecDeque::with_capacity(usize::from(requests));
        self.flushes = VecDeque::with_capacity(usize::from(requests));
    }

    /// Sets whether every change must be durable at once: for a guest that does not flush.
    pub(super) fn set_durable(&mut self, durable: bool) {
        self.durable = durable;
    }

    /// Whether one more request may be taken.
    pub(super) fn has_room(&self) -> bool {
        self.stalled.is_none() && !self.free_slots.is_empty() && !self.free_tags.is_empty()
    }

    /// Whether nothing is under way.
    pub(super) fn is_empty(&self) -> bool {
        self.free_slots.len() == self.slots.len()
    }

    /// Takes a request of the guest.
    ///
    /// # Errors
    /// [`NoStatus`]: the ring breaks.
    pub(super) fn take(
        &mut self,
        chain: DescriptorChain<&GuestMemoryMmap>,
        memory: &GuestMemory,
        driver: &mut EngineDriver,
    ) -> Result<(), NoStatus> {
        let Some(slot) = self.free_slots.pop() else { return Ok(()) };
        let of_slot = &mut self.slots[usize::from(slot)];
        if let Err(error) = of_slot.request.read(chain, memory, self.rules) {
            self.free_slots.push(slot);
            return Err(error);
        }
        if of_slot.request.op() == GuestOp::GetId
            && of_slot.request.status() == super::guest_request::OK
        {
            of_slot.request.tell_id(memory, &self.id);
        }
        of_slot.steps = 0;
        let zeroes = matches!(of_slot.request.op(), GuestOp::Discard | GuestOp::WriteZeroes);
        of_slot.owes_flush = self.durable && zeroes;
        self.begin_steps(slot, memory, driver);
        Ok(())
    }

    /// Continues a request that had no tag for its next step. Returns whether there is one.
    pub(super) fn go_on(&mut self, memory: &GuestMemory, driver: &mut EngineDriver) -> bool {
        let mut any = false;
        while !self.free_tags.is_empty()
            && let Some(slot) = self.flushes.pop_front()
        {
            any = true;
            let step = GuestRequestStep { offset: 0, len: 0, at: 0, guest: None, may_unmap: false };
            match self.send_flush(false, driver) {
                Some(tag) => {
                    self.by_tag[tag.index()] = Some(UnderTag { slot, step });
                    self.slots[usize::from(slot)].steps += 1;
                }
                None => self.slots[usize::from(slot)].request.fail(),
            }
            self.done_if_done(slot);
        }
        self.go_on_with_stalled(memory, driver) || any
    }

    fn go_on_with_stalled(&mut self, memory: &GuestMemory, driver: &mut EngineDriver) -> bool {
        let Some(slot) = self.stalled.take_if(|_| !self.free_tags.is_empty()) else { return false };
        self.begin_steps(slot, memory, driver);
        true
    }

    fn begin_steps(&mut self, slot: u16, memory: &GuestMemory, driver: &mut EngineDriver) {
        loop {
            let GuestRequestSlot { request, .. } = &mut self.slots[usize::from(slot)];
            if request.has_begun() {
                break;
            }
            if self.free_tags.is_empty() {
                self.stalled = Some(slot);
                return;
            }
            let Some(step) = request.next_step(memory, self.rules) else { break };
            if !self.begin_step(slot, step, memory, driver) {
                self.slots[usize::from(slot)].request.fail();
            }
        }
        self.done_if_done(slot);
    }

    /// Gives a step to the engine. Returns whether the engine took it.
    fn begin_step(
        &mut self,
        slot: u16,
        step: GuestRequestStep,
        memory: &GuestMemory,
        driver: &mut EngineDriver,
    ) -> bool {
        let of_slot = &mut self.slots[usize::from(slot)];
        let op = of_slot.request.op();
        let Some(mut io) =
            op.for_target().and_then(|op| Io::new(op, step.offset, step.len, self.block_size))
        else {
            return false;
        };
        io.fua = self.durable && op == GuestOp::Write;
        io.may_unmap = step.may_unmap;
        let Some(tag) = self.free_tags.pop() else { return false };
        let own = tag.index() * self.stride;
        let place = step.guest.map_or(DataPlace::own(own), |(_, place)| place);
        if op == GuestOp::Write && step.guest.is_none() {
            let buffer = (&*self.buffers, own);
            if !of_slot.request.copy(memory, (step.at, step.len), buffer) {
                self.free_tags.push(tag);
                return false;
            }
        }
        if driver.engine_mut().submit_at(tag, io, place).is_err() {
            self.free_tags.push(tag);
            return false;
        }
        self.by_tag[tag.index()] = Some(UnderTag { slot, step });
        of_slot.steps += 1;
        true
    }

    /// Sends a FLUSH for a request of the guest, or for this end. Returns its tag, if it was sent.
    fn send_flush(&mut self, is_own: bool, driver: &mut EngineDriver) -> Option<Tag> {
        let io = Io::new(IoOp::Flush, 0, 0, self.block_size)?;
        let tag = self.free_tags.pop()?;
        let (engine, place) = (driver.engine_mut(), DataPlace::own(tag.index() * self.stride));
        let sent = match is_own {
            true => engine.submit_unasked_flush(tag, io, place),
            false => engine.submit_at(tag, io, place),
        };
        if sent.is_err() {
            self.free_tags.push(tag);
            return None;
        }
        Some(tag)
    }

    /// Sends a FLUSH of this end, unknown to the guest. Returns whether it was sent: one at a time.
    pub(super) fn flush(&mut self, driver: &mut EngineDriver) -> bool {
        if self.own_flush.is_none() {
            self.own_flush = self.send_flush(true, driver);
            return self.own_flush.is_some();
        }
        false
    }

    /// Whether an answer is that to the FLUSH of this end. That FLUSH is over then.
    pub(super) fn is_own(&mut self, tag: Tag) -> bool {
        let is_own = self.own_flush.take_if(|own| *own == tag).is_some();
        if is_own {
            self.free_tags.push(tag);
        }
        is_own
    }

    /// The target has answered a step, or the step has failed.
    pub(super) fn answered(
        &mut self,
        tag: Tag,
        result: i32,
        memory: &GuestMemory,
        stats: &QueueStats,
    ) {
        let under = self.by_tag.get_mut(tag.index()).and_then(Option::take);
        let Some(UnderTag { slot, step }) = under else {
            debug_assert!(false, "an answer to no request: tag {}", tag.0);
            return;
        };
        self.free_tags.push(tag);
        let of_slot = &mut self.slots[usize::from(slot)];
        of_slot.steps -= 1;
        let op = of_slot.request.op();
        if result < 0 {
            of_slot.request.fail();
        } else if matches!(op, GuestOp::Read | GuestOp::Write) {
            let straight = step.guest.is_some();
            count(stats, step.len, straight);
            let buffer = (&*self.buffers, tag.index() * self.stride);
            let brings = op == GuestOp::Read && !straight;
            if brings && !of_slot.request.copy(memory, (step.at, step.len), buffer) {
                of_slot.request.fail();
            }
        }
        if self.stalled == Some(slot) && of_slot.request.has_begun() {
            self.stalled = None;
        }
        self.done_if_done(slot);
    }

    fn done_if_done(&mut self, slot: u16) {
        let of_slot = &mut self.slots[usize::from(slot)];
        if of_slot.steps > 0 || !of_slot.request.has_begun() {
            return;
        }
        let owes_flush = std::mem::take(&mut of_slot.owes_flush);
        if owes_flush && of_slot.request.status() == super::guest_request::OK {
            self.flushes.push_back(slot);
        } else {
            self.done.push_back(slot);
        }
    }

    /// The next completed request, for the ring: the guest has its data and its status.
    pub(super) fn next_done(&mut self, memory: &GuestMemory) -> Option<(u16, u32)> {
        let slot = self.done.pop_front()?;
        self.free_slots.push(slot);
        Some(self.slots[usize::from(slot)].request.tell_status(memory))
    }

    /// Starts no more steps of the present requests.
    pub(super) fn give_up(&mut self) {
        if let Some(slot) = self.stalled.take() {
            self.slots[usize::from(slot)].request.fail();
            self.done_if_done(slot);
        }
        while let Some(slot) = self.flushes.pop_front() {
            self.slots[usize::from(slot)].request.fail();
            self.done_if_done(slot);
        }
    }

    /// Switches to new guest memory. There is no path, so every step waits: it goes on at its
    /// address in the new memory, or has failed.
    pub(super) fn move_to(&mut self, memory: Option<&GuestMemory>, engine: &mut Engine) {
        for index in 0..self.by_tag.len() {
            let tag = Tag(narrow(index));
            let Some(UnderTag { slot, step }) = &mut self.by_tag[index] else { continue };
            let Some((guest, place)) = &mut step.guest else { continue };
            let new = memory.and_then(|memory| memory.place(*guest, step.len));
            let slot = *slot;
            match new.filter(|(_, run)| *run == step.len) {
                Some((new, _)) => {
                    *place = new;
                    engine.replace(tag, new);
                }
                None => {
                    engine.cancel(tag);
                    self.by_tag[index] = None;
                    self.free_tags.push(tag);
                    let of_slot = &mut self.slots[usize::from(slot)];
                    of_slot.steps -= 1;
                    of_slot.request.fail();
                    self.stalled = self.stalled.filter(|stalled| *stalled != slot);
                    self.done_if_done(slot);
                }
            }
        }
    }
}

/// Counts bytes that went directly, or through a buffer.
fn count(stats: &QueueStats, bytes: u64, straight: bool) {
    if straight {
        stats.shared_memory_bytes.add(bytes);
    } else {
        stats.bounced_bytes.add(bytes);
        stats.copied_bytes.add(bytes);
    }
}
