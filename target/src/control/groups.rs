//! [`Groups`]: the poll groups as control sees them: mail to each, which one serves the next
//! connection, and how they ended.
//!
//! Invariant: news of a destroyed QP is never lost. A poll group keeps what it lent to a device
//! until it has that news, so news for a full mailbox is kept here and sent again.

use crate::identity::{ConnectionId, SessionIndex};
use crate::poll_group::thread::Handle;
use crate::poll_group::{Notice, ToGroup};

/// The running poll groups.
#[derive(Debug)]
pub(super) struct Groups {
    handles: Vec<Handle>,
    // Counts admin connections, which go to the poll groups in turn.
    next_admin: usize,
    // Connections whose QP is destroyed and whose poll group had a full mailbox.
    undelivered: Vec<(usize, ConnectionId)>,
    stopped: usize,
    // Every poll group that stopped had written its dirty blocks to the stores.
    clean: bool,
    failure: Option<String>,
}

impl Groups {
    /// Poll groups that run, by index.
    pub(super) fn new(handles: Vec<Handle>) -> Self {
        let (undelivered, failure) = (Vec::new(), None);
        Self { handles, next_admin: 0, undelivered, stopped: 0, clean: true, failure }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.handles.len()
    }

    /// All of them, for their counters.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Handle> {
        self.handles.iter()
    }

    /// The poll group that serves a queue of a session, or without a queue the next admin
    /// connection.
    ///
    /// A queue goes by its number, not by the order of arrival. An initiator that gives each queue
    /// several connections numbers the second ones behind all first ones. So the first ones, which
    /// do most of the work, are spread over all poll groups.
    pub(super) fn for_connection(&self, session: SessionIndex, queue: Option<u16>) -> usize {
        let of_queue = |queue| usize::from(session.index) + 1 + usize::from(queue);
        queue.map_or(self.next_admin, of_queue) % self.handles.len()
    }

    /// An admin connection was made: the next one goes to the next poll group. So the heart-beats
    /// of several mounts show that all poll groups live.
    pub(super) fn took_admin(&mut self) {
        self.next_admin = self.next_admin.wrapping_add(1);
    }

    /// Sends mail. A poll group whose mailbox is full is stuck or gone, and the log says so.
    pub(super) fn send(&self, group: usize, message: ToGroup) {
        let _ = self.try_send(group, message);
    }

    /// Sends mail. Returns what could not be sent.
    pub(super) fn try_send(&self, group: usize, message: ToGroup) -> Option<ToGroup> {
        let Some(handle) = self.handles.get(group) else { return Some(message) };
        let refused = handle.mail.send(message).err()?;
        // The mailbox holds thousands of messages.
        tracing::error!(group, "a poll group takes no mail");
        Some(refused.0)
    }

    /// Sends a notice to every poll group.
    pub(super) fn notify(&self, notice: Notice) {
        (0..self.handles.len()).for_each(|group| self.send(group, ToGroup::Notice(notice)));
    }

    /// Tells every poll group to stop.
    pub(super) fn stop(&self) {
        (0..self.handles.len()).for_each(|group| self.send(group, ToGroup::Stop));
    }

    /// The QP of a connection that ended is destroyed. Sent by [`Self::deliver`].
    pub(super) fn qp_destroyed(&mut self, group: usize, connection: ConnectionId) {
        self.undelivered.push((group, connection));
    }

    /// Sends the news of destroyed QPs. Keeps what a full mailbox does not take.
    pub(super) fn deliver(&mut self) {
        let waiting = std::mem::take(&mut self.undelivered);
        self.undelivered = waiting
            .into_iter()
            .filter(|(group, connection)| {
                let told = ToGroup::Destroyed { connection: *connection };
                self.try_send(*group, told).is_some()
            })
            .collect();
    }

    /// Whether news waits for room in a mailbox.
    pub(super) fn owes_mail(&self) -> bool {
        !self.undelivered.is_empty()
    }

    /// A store lost acknowledged writes: this run does not end clean.
    pub(super) fn lost_writes(&mut self) {
        self.clean = false;
    }

    /// A poll group stopped: whether its dirty blocks are in the stores, and what broke it.
    pub(super) fn stopped(&mut self, group: usize, clean: bool, error: Option<String>) {
        self.stopped += 1;
        self.clean &= clean;
        if let Some(error) = error {
            tracing::error!(group, error, "a poll group broke; the target ends");
            self.failure.get_or_insert(format!("poll group {group} broke: {error}"));
            self.stop();
            // A broken thread never stops again, so its peers may wait for it indefinitely.
            self.stopped = self.handles.len();
        }
    }

    /// Whether every poll group has stopped, or one broke.
    pub(super) fn have_stopped(&self) -> bool {
        self.stopped >= self.handles.len()
    }

    /// Waits for the threads to end. Returns whether every acknowledged write is durable.
    ///
    /// # Errors
    /// A poll group broke.
    pub(super) fn join(mut self) -> anyhow::Result<bool> {
        self.handles.iter_mut().for_each(Handle::join);
        match self.failure {
            Some(failure) => Err(anyhow::anyhow!(failure)),
            None => Ok(self.clean),
        }
    }

    /// What waits for room in a mailbox.
    #[cfg(test)]
    pub(super) fn undelivered(&self) -> &[(usize, ConnectionId)] {
        &self.undelivered
    }
}
