//! [`LateFlushes`]: completions of WRs that were posted to a dead QP.
//!
//! Hardware completes such WRs with a flush. The software devices of the kernel do not, so the
//! poller keeps these WRs from the device and completes them from this list.

use std::collections::VecDeque;
use std::io;

use super::work_completion::WrIdPrefix;
use crate::work::{Completion, WcStatus, WrId};

/// A queue of completions, each with the generation of its QP. It never grows.
#[derive(Debug)]
pub(in crate::verbs) struct LateFlushes(VecDeque<(Completion, u8)>);

impl LateFlushes {
    /// A queue with room for `entries` completions.
    pub(in crate::verbs) fn new(entries: usize) -> Self {
        Self(VecDeque::with_capacity(entries))
    }

    /// Adds the completion of a WR that no device will complete.
    ///
    /// # Errors
    /// ENOMEM: the queue is full.
    pub(in crate::verbs) fn push(
        &mut self,
        wr_ids: WrIdPrefix,
        id: WrId,
        status: WcStatus,
    ) -> io::Result<()> {
        if self.0.len() == self.0.capacity() {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        let id = WrId(id.0 & WrId::MASK);
        let completion = Completion { qp: wr_ids.qp(), id, status, ..Completion::default() };
        self.0.push_back((completion, wr_ids.generation()));
        Ok(())
    }

    /// The oldest completion, with the generation of its QP.
    #[inline]
    pub(in crate::verbs) fn pop(&mut self) -> Option<(Completion, u8)> {
        self.0.pop_front()
    }
}
