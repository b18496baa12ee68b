//! [`Acks`]: which requests of the peer are executed, and whether the peer must be told.

/// Acknowledgements that this QP owes.
#[derive(Debug, Default)]
pub(in crate::soft) struct Acks {
    // Requests of the peer that were executed.
    executed: usize,
    // The peer waits for an acknowledgement. The number of empty polls since it asked.
    due: Option<u8>,
    // Send it now, also in a frame of its own.
    now: bool,
}

impl Acks {
    /// Requests executed so far: the sequence number of the next request.
    pub(super) fn executed(&self) -> usize {
        self.executed
    }

    /// A request was executed.
    #[inline]
    pub(super) fn execute(&mut self) {
        self.executed += 1;
    }

    /// The peer wants an acknowledgement of the executed requests.
    #[inline]
    pub(super) fn want(&mut self) {
        self.due.get_or_insert(0);
    }

    /// The peer wants an acknowledgement at once.
    pub(super) fn want_now(&mut self) {
        self.due = Some(0);
        self.now = true;
    }

    /// Whether the peer waits for an acknowledgement.
    pub(in crate::soft) fn is_due(&self) -> bool {
        self.due.is_some()
    }

    /// Whether a frame of its own is to be sent.
    pub(super) fn is_due_now(&self) -> bool {
        self.due.is_some() && self.now
    }

    /// A poll was empty. Returns whether the acknowledgement is to be sent now: after `polls` empty
    /// polls.
    #[inline]
    pub(in crate::soft) fn age(&mut self, polls: u8) -> bool {
        let Some(age) = &mut self.due else { return false };
        *age = age.saturating_add(1);
        if *age >= polls {
            self.now = true;
        }
        *age >= polls
    }

    /// A frame goes out. Every frame carries the number of executed requests.
    #[inline]
    pub(super) fn told(&mut self) {
        self.due = None;
        self.now = false;
    }
}
