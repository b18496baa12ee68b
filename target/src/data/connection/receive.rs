//! [`ReceiveBuffers`]: the messages that are still in use, and the RECVs to post.
//!
//! A buffer is free when the last command of its message was copied out and the data of each
//! command was used, which happens before the last command with data is answered. The buffer is
//! posted again with the next sends of the connection, and before them: a turn without sends posts
//! no RECVs.
//!
//! A message is in the memory of its buffer, or first in slots of the cache and then in that memory
//! ([`Landing`]).
//!
//! Invariant: a buffer that is not posted has a message with an unanswered command, since an answer
//! is a send. No two buffers have the same command. The peer has at most depth + 1 commands
//! outstanding, at least one of them in the message that it sends now: so it always finds a buffer
//! (RNR cannot happen).

use rblk_fabric::{RecvWr, Recvs, Region, SgeList};
use rblk_protocol::width::wide;

use super::landing::Landing;
use super::wr_id::WrKind;
use crate::data::connection::connection_memory::ConnectionMemory;
use crate::data::request::InCapsule;

/// The receive buffers of a connection.
#[derive(Debug)]
pub(super) struct ReceiveBuffers {
    // For each buffer that is not posted: its users, which are commands with data in it, and its
    // message until all commands are processed.
    users: Box<[u8]>,
    // Indexed by buffer.
    recvs: Box<[RecvWr]>,
    // Buffers to post with the next sends.
    queued: Vec<u16>,
    messages: u64,
    landing: Option<Landing>,
}

impl ReceiveBuffers {
    /// The buffers of this memory, all queued. `landing` has slots for each of them.
    pub(super) fn new(memory: &ConnectionMemory, landing: Option<Landing>) -> Self {
        let buffers = memory.layout().recv_buffers();
        let recvs = |landing: Option<&Landing>| {
            let recv = |buffer| {
                let own = memory.recv_sge(buffer);
                let sges = match landing {
                    Some(landing) => landing.places(buffer, own)?,
                    None => SgeList::one(own),
                };
                Some(RecvWr { id: WrKind::Recv(buffer).id(), sges })
            };
            (0..buffers).map(recv).collect::<Option<Box<[RecvWr]>>>()
        };
        let (recvs, landing) = match recvs(landing.as_ref()) {
            Some(recvs) => (recvs, landing),
            None => unreachable!("the slots are as many as the layout says"),
        };
        Self {
            users: vec![0; recvs.len()].into_boxed_slice(),
            recvs,
            queued: (0..buffers).collect(),
            messages: 0,
            landing,
        }
    }

    /// The landing place of a byte of a message, if it is in a slot of the cache.
    #[inline(always)]
    pub(super) fn slot_place(&self, buffer: u16, at: usize) -> Option<(&Region, usize)> {
        let landing = self.landing.as_ref()?;
        let offset = landing.offset(&self.recvs[wide(buffer)].sges, at)?;
        Some((landing.region(), offset))
    }

    /// The slots of the cache where messages land, if any.
    #[inline(always)]
    pub(super) fn landing(&self) -> Option<&Landing> {
        self.landing.as_ref()
    }

    /// Replaces the slot that this data fills by a fresh one. Both are given by their offsets in
    /// the arena. Returns the slot with the data.
    #[inline(always)]
    pub(super) fn exchange(&mut self, data: InCapsule, fresh: usize) -> Option<usize> {
        let slot = self.recvs[wide(data.buffer)].sges.entry_mut(wide(data.slot))?;
        self.landing.as_ref()?.put(slot, fresh);
        Some(data.offset)
    }

    /// Takes all slots where messages land, given by their offsets in the arena. No RECV uses them
    /// any more.
    pub(super) fn take_slots(&mut self) -> Vec<usize> {
        let Some(landing) = self.landing.take() else { return Vec::new() };
        self.recvs.iter().flat_map(|recv| landing.slots_of(&recv.sges)).collect()
    }

    /// Number of messages received.
    #[inline]
    pub(super) fn messages(&self) -> u64 {
        self.messages
    }

    /// A message came in a buffer, and holds it until [`Self::release`].
    #[inline]
    pub(super) fn hold(&mut self, buffer: u16) {
        self.messages += 1;
        self.users[wide(buffer)] = 1;
    }

    /// The data of a command in a buffer holds it until [`Self::release`].
    #[inline]
    pub(super) fn share(&mut self, buffer: u16) {
        self.users[wide(buffer)] += 1;
    }

    /// One user releases the buffer. The last release queues its RECV.
    #[inline(always)]
    pub(super) fn release(&mut self, buffer: u16) {
        let users = &mut self.users[wide(buffer)];
        debug_assert!(*users > 0, "receive buffer {buffer} is free already");
        *users = users.saturating_sub(1);
        if *users == 0 {
            self.queued.push(buffer);
        }
    }

    /// The RECVs to post with the next sends.
    #[inline]
    pub(super) fn queued(&self) -> Recvs<'_> {
        Recvs { table: &self.recvs, rows: &self.queued }
    }

    /// Clears the list: these RECVs were posted, or never will be.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.queued.clear();
    }
}
