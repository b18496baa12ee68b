//! [`Pins`]: lent memory that is the source of sent answers, until the peer has the bytes.
//!
//! Memory that a WRITE was sent from goes back to its shard when a later signaled WR of the QP
//! completed, whatever the peer does with the tag. iWARP differs: there a completed WRITE only
//! means that TCP has the bytes and may yet send them from our memory (soft-iWARP does); only a
//! READ of the peer's scratch, a barrier, shows that they are sent. But there answers are sent from
//! copies ([`super::Bounce`]), so a shard has its memory back at once, and no memory is pinned
//! here.

use std::collections::VecDeque;

use rblk_protocol::KeyedDescriptor;

use crate::cache::Segments;

#[derive(Debug)]
struct Pin {
    // Position in the send queue of the WRITE that reads the memory.
    position: u64,
    shard: u16,
    memory: Segments,
}

/// Memory of shards that the device may still read.
#[derive(Debug)]
pub(super) struct Pins {
    pins: VecDeque<Pin>,
    sends_free: bool,
    // A page of the peer that stays readable, named in the self-test.
    scratch: Option<KeyedDescriptor>,
    barrier_queued: bool,
}

impl Pins {
    /// Pins with room for `send_wrs` entries. `sends_free`: a completed WRITE means that the peer
    /// has the bytes.
    pub(super) fn new(send_wrs: usize, sends_free: bool) -> Self {
        let pins = VecDeque::with_capacity(send_wrs);
        Self { pins, sends_free, scratch: None, barrier_queued: false }
    }

    /// Whether a completed WRITE means that the peer has the bytes.
    #[inline]
    pub(super) fn sends_free(&self) -> bool {
        self.sends_free
    }

    /// The page of the peer that a barrier reads.
    #[inline]
    pub(super) fn scratch(&self) -> Option<KeyedDescriptor> {
        self.scratch
    }

    /// Whether the peer named a page for barriers.
    #[inline]
    pub(super) fn has_scratch(&self) -> bool {
        self.scratch.is_some()
    }

    /// The self-test named the page for barriers.
    pub(super) fn set_scratch(&mut self, scratch: KeyedDescriptor) {
        self.scratch = Some(scratch);
    }

    /// Pins memory that the WRITE at `position` reads.
    #[inline]
    pub(super) fn pin(&mut self, position: u64, shard: u16, memory: Segments) {
        self.pins.push_back(Pin { position, shard, memory });
    }

    /// Takes the oldest pin of a WRITE up to `position`, to give it back to its shard.
    #[inline]
    pub(super) fn unpin(&mut self, position: u64) -> Option<(u16, Segments)> {
        let is_due = self.pins.front().is_some_and(|pin| pin.position <= position);
        let pin = if is_due { self.pins.pop_front()? } else { return None };
        Some((pin.shard, pin.memory))
    }

    /// Number of pins.
    pub(super) fn len(&self) -> usize {
        self.pins.len()
    }

    /// Pinned bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.pins.iter().map(|pin| pin.memory.bytes()).sum()
    }

    /// Position of the newest pin that no barrier on its way will release, if any.
    pub(super) fn needs_barrier(&self) -> Option<u64> {
        if self.barrier_queued { None } else { self.pins.back().map(|pin| pin.position) }
    }

    /// Whether a barrier is on its way.
    pub(super) fn has_barrier(&self) -> bool {
        self.barrier_queued
    }

    /// A barrier is on its way.
    pub(super) fn barrier_queued(&mut self) {
        self.barrier_queued = true;
    }

    /// The barrier completed.
    pub(super) fn barrier_done(&mut self) {
        self.barrier_queued = false;
    }
}
