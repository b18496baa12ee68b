//! [`ReceiveBuffers`]: which messages are still in use, and the RECVs to post.
//!
//! A buffer is free when the last command of its message was copied out and the data of each
//! command was used, which is before the last command with data is answered. It is posted again
//! with the next sends of the connection, and before them: a turn that sends nothing posts nothing.
//!
//! Invariant: a buffer that is not posted has a message of which a command is unanswered, since an
//! answer is a send. No two buffers are of the same command. The peer has at most depth + 1
//! commands outstanding, at least one of them in the message that it sends now: it always finds a
//! buffer (RNR cannot happen).

use rblk_fabric::{MemoryRegion, RecvWr, Sge};
use rblk_protocol::width::{narrow, wide, wide64};

use super::layout::Layout;
use super::wr_id::WrKind;

/// The receive buffers of a connection.
#[derive(Debug)]
pub(super) struct ReceiveBuffers {
    // By buffer that is not posted: commands whose data is in it, and one while its commands are
    // looked at.
    users: Box<[u8]>,
    // RECVs that go with the next sends.
    queued: Vec<RecvWr>,
    // The first buffer, and how far they are apart.
    first: Sge,
    stride: u64,
    messages: u64,
}

impl ReceiveBuffers {
    /// The buffers of a layout, in that memory. Every buffer is queued.
    pub(super) fn new(layout: &Layout, memory: &MemoryRegion) -> Self {
        let (count, stride) = (layout.recv_buffers(), layout.recv_bytes());
        let all = memory.sge(layout.recv_offset(0), narrow(stride * wide(count)));
        let first = all.unwrap_or_else(|| unreachable!("inside the connection's memory"));
        let mut buffers = Self {
            users: vec![0; wide(count)].into_boxed_slice(),
            queued: Vec::with_capacity(wide(count)),
            first: Sge { len: narrow(stride), ..first },
            stride: wide64(stride),
            messages: 0,
        };
        (0..count).for_each(|buffer| buffers.queue(buffer));
        buffers
    }

    /// Messages that came.
    #[inline]
    pub(super) fn messages(&self) -> u64 {
        self.messages
    }

    /// A message came in that buffer, and its commands are looked at: until [`Self::release`].
    #[inline]
    pub(super) fn hold(&mut self, buffer: u16) {
        self.messages += 1;
        self.users[wide(buffer)] = 1;
    }

    /// The data of a command is in that buffer: until [`Self::release`].
    #[inline]
    pub(super) fn share(&mut self, buffer: u16) {
        self.users[wide(buffer)] += 1;
    }

    /// One user of the buffer does not need it any more. Its RECV is queued when no user is left.
    #[inline]
    pub(super) fn release(&mut self, buffer: u16) {
        let users = &mut self.users[wide(buffer)];
        debug_assert!(*users > 0, "receive buffer {buffer} is free already");
        *users = users.saturating_sub(1);
        if *users == 0 {
            self.queue(buffer);
        }
    }

    #[inline]
    fn queue(&mut self, buffer: u16) {
        let addr = self.first.addr + u64::from(buffer) * self.stride;
        self.queued.push(RecvWr { id: WrKind::Recv(buffer).id(), sge: Sge { addr, ..self.first } });
    }

    /// The RECVs that go with the next sends.
    #[inline]
    pub(super) fn queued(&self) -> &[RecvWr] {
        &self.queued
    }

    /// These RECVs were posted, or never will be.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.queued.clear();
    }
}
