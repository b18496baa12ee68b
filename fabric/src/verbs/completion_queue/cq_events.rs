//! [`CqEvents`]: arming a CQ, and taking its events.
//!
//! An armed CQ stays armed until it gives its one event. So [`CqEvents::arm`] asks the device only
//! when the last event was taken since. An event that is not taken keeps the descriptor of the
//! channel readable, so a thread that sleeps on it wakes at once.

use std::ptr;

use super::{CompletionQueue, broken};
use crate::error::Result;
use crate::verbs::ffi;
use crate::verbs::provider_calls::ProviderCalls;

/// Events that are acknowledged together: an acknowledgement takes a mutex of libibverbs.
const ACKNOWLEDGED_TOGETHER: u32 = 64;

/// The events of one CQ.
#[derive(Debug, Default)]
pub(in crate::verbs) struct CqEvents {
    // The device was asked for an event, and none was taken since.
    armed: bool,
    // Events that were taken and not acknowledged. Destroying the CQ waits until it is 0.
    unacknowledged: u32,
}

impl CqEvents {
    /// Asks for an event at the next completion. Returns whether the device had to be asked.
    ///
    /// # Errors
    /// The CQ is broken.
    pub(in crate::verbs) fn arm(
        &mut self,
        queue: &CompletionQueue,
        calls: &ProviderCalls,
    ) -> Result<bool> {
        let ask = !self.armed;
        if ask {
            // SAFETY: the CQ lives.
            let rc = unsafe { (calls.req_notify)(queue.raw(), 0) };
            if rc != 0 {
                return Err(broken());
            }
            self.armed = true;
        }
        if queue.is_broken() { Err(broken()) } else { Ok(ask) }
    }

    /// Takes the event, if there is one. Returns whether there was. The CQ is not armed afterwards.
    pub(in crate::verbs) fn take(&mut self, queue: &CompletionQueue) -> bool {
        // An armed CQ gives one event, and no other CQ uses the channel. A second read would find
        // nothing. The next sleep arms the CQ again, with or without an event here.
        self.armed = false;
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: channel and its only CQ live; the descriptor is nonblocking.
        let rc = unsafe { ffi::ibv_get_cq_event(queue.channel(), &raw mut cq, &raw mut context) };
        // EAGAIN means that there was no event. Other errors show at the next poll.
        let taken = rc == 0;
        self.unacknowledged += u32::from(taken);
        if self.unacknowledged >= ACKNOWLEDGED_TOGETHER {
            self.acknowledge(queue);
        }
        taken
    }

    /// Acknowledges every event that was taken. Call it before the CQ is destroyed.
    pub(in crate::verbs) fn acknowledge(&mut self, queue: &CompletionQueue) {
        if self.unacknowledged > 0 {
            // SAFETY: `unacknowledged` events of this CQ were taken and not acknowledged.
            unsafe { ffi::ibv_ack_cq_events(queue.raw(), self.unacknowledged) };
            self.unacknowledged = 0;
        }
    }
}
