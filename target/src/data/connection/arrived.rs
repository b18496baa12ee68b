//! [`Message`] and [`Arrived`]: messages of the peer, and the places of their bytes.
//!
//! A message is in the memory of its receive buffer, or first in slots of the cache and then in
//! that memory ([`super::Landing`]). This module joins commands and data that the end of a slot
//! cuts.

use rblk_fabric::Region;
use rblk_protocol::limits::COMMAND_BYTES;
use rblk_protocol::width::{wide, wide64};
use rblk_protocol::{CapsuleError, CommandCapsule, CommandList};

use super::landing::Landing;
use super::receive::ReceiveBuffers;
use crate::cache::SLOT_BYTES;
use crate::data::connection::connection_memory::ConnectionMemory;
use crate::data::request::InCapsule;

/// A message that is being processed, command by command.
#[derive(Debug)]
pub(crate) struct Message {
    list: CommandList,
    buffer: u16,
    // The message still holds the buffer for its next commands, not only for data.
    is_held: bool,
}

impl Message {
    /// A message in a receive buffer, which is held for it.
    #[inline(always)]
    pub(super) fn new(list: CommandList, buffer: u16) -> Self {
        Self { list, buffer, is_held: true }
    }

    /// Whether the last taken command is the last of the message.
    #[inline(always)]
    pub(crate) fn is_over(&self) -> bool {
        self.list.is_done()
    }

    /// The message's receive buffer.
    #[inline(always)]
    pub(super) fn buffer(&self) -> u16 {
        self.buffer
    }

    /// Whether the message holds its buffer for its commands.
    #[inline(always)]
    pub(super) fn is_held(&self) -> bool {
        self.is_held
    }

    /// Passes the hold on the buffer to the data of the last command.
    #[inline(always)]
    pub(super) fn hand_buffer_over(&mut self) {
        self.is_held = false;
    }
}

/// The places of a connection's messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrived<'a> {
    receives: &'a ReceiveBuffers,
    memory: &'a ConnectionMemory,
}

impl<'a> Arrived<'a> {
    /// Messages in these buffers of this memory.
    #[inline(always)]
    pub(super) fn new(receives: &'a ReceiveBuffers, memory: &'a ConnectionMemory) -> Self {
        Self { receives, memory }
    }

    /// The next command of a message; `None` after the last.
    #[inline(always)]
    pub(super) fn next_command(
        self,
        message: &mut Message,
    ) -> Option<Result<CommandCapsule, CapsuleError>> {
        let Message { list, buffer, .. } = message;
        list.take(|at| {
            if let Some(landing) = self.receives.landing()
                && at < landing.bytes()
            {
                return self.read_landed(*buffer, at);
            }
            let (own, offset) = self.memory.recv_place(*buffer, at);
            own.read_array(offset)
        })
    }

    /// Reads a command that starts in a slot.
    #[inline(always)]
    fn read_landed(self, buffer: u16, at: usize) -> [u8; COMMAND_BYTES] {
        if at % SLOT_BYTES <= SLOT_BYTES - COMMAND_BYTES
            && let Some((region, offset)) = self.receives.slot_place(buffer, at)
        {
            return region.read_array(offset);
        }
        self.read_piecewise(buffer, at)
    }

    /// Reads a command that the end of a slot cuts.
    #[cold]
    #[inline(never)]
    fn read_piecewise(self, buffer: u16, at: usize) -> [u8; COMMAND_BYTES] {
        let mut bytes = [0; COMMAND_BYTES];
        let (first, second) = bytes.split_at_mut(COMMAND_BYTES.min(SLOT_BYTES - at % SLOT_BYTES));
        let behind = at + first.len();
        for (at, part) in [(at, first), (behind, second)] {
            let slot = self.receives.slot_place(buffer, at);
            let (region, offset) = slot.unwrap_or_else(|| self.memory.recv_place(buffer, at));
            region.read(offset, part);
        }
        bytes
    }

    /// The place of the data of the command that was last taken from this message. Data that the
    /// end of a slot cuts is joined in the memory of the buffer.
    #[inline(always)]
    pub(super) fn data_of(self, message: &Message, command: &CommandCapsule) -> InCapsule {
        let (buffer, at) = (message.buffer, message.list.data_offset(command));
        if let Some(landing) = self.receives.landing()
            && at < landing.bytes()
        {
            return self.landed(buffer, at, wide(command.in_capsule_bytes));
        }
        let (_, offset) = self.memory.recv_place(buffer, at);
        InCapsule { buffer, landed: false, slot: InCapsule::NO_SLOT, offset }
    }

    /// [`Self::data_of`] for data that starts in a slot.
    #[inline(always)]
    fn landed(self, buffer: u16, at: usize, bytes: usize) -> InCapsule {
        if at % SLOT_BYTES + bytes > SLOT_BYTES {
            self.join_cut(buffer, at, bytes);
        } else if let Some((_, offset)) = self.receives.slot_place(buffer, at) {
            let slot = (wide64(at / SLOT_BYTES) & 0x7f) as u8;
            // Behind less data the slot may have commands that are not read yet.
            let slot = if bytes == SLOT_BYTES { slot } else { InCapsule::NO_SLOT };
            return InCapsule { buffer, landed: true, slot, offset };
        }
        let (_, offset) = self.memory.recv_place(buffer, at);
        InCapsule { buffer, landed: false, slot: InCapsule::NO_SLOT, offset }
    }

    /// Copies the landed data of a message to its place in the memory of the buffer.
    #[cold]
    #[inline(never)]
    fn join_cut(self, buffer: u16, at: usize, bytes: usize) {
        let (mut at, end) = (at, at + bytes);
        while at < end {
            let len = (end - at).min(SLOT_BYTES - at % SLOT_BYTES);
            // Data behind the slots is already in its place.
            if let Some((from, offset)) = self.receives.slot_place(buffer, at) {
                let (own, to) = self.memory.recv_place(buffer, at);
                from.copy_to(offset, own, to, len);
            }
            at += len;
        }
    }

    /// The memory and the offset of in-capsule data.
    #[inline(always)]
    pub(super) fn place_of(self, data: InCapsule) -> (&'a Region, usize) {
        let slots = self.receives.landing().filter(|_| data.landed);
        (slots.map_or(&**self.memory.region(), Landing::region), data.offset)
    }
}
