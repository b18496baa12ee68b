//! [`Groups`]: the poll groups as control sees them: mail to each, the choice of one for the next
//! connection, and their ends.
//!
//! Invariant: mail is delivered in order, and none is lost. A poll group that missed the end of a
//! session or of its rights would go on to serve it; one that missed the destruction of a QP would
//! keep the memory that it lent. So mail for a full mailbox is kept here, up to [`KEPT_MAX`], and
//! sent again. A poll group that exceeds even this is stuck: the target ends. Connections alone are
//! not kept: one that cannot be handed over is destroyed.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::cache::Unsaved;
use crate::data::poll_group::group_thread::GroupHandle;
use crate::data::poll_group::{Notice, ToGroup};
use crate::volume::ids::{ConnectionId, SessionIndex};
use crate::volume::limits::Limiter;

/// Messages that are kept for one poll group with a full mailbox. The mailbox holds thousands more.
const KEPT_MAX: usize = 4096;

/// The running poll groups.
#[derive(Debug)]
pub(super) struct Groups {
    handles: Vec<GroupHandle>,
    // Counts admin connections, which go to the poll groups in turn.
    next_admin: usize,
    // By poll group: mail for a full mailbox, in order.
    kept: Vec<VecDeque<ToGroup>>,
    // By poll group: it has ended and needs no mail.
    ended: Vec<bool>,
    // The poll group that takes no mail any more.
    stuck: Option<usize>,
    stopped: usize,
    // Acknowledged data that the stopped poll groups had not made durable.
    unsaved: Vec<Unsaved>,
    failure: Option<String>,
}

impl Groups {
    /// Poll groups that run, by index.
    pub(super) fn new(handles: Vec<GroupHandle>) -> Self {
        let count = handles.len();
        Self {
            handles,
            next_admin: 0,
            kept: (0..count).map(|_| VecDeque::new()).collect(),
            ended: vec![false; count],
            stuck: None,
            stopped: 0,
            unsaved: Vec::new(),
            failure: None,
        }
    }

    /// The number of poll groups.
    pub(super) fn len(&self) -> usize {
        self.handles.len()
    }

    /// Those that have not ended, by index.
    pub(super) fn running(&self) -> impl Iterator<Item = usize> {
        self.ended.iter().enumerate().filter(|(_, ended)| !**ended).map(|(group, _)| group)
    }

    /// All of them, for their counters.
    pub(super) fn iter(&self) -> impl Iterator<Item = &GroupHandle> {
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

    /// All of them, to note which volumes they serve.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut GroupHandle> {
        self.handles.iter_mut()
    }

    /// Sends mail, behind kept mail. Keeps it if the mailbox is full.
    pub(super) fn send(&mut self, group: usize, message: ToGroup) {
        if let Some(message) = self.try_send(group, message) {
            self.keep(group, message);
        }
    }

    /// Sends mail, behind kept mail. Returns it if it could not be sent.
    pub(super) fn try_send(&self, group: usize, message: ToGroup) -> Option<ToGroup> {
        let Some(kept) = self.kept.get(group) else { return Some(message) };
        if !kept.is_empty() {
            return Some(message);
        }
        self.handles.get(group)?.mail.send(message).err().map(|refused| refused.0)
    }

    fn keep(&mut self, group: usize, message: ToGroup) {
        let (Some(kept), Some(false)) = (self.kept.get_mut(group), self.ended.get(group)) else {
            return;
        };
        if kept.is_empty() {
            tracing::warn!(group, "the mailbox of a poll group is full: mail for it is kept");
        }
        if kept.len() < KEPT_MAX {
            return kept.push_back(message);
        }
        if self.stuck.is_some() {
            return;
        }
        // Without its news it must not go on: the target stops.
        tracing::error!(group, "a poll group takes no mail: it is stuck, and the target ends");
        self.stuck = Some(group);
        self.fail(format!(
            "poll group {group} takes no mail ({KEPT_MAX} messages wait behind a full mailbox): its thread is stuck, \
             as by a device or a file system that does not answer"
        ));
    }

    /// Sends a notice to every poll group.
    pub(super) fn notify(&mut self, notice: Notice) {
        (0..self.handles.len()).for_each(|group| self.send(group, ToGroup::Notice(notice)));
    }

    /// Tells every poll group the limits of the host of a session.
    pub(super) fn limit_host(&mut self, session: SessionIndex, limits: &Option<Arc<Limiter>>) {
        for group in 0..self.handles.len() {
            self.send(group, ToGroup::LimitHost { session, limits: limits.clone() });
        }
    }

    /// Tells every poll group to stop.
    pub(super) fn stop(&mut self) {
        (0..self.handles.len()).for_each(|group| self.send(group, ToGroup::Stop));
    }

    /// The QP of a connection that ended is destroyed.
    pub(super) fn qp_destroyed(&mut self, group: usize, connection: ConnectionId) {
        self.send(group, ToGroup::Destroyed { connection });
    }

    /// Sends kept mail, in order, as far as the mailboxes take it.
    pub(super) fn deliver(&mut self) {
        for (handle, kept) in self.handles.iter().zip(&mut self.kept) {
            while let Some(message) = kept.pop_front() {
                if let Err(refused) = handle.mail.send(message) {
                    kept.push_front(refused.0);
                    break;
                }
            }
        }
    }

    /// Whether mail waits for room in a mailbox.
    pub(super) fn owes_mail(&self) -> bool {
        self.kept.iter().any(|kept| !kept.is_empty())
    }

    /// A poll group stopped: the data that it has not made durable, and its error.
    pub(super) fn stopped(
        &mut self,
        group: usize,
        mut unsaved: Vec<Unsaved>,
        error: Option<String>,
    ) {
        self.stopped += 1;
        self.unsaved.append(&mut unsaved);
        if let (Some(ended), Some(kept)) = (self.ended.get_mut(group), self.kept.get_mut(group)) {
            *ended = true;
            kept.clear();
        }
        if let Some(error) = error {
            tracing::error!(group, error, "a poll group broke; the target ends");
            self.fail(format!("poll group {group} broke: {error}"));
        }
    }

    /// Ends the target for this reason.
    fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
        self.stop();
        // A broken thread never stops again, so its peers may wait for it indefinitely.
        self.stopped = self.handles.len();
    }

    /// Whether every poll group has stopped, or one broke.
    pub(super) fn have_stopped(&self) -> bool {
        self.stopped >= self.handles.len()
    }

    /// The volumes with acknowledged data that the stopped poll groups have not made durable.
    pub(super) fn unsaved(&self) -> Vec<Unsaved> {
        Unsaved::merged(&self.unsaved)
    }

    /// Why the target ends, if a poll group broke.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Waits for the threads to end. Returns the volumes with acknowledged data that is not
    /// durable: all others are safe.
    ///
    /// # Errors
    /// A poll group broke: no volume is known to be safe.
    pub(super) fn join(mut self) -> anyhow::Result<Vec<Unsaved>> {
        // A thread that is stuck would be waited for indefinitely. It ends with the process.
        let stuck = self.stuck;
        let joined = self.handles.iter_mut().enumerate().filter(|(group, _)| Some(*group) != stuck);
        joined.for_each(|(_, handle)| handle.join());
        match self.failure {
            Some(failure) => Err(anyhow::anyhow!(failure)),
            None => Ok(self.unsaved()),
        }
    }

    /// The kept mail for a poll group.
    #[cfg(test)]
    pub(super) fn kept(&self, group: usize) -> impl Iterator<Item = &ToGroup> {
        self.kept[group].iter()
    }
}

#[cfg(test)]
mod tests {
    use rblk_protocol::Epoch;
    use rblk_runtime::mailbox::{Receiver, mailbox};

    use super::*;

    /// A poll group without a thread; its mailbox holds `room` messages.
    fn deaf(room: usize) -> (Groups, Receiver<ToGroup>) {
        let (mail, receiver) = mailbox(room).unwrap();
        (Groups::new(vec![GroupHandle::without_thread(mail)]), receiver)
    }

    fn notice(number: usize) -> Notice {
        let session = SessionIndex { index: 0, life: 1 };
        let before = Epoch(u32::try_from(number).unwrap());
        Notice::EndConnections { session, before }
    }

    fn number(mail: &ToGroup) -> usize {
        match mail {
            ToGroup::Notice(Notice::EndConnections { before, .. }) => {
                usize::try_from(before.0).unwrap()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn mail_for_a_full_mailbox_is_kept_in_order() {
        let (mut groups, mut receiver) = deaf(4);
        (0..20).for_each(|at| groups.notify(notice(at)));
        let mut came = Vec::new();
        while came.len() < 20 {
            assert!(groups.owes_mail() || came.len() >= 16);
            // One by one: later mail must not overtake kept mail.
            came.push(number(&receiver.receive().expect("it is delivered")));
            let overtakes = groups.try_send(0, ToGroup::Stop);
            assert!(groups.kept(0).next().is_none() || overtakes.is_some());
            if overtakes.is_none() {
                break;
            }
            groups.deliver();
        }
        assert!(came.iter().copied().eq(0..came.len()), "{came:?}");
        assert!(came.len() >= 16 && !groups.have_stopped());
    }

    #[test]
    fn a_full_mailbox_ends_the_target() {
        let (mut groups, mut receiver) = deaf(4);
        (0..4 + KEPT_MAX).for_each(|at| groups.notify(notice(at)));
        assert!(!groups.have_stopped(), "it may still come");
        groups.notify(notice(4 + KEPT_MAX));
        assert!(groups.have_stopped(), "one message would be lost");
        // All mail that it takes later comes in order.
        (0..4).for_each(|at| assert_eq!(number(&receiver.receive().unwrap()), at));
        groups.deliver();
        assert_eq!(number(&receiver.receive().unwrap()), 4);
        let error = groups.join().unwrap_err().to_string();
        assert!(error.contains("poll group 0 takes no mail"), "{error}");
    }

    #[test]
    fn a_poll_group_that_ended_needs_no_mail() {
        let (mut groups, receiver) = deaf(4);
        drop(receiver);
        groups.notify(notice(0));
        assert!(groups.owes_mail());
        groups.stopped(0, Vec::new(), None);
        assert!(!groups.owes_mail());
        (0..2 * KEPT_MAX).for_each(|at| groups.notify(notice(at)));
        assert_eq!(groups.join().unwrap(), [], "and that is no failure");
    }
}
